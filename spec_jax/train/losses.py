"""Losses and figures of merit of one distribution, or of a draft beside its target.

Pure functions over the last axis, in float32 and nats; leading axes are kept, so that
the caller averages (or masks) them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.errors import ConfigError


def _float32(logits: jax.Array) -> jax.Array:
    """The logits in float32; their gradient is an array, not computed anew by all who read it."""
    return jax.lax.optimization_barrier(logits.astype(jnp.float32))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood of the labels.

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
    """KL(target || draft): zero where they agree, else positive.

    Its gradient reaches the draft and, unless the caller stops it, the target.

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
    q = jax.nn.softmax(_float32(draft_logits) / temperature, axis=-1)
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def reverse_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """KL(draft || target): the draft avoids what the target would not say.

    Source: DistillSpec, arXiv 2310.08461, section 4.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].

    Returns:
      f32[...], nats.
    """
    return forward_kl(draft_logits, target_logits)


def total_variation(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Half the L1 distance of the two laws: the chance that residual sampling rejects.

    Source: DistillSpec, arXiv 2310.08461, section 4.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].

    Returns:
      f32[...], in [0, 1].
    """
    return 1.0 - expected_acceptance(target_logits, draft_logits)


def negative_log_acceptance(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Minus the log of the sum of min(p, q): the acceptance itself, as a likelihood.

    Its gradient is the total variation's over the acceptance, so that tokens which are
    hardly ever accepted pull no less than the others.

    Source: the alpha loss of SpecForge's LK losses.

    Args:
      target_logits: dtype[..., V].
      draft_logits: dtype[..., V].

    Returns:
      f32[...], nats.
    """
    return -jnp.log(expected_acceptance(target_logits, draft_logits) + 1e-9)


def soft_cross_entropy(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Cross-entropy of the draft under the target's law: forward KL and the target's entropy.

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


def make_divergence(name: str):
    """The loss of a draft's logits beside its target's, ``(target, draft) -> f32[...]``.

    Raises:
      ConfigError: an unknown name.
    """
    if name not in DIVERGENCES:
        raise ConfigError(f"divergence is {name!r}; expected one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[name]
