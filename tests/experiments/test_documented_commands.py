"""Commands of the documents: every experiment, config file and key that they name exists."""

import functools
import importlib
import operator
import pathlib
import re
import types

import pytest

from experiments.common import report

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = [
    *(ROOT / name for name in ("README.md", "WORKSPACE.md", "spec_jax/zoo/MODEL_CARD.md")),
    *sorted((ROOT / "docs").glob("*.md")),
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


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_documented_commands_exist(path):
    for experiment, arguments in commands(path.read_text(encoding="utf-8")):
        importlib.import_module(f"experiments.{experiment}")
        keys = re.findall(r"--config\.([\w.]+)=", arguments)
        config = default_config(experiment, arguments) if keys or "--config=" in arguments else {}
        for key in keys:
            *sections, name = key.split(".")
            section = functools.reduce(operator.getitem, sections, config)
            assert name in section, f"{path.name}: {experiment} has no key {key}"


MAINS = sorted({path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__", "launch"})


@pytest.mark.parametrize("name", MAINS)
def test_every_experiment_leaves_its_files_by_the_same_functions(name):
    """`support.runs.check_run_files` looks at the files themselves, in each experiment's test."""
    text = (ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8")
    assert f'report.begin("{name}", ' in text
    assert "report.finish(" in text or "training_report.write(" in text
    for written in re.findall(r"report.write_\w+\(\w+ / \"(\S+)\"", text):
        assert written not in report.FILES, f"{name} writes {written} by itself"
