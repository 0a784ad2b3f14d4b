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


class _Special(NamedTuple):
    """A special token of a row's output, which the text leaves out."""

    index: int
    before: str  # the text before it
    content: str


# New tokens after which the known text is extended, and known tokens that are decoded along with
# new ones, since a token's text may depend on those before it.
_STRETCH = 64
_CONTEXT = 64


class TextTracker:
    """Follows the text of every row: finds stop strings and hands out what is settled.

    Results do not depend on how often they are polled. A poll decodes only the last tokens, however
    long the row is.

    Args:
      tokenizer: None where there is no text to follow.
      prompts: ids of every row.
      stops: strings at which a row ends. In one that holds a special token, such as "<|end|>" or
        "Bye.<|end|>", it is matched by its id too: such a string is looked for in the text with its
        special tokens.
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
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._stops = stops
        self.has_pieces = has_pieces
        self._pieces = []
        self._sent = [0] * len(prompts)  # characters
        self._known = [_Known()] * len(prompts)
        texts = () if tokenizer is None else tokenizer.special_texts.values()
        self._special_stops = [stop for stop in stops if any(text in stop for text in texts)]
        self._specials: list[list[_Special]] = [[] for _ in prompts]
        self._num_scanned = [0] * len(prompts)  # tokens in which special ones were looked for
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
        tokenizer = self._tokenizer
        known = self._known[row]
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

    def _scan(self, row: int, ids: list[int]) -> None:
        """Notes the special tokens of new ids."""
        texts = self._tokenizer.special_texts
        begin = self._num_scanned[row]
        for index, token in enumerate(ids[begin:], begin):
            if token in texts:
                before = self._text(row, ids[:index], Finish.CANCELLED)  # whole characters
                self._specials[row].append(_Special(index, before, texts[token]))
        self._num_scanned[row] = len(ids)

    def _before_stop(self, row: int, ids: list[int], end: Finish) -> str | None:
        """Returns the text before the first stop string in it; None without one."""
        text = self._text(row, ids, end)
        places = [text.find(stop) for stop in self._stops if stop not in self._special_stops]
        specials = [special for special in self._specials[row] if special.index < len(ids)]
        if specials:
            text = max(text, specials[-1].before, key=len)
        shown = _with_specials(text, specials)
        starts = [shown.find(stop) for stop in self._special_stops]
        places += [_without_specials(start, specials) for start in starts if start >= 0]
        places = [place for place in places if place >= 0]
        return text[: min(places)] if places else None

    def _find_stop(self, row: int, ids: list[int], end: Finish) -> None:
        if self._special_stops:
            self._scan(row, ids)

        def before_stop(n: int) -> str | None:
            return self._before_stop(row, ids[:n], end if n == len(ids) else Finish.RUNNING)

        if before_stop(len(ids)) is None:
            return
        # the fewest tokens whose settled text holds a stop string
        low = 1
        high = len(ids)
        while low < high:
            middle = (low + high) // 2
            has_stop = before_stop(middle) is not None
            low, high = (low, middle) if has_stop else (middle + 1, high)
        self._cut[row] = _Cut(low, before_stop(low), Finish.STOP_STRING)

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


def _with_specials(text: str, specials: Sequence[_Special]) -> str:
    """Returns a text with its special tokens.

    The text before a special token is as noted, since later bytes may change how it is decoded, and
    what is found must not depend on how often a row is polled.
    """
    ends = [0, *(len(special.before) for special in specials)]
    pieces = [special.before[end:] + special.content for end, special in zip(ends, specials)]
    return "".join([*pieces, text[ends[-1] :]])


def _without_specials(place: int, specials: Sequence[_Special]) -> int:
    """Returns where a place of the text with its special tokens is in the text without them."""
    num_left_out = 0
    for special in specials:
        begin = len(special.before) + num_left_out
        if place < begin + len(special.content):
            return min(place - num_left_out, len(special.before))
        num_left_out += len(special.content)
    return place - num_left_out
