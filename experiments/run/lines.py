"""Texts in lines that fit the terminal."""

from __future__ import annotations

import shutil
import textwrap

_WIDEST = 100


def width() -> int:
    """Returns the columns of the terminal, at most 100; 80 where there is none."""
    return min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)


def command(line: str, columns: int) -> str:
    """Returns a command in lines that end with a backslash where it goes on.

    Args:
      line: The command, with its indent.
      columns: Of the lines.
    """
    indent = " " * (len(line) - len(line.lstrip()))
    options = {"break_on_hyphens": False, "break_long_words": False}
    words = " ".join(line.split())
    found = textwrap.wrap(
        words, columns - 2, initial_indent=indent, subsequent_indent=f"{indent}    ", **options
    )
    return line if len(line) <= columns else " \\\n".join(found)


def fit(text: str, columns: int) -> str:
    """Returns a docstring whose paragraphs and commands fit.

    Args:
      text: The docstring; what is indented are commands, or lines that stay.
      columns: Of the lines.
    """
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        if any(line.startswith((" ", "- ")) for line in lines):
            fitted = (command(x, columns) if "python -m" in x else x for x in lines)
            blocks.append("\n".join(fitted))
        else:
            words = " ".join(block.split())
            blocks.append(textwrap.fill(words, columns, break_on_hyphens=False))
    return "\n\n".join(blocks)
