"""The Python of the documents runs, block after block, as a reader would type it."""

import ast
import pathlib
import re

import pytest

from spec_jax.config import METHODS
from spec_jax.drafters import registry

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/write_a_drafter.md", "docs/write_a_rule.md")


def blocks(name):
    """The python blocks of a document, each after as many empty lines as stand before it."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert found, f"{name} has no python block"
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def run(name, trees):
    """Runs the blocks in one namespace; a traceback shows the document's own lines."""
    namespace = {"__name__": "document"}
    for tree in trees:
        exec(compile(tree, str(ROOT / name), "exec"), namespace)


@pytest.fixture
def forget_kinds():
    before = set(METHODS)
    yield
    for name in set(METHODS) - before:
        registry.unregister(name)


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_imports_exists(name):
    trees = [ast.parse(block) for block in blocks(name)]
    for tree in trees:
        tree.body = [x for x in tree.body if isinstance(x, ast.Import | ast.ImportFrom)]
    run(name, trees)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name, capsys, forget_kinds):
    run(name, blocks(name))
    out = capsys.readouterr().out
    printed = re.findall(r"^  Largest error (\S+),", out, re.MULTILINE)
    assert printed and max(map(float, printed)) < 1e-6  # errors of the certificates
    assert "No certificate" not in out
