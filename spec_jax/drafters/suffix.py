"""Suffix decoding: copies what most often followed the same tokens before, while it is likely.

The published form keeps two trees of suffixes, of the request's own text and of past outputs.
A path of such a tree is a set of places in the text, so the tree is not built: the places where
the last m tokens occurred are a mask, and following a child narrows it to the places where that
child came next.

Source: SuffixDecoding, arXiv 2411.04975; Arctic Inference's choice of the best match by its
summed probability.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import SuffixConfig
from spec_jax.contracts import Context, Drafter, Proposal, UpdateCount
from spec_jax.drafters.model_free import model_free
from spec_jax.drafters.registry import DrafterKind, Drafting

GAP = -1  # in a text: no token, as between two outputs


class Continuation(NamedTuple):
    """Drafts, and the expected number of them that will be accepted."""

    tokens: jax.Array  # i32[K]
    n_draft: jax.Array  # i32[]
    score: jax.Array  # f32[], the sum of the drafts' probabilities
    size: jax.Array  # i32[], tokens that matched

    @classmethod
    def none(cls, num_draft: int) -> Continuation:
        zero = jnp.int32(0)
        return cls(jnp.zeros((num_draft,), jnp.int32), zero, jnp.float32(0.0), zero)

    def or_better(self, other: Continuation) -> Continuation:
        """The one of the larger score; of equal ones the longer match; of equal ones self."""
        is_better = (other.score > self.score) | (
            (other.score == self.score) & (other.size > self.size)
        )
        return jax.tree.map(lambda a, b: jnp.where(is_better, b, a), self, other)


def continuation(
    text: jax.Array, last: jax.Array, num_draft: int, vocab_size: int, follow: SuffixConfig
) -> Continuation:
    """The most promising continuation of the last tokens, by what followed them in ``text``.

    For each m the last m tokens are looked for; from their occurrences the most frequent next
    token is followed (of equally frequent ones the smallest id) until the product of
    ``count(token) / count(all tokens that came next)`` falls below ``min_prob``.

    Args:
      text: i32[N], ``GAP`` where there is no token; what follows a place is looked for up to
        the next gap.
      last: i32[max_depth], the last tokens, the very last first; ``GAP`` before their beginning.
      num_draft: K.
      vocab_size: V.
      follow: how far.
    """
    index = jnp.arange(text.shape[0])  # of the token that follows a match

    def copy(places, size):
        """Follows the most frequent tokens from ``places`` bool[N]."""

        def step(carry):
            places, prob, drafted = carry
            nth = drafted.n_draft
            after = jnp.where(index + nth < len(text), jnp.roll(text, -nth), GAP)
            known = places & (after >= 0)
            counts = jnp.zeros((vocab_size,), jnp.int32)
            counts = counts.at[jnp.where(known, after, vocab_size)].add(1, mode="drop")
            token = jnp.argmax(counts).astype(jnp.int32)
            prob = prob * counts[token] / jnp.maximum(known.sum(), 1)
            is_kept = prob >= jnp.maximum(follow.min_prob, 1e-30)
            longer = Continuation(
                drafted.tokens.at[nth].set(token), nth + 1, drafted.score + prob, size
            )
            drafted = jax.tree.map(lambda a, b: jnp.where(is_kept, a, b), longer, drafted)
            return known & (after == token), jnp.where(is_kept, prob, 0.0), drafted

        budget = jnp.floor(follow.max_factor * size + follow.max_offset).astype(jnp.int32)
        room = jnp.minimum(num_draft, budget)

        def going(carry):
            return (carry[1] > 0) & (carry[2].n_draft < room)

        start = (places, jnp.float32(1.0), Continuation.none(num_draft)._replace(size=size))
        return jax.lax.while_loop(going, step, start)[2]

    def longer_match(carry):
        size, places, best = carry
        best = copy(places, size).or_better(best)
        before = jnp.where(index > size, jnp.roll(text, size + 1), GAP)
        at = jnp.minimum(size, follow.max_depth - 1)
        places &= (before == last[at]) & (last[at] >= 0) & (size < follow.max_depth)
        return size + 1, places, best

    places = (jnp.where(index > 0, jnp.roll(text, 1), GAP) == last[0]) & (last[0] >= 0)
    places &= text >= 0
    carry = (jnp.int32(1), places, Continuation.none(num_draft))
    return jax.lax.while_loop(lambda carry: carry[1].any(), longer_match, carry)[2]


@functools.cache
def suffix(vocab_size: int, follow: SuffixConfig = SuffixConfig()) -> Drafter:
    """Returns a drafter that copies from each row's own text and from past outputs.

    Its proposals are deterministic and it has no state. Its parameters are those of a ``History``,
    the same for every row, or None. The row's own text is preferred if both are equally good.

    Args:
      vocab_size: V of the target.
      follow: how far a match is followed.
    """

    def propose(params, state, context: Context, num_draft: int):
        back = jnp.arange(follow.max_depth)

        def one(tokens, length):
            text = jnp.where(jnp.arange(len(tokens)) <= length, tokens, GAP)
            at = length - back
            last = jnp.where(at >= 0, jnp.take(tokens, at, mode="clip"), GAP)

            def find(text):
                return continuation(text, last, num_draft, vocab_size, follow)

            best = find(text)
            return best if params is None else best.or_better(find(params["tokens"]))

        best = jax.vmap(one)(context.tokens, context.length)
        offered = jnp.arange(num_draft) < best.n_draft[:, None]
        return Proposal(jnp.where(offered, best.tokens, 0), best.n_draft), state

    def num_updates(params, state):
        del state
        return jnp.uint32(0) if params is None else params["num_updates"]

    drafter = model_free("suffix", propose, vocab_size)
    if follow.history_tokens == 0:
        return drafter
    return drafter._replace(memory=UpdateCount(num_updates))


class History:
    """The latest outputs, at most ``size`` tokens in total; the oldest are dropped first.

    The device array is made once for each output that is added, and arrays returned earlier stay
    valid. Threads and decoders may share a history. A copy goes on by itself; pickling saves the
    outputs with their count.

    Args:
      size: H, maximum tokens including the gaps between outputs; 0 keeps nothing.
    """

    def __init__(self, size: int):
        self._text = np.full((size,), GAP, np.int32)
        self._num_updates = 0
        self._params: dict[str, jax.Array] | None = None
        self._lock = threading.Lock()

    @property
    def num_updates(self) -> int:
        """How many outputs were ever added, those that were dropped since included."""
        return self._num_updates

    @property
    def params(self) -> dict[str, jax.Array] | None:
        """The drafter's parameters; None if nothing is kept.

        ``{"tokens": i32[H], the oldest first, "num_updates": u32[]}``, of one moment.
        """
        with self._lock:
            if self._params is None and len(self._text):
                count = jnp.uint32(self._num_updates)
                self._params = {"tokens": jnp.asarray(self._text), "num_updates": count}
            return self._params

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {"text": self._text, "num_updates": self._num_updates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(0)
        self._text = state["text"]
        self._num_updates = state["num_updates"]

    def add(self, output) -> None:
        """Appends the ids of a finished output."""
        if len(self._text) == 0 or len(output) == 0:
            return
        with self._lock:
            joined = np.concatenate([self._text, [GAP], np.asarray(output, np.int32)])
            self._text = joined[-len(self._text) :].astype(np.int32)
            self._num_updates += 1
            self._params = None


SUFFIX = DrafterKind(
    name="suffix",
    drafting=Drafting(
        draft="none",
        history=lambda config: History(config.suffix.history_tokens),
        drafter=lambda draft, target, config: suffix(target.vocab_size, config.suffix),
    ),
)
