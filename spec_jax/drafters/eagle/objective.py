"""EAGLE's objectives.

EAGLE-1 learns the target's next feature, and the distribution that the target's output head reads
from it. EAGLE-3 is trained by training-time test: K drafts from every pair are compared with the
target's distribution.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.contracts import Model
from spec_jax.drafters.eagle import model as eagle
from spec_jax.drafters.eagle.model import EagleConfig, eagle_head
from spec_jax.models.layers import constrain_logits
from spec_jax.train.chunks import chain_loss
from spec_jax.train.losses import make_divergence, soft_cross_entropy
from spec_jax.train.objective import Batch, Objective, weighted_mean
from spec_jax.train.unroll import shifted, unroll


def smooth_l1(x: jax.Array) -> jax.Array:
    """Computes x²/2 where |x| < 1, and |x| - 1/2 elsewhere."""
    size = jnp.abs(x)
    return jnp.where(size < 1, 0.5 * x * x, size - 0.5)


def eagle1_loss(
    head: dict,
    batch: Batch,
    target: dict,
    *,
    config: EagleConfig,
    model: Model,
    feature_weight: float = 1.0,
    token_weight: float = 0.1,
    noise: float = 0.0,
) -> tuple[jax.Array, dict]:
    """Computes smooth L1 to the target's next feature, plus cross-entropy to its distribution.

    Source: EAGLE, arXiv 2401.15077, section 4.2. The noise is that of its code: uniform, with a
    width that falls with the window's length.

    Args:
      head: The head's weights; they are trained.
      batch: Windows with the target's view.
      target: The target's weights; they are not trained.
      config: The head's shape, of version 1.
      model: The target's functions.
      feature_weight: The weight of the regression.
      token_weight: The weight of the cross-entropy.
      noise: The width of the noise on the features that are read, times 512 over the length.
        The published value is 0.2.

    Returns:
      The loss, and ``feature_loss``, ``token_loss`` in nats, ``reached`` and ``hits`` f32[1].
    """
    T = batch.tokens.shape[1] - 2
    params = {"head": head, "target": target}
    features = batch.view.features
    if noise:
        uniform = jax.random.uniform(batch.key, features.shape, jnp.float32, -0.5, 0.5)
        features = features + (noise * 512 / T * uniform).astype(features.dtype)
    x = unroll(eagle_head(config, model), params, features, batch.tokens, 1)
    weight = shifted(batch.mask, 2, T)
    next_features = shifted(batch.view.features, 1, T).astype(jnp.float32)
    regression = smooth_l1(x[0].astype(jnp.float32) - next_features).mean(axis=-1)
    feature_loss = weighted_mean(regression, weight)

    def measure(_, states, hidden):
        q = model.unembed(target, states)
        p = model.unembed(target, hidden)[:, None]
        return soft_cross_entropy(p, q), jnp.argmax(q, axis=-1)

    hidden, share = batch.view.hidden[:, 1 : 1 + T], jnp.full(1, token_weight)
    loss, figures = chain_loss(measure, {}, x, batch, hidden, share)
    (token_loss,) = figures.pop("loss_by_step")
    figures |= {"feature_loss": feature_loss, "token_loss": token_loss}
    return feature_weight * feature_loss + loss, figures


def eagle3_loss(
    head: dict,
    batch: Batch,
    target: dict,
    *,
    config: EagleConfig,
    model: Model,
    num_steps: int = 7,
    decay: float = 0.8,
    divergence: str = "cross-entropy",
    is_remat: bool = False,
) -> tuple[jax.Array, dict]:
    """Computes the decayed sum over K steps of the divergence from the target's distribution.

    The target's distribution is restricted to the draft vocabulary. A row whose likeliest token
    the head cannot draft adds nothing to the sum, but counts in the mean's denominator.

    Source: EAGLE-3, arXiv 2503.01840, section 3. Decay and restriction are those of its code,
    except that the code masks by the feature's token and this function by the predicted one.

    Args:
      head: The head's weights; all but ``d2t`` are trained.
      batch: Windows with the target's view.
      target: The target's weights; they are not trained.
      config: The head's shape, of version 3.
      model: The target's functions.
      num_steps: K; 1 is training without training-time test.
      decay: Step j is weighted by ``decay ** j``.
      divergence: A key of ``losses.DIVERGENCES``.
      is_remat: See ``unroll``.

    Returns:
      The loss, and f32[K] ``loss_by_step`` in nats, ``reached`` and ``hits``.
    """
    T = batch.tokens.shape[1] - 2
    params = {"head": head, "target": target}
    run, features = eagle_head(config, model), batch.view.features
    states = unroll(run, params, features, batch.tokens, num_steps, is_remat=is_remat)
    ids, compare = eagle.draft_ids(head), make_divergence(divergence)
    is_drafted = ids if ids is None else jnp.zeros((model.vocab_size,), bool).at[ids].set(True)

    def measure(scored, states, hidden):
        q = eagle.score({"head": head | scored}, states, config, model)
        p = model.unembed(target, hidden)[:, None]
        draft = jnp.argmax(q, axis=-1)
        if ids is None:
            return compare(p, q), draft
        is_known, p = is_drafted[jnp.argmax(p, axis=-1)], constrain_logits(p[..., ids])
        return jnp.where(is_known, compare(p, q), 0.0), ids[draft]

    scored = {name: head[name] for name in ("norm", "head")}
    hidden = batch.view.hidden[:, 1 : 1 + T]
    return chain_loss(measure, scored, states, batch, hidden, decay ** jnp.arange(num_steps))


EAGLE1 = Objective("eagle1", eagle1_loss)
EAGLE3 = Objective("eagle3", eagle3_loss, constants=("d2t",))
OBJECTIVES = {objective.name: objective for objective in (EAGLE1, EAGLE3)}
