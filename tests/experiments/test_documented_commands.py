"""Commands of the documents: every experiment, flag, part, config file and key of them exists."""

import functools
import importlib
import pathlib
import re
import types

import pytest

from experiments import __main__ as index
from experiments import benchmark

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = [
    *(ROOT / name for name in ("README.md", "WORKSPACE.md", "spec_jax/zoo/MODEL_CARD.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").glob("*.py")),
    *sorted((ROOT / "experiments").glob("*.py")),
]


def commands(text):
    """(experiment, arguments) of each command line, continued lines joined; launched ones too."""
    text = re.sub(r"\\\n\s*", "", text)
    text = re.sub(r"experiments\.launch( --\w+=\d+)* experiments\.", "experiments.", text)
    return re.findall(r"python -m experiments\.(\w+)([^#\n`|]*)", text)


def default_config(experiment, arguments):
    """The config that the command begins with, as the experiment or the command names it."""
    if named := re.search(r"--config=configs/(\w+)\.py", arguments):
        return importlib.import_module(f"configs.{named[1]}").get_config()
    main = importlib.import_module(f"experiments.{experiment}")
    modules = [x for x in vars(main).values() if isinstance(x, types.ModuleType)]
    (default,) = [x for x in modules if x.__name__.startswith("configs.")]
    return default.get_config()


def flags_of(experiment):
    """The names of the experiment's own flags, and of those that it has others define for it."""
    read = lambda name: (ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8")
    text = read(experiment)
    for call, files in {
        "cli.define_flags(": ("run/cli", "run/distributed"),
        "cli.define_profile(": ("run/cli",),
    }.items():
        text += "".join(map(read, files)) if call in text else ""
    return {*re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", text), "help"}


@functools.cache
def usage(experiment, arguments):
    """What is wrong with the arguments: unknown flags and parts, and keys that the config lacks."""
    importlib.import_module(f"experiments.{experiment}")
    given = re.findall(r"(?<!\S)--(\w+)(?![\w.])", arguments)
    wrong = [f"no flag {name}" for name in given if name not in flags_of(experiment)]
    for parts in re.findall(r"--parts=([\w,]+)", arguments):
        wrong += [f"no part {name}" for name in parts.split(",") if name not in benchmark.PARTS]
    keys = re.findall(r"--config\.([\w.]+)(=?)", arguments)
    config = default_config(experiment, arguments) if keys or "--config=" in arguments else {}
    for key, is_set in keys:
        *sections, name = key.split(".")
        section = functools.reduce(lambda found, part: found.get(part, {}), sections, config)
        if name not in section:
            wrong.append(f"no key {key}")
        elif not is_set and not isinstance(section[name], bool):
            wrong.append(f"key {key} needs a value")
    return wrong


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_documented_commands_exist(path):
    for experiment, arguments in commands(path.read_text(encoding="utf-8")):
        assert not usage(experiment, arguments), f"{path.name}: {experiment}{arguments}"


NAMES = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__", "__main__"}


def test_experiments_are_listed_with_a_sentence_and_a_command():
    found = {one.name: one for one in index.experiments()}
    assert {*found} == NAMES
    for name, one in found.items():
        assert one.sentence.endswith(".") and not usage(*commands(one.command)[0])
        assert f"python -m experiments.{name}" in index.text()
