"""Training windows by step. The order depends on (seed, step) alone, so resuming is exact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import grain
import numpy as np

from spec_jax.config.checks import MAX_INT
from spec_jax.data import tokens
from spec_jax.errors import ConfigError
from spec_jax.models.tokenizer import Tokenizer


class Corpus(NamedTuple):
    """Packed tokens, in memory or mapped from a file, and which of them are to be predicted.

    Attributes:
      name: The name of the corpus in error messages.
      tokens: i32[T].
      mask: bool[T], True where the token is to be predicted. None means everywhere.
      starts: i64[number of documents + 1], where each document begins, and the end of the last;
        what follows it is a document of its own. None means that they are not known.
      counts: What was read and what was left out, see ``read_documents``.
      notes: Sentences on how it was made.
    """

    name: str
    tokens: np.ndarray
    mask: np.ndarray | None = None
    starts: np.ndarray | None = None
    counts: Mapping[str, int] = MappingProxyType({})
    notes: tuple[str, ...] = ()

    @classmethod
    def of_documents(
        cls,
        name: str,
        tokenizer: Tokenizer,
        documents: Iterable[tuple[str, str]],
        counts: Mapping[str, int] = MappingProxyType({}),
    ) -> Corpus:
        """Packs documents in memory, see ``tokens.pack``.

        Args:
          name: The name of the corpus in error messages.
          tokenizer: The tokenizer of the model that reads the text.
          documents: Pairs of a name and a text, as ``python_source.documents`` returns them.
          counts: What was read and what was left out.

        Raises:
          ConfigError: The tokenizer has no token that separates documents.
        """
        packed, starts = tokens.pack(tokenizer, documents)
        return cls(name, packed, starts=starts, counts=counts)

    @classmethod
    def of_tokens(cls, name: str, tokens: Any, limit: int | None = None) -> Corpus:
        """Makes a corpus of ids in memory.

        Args:
          name: The name of the corpus in error messages.
          tokens: An array i32[T], or an iterable of arrays i32[T] or i32[N,T], each row of which is
            a document. A corpus is returned as it is.
          limit: The number of tokens after which no further document is read; None means no limit.

        Raises:
          ConfigError: It is none of these, or an id has more than 32 bits.
        """
        if isinstance(tokens, cls):
            return tokens
        is_array = getattr(tokens, "ndim", None) == 1

        def refused(fault: object) -> ConfigError:
            return ConfigError(
                f"{name} is a {type(tokens).__name__} ({fault}); expected a Corpus, an array "
                "i32[T] of token ids, or an iterable of such arrays"
            )

        parts = []
        starts = [0]
        try:
            documents = iter([tokens] if is_array else tokens)
        except TypeError as error:
            raise refused(error) from error
        for part in documents:
            try:
                part = np.asarray(part)
            except (TypeError, ValueError) as error:  # such as lists of several lengths
                raise refused(error) from error
            if part.ndim not in (1, 2) or not np.issubdtype(part.dtype, np.integer):
                raise refused(f"of {part.dtype.name}{list(part.shape)}")
            if part.size and not -MAX_INT <= part.min() <= part.max() <= MAX_INT:
                bad = part.max() if part.max() > MAX_INT else part.min()
                raise ConfigError(f"{name} holds id {bad}; ids have 32 bits")
            for row in np.atleast_2d(part):
                parts.append(row.astype(np.int32))
                starts.append(starts[-1] + len(row))
            if limit is not None and starts[-1] >= limit:
                break
        packed = np.concatenate([np.zeros(0, np.int32), *parts])
        return cls(name, packed, starts=None if is_array else np.asarray(starts))

    def num_windows(self, length: int) -> int:
        """Returns the number of whole windows; the tokens after the last are not used."""
        return len(self.tokens) // length

    def window(self, index: int, length: int) -> dict[str, np.ndarray]:
        """Returns ``tokens`` i32[length] and ``mask`` bool[length] of window ``index``.

        Also ``begins`` i32[length], the place in the window where each token's document begins; 0
        if it began before, or if that is not known.
        """
        part = slice(index * length, (index + 1) * length)
        mask = np.ones(length, bool) if self.mask is None else np.asarray(self.mask[part], bool)
        begins = np.zeros(length, np.int32)
        if self.starts is not None:
            starts = np.concatenate([[0], self.starts])  # what is before the first is one too
            document = np.searchsorted(starts, np.arange(part.start, part.stop), "right") - 1
            begins = np.maximum(starts[document] - part.start, 0).astype(np.int32)
        return {"tokens": np.asarray(self.tokens[part], np.int32), "mask": mask, "begins": begins}


def window_batches(
    texts: Sequence[Corpus], shares: Sequence[float], *, seed: int, batch: int, length: int
) -> grain.MapDataset:
    """Makes batches by step, drawn from one or several texts.

    In each epoch of a text, each of its windows is drawn once, in a new order. Only the windows
    of one batch are held in memory.

    Args:
      texts: The texts to draw from.
      shares: The share of the windows for each text; they need not add up to 1.
      seed: The seed of the order.
      batch: B, the number of windows.
      length: W, the number of tokens in a window.

    Returns:
      A dataset whose item ``[step]`` holds ``tokens`` i32[B,W], ``mask`` bool[B,W], ``begins``
      i32[B,W], see ``Corpus.window``, and ``window`` i64[B,2], the numbers of the text and of the
      window in it.

    Raises:
      ConfigError: There is no text, a share is negative or not finite, all are 0, or a text is
        shorter than a window or has no token to predict.
    """
    if not texts or len(texts) != len(shares):
        raise ConfigError(f"{len(texts)} texts have {len(shares)} shares; expected one each")
    parts = []
    weights = []
    for number, (text, share) in enumerate(zip(texts, shares)):
        if not 0 <= share < float("inf"):
            raise ConfigError(f"the share of {text.name} is {share}; expected 0 or more")
        if share == 0:
            continue
        count = text.num_windows(length)
        if count == 0:
            raise ConfigError(
                f"{text.name} has {len(text.tokens)} tokens; expected at least {length}, a window: "
                "give more text, or shorten the windows"
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
    """Counts how often each id is to be predicted.

    Args:
      text: The corpus.
      vocab_size: V.
      chunk: The number of tokens that are read at a time.

    Returns:
      i64[V].

    Raises:
      ConfigError: The text holds an id that the vocabulary does not have.
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
    """Chooses the most frequent tokens, and returns their ids as EAGLE-3 stores them.

    Args:
      counts: i64[V], how often each id occurs.
      size: U, the size of the draft vocabulary.

    Returns:
      ``d2t`` i32[U]: draft id i is the target's id ``i + d2t[i]``, in ascending order.

    Raises:
      ConfigError: The size is below 1 or above V.
    """
    if not 0 < size <= len(counts):
        raise ConfigError(f"the draft vocabulary is {size}; expected 1 to {len(counts)}")
    by_count = np.argsort(-counts, kind="stable")[:size]  # of equal counts the smaller id
    return (np.sort(by_count) - np.arange(size)).astype(np.int32)
