"""The notebooks run from a clean kernel, and hold the outputs of the code that they show.

They run as a user's Jupyter runs them: in their own folder, with the package installed. All of them
run in the tier ``measure``, and one in ``exhaustive``, see ``_of_this_commit``.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SHOWN = {"stream", "display_data", "execute_result"}  # text, tables, plots; no errors


def _of_this_commit():
    """The notebook that CI runs: they take turns by the commit's hash, so a commit has one.

    Where there is no commit, it is the first.
    """
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).stdout
    except FileNotFoundError:  # no git
        found = b""
    return NOTEBOOKS[int(found or b"0", 16) % len(NOTEBOOKS)]


CHOSEN = _of_this_commit()
_TIER = [pytest.mark.exhaustive, pytest.mark.landing]
_PATHS = re.compile(r"/(home|root|tmp|work|Users|private|mnt|opt)/|[A-Z]:\\\\")


def _cells(path):
    return [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]


def _printed(cell):
    return "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")


def _without_numbers(text):
    return re.sub(r"[\s-]+", " ", re.sub(r"\d[\d.,]*(e[+-]\d+)?", "#", text))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_run_from_top_to_bottom_without_an_error(path):
    cells = _cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= SHOWN
    assert not [o for o in outputs if o.get("name") == "stderr"], "no warnings"
    shown = {kind for output in outputs for kind in output.get("data", ())}
    assert {"image/png", "text/html"} & shown, "it shows a plot, or tokens"
    text = json.dumps([{**o, "data": {**o.get("data", {}), "image/png": ""}} for o in outputs])
    found = re.search(_PATHS, text)
    assert found is None, text[found.start() - 50 : found.end() + 50]
    assert str(pathlib.Path.home()) not in path.read_text("utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            for link in re.findall(r"\]\(([^)#]+)\)", "".join(cell["source"])):
                assert link.startswith("http") or (path.parent / link).exists(), link


def _imported(source):
    """Names of the packages that a cell imports."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_imports_what_is_installed_with_the_package(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    depends = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}
    names = set().union(*(_imported("".join(cell["source"])) for cell in _cells(path)))
    assert names <= depends | sys.stdlib_module_names | {"spec_jax"}


def _execute(path, to):
    # In a process of its own: the kernel's packages warn, and here a warning is an error.
    arguments = [sys.executable, ROOT / "tests/support/execute_notebook.py", path, to]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.measure
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=_TIER * (p == CHOSEN), id=p.stem) for p in NOTEBOOKS]
)
def test_notebook_runs_and_prints_what_it_shows(path, tmp_path):
    """What a cell prints is what it showed; of one that is tagged "measured", but for numbers."""
    run = tmp_path / path.name
    _execute(path, run)
    for before, now in zip(_cells(path), _cells(run), strict=True):
        tags = before["metadata"].get("tags", ())
        if "measured" in tags:
            assert _without_numbers(_printed(now)) == _without_numbers(_printed(before))
        elif "optional" not in tags:  # it depends on what is installed
            assert _printed(now) == _printed(before)
