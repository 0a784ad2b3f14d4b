"""Mutants of the package and of the experiments: edits of a syntax tree.

Reformatting and moving do not touch them.

A pattern is a Python expression. In it a name that ends in ``_`` stands for any expression, and
``f(...)`` for a call with any further arguments; the replacement may use both again.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "spec_jax", ROOT / "experiments")


class Mutation(NamedTuple):
    name: str
    place: str  # a function, method or table: as much of its dotted name's end as makes it unique
    old: str  # the pattern of one expression there
    new: str  # its replacement
    test: str  # of the default tier, which fails
    is_in_ci: bool


def read(table: str) -> list[Mutation]:
    """Reads mutations of three lines: name (``* name`` in CI), ``place: old -> new``, test."""
    lines = [line.strip() for line in table.strip().splitlines()]
    mutations = []
    for name, edit, test in zip(lines[::3], lines[1::3], lines[2::3]):
        edit = re.fullmatch(r"([\w.]+): (.+) -> (.+)", edit).groups()
        mutations.append(Mutation(name.removeprefix("* "), *edit, test, name[0] == "*"))
    return mutations


def find_test(mutation: Mutation) -> str:
    """Returns the node of the test, ``file::test`` or ``test``, whichever folder it is in."""
    file, _, test = mutation.test.rpartition("::")
    line = f"def {test.split('[')[0]}("
    paths = (ROOT / "tests").rglob(f"{file or 'test_*'}.py")
    files = [path for path in paths if line in path.read_text(encoding="utf-8")]
    if len(files) != 1:
        raise LookupError(f"{mutation.name}: {len(files)} files have {mutation.test}; name one")
    return f"{files[0].relative_to(ROOT)}::{test}"


def _definitions(node: ast.AST, prefix: str, has_tables: bool) -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes and, outside of functions, what is assigned to a name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from _definitions(child, name, isinstance(child, ast.ClassDef))
        elif has_tables and isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((f"{prefix}.{x.id}", child) for x in targets if isinstance(x, ast.Name))
        elif isinstance(child, ast.stmt):
            yield from _definitions(child, prefix, has_tables)


@functools.cache
def _package() -> list[tuple[str, pathlib.Path, ast.AST, ast.Module]]:
    """Dotted name, file, definition and module of all that may be changed."""
    found = []
    for path in (path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))):
        module = ast.parse(path.read_text(encoding="utf-8"))
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found += [(name, path, node, module) for name, node in _definitions(module, dotted, True)]
    return found


def _is_open(pattern: ast.AST) -> bool:
    args = pattern.args if isinstance(pattern, ast.Call) else []
    return bool(args) and isinstance(args[-1], ast.Constant) and args[-1].value is ...


def _matches(pattern, node, captured: dict) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.endswith("_"):
        first = captured.setdefault(pattern.id, node)
        return isinstance(node, ast.expr) and ast.dump(first) == ast.dump(node)
    if type(pattern) is not type(node):
        return False
    if _is_open(pattern):
        n = len(pattern.args) - 1
        captured[...] = node.args[n:], node.keywords
        return _matches([pattern.func, *pattern.args[:n]], [node.func, *node.args[:n]], captured)
    if isinstance(pattern, ast.AST):
        fields = [name for name in pattern._fields if name != "ctx"]
        return all(_matches(getattr(pattern, f), getattr(node, f), captured) for f in fields)
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(
            _matches(a, b, captured) for a, b in zip(pattern, node)
        )
    return pattern == node


class _Fill(ast.NodeTransformer):
    """Puts what a pattern captured into its replacement."""

    def __init__(self, captured: dict):
        self.captured = captured

    def visit_Name(self, node):
        return self.captured.get(node.id, node)

    def visit_Call(self, node):
        is_open = _is_open(node)
        self.generic_visit(node)
        if is_open:
            args, keywords = self.captured[...]
            node.args[-1:] = args
            node.keywords += keywords
        return node


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def find_site(mutation: Mutation) -> tuple[pathlib.Path, ast.AST, dict, ast.Module]:
    """File, expression, what the pattern captured there, and module.

    Raises:
      LookupError: what has to be repaired in the mutation.
    """
    end = f".{mutation.place}"
    places = [place for place in _package() if f".{place[0]}".endswith(end)]
    if len(places) != 1:
        names = ", ".join(place[0] for place in places) or "nothing"
        raise LookupError(f"{mutation.name}: {mutation.place} names {names}; name one definition")
    _, path, definition, module = places[0]
    pattern, sites = _expression(mutation.old), []
    for node in ast.walk(definition):
        captured = {}
        if _matches(pattern, node, captured):
            sites.append((path, node, captured, module))
    if len(sites) != 1:
        lines = ", ".join(str(node.lineno) for _, node, _, _ in sites) or "no line"
        raise LookupError(
            f"{mutation.name}: {mutation.old!r} matches {lines} of {mutation.place} in "
            f"{path.relative_to(ROOT)}; write a pattern that matches one expression"
        )
    return sites[0]


def mutate(mutation: Mutation) -> tuple[pathlib.PurePath, str]:
    """Returns the file that the mutation changes, relative to the root, and its new text."""
    path, node, captured, module = find_site(mutation)
    new = _Fill(captured).visit(_expression(mutation.new))
    text = ast.unparse(ast.fix_missing_locations(_Replace(node, new).visit(module)))
    _package.cache_clear()  # the tree is changed
    return path.relative_to(ROOT), text
