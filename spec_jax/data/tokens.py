"""Text as tokens: a tokenizer, packing, and the share of a text that repeats itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from spec_jax.errors import ConfigError
from spec_jax.models.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"

# One digit a token; a word with the one character before it (space, dot, bracket,
# underscore); newlines together with the indentation that follows; runs of spaces.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\n+ *| ?[^\s\p{L}\p{N}]+| +|\s"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE tokenizer.

    Any text that is encoded and decoded stays the same. Id 0 is ``END_OF_TEXT``.

    Args:
      texts: The texts to learn merges from.
      vocab_size: The exact number of entries of the vocabulary.

    Raises:
      ConfigError: The vocabulary cannot hold the 256 bytes and the special token, or there is
        too little text to fill it.
    """
    if vocab_size < 257:
        raise ConfigError(
            f"vocab_size is {vocab_size}; expected at least 257 (bytes and {END_OF_TEXT})"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"the texts give a vocabulary of {tokenizer.get_vocab_size()}; expected {vocab_size}: "
            "use more text or a smaller vocab_size"
        )
    return tokenizer


def separator_id(tokenizer: Tokenizer) -> int:
    """Returns the id of ``END_OF_TEXT`` if the tokenizer has it, else that of its ``eos_token``.

    It separates documents.

    Args:
      tokenizer: The tokenizer of the model that reads the text.

    Raises:
      ConfigError: The tokenizer has no such token.
    """
    token = END_OF_TEXT
    if tokenizer.token_id(token) is None:
        token = tokenizer.special_tokens.get("eos_token")
        if token is None:
            raise ConfigError(
                f"the tokenizer has no {END_OF_TEXT}, and no eos_token that could separate "
                "documents in its place: name one of its tokens eos_token in tokenizer_config.json"
            )
    index = tokenizer.token_id(token)
    if index is None:
        raise ConfigError(
            f"the tokenizer has no token {token!r} to separate documents; set eos_token in "
            "tokenizer_config.json to one of its tokens"
        )
    return index


def pack(
    tokenizer: Tokenizer, documents: Iterable[tuple[str, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenates documents, with ``separator_id`` at the beginning and after each.

    The tokenizer adds the special tokens that it puts into a prompt, and cuts nothing.

    Args:
      tokenizer: The tokenizer to encode with.
      documents: Pairs of a name and a text.

    Returns:
      i32[T], and i64[number of documents + 1], where each document begins, and the end of the last.
      A document ends with its separator.

    Raises:
      ConfigError: The tokenizer has no token that separates documents.
    """
    end = separator_id(tokenizer)
    texts = [text for _, text in documents]
    found = [encoding.ids for encoding in tokenizer.backend.encode_batch(texts)]
    parts = [ids if ids[-1:] == [end] else [*ids, end] for ids in found]
    starts = np.cumsum([1, *map(len, parts)], dtype=np.int64)
    return np.concatenate([[end], *parts]).astype(np.int32), starts


def looping_share(tokens: np.ndarray, *, max_period: int = 32, repeats: int = 3) -> float:
    """Computes the share of the tokens that are part of a loop.

    A loop is an n-gram that is written several times in a row.

    Args:
      tokens: i32[T], one sequence.
      max_period: The largest n.
      repeats: The smallest number of times in a row.

    Returns:
      A number in [0, 1]; 0 for an empty sequence.
    """
    tokens = np.asarray(tokens)
    is_looping = np.zeros(len(tokens), bool)
    for period in range(1, min(max_period, len(tokens) // repeats) + 1):
        is_equal = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]])
        edges = np.flatnonzero(is_equal[1:] != is_equal[:-1])
        for begin, end in edges.reshape(-1, 2):  # tokens[begin:end] is repeated a period later
            if end - begin >= (repeats - 1) * period:
                is_looping[begin : end + period] = True
    return float(is_looping.mean()) if len(tokens) else 0.0
