"""Text as it becomes final: stop strings, and pieces to a callback."""

from __future__ import annotations

import numpy as np

from spec_jax.state import Finish


class Watch:
    """Follows the text of every row: finds stop strings and hands out final pieces."""

    def __init__(self, tokenizer, prompts, stops, on_text):
        self._tokenizer, self._prompts, self._stops = tokenizer, prompts, stops
        self._on_text = on_text
        self._sent = [""] * len(prompts)
        self._cut: dict[int, tuple[int, str]] = {}  # row -> tokens kept, text

    def look(self, tokens, total, finish) -> np.ndarray:
        """i32[B], STOP_STRING for rows that are to end now, else RUNNING."""
        ending = np.full(len(self._prompts), Finish.RUNNING, np.int32)
        for row, prompt in enumerate(self._prompts):
            ids = tokens[row, len(prompt) : total[row]].tolist()
            if row not in self._cut and self._stops:
                self._find_stop(row, ids)
            if row in self._cut:
                ending[row] = Finish.STOP_STRING
            is_final = row in self._cut or finish[row] != Finish.RUNNING
            self._send(row, ids, is_final)
        return ending

    def _text(self, row: int, ids: list[int]) -> str:
        return self._tokenizer.decode_after(self._prompts[row], ids)

    def _first_stop(self, text: str) -> int | None:
        found = [at for at in map(text.find, self._stops) if at >= 0]
        return min(found) if found else None

    def _find_stop(self, row: int, ids: list[int]) -> None:
        at = self._first_stop(self._text(row, ids))
        if at is None:
            return
        low, high = 1, len(ids)  # the fewest tokens whose text holds a stop string
        while low < high:
            middle = (low + high) // 2
            has_stop = self._first_stop(self._text(row, ids[:middle])) is not None
            low, high = (low, middle) if has_stop else (middle + 1, high)
        text = self._text(row, ids[:low])
        at = self._first_stop(text)
        self._cut[row] = (low, text[: len(text) if at is None else at])

    def _send(self, row: int, ids: list[int], is_final: bool) -> None:
        if self._on_text is None:
            return
        text = self._cut[row][1] if row in self._cut else self._text(row, ids)
        if not is_final:
            # A character whose bytes are not all there decodes to U+FFFD, and the start of
            # a stop string may yet be cut: both wait.
            text = text.rstrip("\ufffd")
            held = max((len(s) for s in self._stops), default=1) - 1
            text = text[: max(len(text) - held, 0)]
        if len(text) > len(self._sent[row]):
            self._on_text(row, text[len(self._sent[row]) :])
            self._sent[row] = text

    def result(self, row: int, n: int, tokens) -> tuple[int, str | None, bool]:
        """Tokens kept, text, and whether a stop string cut them."""
        if row in self._cut:
            return (*self._cut[row], True)
        if self._tokenizer is None:
            return n, None, False
        begin = len(self._prompts[row])
        return n, self._text(row, tokens[begin : begin + n].tolist()), False
