"""Text that streams to a terminal: in colours, and in lines that end between words."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

DIM = "2"
STYLES = {"accepted": "32", "corrected": "33"}  # codes of terminals, by the kind of a token


class Terminal:
    """Writes text as it comes, with the word that is not complete yet held back.

    Args:
      send: Shows a text.
      width: The columns of the terminal.
      has_colors: Whether texts have styles.
    """

    def __init__(self, send: Callable[[str], object], width: int, *, has_colors: bool = True):
        self._send = send
        self._width = width
        self._has_colors = has_colors
        self._column = 0
        self._word: list[tuple[str, str]] = []  # characters with their styles

    def write(self, text: str, style: str = "") -> None:
        """Adds text; ``flush`` shows its last word.

        Args:
          text: What is added.
          style: A code of terminals, such as ``DIM``; empty for none.
        """
        for char in text:
            if not char.isspace():
                self._word.append((char, style))
                continue
            self.flush()
            if char == "\n" or self._column >= self._width:
                self._column = 0
                self._send("\n")
            else:
                self._column += 1
                self._send(char)

    def flush(self) -> None:
        """Shows the word that was held back."""
        size = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c, _ in self._word)
        if 0 < self._column and self._column + size > self._width >= size:
            self._column = 0
            self._send("\n")
        self._column += size
        if self._column > self._width:  # the terminal cuts the word
            self._column %= self._width
        shown = before = ""
        for char, style in self._word:
            if style != before and self._has_colors:
                shown += f"\033[0{style and ';'}{style}m"
            shown += char
            before = style
        self._word = []
        if shown:
            self._send(shown + "\033[0m" * (before != "" and self._has_colors))
