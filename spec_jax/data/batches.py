"""Training windows by step: the order is a function of (seed, step), so resuming is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import grain
import numpy as np

from spec_jax.errors import ConfigError


class Corpus(NamedTuple):
    """Packed tokens, in memory or mapped from a file, and which of them are to be predicted.

    Attributes:
      name: for errors.
      tokens: i32[T].
      mask: bool[T], or None: all of them.
    """

    name: str
    tokens: np.ndarray
    mask: np.ndarray | None = None

    def window(self, index: int, length: int) -> dict[str, np.ndarray]:
        """``tokens`` i32[length] and ``mask`` bool[length] of one of consecutive windows."""
        part = slice(index * length, (index + 1) * length)
        mask = np.ones(length, bool) if self.mask is None else np.asarray(self.mask[part], bool)
        return {"tokens": np.asarray(self.tokens[part], np.int32), "mask": mask}


def window_batches(
    texts: Sequence[Corpus], shares: Sequence[float], *, seed: int, batch: int, length: int
) -> grain.MapDataset:
    """Batches by step, ``[step]`` giving ``tokens`` i32[B,W], ``mask`` bool[B,W] and ``window``.

    In each epoch of a text every window of it is drawn once, in an order of its own. Nothing of
    a text is held in memory but the windows of one batch. ``window`` is i64[B,2]: which text,
    and which of its windows.

    Args:
      texts: to draw from.
      shares: of the windows, one a text; they need not add up to 1.
      seed: names the order.
      batch: B.
      length: W.

    Raises:
      ConfigError: no text, a share that cannot be, a text shorter than a window, or one none of
        whose tokens is to be predicted.
    """
    if not texts or len(texts) != len(shares):
        raise ConfigError(f"{len(texts)} texts have {len(shares)} shares; expected one each")
    parts, weights = [], []
    for number, (text, share) in enumerate(zip(texts, shares)):
        if not 0 <= share < float("inf"):
            raise ConfigError(f"the share of {text.name} is {share}; expected 0 or more")
        if share == 0:
            continue
        count = len(text.tokens) // length
        if count == 0:
            raise ConfigError(
                f"{text.name} has {len(text.tokens)} tokens; expected at least {length}, a window"
            )
        if text.mask is not None and not np.any(text.mask):
            raise ConfigError(f"no token of {text.name} is to be predicted: its mask is all false")

        def window(index, text=text, number=number):
            return text.window(index, length) | {"window": np.asarray((number, index))}

        order = grain.MapDataset.range(count).seed((seed + number) % 2**32)
        parts.append(order.shuffle().repeat().map(window))
        weights.append(share)
    if not parts:
        raise ConfigError("every share is 0; expected one above it")
    mixed = grain.MapDataset.mix(parts, weights) if len(parts) > 1 else parts[0]
    return mixed.batch(batch)


def count_tokens(text: Corpus, vocab_size: int, chunk: int = 1 << 20) -> np.ndarray:
    """How often each id is to be predicted, i64[V], read ``chunk`` tokens at a time.

    Raises:
      ConfigError: the text holds an id that the vocabulary does not have.
    """
    counts = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(text.tokens), chunk):
        part = np.asarray(text.tokens[begin : begin + chunk])
        if part.size and not 0 <= part.min() <= part.max() < vocab_size:
            bad = part.max() if part.max() >= vocab_size else part.min()
            raise ConfigError(
                f"{text.name} holds id {bad}; the target has ids 0 to {vocab_size - 1}: it was "
                "tokenised for another model"
            )
        if text.mask is not None:
            part = part[np.asarray(text.mask[begin : begin + chunk], bool)]
        counts += np.bincount(part, minlength=vocab_size)
    return counts


def draft_vocabulary(counts: np.ndarray, size: int) -> np.ndarray:
    """The ids of the most frequent tokens, as EAGLE-3 stores them.

    Args:
      counts: i64[V].
      size: U.

    Returns:
      i32[U], ``d2t``: draft id i is the target's id ``i + d2t[i]``; ids ascend.

    Raises:
      ConfigError: a size that the vocabulary does not have.
    """
    if not 0 < size <= len(counts):
        raise ConfigError(f"the draft vocabulary is {size}; expected 1 to {len(counts)}")
    by_count = np.argsort(-counts, kind="stable")[:size]  # of equal counts the smaller id
    return (np.sort(by_count) - np.arange(size)).astype(np.int32)
