"""Objectives of whole models: language modelling, and distillation of a standalone draft."""

from __future__ import annotations

import jax

from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.train import losses


def lm_loss(
    params: dict, batch: jax.Array, teacher: None = None, *, config: ModelConfig
) -> tuple[jax.Array, dict]:
    """Computes the mean cross-entropy of the text's tokens.

    Args:
      params: The model's weights; they are trained.
      batch: i32[B,T+1], windows.
      teacher: Not read; it makes the signature that of every objective.
      config: The model's shape.

    Returns:
      The loss in nats a token, and no further figures.
    """
    del teacher
    logits = transformer.logits(params, batch[:, :-1], config=config)
    return losses.cross_entropy(logits, batch[:, 1:]).mean(), {}


def distill_loss(
    params: dict,
    batch: jax.Array,
    teacher: dict,
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
    loss = measure(p, q).mean()
    ce = losses.cross_entropy(q, batch[:, 1:]).mean()
    q = jax.lax.stop_gradient(q)
    figures = {
        "kl": losses.forward_kl(p, q).mean(),
        "ce": ce,
        "top1_agreement": losses.expected_acceptance(p, q, temperature=0.0).mean(),
        "acceptance": losses.expected_acceptance(p, q).mean(),
    }
    return loss + ce_weight * ce, figures
