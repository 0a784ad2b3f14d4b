"""Drafting a chain token by token, from any model that turns a token into the next logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax import rng
from spec_jax.contracts import Context, Proposal
from spec_jax.sampling import is_sampling, process, sample


def draw(logits: jax.Array, context: Context, counts, node) -> tuple[jax.Array, jax.Array]:
    """Draws the token of one node of each row, and says from which distribution.

    Args:
      logits: f32[B,V], the draft's at the node's parent.
      context: whose sampler and noise apply.
      counts: prompt, output and the drafts before this one.
      node: i32[], 1..K.

    Returns:
      i32[B] tokens and f32[B,V], the unnormalised log-probabilities they were drawn from.
    """
    processed = process(logits[:, None], context.sampler, counts)[:, 0]
    if context.gumbel is not None:
        return sample(processed, context.gumbel[:, node - 1]), processed

    def noise():
        if context.is_coupled:
            keys = rng.keys(context.request, rng.Stream.TARGET, context.length + node)
        else:
            keys = rng.keys(context.sampler.seed, rng.Stream.DRAFT, context.length, node)
        return rng.gumbel(keys, logits.shape[-1])

    gumbel = jax.lax.cond(is_sampling(context.sampler), noise, lambda: jnp.zeros_like(processed))
    return sample(processed, gumbel), processed


@flax.struct.dataclass
class Drafted:
    """A chain as it grows.

    Attributes:
      out: the fields of the ``Proposal`` that are asked for, K columns.
      counts: prompt, output and the drafts so far.
      is_sound: bool[B], every law so far was finite.
    """

    out: dict[str, jax.Array]
    counts: Any
    is_sound: jax.Array

    @classmethod
    def none(cls, context: Context, num_draft: int, vocab_size: int) -> Drafted:
        B = context.length.shape[0]
        out = {"tokens": jnp.zeros((B, num_draft), jnp.int32)}
        if context.has_probs:
            out["probs"] = jnp.zeros((B, num_draft, vocab_size), jnp.float32)
        if context.has_logits:
            out["logits"] = jnp.zeros((B, num_draft, vocab_size), jnp.float32)
        return cls(out, context.counts, jnp.ones((B,), bool))

    def add(self, logits: jax.Array, context: Context, node) -> tuple[jax.Array, Drafted]:
        """Draws the token i32[B] of ``node`` (1..K) from f32[B,V] and keeps what is asked for."""
        token, law = draw(logits, context, self.counts, node)
        values = {"tokens": token, "probs": jax.nn.softmax(law, axis=-1), "logits": logits}
        out = {name: array.at[:, node - 1].set(values[name]) for name, array in self.out.items()}
        counts = self.counts.add(token[:, None], jnp.ones((len(token), 1), bool))
        is_sound = self.is_sound & jnp.isfinite(law.max(axis=-1))
        return token, Drafted(out, counts, is_sound)

    def proposal(self) -> Proposal:
        B, K = self.out["tokens"].shape
        n_draft = jnp.full((B,), K, jnp.int32)
        return Proposal(n_draft=n_draft, is_sound=self.is_sound, **self.out)


def draft_chain(
    logits: jax.Array,
    carry: Any,
    advance: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]],
    context: Context,
    num_draft: int,
) -> tuple[Proposal, Any]:
    """Draws K tokens, each from the logits that the one before it gives.

    Args:
      logits: f32[B,V], of the first draft.
      carry: what ``advance`` takes and returns.
      advance: ``(carry, token i32[B], node i32[]) -> (logits f32[B,V], carry)``, called for
        nodes 2..K with the token of the node before.
      context: whose sampler and noise apply.
      num_draft: K, which may be 0.
    """
    drafted = Drafted.none(context, num_draft, logits.shape[1])
    if num_draft == 0:
        return drafted.proposal(), carry

    def body(node, state):
        carry, token, drafted = state
        logits, carry = advance(carry, token, node)
        return carry, *drafted.add(logits, context, node)

    state = (carry, *drafted.add(logits, context, jnp.int32(1)))
    carry, _, drafted = jax.lax.fori_loop(2, num_draft + 1, body, state)
    return drafted.proposal(), carry
