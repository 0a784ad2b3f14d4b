"""The dependency direction: a module imports lower levels only, and nothing at the edge."""

from __future__ import annotations

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "spec_jax"
# From the ground up: a room imports rooms of lower levels, and modules of its own.
ROOMS = (
    ("errors", "version", "progress", "intervals"),
    ("meshes", "compilation", "show"),
    ("shapes", "rng", "tree", "sharding", "processes"),
    ("config", "contracts"),
    ("processors",),
    ("sampling",),
    ("models", "rules"),
    ("data",),
    ("drafters/common", "train"),
    ("drafters",),
    ("decoding", "zoo", "hub", "fitting"),
    ("loading", "rollouts"),
    ("named", "inspection", "engine/adaptive", "engine/cancellation", "overlap"),
    ("engine",),
    ("planning",),
    ("testing",),
    ("evaluation",),
    ("reference",),
    ("__init__",),
    ("__main__",),
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
# What may not be imported although it lies below; of drafters, only objectives know of training.
FORBIDDEN = {"drafters": {"rules", "decoding"}, "drafters/common": {"rules"}}
OUTSIDE = {"absl", "configs", "experiments"}


def _room(dotted: str) -> str | None:
    """The most particular room that a module of the package belongs to."""
    parts = dotted.split(".")[1:]
    names = ("/".join(parts[:n]) for n in (2, 1))
    return next((name for name in names if name in LEVELS), None)


def _imports(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _rooms_imported(path: pathlib.Path) -> set[str]:
    names = (name for name in _imports(path) if name.startswith("spec_jax."))
    return {room for room in map(_room, names) if room is not None}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_modules_import_lower_levels_only(path):
    room = _room(".".join(("spec_jax", *path.relative_to(PACKAGE).with_suffix("").parts)))
    assert room in LEVELS, f"{path} is in no room: add it to the table"
    for other in _rooms_imported(path) - {room}:
        assert LEVELS[other] < LEVELS[room], f"{path.name} of {room} imports {other}"
        is_objective = path.name in ("objective.py", "start.py") and other == "train"
        is_forbidden = other in FORBIDDEN.get(room, ()) or (room == "drafters" and other == "train")
        assert is_objective or not is_forbidden, f"{room} may not import {other}"
    outside = {name.split(".")[0] for name in _imports(path)} & OUTSIDE
    assert not outside, f"{path.name} imports {outside}"
    assert "environ" not in path.read_text(encoding="utf-8"), f"{path.name} reads the environment"


@pytest.mark.parametrize("top", ["spec_jax", "experiments", "configs"])
def test_every_module_can_be_imported(top):
    for path in sorted((PACKAGE.parent / top).rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))


def test_importing_the_package_starts_no_device():
    """Nor does importing an experiment; what is slow to import waits until it is used."""
    code = (
        "import sys, experiments.evaluate, experiments.decode\n"
        "slow = 'matplotlib orbax grain jinja2 optax scipy.stats tensorboardX'.split()\n"
        "assert not {*slow} & {*sys.modules}, {*slow} & {*sys.modules}\n"
        "import spec_jax.testing, jax._src.xla_bridge as b\n"
        "assert not b._backends, b._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
