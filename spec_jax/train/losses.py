"""Losses and figures of merit of one distribution, or of a draft beside its target.

Pure functions over the last axis, in float32 and nats; leading axes are kept, so that
the caller averages (or masks) them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood of the labels.

    Args:
      logits: dtype[..., V].
      labels: i32[...].

    Returns:
      f32[...], nats.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def forward_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """KL(target || draft): zero where they agree, else positive.

    Its gradient reaches the draft and, unless the caller stops it, the target.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].

    Returns:
      f32[...], nats.
    """
    log_p = jax.nn.log_softmax(target_logits.astype(jnp.float32), axis=-1)
    log_q = jax.nn.log_softmax(draft_logits.astype(jnp.float32), axis=-1)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def expected_acceptance(
    target_logits: jax.Array, draft_logits: jax.Array, *, temperature: float = 1.0
) -> jax.Array:
    """The probability that residual sampling accepts one token drafted here.

    At temperature 0 it is 1 where the two most likely tokens agree, else 0.
    Source: Leviathan et al., arXiv 2211.17192, theorem 3.5: the sum over tokens of
    min(p, q).

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].
      temperature: divides both logits.

    Returns:
      f32[...], in [0, 1].
    """
    if temperature == 0.0:
        return (jnp.argmax(target_logits, -1) == jnp.argmax(draft_logits, -1)).astype(jnp.float32)
    p = jax.nn.softmax(target_logits.astype(jnp.float32) / temperature, axis=-1)
    q = jax.nn.softmax(draft_logits.astype(jnp.float32) / temperature, axis=-1)
    return jnp.sum(jnp.minimum(p, q), axis=-1)
