"""The objective of MTP modules: one module for each depth, or one that reads its own states."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from spec_jax.config.checks import check_name
from spec_jax.contracts import Model
from spec_jax.drafters.mtp import model as mtp
from spec_jax.train.chunks import chain_loss
from spec_jax.train.losses import cross_entropy, soft_cross_entropy
from spec_jax.train.objective import Batch, Objective
from spec_jax.train.unroll import shifted, unroll

LABELS = ("text", "target")


def mtp_loss(
    head: dict,
    batch: Batch,
    target: dict,
    *,
    config: mtp.MtpConfig,
    model: Model,
    num_steps: int = 3,
    decay: float | None = None,
    labels: str = "text",
    counts: Mapping[str, jax.Array] | None = None,
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
      counts: See ``Objective``.
      is_remat: See ``unroll``.

    Returns:
      The loss, and its figures, see ``chain_loss``.

    Raises:
      ConfigError: The labels are unknown.
    """
    check_name("labels", labels, LABELS)
    T = batch.tokens.shape[1] - 2
    params = {"head": head, "target": target}
    modules = [mtp.mtp_head(config, model, i) for i in range(config.num_modules)]
    if config.protocol == "recycled":
        given = batch.view.features, batch.tokens, num_steps, batch.begins
        states = unroll(modules[0], params, *given, is_remat=is_remat)
    else:
        state = batch.view.features[:, :T]
        begins = None if batch.begins is None else batch.begins[:, :T]
        each = []
        for i, module in enumerate(modules):
            given = params, state, shifted(batch.tokens, 1 + i, T), None
            of = {"config": config, "target": model, "index": i}
            x, _ = mtp.forward(*given, **of, begins=begins)
            each.append(x)
            state = module.recycle(params, x)
        states = jnp.stack(each)
    is_soft = labels == "target"
    K = len(states)
    names = ("norm", "head") if config.has_own_head else ("norm",)
    scored = {index: {name: head[index][name] for name in names} for index in head}

    def measure(scored, states, true):
        params = {"head": scored, "target": target}
        if config.protocol == "recycled":
            q = modules[0].unembed(params, states)
        else:
            each = [one.unembed(params, states[:, i]) for i, one in enumerate(modules)]
            q = jnp.stack(each, axis=1)
        draft = jnp.argmax(q, axis=-1)
        if is_soft:
            return soft_cross_entropy(model.unembed(target, true)[:, None], q), draft
        return cross_entropy(q, jnp.broadcast_to(true[:, None], draft.shape)), draft

    true = batch.view.hidden[:, 1 : 1 + T] if is_soft else batch.tokens[:, 2:]
    usual = 0.6 if config.protocol == "recycled" else 1.0
    share = (usual if decay is None else decay) ** jnp.arange(K)
    over = counts and counts["tokens"]
    return chain_loss(measure, scored, states, batch, true, share / share.sum(), over)


MTP = Objective("mtp", mtp_loss)
