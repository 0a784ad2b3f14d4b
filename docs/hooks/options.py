"""Pages of the experiments: what ``--help`` prints, and their config files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import multiprocessing
import os
import re
import runpy
import sys
import textwrap

from experiments.run import config_help

ROOT = config_help.ROOT
_COMMANDS = ("generate", "certify", "inspect")  # of python -m spec_jax
_FLAGS = "Flags, with their values by default:"  # what the text of --help has above them


def experiments() -> list[str]:
    """Returns the names of the experiments."""
    return sorted({p.stem for p in (ROOT / "experiments").glob("*.py")} - {"__init__", "__main__"})


def ask(module: str, *arguments: str) -> str:
    """Returns what ``--help`` prints. To be called once in a process, which has its flags."""
    os.environ["COLUMNS"] = "88"
    sys.argv = [module, *arguments, "--help"]
    out = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return out.getvalue()


def ask_all() -> dict[str, str]:
    """Returns what every experiment and every command of ``python -m spec_jax`` say, by name."""
    calls = {name: (f"experiments.{name}",) for name in experiments()}
    calls |= {f"spec_jax {name}": ("spec_jax", name) for name in _COMMANDS}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.run.cli", "experiments.run.plots"])
    with concurrent.futures.ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
        asked = {name: pool.submit(ask, *call) for name, call in calls.items()}
        return {name: future.result() for name, future in asked.items()}


def prose(docstring: str) -> str:
    """Returns a docstring as markdown: its indented commands are blocks of code."""
    shown = []
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        if all(line.startswith("    ") for line in block.splitlines()):
            shown.append(f"```sh\n{textwrap.dedent(block)}\n```")
        else:
            text = block.replace("<", "&lt;").replace("*", r"\*")
            # Flags are code.
            shown.append(re.sub(r"(?<![`\w/])(--[\w.]+(?:=[\w/.:,*-]*[\w/*])?)", r"`\1`", text))
    return "\n\n".join(shown)


def page(name: str, text: str) -> str:
    """Returns the page of an experiment.

    Args:
      name: Its name.
      text: What its ``--help`` prints.
    """
    about, _, flags = text.partition(_FLAGS)
    if not flags:  # its parser is argparse's
        return f"# {name}\n\n```text\n{text}```\n"
    parts = [f"# {name}", prose(about), "## Flags", f"{_FLAGS}\n\n```text{flags}```"]
    for path in sorted((ROOT / "configs").glob("*.py")):
        if re.search(rf"python -m experiments\.{name}\b", config_help.docstring(path)):
            parts.append(f"::: configs.{path.stem}")
    return "\n\n".join(parts)


def index() -> str:
    """Returns the page that lists the experiments."""
    lines = [
        "# Experiments\n",
        "An experiment is one command. These pages are what its `--help` prints: what it does, its "
        "flags, and the keys of its config, each of which is a flag too; and its config files. "
        "Every run leaves a folder with `config.json`, `environment.json` (versions, devices), "
        "`report.json` and `report.md`.\n",
        "| experiment | what it does |\n|---|---|",
    ]
    for name in experiments():
        first = config_help.docstring(ROOT / "experiments" / f"{name}.py").partition("\n")[0]
        lines.append(f"| [`{name}`]({name}.md) | {first} |")
    return "\n".join(lines)


def command_line(all_said: dict[str, str]) -> str:
    """Returns the page of ``python -m spec_jax``."""
    parts = ["# Command line\n"]
    for name, text in all_said.items():
        if name.startswith("spec_jax "):
            parts.append(f"## python -m {name}\n\n```text\n{text}```\n")
    return "\n".join(parts)
