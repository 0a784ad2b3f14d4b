"""EAGLE-1's objective: the target's next feature, and the law that its head reads from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.contracts import Model
from spec_jax.draft.eagle import EagleConfig, eagle_head
from spec_jax.train.losses import soft_cross_entropy
from spec_jax.train.objective import Batch, chain_figures, weighted_mean
from spec_jax.train.unroll import shifted, unroll


def smooth_l1(x: jax.Array) -> jax.Array:
    """Half the square within 1 of zero, the distance less a half outside; elementwise."""
    size = jnp.abs(x)
    return jnp.where(size < 1, 0.5 * x * x, size - 0.5)


def eagle1_loss(
    head: dict, batch: Batch, target: dict, *, config: EagleConfig, model: Model,
    feature_weight: float = 1.0, token_weight: float = 0.1, noise: float = 0.0,
) -> tuple[jax.Array, dict]:
    """Smooth-L1 to the target's next feature, and cross-entropy to its next law.

    Source: EAGLE, arXiv 2401.15077, section 4.2; the noise as in its code, uniform and of a
    width that falls with the window's length.

    Args:
      head: trained.
      batch: windows with the target's view.
      target: its weights, not trained.
      config: the head's shape, of version 1.
      model: the target.
      feature_weight: of the regression.
      token_weight: of the cross-entropy.
      noise: width of what is added to the features that are read, times 512 over the length;
        published: 0.2.

    Returns:
      The loss, and ``feature_loss``, ``token_loss`` in nats, ``reached`` and ``hits`` f32[1].
    """  # fmt: skip
    T = batch.tokens.shape[1] - 2
    params = {"head": head, "target": target}
    features = batch.view.features
    if noise:
        uniform = jax.random.uniform(batch.key, features.shape, jnp.float32, -0.5, 0.5)
        features = features + (noise * 512 / T * uniform).astype(features.dtype)
    (x,) = unroll(eagle_head(config, model), params, features, batch.tokens, 1)
    weight = shifted(batch.mask, 2, T)
    wanted = shifted(batch.view.features, 1, T).astype(jnp.float32)
    regression = smooth_l1(x.astype(jnp.float32) - wanted).mean(axis=-1)
    q = model.unembed(target, x)
    p = model.unembed(target, shifted(batch.view.hidden, 1, T))
    feature_loss = weighted_mean(regression, weight)
    token_loss = weighted_mean(soft_cross_entropy(p, q), weight)
    figures = {"feature_loss": feature_loss, "token_loss": token_loss}
    figures |= chain_figures([jnp.argmax(q, axis=-1)], batch, [weight])
    return feature_weight * feature_loss + token_weight * token_loss, figures
