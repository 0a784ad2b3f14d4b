"""The examples of docstrings run, each by itself, as a reader would type it."""

import ast
import pathlib
import re
import textwrap

import pytest

from spec_jax.config import METHODS
from spec_jax.drafters import registry

ROOT = pathlib.Path(__file__).resolve().parents[1]
SLOW = {  # they compile programs of their own
    "audit.audit",
    "certify.certify",
    "compare.compare",
    "decoder.stream",
    "fitting.fit_head",
    "loop.generate",
    "loop.prefill",
    "round.decode_round",
}


def examples():
    """Yields the file and the code of every example."""
    for path in sorted((ROOT / "spec_jax").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            doc = ast.get_docstring(node) or ""
            found = re.search(r"^Example:\n  ```python\n(.*?)^  ```", doc, re.DOTALL | re.MULTILINE)
            assert found or "Example:" not in doc, f"{path.name}: {node.name}"
            if found:
                name = f"{path.stem}.{node.name}"
                slow = [pytest.mark.exhaustive] if name in SLOW else []
                yield pytest.param(str(path), textwrap.dedent(found[1]), id=name, marks=slow)


@pytest.mark.parametrize("path, code", list(examples()))
def test_the_example_of_a_docstring_runs(path, code, capsys):
    before = set(METHODS)
    try:
        exec(compile(code, path, "exec"), {"__name__": "example"})
    finally:
        for name in set(METHODS) - before:
            registry.unregister(name)
