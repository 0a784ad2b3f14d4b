"""HTML for notebooks: tables, and tokens coloured by where they came from.

Colours are translucent, so that they suit light and dark themes, and nothing runs as a script.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Okabe and Ito's palette, which everyone can tell apart.
COLORS = {
    "first": "#999999",
    "accepted": "#009E73",
    "corrected": "#D55E00",
    "bonus": "#0072B2",
    "target": "#0072B2",
    "rejected": "#CC79A7",
}
MEANING = {
    "first": "sampled by prefill",
    "accepted": "drafted, and accepted by the rule",
    "corrected": "the target's, in place of a rejected draft",
    "bonus": "the target's, after drafts that were all accepted",
    "target": "the target's, in a round without drafts",
    "rejected": "drafted, and rejected",
}
MAX_TOKENS = 2000  # that are shown
_PLAIN = 'class="tex2jax_ignore"'  # in which a notebook takes dollar signs for no formula
_START = "border-left:2px solid rgba(128,128,128,.8)"


class Token(NamedTuple):
    """One output token as it is shown.

    Attributes:
      text: what it adds to the text; "" where it adds nothing.
      kind: a key of ``COLORS``.
      hint: shown when the pointer is over it.
      rejected: the text of the draft that it replaces, or None.
      is_start: a round begins with it.
    """

    text: str
    kind: str
    hint: str
    rejected: str | None = None
    is_start: bool = False


def tokens(shown: Sequence[Token], note: str) -> str:
    """Returns tokens in colour, a legend above them, and a note beside it.

    Args:
      shown: of the output, in order.
      note: such as why the row ended.
    """
    counts = {kind: sum(token.kind == kind for token in shown) for kind in COLORS}
    counts["rejected"] = sum(token.rejected is not None for token in shown)
    legend = " ".join(
        f'<span style="{_style(kind)}" title="{_text(MEANING[kind])}">{kind} {count}</span>'
        for kind, count in counts.items()
        if count
    )
    body = "".join(map(_token, shown[:MAX_TOKENS]))
    more = len(shown) - MAX_TOKENS
    rest = f"<em> and {more:,} tokens more</em>" if more > 0 else ""
    return (
        f'<div {_PLAIN}><div style="font-size:smaller;margin-bottom:.5em">{legend} '
        f'<span style="{_START}">&nbsp;a round begins</span> · {_text(note)}</div>'
        f'<div style="font-family:monospace;white-space:pre-wrap;line-height:1.6">{body}{rest}'
        "</div></div>"
    )


def table(title: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of texts with a title.

    Args:
      title: above the rows.
      rows: of cells; the first one of each is a name. A single one beside it takes the whole width.
    """
    rows, left = list(rows), 'style="text-align:left"'
    width = max((len(row) for row in rows), default=2) - 1

    def cells(row: Sequence[str]) -> str:
        span = f' colspan="{width}"' if len(row) == 2 and width > 1 else ""
        return "".join(f"<td {left}{span}>{_text(cell)}</td>" for cell in row[1:])

    lines = "".join(f"<tr><th {left}>{_text(row[0])}</th>{cells(row)}</tr>" for row in rows)
    return f"<table {_PLAIN}><caption {left}><b>{_text(title)}</b></caption>{lines}</table>"


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _style(kind: str) -> str:
    red, green, blue = (int(COLORS[kind][i : i + 2], 16) for i in (1, 3, 5))
    look = f"background-color:rgba({red},{green},{blue},.3);border-radius:2px"
    return look + (";text-decoration:line-through" if kind == "rejected" else "")


def _token(token: Token) -> str:
    style = _style(token.kind)
    if token.is_start:
        style += f";{_START}"
    draft = ""
    if token.rejected is not None:
        text = _text(_visible(token.rejected))
        draft = f'<del style="{_style("rejected")};font-size:75%" title="rejected">{text}</del>'
    is_blank = not token.text or token.text.isspace()
    text = _visible(token.text) if is_blank else token.text
    # A line ends where the token ends it, beside the mark that says so.
    text = text.replace("↵", "↵\n") if is_blank else text
    return f'{draft}<span style="{style}" title="{_text(token.hint)}">{_text(text)}</span>'


def _visible(text: str) -> str:
    """The text with marks for its blanks; a box for a token without any text."""
    for blank, mark in (("\r\n", "↵"), ("\n", "↵"), ("\t", "→"), (" ", "·")):
        text = text.replace(blank, mark)
    return text or "▯"
