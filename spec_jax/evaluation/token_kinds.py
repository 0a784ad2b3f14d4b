"""Tokens by what they are made of, for the acceptance of each kind."""

from __future__ import annotations

import numpy as np

from spec_jax.models.tokenizer import Tokenizer

TOKEN_KINDS = ("whitespace", "identifier", "digit", "punctuation", "other")


def token_kinds(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Returns the kind of each token, i32[V], as its index in ``TOKEN_KINDS``.

    Space around a token does not count: " def" is an identifier. "other" are special tokens, ids
    without a token, parts of a character, and mixtures such as "x1(".

    Args:
      tokenizer: Turns ids into text.
      vocab_size: V of the model.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {index for index, token in added.items() if token.special}

    def is_text(i):
        return i not in special and tokenizer.backend.id_to_token(i) is not None

    texts = (tokenizer.decode([i]) if is_text(i) else None for i in range(vocab_size))
    return np.asarray([TOKEN_KINDS.index(_kind(text)) for text in texts], np.int32)


def _kind(text: str | None) -> str:
    if text is None or "\ufffd" in text:
        return "other"
    core = text.strip()
    if not core:
        return "whitespace"
    if core.isidentifier():
        return "identifier"
    if core.isdigit():
        return "digit"
    return "other" if any(map(str.isalnum, core)) else "punctuation"
