"""Penalties on repetition, presence and frequency, as a processor that counts tokens."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.contracts import Processor


@flax.struct.dataclass
class TokenCounts:
    """Which tokens a row has seen; the state of the processor."""

    prompt: jax.Array  # bool[B,V], in the prompt
    output: jax.Array  # i32[B,V], times in the output, the pending token included


def _init(tokens: jax.Array, length: jax.Array, vocab_size: int) -> TokenCounts:
    columns = jnp.where(jnp.arange(len(tokens)) < length, tokens, vocab_size)
    prompt = jnp.zeros(vocab_size, bool).at[columns].set(True, mode="drop")
    return TokenCounts(prompt, jnp.zeros(vocab_size, jnp.int32))


def _advance(counts: TokenCounts, tokens: jax.Array, n: jax.Array) -> TokenCounts:
    is_new = (jnp.arange(len(tokens)) < n).astype(jnp.int32)
    return counts.replace(output=counts.output.at[tokens].add(is_new))


def _apply(penalties: dict[str, jax.Array], counts: TokenCounts, x_TV, drafted, is_before):
    """Applies penalties by the row's counts, then again to the few tokens that drafts change."""

    def penalty(x, output, is_seen):
        r = penalties["repetition_penalty"]
        x = jnp.where(is_seen, jnp.where(x > 0, x / r, x * r), x)
        x -= penalties["presence_penalty"] * (output > 0)
        return x - penalties["frequency_penalty"] * output

    penalised = penalty(x_TV, counts.output, counts.prompt | (counts.output > 0))
    T, V = x_TV.shape
    K = len(drafted)
    if K == 0:
        return penalised
    if is_before is None:
        is_before = jnp.arange(K) < jnp.arange(T)[:, None]
    is_same = drafted[:, None] == drafted
    repeats = is_before.astype(jnp.int32) @ is_same.astype(jnp.int32)
    new = penalty(x_TV[:, drafted], counts.output[drafted] + repeats, True)
    column = jnp.where(is_before, drafted, V)  # V is out of range: dropped
    return penalised.at[jnp.arange(T)[:, None], column].set(new, mode="drop")


PENALTIES = Processor("penalties", _init, _apply, _advance)
"""The penalties of ``SamplerConfig``, by name, and ``TokenCounts`` of one row.

Source: the logits processors of transformers, and the penalties of the OpenAI API.
"""
