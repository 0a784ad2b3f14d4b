"""Follows text as it becomes final: finds stop strings and collects pieces for streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    """Follows the text of a row: finds stop strings and hands out what is settled.

    Results do not depend on how often they are polled. A poll decodes only the last tokens, however
    long the row is.

    Args:
      tokenizer: None where there is no text to follow.
      prompt: ids of the prompt.
      stops: strings at which the row ends. In one that holds a special token, such as "<|end|>" or
        "Bye.<|end|>", it is matched by its id too: such a string is looked for in the text with its
        special tokens.
      has_pieces: collect the text's pieces.

    Attributes:
      prompt: ids of the prompt.
      tokenizer: as given.
      is_needed: whether the text must be followed before the row has ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        *,
        has_pieces: bool = False,
    ):
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.is_needed = has_pieces or bool(stops)
        self._stops = stops
        self._has_pieces = has_pieces
        self._num_sent = 0  # characters
        self._known = _Known()
        texts = () if tokenizer is None else tokenizer.special_texts.values()
        self._special_stops = [stop for stop in stops if any(text in stop for text in texts)]
        self._specials: list[_Special] = []
        self._num_scanned = 0  # tokens in which special ones were looked for
        self._cut: _Cut | None = None
        self._has_ended = False

    def look(self, ids: list[int], finish: int) -> tuple[Finish, str]:
        """Follows the row.

        Args:
          ids: of the output so far.
          finish: the ``Finish`` of the row.

        Returns:
          STOP_STRING if the row must end now, else RUNNING; and the text that has become final
          since the last call, if pieces are collected.
        """
        if self._has_ended:
            return Finish.RUNNING, ""
        end = Finish(int(finish))
        if self._cut is None and self._stops:
            self._find_stop(ids, end)
        if self._cut is not None:
            end = self._cut.finish
        self._has_ended = end != Finish.RUNNING
        piece = self._piece(ids, end) if self._has_pieces else ""
        return end if self._cut is not None else Finish.RUNNING, piece

    def drop(self) -> None:
        """Ends a row that was cancelled before its first token."""
        self._cut = _Cut(0, None if self.tokenizer is None else "", Finish.CANCELLED)

    def result(self, ids: list[int], end: Finish) -> tuple[int, str | None, Finish]:
        """Returns how many of the row's tokens are kept, their text, and why the row ended."""
        if self._cut is not None:
            return self._cut
        text = None if self.tokenizer is None else self._text(ids, end)
        return len(ids), text, end

    def _text(self, ids: list[int], end: Finish) -> str:
        """The row's text up to where later tokens cannot change it."""
        known = self._known
        if known.num_tokens > len(ids):
            known = _Known()
        context = [*self.prompt, *ids[: known.num_tokens]][-_CONTEXT:]
        new = ids[known.num_tokens :]
        if end == Finish.CANCELLED:
            return known.text + self.tokenizer.whole_after(context, new)
        if end != Finish.RUNNING:
            return known.text + self.tokenizer.decode_after(context, new)
        text = self.tokenizer.settled_after(context, new)
        if len(new) >= _STRETCH and text == self.tokenizer.decode_after(context, new):
            self._known = _Known(len(ids), known.text + text)
        return known.text + text

    def _before_stop(self, ids: list[int], end: Finish) -> str | None:
        """Returns the text before the first stop string in it; None without one."""
        text = self._text(ids, end)
        places = [text.find(stop) for stop in self._stops if stop not in self._special_stops]
        specials = [special for special in self._specials if special.index < len(ids)]
        if specials:
            text = max(text, specials[-1].before, key=len)
        shown = _with_specials(text, specials)
        starts = [shown.find(stop) for stop in self._special_stops]
        places += [_without_specials(start, specials) for start in starts if start >= 0]
        places = [place for place in places if place >= 0]
        return text[: min(places)] if places else None

    def _find_stop(self, ids: list[int], end: Finish) -> None:
        if self._special_stops:
            texts = self.tokenizer.special_texts
            for index, token in enumerate(ids[self._num_scanned :], self._num_scanned):
                if token in texts:
                    before = self._text(ids[:index], Finish.CANCELLED)  # whole characters
                    self._specials.append(_Special(index, before, texts[token]))
            self._num_scanned = len(ids)

        def before_stop(n: int) -> str | None:
            return self._before_stop(ids[:n], end if n == len(ids) else Finish.RUNNING)

        if before_stop(len(ids)) is None:
            return
        # the fewest tokens whose settled text holds a stop string
        low = 1
        high = len(ids)
        while low < high:
            middle = (low + high) // 2
            has_stop = before_stop(middle) is not None
            low, high = (low, middle) if has_stop else (middle + 1, high)
        self._cut = _Cut(low, before_stop(low), Finish.STOP_STRING)

    def _piece(self, ids: list[int], end: Finish) -> str:
        text = self._text(ids, end) if self._cut is None else self._cut.text
        if end == Finish.RUNNING:  # the start of a stop string may yet be cut
            held = max((len(s) for s in self._stops), default=1) - 1
            text = text[: max(len(text) - held, 0)]
        piece = text[self._num_sent :]
        self._num_sent += len(piece)
        return piece


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
