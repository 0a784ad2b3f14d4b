"""Lists the experiments: ``python -m experiments``."""

from __future__ import annotations

import ast
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

_FOLDER = pathlib.Path(__file__).parent
_WIDTH = 100


class MainModule(NamedTuple):
    """One main module.

    Attributes:
      name: Its name.
      sentence: What it does.
      command: A command that runs it.
    """

    name: str
    sentence: str
    command: str


def experiments() -> Iterator[MainModule]:
    """Yields the experiments by name, as their docstrings describe them, without importing them."""
    for path in sorted(_FOLDER.glob("*.py")):
        if path.stem.startswith("__"):
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        command = re.search(rf"python -m experiments\.{path.stem}\b.*", re.sub(r"\\\n", "", text))
        words = command[0].split() if command else []
        yield MainModule(path.stem, text.partition("\n")[0], " ".join(words))


def text() -> str:
    """Returns the list: the name of each experiment, a sentence and a command."""
    found = [*experiments()]
    column = 2 + max(len(one.name) for one in found)
    lines = ["The experiments. Each command also takes --help, which lists its flags.", ""]
    for one in found:
        said = textwrap.wrap(one.sentence, _WIDTH - column, break_on_hyphens=False)
        lines += [part.rjust(column + len(part)) for part in (*said, one.command)]
        lines[-len(said) - 1] = one.name.ljust(column) + said[0]
    return "\n".join(lines)


def main() -> None:
    print(text())


if __name__ == "__main__":
    main()
