"""Pages of the experiments, from what ``--help`` prints: docstrings, flags, keys of configs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import multiprocessing
import os
import pathlib
import re
import runpy
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags
from ml_collections import config_flags

from experiments.run import config_help

ROOT = config_help.ROOT
_COMMANDS = ("generate", "certify", "inspect")  # of python -m spec_jax
_Row = tuple[str, str, str]  # a flag, its value, its meaning


class Help(NamedTuple):
    """What a command says of itself.

    Attributes:
      text: What ``--help`` prints.
      flags: Name, value by default and meaning of the flags; empty if its parser is not absl's.
      config: The config file by default, or None.
    """

    text: str
    flags: list[_Row]
    config: pathlib.Path | None


def experiments() -> list[str]:
    """Returns the names of the experiments."""
    return sorted({p.stem for p in (ROOT / "experiments").glob("*.py")} - {"__init__", "__main__"})


def ask(module: str, *arguments: str) -> Help:
    """Runs a main module with ``--help``. To be called once in a process, which has its flags."""
    os.environ["COLUMNS"] = "88"
    sys.argv = [module, *arguments, "--help"]
    out = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    path = str(ROOT / f"{module.replace('.', '/')}.py")
    config = None
    if "config" in flags.FLAGS:
        config = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"]))
    return Help(out.getvalue(), config_help.main_flags(path), config)


def ask_all() -> dict[str, Help]:
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
    blocks = re.split(r"\n\s*\n", docstring.strip())
    is_code = [all(line.startswith("    ") for line in block.splitlines()) for block in blocks]
    fence = lambda block: f"```sh\n{textwrap.dedent(block)}\n```"
    shown = (fence(x) if code else _safe(x) for x, code in zip(blocks, is_code))
    return "\n\n".join(shown)


def _safe(text: str) -> str:
    text = text.replace("<", "&lt;").replace("*", r"\*")
    # Flags and names with dots or underscores are code.
    return re.sub(r"(?<![`\w/])(--[\w.]+(?:=[\w/.:,*-]*[\w/*])?)", r"`\1`", text)


def _table(head: Sequence[str], rows: Sequence[_Row]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    cell = lambda text: text.replace("|", r"\|").replace("\n", " ")
    code = lambda text: f"`{text}`" if text else ""
    for name, value, said in rows:
        lines.append(f"| {code(name)} | {code(cell(value))} | {cell(_safe(said))} |")
    return '<div class="flags" markdown>\n\n' + "\n".join(lines) + "\n\n</div>\n"


def _keys(path: pathlib.Path) -> dict[str, _Row]:
    return {
        key: (f"--config.{key}", config_help.plain(value), config_help.sentence(said))
        for key, (value, said) in config_help.meanings(path).items()
    }


def _sections(rows: dict[str, _Row], level: str) -> str:
    """A table of the keys at the top, and one for each section."""
    parts: dict[str, list[_Row]] = {}
    for key, row in rows.items():
        parts.setdefault(key.rpartition(".")[0], []).append(row)
    head = ("flag", "value", "meaning")
    return "\n".join(
        (f"{level} `{section}`\n\n" if section else "") + _table(head, part)
        for section, part in sorted(parts.items(), key=lambda item: item[0] != "")
    )


def page(name: str, said: Help) -> str:
    """Returns the page of an experiment.

    Args:
      name: Its name.
      said: What it says of itself.
    """
    lines = [f"# {name}\n"]
    if not said.flags:  # its parser is argparse's
        return "\n".join([*lines, f"```text\n{said.text}```"])
    lines.append(prose(said.text.partition("\nFlags, with their values by default:")[0]))
    lines += [
        "\n## Flags\n",
        _table(
            ("flag", "default", "meaning"),
            [(f"--{flag}", value, config_help.sentence(text)) for flag, value, text in said.flags],
        ),
    ]
    if said.config is None:
        return "\n".join(lines)
    default = _keys(said.config)
    lines += [
        f"\n## Config `{said.config.relative_to(ROOT)}`\n",
        prose(config_help.docstring(said.config)),
        "\n### Keys\n",
        _sections(default, "####"),
    ]
    for path in _others(name, said.config):
        rows = {k: row for k, row in _keys(path).items() if row[:2] != default.get(k, ("",))[:2]}
        lines += [f"\n## Config `{path.relative_to(ROOT)}`\n", prose(config_help.docstring(path))]
        lines += ["\n### Values that differ\n", _sections(rows, "####")] if rows else []
    return "\n".join(lines)


def _others(name: str, default: pathlib.Path) -> list[pathlib.Path]:
    """The config files that are written for an experiment, beside the default one."""
    used = lambda path: rf"experiments\.{name} (\\\n *)?--config=configs/{path.name}"
    return [
        path
        for path in sorted(default.parent.glob("*.py"))
        if path != default and re.search(used(path), config_help.docstring(path))
    ]


def index(all_said: dict[str, Help]) -> str:
    """Returns the page that lists the experiments."""
    lines = [
        "# Experiments\n",
        "An experiment is one command. These pages are what its `--help` prints: what it does, its "
        "flags, and the keys of its config, each of which is a flag too. Every run leaves a folder "
        "with `config.json`, `environment.json` (versions, devices), `report.json` and "
        "`report.md`.\n",
        "| experiment | what it does |\n|---|---|",
    ]
    for name in experiments():
        first = config_help.docstring(ROOT / "experiments" / f"{name}.py").split("\n\n")[0]
        lines.append(f"| [`{name}`]({name}.md) | {_safe(' '.join(first.split()))} |")
    return "\n".join(lines)


def command_line(all_said: dict[str, Help]) -> str:
    """Returns the page of ``python -m spec_jax``."""
    parts = ["# Command line\n"]
    for name, said in all_said.items():
        if name.startswith("spec_jax "):
            parts.append(f"## python -m {name}\n\n```text\n{said.text}```\n")
    return "\n".join(parts)
