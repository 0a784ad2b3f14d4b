"""Follows text as it becomes final: finds stop strings and collects pieces for streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spec_jax.decoding.state import Finish
from spec_jax.models.tokenizer import Tokenizer


class _Cut(NamedTuple):
    """The end of a row that is cut before its last token."""

    num_tokens: int
    text: str | None
    finish: Finish


class _Known(NamedTuple):
    """The beginning of a row whose text no later token can change."""

    num_tokens: int = 0
    text: str = ""


# New tokens after which the known text is extended, and known tokens that are decoded along with
# new ones, since a token's text may depend on those before it.
_STRETCH, _CONTEXT = 64, 64


class TextTracker:
    """Follows the text of every row: finds stop strings and hands out what is settled.

    Results do not depend on how often they are polled. A poll decodes only the last tokens, however
    long the row is.

    Args:
      tokenizer: None where there is no text to follow.
      prompts: ids of every row.
      stops: strings at which a row ends.
      has_pieces: collect the text's pieces.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        stops: Sequence[str] = (),
        *,
        has_pieces: bool = False,
    ):
        self._tokenizer, self._prompts, self._stops = tokenizer, prompts, stops
        self.has_pieces, self._pieces = has_pieces, []
        self._sent = [0] * len(prompts)  # characters
        self._known = [_Known()] * len(prompts)
        self._cut: dict[int, _Cut] = {}
        self._ended: set[int] = set()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Turns ids into text; None where there is no text."""
        return self._tokenizer

    @property
    def is_needed(self) -> bool:
        """Whether the text must be followed before the rows have ended."""
        return self.has_pieces or bool(self._stops)

    def look(self, tokens, total, finish) -> np.ndarray:
        """Returns i32[B], STOP_STRING for rows that must end now, else RUNNING.

        Args:
          tokens: i32[B,M], prompt and output.
          total: i32[B], tokens of prompt and output so far.
          finish: i32[B], a Finish for each row.
        """
        ending = np.full(len(self._prompts), Finish.RUNNING, np.int32)
        for row, prompt in enumerate(self._prompts):
            if row in self._ended:
                continue
            ids = tokens[row, len(prompt) : total[row]].tolist()
            end = Finish(int(finish[row]))
            if row not in self._cut and self._stops:
                self._find_stop(row, ids, end)
            if row in self._cut:
                ending[row] = end = self._cut[row].finish
            if self.has_pieces:
                self._send(row, ids, end)
            if end != Finish.RUNNING:
                self._ended.add(row)
        return ending

    def drop(self, row: int) -> None:
        """Ends a row that was cancelled before its first token."""
        self._cut[row] = _Cut(0, None if self._tokenizer is None else "", Finish.CANCELLED)

    def take(self) -> list[tuple[int, str]]:
        """Returns the pieces found since the last call, as (row, text)."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _text(self, row: int, ids: list[int], end: Finish) -> str:
        """The row's text up to where later tokens cannot change it."""
        tokenizer, known = self._tokenizer, self._known[row]
        if known.num_tokens > len(ids):
            known = _Known()
        context = [*self._prompts[row], *ids[: known.num_tokens]][-_CONTEXT:]
        new = ids[known.num_tokens :]
        if end == Finish.CANCELLED:
            return known.text + tokenizer.whole_after(context, new)
        if end != Finish.RUNNING:
            return known.text + tokenizer.decode_after(context, new)
        text = tokenizer.settled_after(context, new)
        if len(new) >= _STRETCH and text == tokenizer.decode_after(context, new):
            self._known[row] = _Known(len(ids), known.text + text)
        return known.text + text

    def _first_stop(self, text: str) -> int | None:
        found = [at for at in map(text.find, self._stops) if at >= 0]
        return min(found) if found else None

    def _find_stop(self, row: int, ids: list[int], end: Finish) -> None:
        text_of = lambda n: self._text(row, ids[:n], end if n == len(ids) else Finish.RUNNING)
        if self._first_stop(text_of(len(ids))) is None:
            return
        low, high = 1, len(ids)  # the fewest tokens whose settled text holds a stop string
        while low < high:
            middle = (low + high) // 2
            has_stop = self._first_stop(text_of(middle)) is not None
            low, high = (low, middle) if has_stop else (middle + 1, high)
        text = text_of(low)
        self._cut[row] = _Cut(low, text[: self._first_stop(text)], Finish.STOP_STRING)

    def _send(self, row: int, ids: list[int], end: Finish) -> None:
        text = self._cut[row].text if row in self._cut else self._text(row, ids, end)
        if end == Finish.RUNNING:  # the start of a stop string may yet be cut
            held = max((len(s) for s in self._stops), default=1) - 1
            text = text[: max(len(text) - held, 0)]
        if len(text) > self._sent[row]:
            self._pieces.append((row, text[self._sent[row] :]))
            self._sent[row] = len(text)

    def result(self, row: int, ids: list[int], end: Finish) -> tuple[int, str | None, Finish]:
        """Returns how many of a row's tokens are kept, their text, and why the row ended."""
        if row in self._cut:
            return self._cut[row]
        text = None if self._tokenizer is None else self._text(row, ids, end)
        return len(ids), text, end
