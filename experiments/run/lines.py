"""Texts in lines that fit the terminal."""

from __future__ import annotations

import shutil
import textwrap

_WIDEST = 100


def width() -> int:
    """Returns the columns of the terminal, at most 100; 80 where there is none."""
    return min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)


def fill(text: str, first: str = "", others: str = "") -> str:
    """Returns a text in lines that fit, broken between words alone.

    Args:
      text: The text.
      first: What the first line begins with.
      others: What the others begin with.
    """
    return textwrap.fill(
        text,
        width(),
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )
