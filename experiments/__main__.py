"""Lists the experiments: ``python -m experiments``."""

from __future__ import annotations

import ast
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from experiments.run import lines

_FOLDER = pathlib.Path(__file__).parent


class MainModule(NamedTuple):
    """One main module.

    Attributes:
      name: Its name.
      sentence: What it does.
      command: A command that runs it, perhaps in several lines.
    """

    name: str
    sentence: str
    command: str


def experiments() -> Iterator[MainModule]:
    """Yields the experiments by name, as their docstrings describe them, without importing them."""
    for path in sorted(_FOLDER.glob("*.py")):
        if not path.stem.startswith("__"):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            command = re.search(rf"python -m experiments\.{path.stem}\b(.*\\\n)*.*", text)
            yield MainModule(path.stem, text.partition("\n")[0], command[0])


def text() -> str:
    """Returns the list: the name of each experiment, a sentence and a command."""
    found = [*experiments()]
    column = 2 + max(len(one.name) for one in found)
    indent = " " * column
    shown = ["The experiments. Each command also takes --help, which lists its flags.", ""]
    for one in found:
        shown.append(lines.fill(one.sentence, one.name.ljust(column), indent))
        shown.append(textwrap.indent(one.command, indent))
    return "\n".join(shown)


def main() -> None:
    print(text())


if __name__ == "__main__":
    main()
