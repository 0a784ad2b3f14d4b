"""Objectives of whole models: language modelling, and distillation of a standalone draft."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.train import losses
from spec_jax.train.means import Mean, loss_of


def lm_loss(
    params: dict,
    batch: jax.Array,
    teacher: None = None,
    counts: Mapping[str, jax.Array] | None = None,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, dict]:
    """Computes the mean cross-entropy of the text's tokens.

    Args:
      params: The model's weights; they are trained.
      batch: i32[B,T+1], windows.
      teacher: Not read; it makes the signature that of every objective.
      counts: See ``Objective``.
      config: The model's shape.

    Returns:
      The loss in nats a token, and its ``terms``.
    """
    del teacher
    logits = transformer.logits(params, batch[:, :-1], config=config)
    terms = {"tokens": _mean(losses.cross_entropy(logits, batch[:, 1:]))}
    return loss_of(terms, counts), {"terms": terms}


def _mean(values: jax.Array) -> Mean:
    return Mean(values.sum(), jnp.asarray(values.size, jnp.float32))


def distill_loss(
    params: dict,
    batch: jax.Array,
    teacher: dict,
    counts: Mapping[str, jax.Array] | None = None,
    *,
    config: ModelConfig,
    teacher_config: ModelConfig,
    ce_weight: float = 0.0,
    divergence: str = "forward-kl",
) -> tuple[jax.Array, dict]:
    """Computes the mean divergence from the teacher, plus the weighted cross-entropy of the text.

    Source: DistillSpec, arXiv 2310.08461, section 4, for the divergences. ``acceptance`` is
    what Leviathan et al., arXiv 2211.17192, call alpha.

    Args:
      params: The draft's weights; they are trained.
      batch: i32[B,T+1], windows.
      teacher: The teacher's weights; they are not trained.
      counts: See ``Objective``.
      config: The draft's shape.
      teacher_config: The teacher's shape.
      ce_weight: The weight of the text's cross-entropy.
      divergence: A key of ``losses.DIVERGENCES``.

    Returns:
      The loss, and means over the windows' positions: ``kl`` and ``ce`` in nats,
      ``top1_agreement`` and ``acceptance`` (at temperature 1) in [0, 1].
    """
    measure = losses.make_divergence(divergence)
    p = jax.lax.stop_gradient(transformer.logits(teacher, batch[:, :-1], config=teacher_config))
    q = transformer.logits(params, batch[:, :-1], config=config)
    ce = losses.cross_entropy(q, batch[:, 1:])
    terms = {"tokens": _mean(measure(p, q) + ce_weight * ce)}
    q = jax.lax.stop_gradient(q)
    figures = {
        "terms": terms,
        "kl": _mean(losses.forward_kl(p, q)),
        "ce": _mean(ce),
        "top1_agreement": _mean(losses.expected_acceptance(p, q, temperature=0.0)),
        "acceptance": _mean(losses.expected_acceptance(p, q)),
    }
    return loss_of(terms, counts), figures
