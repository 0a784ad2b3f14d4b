"""The state and the step of language-model training, from text or from a teacher."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.train import losses

OPTIMIZERS = ("muon", "adamw")


@flax.struct.dataclass
class TrainState:
    """Everything that training carries from step to step."""

    step: jax.Array  # i32[], steps done
    params: Any  # nested dict, float32
    opt_state: Any


def warmup_stable_decay(peak: float, steps: int, warmup: int, decay_share: float) -> optax.Schedule:
    """Linear warm-up to ``peak``, constant, then linear to zero over the last ``decay_share``.

    Until the decay begins the schedule does not depend on ``steps``, so a run may be
    shortened or lengthened up to there.
    """
    begin = decay_begin(steps, decay_share)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, steps - begin),
        ],
        [warmup, max(begin, warmup)],
    )


def decay_begin(steps: int, decay_share: float) -> int:
    """The step at which the decay begins."""
    return steps - max(1, round(steps * decay_share))


def make_optimizer(
    name: str,
    *,
    steps: int,
    warmup: int,
    decay_share: float,
    lr: float,
    matrix_lr: float,
    weight_decay: float,
    clip: float,
) -> optax.GradientTransformation:
    """AdamW, or Muon for the matrices inside the layers with AdamW for the rest.

    Source: Muon, Jordan et al. 2024 (optax.contrib.muon): momentum whose matrices are
    orthogonalised before the update.

    Args:
      name: "adamw" or "muon".
      steps: of the whole run.
      warmup: steps of warm-up.
      decay_share: the part of the run in which the rate falls to zero.
      lr: AdamW's peak rate.
      matrix_lr: Muon's peak rate.
      weight_decay: decoupled, on matrices (the embedding included).
      clip: the largest norm of the whole gradient.

    Raises:
      ConfigError: an unknown name.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer is {name!r}; expected one of {', '.join(OPTIMIZERS)}")
    schedule = functools.partial(
        warmup_stable_decay, steps=steps, warmup=warmup, decay_share=decay_share
    )
    is_matrix = functools.partial(jax.tree.map, lambda x: x.ndim == 2)
    if name == "adamw":
        update = optax.adamw(schedule(lr), b2=0.95, weight_decay=weight_decay, mask=is_matrix)
    else:
        update = optax.contrib.muon(
            schedule(matrix_lr),
            adam_learning_rate=schedule(lr),
            adam_b2=0.95,
            weight_decay=weight_decay,
            weight_decay_mask=is_matrix,
            muon_weight_dimension_numbers=_layer_matrices,
        )
    return optax.chain(optax.clip_by_global_norm(clip), update)


def _layer_matrices(params):
    dimensions = optax.contrib.MuonDimensionNumbers()
    return {
        name: jax.tree.map(lambda x: dimensions if x.ndim == 2 else None, value)
        if name == "layers"
        else None
        for name, value in params.items()
    }


def init_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    """Fresh parameters and an untouched optimizer. The key is consumed."""
    params = transformer.init_params(config, key)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def lm_loss(params, batch, teacher=None, *, config: ModelConfig):
    """Mean cross-entropy in nats a token of windows i32[B,T+1], and no further figures."""
    del teacher
    logits = transformer.logits(params, batch[:, :-1], config=config)
    return losses.cross_entropy(logits, batch[:, 1:]).mean(), {}


def distill_loss(
    params, batch, teacher, *, config: ModelConfig, teacher_config: ModelConfig, ce_weight: float
):
    """Mean forward KL to the teacher, plus ``ce_weight`` times the cross-entropy of the text.

    Returns:
      The loss, and means over the positions of windows i32[B,T+1]: ``kl`` and ``ce`` in
      nats, ``top1_agreement`` and ``acceptance`` (temperature 1) in [0, 1].
    """
    p = jax.lax.stop_gradient(transformer.logits(teacher, batch[:, :-1], config=teacher_config))
    q = transformer.logits(params, batch[:, :-1], config=config)
    kl = losses.forward_kl(p, q).mean()
    ce = losses.cross_entropy(q, batch[:, 1:]).mean()
    q = jax.lax.stop_gradient(q)
    figures = {
        "kl": kl,
        "ce": ce,
        "top1_agreement": losses.expected_acceptance(p, q, temperature=0.0).mean(),
        "acceptance": losses.expected_acceptance(p, q).mean(),
    }
    return kl + ce_weight * ce, figures


def train_step(state: TrainState, batch: jax.Array, teacher=None, *, loss, optimizer):
    """One update. Pure; jit it with the state donated.

    Args:
      state: consumed.
      batch: i32[B,T+1].
      teacher: parameters that the loss reads and that stay as they are, or None.
      loss: ``(params, batch, teacher) -> (scalar, figures)``.
      optimizer: of ``make_optimizer``.

    Returns:
      The next state, and ``loss``, ``grad_norm`` and the loss's own figures.
    """
    (value, figures), grads = jax.value_and_grad(loss, has_aux=True)(state.params, batch, teacher)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **figures}
    return TrainState(
        state.step + 1, optax.apply_updates(state.params, updates), opt_state
    ), metrics
