"""GRPO: advantages within a group, the clipped ratio, and the distance to a reference.

Source: DeepSeekMath, arXiv 2402.03300.

  equation                                      function
  outcome advantage, section 4.1.2              advantages
  clipped objective and KL term, (3)            grpo_loss
  estimate of the KL divergence, (4)            grpo_loss

The estimate is that of the models. It is unbiased where tokens are drawn from the model itself, at
temperature 1 without filters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Model
from spec_jax.sampling import make_sampler, process
from spec_jax.train.means import Mean, loss_of


@flax.struct.dataclass
class Batch:
    """Rollouts that a step trains on."""

    tokens: jax.Array  # i32[B,S], prompt and output, left-aligned
    is_output: jax.Array  # bool[B,S], which of them are trained on
    advantages: jax.Array  # f32[B]
    old: jax.Array | None = None  # f32[B,S], of the behaviour policy; None: it is the policy
    reference: jax.Array | None = None  # f32[B,S], of the reference model; None: there is none


def advantages(rewards: np.ndarray, is_scaled: bool = True) -> np.ndarray:
    """Returns f32[P,N], how far each reward lies above the mean of its group.

    Args:
      rewards: f64[P,N], those of N samples of each prompt.
      is_scaled: Whether to divide by the group's standard deviation.
    """
    above = rewards - rewards.mean(axis=1, keepdims=True)
    spread = rewards.std(axis=1, keepdims=True)
    size = np.maximum(1.0, np.abs(rewards).max(axis=1, keepdims=True))
    is_equal = np.ptp(rewards, axis=1, keepdims=True) <= 1e-9 * size  # but for rounding
    above = np.where(is_equal, 0.0, above)
    return (above / np.where(is_equal, 1.0, spread) if is_scaled else above).astype(np.float32)


def logprobs(
    params: Any,
    tokens: jax.Array,
    is_output: jax.Array,
    *,
    model: Model,
    sampler: SamplerConfig,
    max_new_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes the log-probability of each output token given those before it, in one pass.

    Args:
      params: The weights.
      tokens: i32[B,S].
      is_output: bool[B,S], which of them are output: neighbours, and not the first.
      model: The model's functions.
      sampler: How tokens are drawn.
      max_new_tokens: The most output tokens of a row; logits are computed for so many.

    Returns:
      f32[B,S] under the distribution that ``sampler`` draws from, and under the model's own; 0 of
      tokens that are no output. No gradient flows through the choice of what the filters drop. The
      token itself is kept: rounding or an update may have put it past their edge since.
    """
    B, S = tokens.shape
    columns = jnp.argmax(is_output, axis=1)[:, None] + jnp.arange(min(max_new_tokens, S - 1))
    places = jnp.minimum(columns, S - 1)
    labels = jnp.take_along_axis(tokens, places, axis=1)[..., None]
    hidden = model.forward(params, tokens[:, :-1]).hidden
    hidden = jnp.take_along_axis(hidden, jnp.maximum(places - 1, 0)[..., None], axis=1)
    logits = model.unembed(params, hidden)
    drawn = make_sampler(sampler, B, model.vocab_size)
    warm = logits / sampler.temperature
    if drawn.filters is not None:
        kept = process(jax.lax.stop_gradient(logits), drawn) > -jnp.inf
        kept |= jnp.arange(model.vocab_size) == labels
        warm = jnp.where(kept, warm, -jnp.inf)

    def of(x):
        values = jnp.take_along_axis(x, labels, axis=-1)[..., 0] - jax.nn.logsumexp(x, axis=-1)
        rows = jnp.arange(B)[:, None]
        placed = jnp.zeros((B, S)).at[rows, columns].set(values, mode="drop")
        return jnp.where(is_output, placed, 0.0)

    return of(warm), of(logits)


def grpo_loss(
    params: Any,
    batch: Batch,
    frozen: Any = None,
    counts: Mapping[str, jax.Array] | None = None,
    *,
    model: Model,
    sampler: SamplerConfig,
    max_new_tokens: int,
    clip: tuple[float, float],
    kl_weight: float,
) -> tuple[jax.Array, dict[str, Any]]:
    """Computes the loss of a batch, a mean over rows of means over their tokens.

    The ratio is that of the distributions after temperature and filters, since tokens were drawn
    from these; the distance to the reference is that of the models.

    Args:
      params: The policy's weights.
      batch: The rollouts.
      frozen: Not read.
      counts: What each term is divided by, see ``spec_jax.train.objective.Objective``.
      model: The model's functions.
      sampler: How the tokens were drawn.
      max_new_tokens: The most output tokens of a row.
      clip: How far the ratio may fall below 1, and rise above it.
      kl_weight: Of the KL divergence to the reference.

    Returns:
      The loss f32[], and figures: ``terms``, ``kl``, ``ratio`` and ``clipped``, means of tokens.
    """
    del frozen
    is_output = batch.is_output
    options = dict(model=model, sampler=sampler, max_new_tokens=max_new_tokens)
    drawn, own = logprobs(params, batch.tokens, is_output, **options)
    old = jax.lax.stop_gradient(drawn) if batch.old is None else batch.old
    ratio = jnp.exp(jnp.where(is_output, drawn - old, 0.0))
    advantage = batch.advantages[:, None]
    kept = jnp.clip(ratio, 1 - clip[0], 1 + clip[1])
    gain = jnp.minimum(ratio * advantage, kept * advantage)
    length = is_output.sum(axis=1)

    def by_row(x):
        x = jnp.where(is_output, x, 0.0).sum(axis=1) / jnp.maximum(length, 1)
        return Mean.of(x, length > 0)

    terms = {"policy": by_row(-gain)}
    figures = {"ratio": Mean.of(ratio, is_output), "clipped": Mean.of(ratio != kept, is_output)}
    if batch.reference is not None:
        apart = jnp.where(is_output, batch.reference - own, 0.0)
        kl = jnp.exp(apart) - apart - 1
        terms["kl"] = by_row(kl_weight * kl)
        figures["kl"] = Mean.of(kl, is_output)
    return loss_of(terms, counts), {"terms": terms, **figures}
