"""The objective of MTP modules: one module for each depth, or one that reads its own states."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.contracts import Model
from spec_jax.drafters.mtp import model as mtp
from spec_jax.drafters.mtp.model import MtpConfig, mtp_head
from spec_jax.errors import ConfigError
from spec_jax.train.losses import cross_entropy, soft_cross_entropy
from spec_jax.train.objective import Batch, Objective, chain_figures, weighted_mean
from spec_jax.train.unroll import shifted, unroll

LABELS = ("text", "target")


def mtp_loss(
    head: dict,
    batch: Batch,
    target: dict,
    *,
    config: MtpConfig,
    model: Model,
    num_steps: int = 3,
    decay: float | None = None,
    labels: str = "text",
    is_remat: bool = False,
) -> tuple[jax.Array, dict]:
    """Computes the weighted mean of the cross-entropy over depths.

    With the protocol "recycled", one module is unrolled as it will draft: each later step reads
    the module's own earlier states. With "sequential", module m reads the states of module m - 1
    over the whole text.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2 (equal weights, the text's tokens). The
    weights of a single module are those of FastMTP, arXiv 2509.18362.

    Args:
      head: The modules' weights; they are trained.
      batch: Windows with the target's view.
      target: The target's weights; they are not trained.
      config: The modules' shape and protocol.
      model: The target's functions.
      num_steps: K of a recycled module; sequential modules have one step each.
      decay: Step j is weighted by ``decay ** j``, and the weights add up to 1. By default 0.6
        for a recycled module, else 1.
      labels: What is predicted: the tokens of the "text" or the distribution of the "target".
      is_remat: See ``unroll``.

    Returns:
      The loss, and f32[K] ``loss_by_step`` in nats, ``reached`` and ``hits``.

    Raises:
      ConfigError: The labels are unknown.
    """
    if labels not in LABELS:
        raise ConfigError(f"labels are {labels!r}; expected one of {', '.join(LABELS)}")
    T = batch.tokens.shape[1] - 2
    params = {"head": head, "target": target}
    if config.protocol == "recycled":
        modules = [0] * num_steps
        run, features = mtp_head(config, model), batch.view.features
        states = unroll(run, params, features, batch.tokens, num_steps, is_remat=is_remat)
    else:
        modules = list(range(config.num_modules))
        states = _sequential_states(params, batch, config)
    p = model.unembed(target, batch.view.hidden[:, 1:]) if labels == "target" else None
    losses, drafts, weights = [], [], []
    for step, (module, x) in enumerate(zip(modules, states)):
        q = mtp.unembed(params, x, config=config, target=model, index=module)
        weight = shifted(batch.mask, 2 + step, T)
        if p is None:
            loss = cross_entropy(q, shifted(batch.tokens, 2 + step, T))
        else:
            loss = soft_cross_entropy(shifted(p, step, T), q)
        losses.append(weighted_mean(loss, weight))
        drafts.append(jnp.argmax(q, axis=-1))
        weights.append(weight)
    losses = jnp.stack(losses)
    usual = 0.6 if config.protocol == "recycled" else 1.0
    share = (usual if decay is None else decay) ** jnp.arange(len(modules))
    figures = {"loss_by_step": losses} | chain_figures(drafts, batch, weights)
    return jnp.sum(losses * share / share.sum()), figures


MTP = Objective("mtp", mtp_loss)


def _sequential_states(params, batch: Batch, config: MtpConfig):
    """Returns the states dtype[B,T,D] of every module, each over the whole text."""
    T = batch.tokens.shape[1] - 2
    state, states = batch.view.features[:, :T], []
    for index in range(config.num_modules):
        tokens = shifted(batch.tokens, 1 + index, T)
        x, _ = mtp.forward(params, state, tokens, None, config=config, index=index)
        states.append(x)
        state = mtp.recycle(params, x, config=config, index=index)
    return states
