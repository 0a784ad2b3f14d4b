"""Tables for the screen and for Markdown files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import tabulate

tabulate.MIN_PADDING = 0  # titles are as narrow as their cells


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    is_markdown: bool = False,
) -> str:
    """Formats rows of text as a table with aligned columns.

    Args:
      header: The titles of the columns.
      rows: The cells, already formatted.
      numbers: Titles of the columns that are aligned at the right.
      is_markdown: Whether to write Markdown instead of plain text.
    """
    align = ["right" if title in numbers else "left" for title in header]
    style = "pipe" if is_markdown else "simple"
    if is_markdown:  # or a category's name would begin another column
        header, rows = _escaped(header), map(_escaped, rows)
    text = tabulate.tabulate(list(rows), header, style, colalign=align, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _escaped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]


class Section(NamedTuple):
    """A table with a title, for the screen and for report.md.

    Attributes:
      title: What the table shows.
      header: The titles of the columns.
      rows: The cells, already formatted.
      numbers: Titles of the columns that are aligned at the right.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()

    def text(self, *, is_markdown: bool = False) -> str:
        """Formats the title, an empty line in Markdown, and the table."""
        cells = table(self.header, self.rows, numbers=self.numbers, is_markdown=is_markdown)
        return f"## {self.title}\n\n{cells}" if is_markdown else f"{self.title}\n{cells}"
