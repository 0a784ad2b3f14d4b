"""Runs a notebook from a clean kernel and writes it with its outputs, in a process of its own.

    python tests/support/execute_notebook.py docs/notebooks/quick_start.ipynb [OUTPUT]

Bars and notices of compilation, which were there while it ran, are left out.
"""

from __future__ import annotations

import pathlib
import re
import sys

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[2]
_PASSING = re.compile(r"\s*(compiling .*\s*)*")


def is_passing(output: dict) -> bool:
    """Whether an output is what is left of a bar or of a notice."""
    data = output.get("data", {})
    return output["output_type"] == "display_data" and set(data) == {"text/plain"} and bool(
        _PASSING.fullmatch(data["text/plain"])
    )


def main(path: str, to: str | None = None) -> None:
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(ROOT)}}
    about = {name: dict(notebook.metadata[name]) for name in ("kernelspec", "language_info")}
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources).execute()
    notebook.metadata = about
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_passing(output)]
    nbformat.write(notebook, to or path)


if __name__ == "__main__":
    main(*sys.argv[1:])
