"""The dependency direction: a module imports lower levels only, and nothing at the edge."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "spec_jax"
LEVELS = {
    "shapes": 0, "rng": 0, "errors": 0, "contracts": 0, "tree": 0, "version": 0, "cancel": 0,
    "config": 1, "async_config": 1, "models": 2, "sampling": 3, "verify": 3, "draft": 3,
    "adaptive": 0, "decode": 4, "state": 4, "stats": 4, "data": 4, "train": 4, "formats": 4,
    "zoo": 5, "loading": 5, "testing": 5, "pace": 5, "drafters": 5, "decoder": 5, "watch": 5,
    "queue": 5, "request": 5, "overlap": 5, "run": 5, "stream": 5, "__init__": 6,
}  # fmt: skip
FORBIDDEN = {
    "draft": {"verify", "decode"},
    "decode": {"draft"},
    "train": {"decode"},
}
OUTSIDE = {"absl", "configs", "experiments"}


def _room(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _rooms_imported(path: pathlib.Path) -> set[str]:
    parts = (name.split(".") for name in _imports(path))
    return {p[1] for p in parts if p[0] == "spec_jax" and len(p) > 1 and p[1] in LEVELS}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_modules_import_lower_levels_only(path):
    room = _room(path)
    assert room in LEVELS, f"{room} has no level: add it to the table"
    for other in _rooms_imported(path) - {room}:
        assert LEVELS[other] <= LEVELS[room], f"{path.name} imports {other}"
        assert other not in FORBIDDEN.get(room, ()), f"{room} may not import {other}"
    outside = {name.split(".")[0] for name in _imports(path)} & OUTSIDE
    assert not outside, f"{path.name} imports {outside}"
    assert "environ" not in path.read_text(encoding="utf-8"), f"{path.name} reads the environment"


def test_importing_the_package_starts_no_device():
    code = (
        "import spec_jax, spec_jax.testing, jax._src.xla_bridge as b; "
        "assert not b._backends, b._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_files_stay_short():
    for path in PACKAGE.parent.glob("*/**/*.py"):
        if path.relative_to(PACKAGE.parent).parts[0] in ("spec_jax", "experiments", "tests"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path
