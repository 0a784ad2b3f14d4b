"""Sections of a report: texts, tables and figures, for the screen, for Markdown and for a page."""

from __future__ import annotations

import functools
import math
import shutil
import textwrap
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import tabulate

tabulate.MIN_PADDING = 0  # titles are as narrow as their cells
_WIDEST = 100  # characters of a line of text on the screen
_NAMES = ("method", "K", "T", "category")  # columns that name a row
_NONE: Mapping[str, Any] = types.MappingProxyType({})


class Entry(NamedTuple):
    """A cell of a table with what a page shows beside its text.

    Attributes:
      text: All that the screen and Markdown show.
      look: Classes of the page's style sheet, such as "good".
      bar: Pieces of a line that goes from 0 to 1: the look of each, its begin and its end.
      shade: The background, from -1 (slower) to 1 (faster); None for none.
    """

    text: str
    look: str = ""
    bar: Sequence[tuple[str, float, float]] = ()
    shade: float | None = None

    def __str__(self) -> str:
        return self.text


class Table(NamedTuple):
    """A table of a section.

    Attributes:
      header: The titles of the columns.
      rows: The cells, texts or ``Entry``.
      numbers: Titles of the columns that are aligned at the right.
      group: The title of a column; on the screen an empty line stands where its value changes.
      filters: Titles of columns by whose values a page hides rows. The value says which rows are
        shown at first, and are all of them elsewhere; "" stands for all.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | Entry]]
    numbers: Collection[str] = ()
    group: str = ""
    filters: Mapping[str, str] = _NONE

    def text(self, *, is_markdown: bool = False, width: float = math.inf) -> str:
        """Formats the rows that are shown at first, without the columns that choose them.

        Args:
          is_markdown: Whether to write Markdown instead of plain text.
          width: Of the lines, in characters. A wider table goes on below, where each row has its
            name again.
        """
        chosen = {self.header.index(name): x for name, x in self.filters.items() if x}
        kept = [i for i in range(len(self.header)) if i not in chosen]
        rows = []
        before = None
        for row in self.rows:
            if any(str(row[i]) != x for i, x in chosen.items()):
                continue
            value = str(row[self.header.index(self.group)]) if self.group else None
            if rows and value != before and not is_markdown:
                rows.append([""] * len(kept))
            before = value
            rows.append([str(row[i]) for i in kept])
        header = [self.header[i] for i in kept]
        sizes = [2 + max(map(len, column)) for column in zip(header, *rows)]
        names = [i for i, name in enumerate(header) if not i or name in _NAMES]
        parts = [names]
        for i in (i for i in range(len(header)) if i not in names):
            if sum(sizes[j] for j in (*parts[-1], i)) - 2 > width and parts[-1] != names:
                parts.append(names)
            parts[-1] = [*parts[-1], i]
        if len(parts) == 1:
            parts = [range(len(header))]
        texts = []
        for part in parts:
            cells = [[row[i] for i in part] for row in (header, *rows)]
            if is_markdown:  # or a category's name would begin another column
                cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]
            align = ["right" if header[i] in self.numbers else "left" for i in part]
            text = tabulate.tabulate(
                cells[1:],
                cells[0],
                "pipe" if is_markdown else "simple",
                colalign=align,
                disable_numparse=True,
            )
            texts.append("\n".join(line.rstrip() for line in text.splitlines()))
        return "\n\n".join(texts)


class Section(NamedTuple):
    """A part of a report: each of its fields is shown where there is something.

    Attributes:
      title: The heading.
      text: Sentences: one is a paragraph, several are a list.
      table: A table.
      terms: Meanings by name: of the columns of the table, or facts.
      figure: The name of a plot's PNG file in the folder of the run.
      is_brief: Whether the short report on the screen has it.
    """

    title: str
    text: Sequence[str] = ()
    table: Table | None = None
    terms: Mapping[str, str] = _NONE
    figure: str = ""
    is_brief: bool = False

    def console(self) -> str:
        """Formats the section for the screen, in lines as wide as it; "" if it is a figure."""
        if self.figure and self.table is None:
            return ""
        columns = shutil.get_terminal_size((_WIDEST, 0)).columns
        width = min(_WIDEST, columns)
        fill = functools.partial(textwrap.fill, width=width, break_on_hyphens=False)
        bullet = "- " * (len(self.text) > 1)
        lines = [fill(bullet + line, subsequent_indent=" " * len(bullet)) for line in self.text]
        lines += [] if self.table is None else [self.table.text(width=columns)]
        lines += [""] * bool(lines and self.terms)
        lines += [
            fill(f"  {name:15} {x}", subsequent_indent=" " * 18) for name, x in self.terms.items()
        ]
        return "\n".join([self.title] * bool(lines and self.title) + lines)

    def markdown(self) -> str:
        """Formats the section as Markdown."""
        bullet = "- " * (len(self.text) > 1)
        blocks = [f"## {self.title}"] if self.title else []
        blocks += ["\n".join(bullet + line for line in self.text)] if self.text else []
        blocks += [] if self.table is None else [self.table.text(is_markdown=True)]
        blocks += ["\n".join(f"- **{name}**: {x}" for name, x in self.terms.items())]
        blocks += [f"![{self.figure}]({self.figure})"] if self.figure else []
        return "\n\n".join(filter(None, blocks))
