"""Losses of one distribution, and divergences of a draft's distribution from its target's.

All are pure functions over the last axis, computed in float32, in nats. Leading axes are kept;
the caller averages or masks them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec_jax.config.checks import check_name


def _float32(logits: jax.Array) -> jax.Array:
    """Casts to float32. The barrier keeps the gradient one array, not recomputed by each reader."""
    return jax.lax.optimization_barrier(logits.astype(jnp.float32))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the negative log-likelihood of the labels.

    Args:
      logits: dtype[..., V].
      labels: i32[...].

    Returns:
      f32[...], nats.
    """
    logits = _float32(logits)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def forward_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Computes KL(target || draft), which is zero where the two distributions agree.

    Its gradient flows to the draft and, unless the caller stops it, to the target.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].

    Returns:
      f32[...], nats.
    """
    log_p = jax.nn.log_softmax(target_logits.astype(jnp.float32), axis=-1)
    log_q = jax.nn.log_softmax(_float32(draft_logits), axis=-1)
    p = jnp.exp(log_p)
    gap = jnp.where(p > 0, log_p - log_q, 0.0)  # before the product, for its gradient's sake
    return jnp.sum(p * gap, axis=-1)


def expected_acceptance(
    target_logits: jax.Array, draft_logits: jax.Array, *, temperature: float = 1.0
) -> jax.Array:
    """Computes the probability that residual sampling accepts one token drafted here.

    It is the sum over tokens of min(p, q). At temperature 0 it is 1 where the two likeliest
    tokens agree, else 0.

    Source: Leviathan et al., arXiv 2211.17192, theorem 3.5.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].
      temperature: The number that divides both logits.

    Returns:
      f32[...], in [0, 1].
    """
    if temperature == 0.0:
        return (jnp.argmax(target_logits, -1) == jnp.argmax(draft_logits, -1)).astype(jnp.float32)
    p = jax.nn.softmax(target_logits.astype(jnp.float32) / temperature, axis=-1)
    q = jax.nn.softmax(_float32(draft_logits) / temperature, axis=-1)
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def reverse_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Computes KL(draft || target), which is large where the draft says what the target would not.

    Source: DistillSpec, arXiv 2310.08461, section 4.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].

    Returns:
      f32[...], nats.
    """
    return forward_kl(draft_logits, target_logits)


def total_variation(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Computes half the L1 distance: the probability that residual sampling rejects.

    Source: DistillSpec, arXiv 2310.08461, section 4.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].

    Returns:
      f32[...], in [0, 1].
    """
    return 1.0 - expected_acceptance(target_logits, draft_logits)


def negative_log_acceptance(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Computes minus the log of the probability of acceptance, the sum of min(p, q).

    Its gradient is that of the total variation divided by the acceptance, so tokens that are
    rarely accepted count no less than the others.

    Source: the alpha loss of SpecForge's LK losses.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].

    Returns:
      f32[...], nats.
    """
    return -jnp.log(expected_acceptance(target_logits, draft_logits) + 1e-9)


def soft_cross_entropy(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Computes the cross-entropy of the draft under the target's distribution.

    It is the forward KL divergence plus the entropy of the target.

    Source: EAGLE, arXiv 2401.15077, section 4.2; EAGLE-3, arXiv 2503.01840, section 3.2.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].

    Returns:
      f32[...], nats.
    """
    p = jax.nn.softmax(target_logits.astype(jnp.float32), axis=-1)
    draft_logits = _float32(draft_logits)
    expected = jnp.sum(p * jnp.where(p > 0, draft_logits, 0.0), axis=-1)
    return jax.nn.logsumexp(draft_logits, axis=-1) - expected


DIVERGENCES = {
    "cross-entropy": soft_cross_entropy,
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "total-variation": total_variation,
    "acceptance": negative_log_acceptance,
}


def make_divergence(name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the divergence of this name, ``(target_logits, draft_logits) -> f32[...]``.

    Args:
      name: A key of ``DIVERGENCES``.

    Raises:
      ConfigError: The name is unknown.
    """
    check_name("divergence", name, DIVERGENCES)
    return DIVERGENCES[name]
