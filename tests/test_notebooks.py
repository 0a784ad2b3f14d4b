"""The notebooks run from a clean kernel, and hold the outputs of the code that they show."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LONGEST_S = 180.0

# In a process of its own: the kernel's packages warn, and here a warning is an error.
_EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
resources = {"metadata": {"path": sys.argv[3]}}
NotebookClient(notebook, timeout=170, kernel_name="python3", resources=resources).execute()
nbformat.write(notebook, sys.argv[2])
"""


def _cells(path):
    return [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]


def _printed(cell):
    return "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_run_from_top_to_bottom_without_an_error(path):
    cells = _cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}, "text and plots; no errors and no warnings"
    assert not [o for c in cells for o in c["outputs"] if o.get("name") == "stderr"]
    assert str(pathlib.Path.home()) not in path.read_text("utf-8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_prints_what_it_shows(path, tmp_path):
    run, begin = tmp_path / path.name, time.monotonic()
    arguments = [sys.executable, "-c", _EXECUTE, str(path), str(run), str(ROOT)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - begin < LONGEST_S
    for before, now in zip(_cells(path), _cells(run), strict=True):
        if "optional" not in before["metadata"].get("tags", ()):  # it depends on what is installed
            assert _printed(now) == _printed(before)
