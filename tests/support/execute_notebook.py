"""Runs a notebook from a clean kernel and writes it with its outputs, in a process of its own.

    python tests/support/execute_notebook.py docs/notebooks/quick_start.ipynb [OUTPUT]

The kernel is as Jupyter starts it for a user who has installed the package: it runs in the
notebook's own folder, and of this checkout it can import ``spec_jax`` alone. Bars and notices of
compilation, which were there while it ran, are left out.
"""

import contextlib
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[2]
_PASSING = re.compile(r"\s*(compiling .*\s*)*")


def is_passing(output: dict) -> bool:
    """Whether an output is what is left of a bar or of a notice."""
    data = output.get("data", {})
    return (
        output["output_type"] == "display_data"
        and set(data) == {"text/plain"}
        and bool(_PASSING.fullmatch(data["text/plain"]))
    )


@contextlib.contextmanager
def installed() -> Iterator[dict[str, str]]:
    """Yields an environment in which this checkout's ``spec_jax`` is installed, and nothing else.

    Whatever ``PYTHONPATH`` named is gone: in its place is a folder with a link to the package.
    """
    with tempfile.TemporaryDirectory() as folder:
        link = pathlib.Path(folder) / "spec_jax"
        link.symlink_to(ROOT / "spec_jax", target_is_directory=True)
        yield os.environ | {"PYTHONPATH": folder}


def main(path: str, to: str | None = None) -> None:
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(pathlib.Path(path).resolve().parent)}}
    about = {name: dict(notebook.metadata[name]) for name in ("kernelspec", "language_info")}
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources)
    with installed() as environment:
        client.execute(env=environment)
    notebook.metadata = about
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_passing(output)]
    nbformat.write(notebook, to or path)


if __name__ == "__main__":
    main(*sys.argv[1:])
