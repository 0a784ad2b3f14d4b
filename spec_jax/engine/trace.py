"""Where each output token of a row came from, to be looked at."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_jax.decoding import Finish, Kind
from spec_jax.engine.text import TextTracker
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.show import page, plots

_CONTEXT = 64  # ids of the prompt that are kept: the text of the output may depend on the last ones


@dataclasses.dataclass(frozen=True)
class Trace:
    """Where each output token of a row came from.

    Attributes:
      kinds: of each token: "first", "accepted", "corrected" or "bonus".
      offered: drafts offered by the round that begins at each token, else -1.
      rejected: the id of the draft that each corrected token replaces, else -1. Where a tree had
        several at this place, it is the first of them.
      expected: the rule's closed-form acceptance of the draft at each place that was reached, else
        NaN; empty if it was not recorded.
      prompt: the last ids of the prompt.
      tokenizer: turns ids into text, or None.
    """

    kinds: tuple[str, ...]
    offered: tuple[int, ...]
    rejected: tuple[int, ...]
    expected: tuple[float, ...]
    prompt: tuple[int, ...]
    tokenizer: Tokenizer | None

    @classmethod
    def of(
        cls, kind: np.ndarray, offered: np.ndarray, rejected: np.ndarray,
        expected: np.ndarray | None, prompt: np.ndarray, tokenizer: Tokenizer | None,
    ) -> Trace:  # fmt: skip
        """Makes the trace of a row from its record, on the host.

        Args:
          kind, offered, rejected, expected: of the output tokens, see ``decoding.DecodeState``.
          prompt: ids of the prompt.
          tokenizer: turns ids into text, or None.
        """
        return cls(
            tuple(Kind(k).name.lower() for k in kind.tolist()), tuple(offered.tolist()),
            tuple(rejected.tolist()), () if expected is None else tuple(expected.tolist()),
            tuple(prompt[-_CONTEXT:].tolist()), tokenizer,
        )  # fmt: skip

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text that each output token adds, "" for one that ends inside a character.

        Args:
          tokens: of the output, or the first of them.
        """
        if self.tokenizer is None:
            return [f"{token} " for token in tokens]
        tracker = TextTracker(self.tokenizer, [self.prompt], has_pieces=True)
        row, begin = np.asarray([[*self.prompt, *tokens]]), len(self.prompt)
        pieces = []
        for n in range(1, len(tokens) + 1):
            end = Finish.LENGTH if n == len(tokens) else Finish.RUNNING
            tracker.look(row, [begin + n], [end])
            pieces.append("".join(text for _, text in tracker.take()))
        return pieces

    def shown(self, tokens: Sequence[int]) -> list[page.Token]:
        """Returns the output's tokens as ``page.tokens`` shows them.

        Args:
          tokens: of the output.
        """
        tokens, found, number, place, count = tokens[: len(self.kinds)], [], 0, 0, 0
        for i, text in enumerate(self.pieces(tokens)):
            if self.offered[i] >= 0:
                number, place, count = number + 1, 0, self.offered[i]
            place += 1
            kind = "target" if self.kinds[i] == "bonus" and not count else self.kinds[i]
            hint = f"token {i + 1}, id {tokens[i]}: {page.MEANING[kind]}"
            if number:
                hint += f"; round {number}"
            if kind == "accepted":
                hint += f", draft {place} of {count}"
            if self.expected and not math.isnan(self.expected[i]):
                hint += f", accepted with probability {self.expected[i]:.2f}"
            if self.tokenizer is not None and not text:
                text = self.tokenizer.special_name(tokens[i]) or ""
            rejected = None
            if self.rejected[i] >= 0:
                rejected = self._draft([*self.prompt, *tokens[:i]], self.rejected[i])
            found.append(page.Token(text, kind, hint, rejected, self.offered[i] >= 0))
        return found

    def _draft(self, context: Sequence[int], token: int) -> str:
        """The text that a draft would have added."""
        if self.tokenizer is None:
            return str(token)
        text = self.tokenizer.decode_after(context[-_CONTEXT:], [token])
        return text or self.tokenizer.special_name(token) or ""

    def plot(self, axes: Any = None) -> Any:
        """Draws the tokens of each round; returns the figure, see ``plots.plot_rounds``."""
        starts = [i for i, count in enumerate(self.offered) if count >= 0]
        rounds = [
            self.kinds[begin:end] for begin, end in zip(starts, [*starts[1:], len(self.kinds)])
        ]
        return plots.plot_rounds(
            [kinds.count("accepted") for kinds in rounds],
            [kinds[-1] if kinds[-1] != "accepted" else "" for kinds in rounds],
            [self.offered[i] for i in starts], axes,
        )  # fmt: skip
