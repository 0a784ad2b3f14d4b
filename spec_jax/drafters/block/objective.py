"""The objectives of block drafters: blocks at anchors of a window, all of them in one pass.

The target's states of a window become keys and values once. The block at anchor a sees those of
the tokens before a, as in a round whose pending token is a, and itself; two blocks never see each
other. Draft k is scored after the text's own token a + k - 1.

Source: DFlash, arXiv 2602.06036, section 4; DSpark, arXiv 2607.05147, section 3; TreeFlash,
arXiv 2606.03819; DFlash 2 as in SpecForge and speculators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from spec_jax.config.checks import check
from spec_jax.contracts import Model
from spec_jax.drafters.block.config import BlockConfig, DFlash2Config
from spec_jax.drafters.block.model import block_layer, context_states
from spec_jax.drafters.block.steps import confidence_logits, normed, pair_scores, step_logits
from spec_jax.models.layers import Window, embed_tokens, keys_values
from spec_jax.sampling import top_k
from spec_jax.train.anchors import chains, choose_anchors, counted, slots, sum_slots, weigh_slots
from spec_jax.train.blocks import Blocks, blocks_at_once, map_places, origins
from spec_jax.train.chunks import cut_chunks, sum_chunks
from spec_jax.train.losses import cross_entropy, soft_cross_entropy, total_variation
from spec_jax.train.means import Mean, loss_of
from spec_jax.train.objective import Batch, Objective

_FIGURES = {  # means over the drafts that count, by the name of their sum
    "loss": "loss_by_step",
    "right": "accuracy",
    "accepted": "acceptance",
    "chain": "chain_acceptance",
    "bias": "confidence_bias",
    "recall": "recall",
}
_CONTEXT = ("fc", "context_norm")  # what the target's states go through, once for all blocks


def context_keys(
    head: dict, features: jax.Array, config: BlockConfig, begins: jax.Array | None = None
) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Returns keys and values dtype[B,G,W,H] of every layer, of the target's states of a window.

    Args:
      head: the weights.
      features: dtype[B,W,E], the target's tapped states.
      config: the head's shape.
      begins: i32[B,W], where each token's document begins, see ``Batch``.
    """
    states = context_states(head, features, config)
    window = Window.after(config.layer, None, *states.shape[:2], begins=begins)
    layers = (head["layers"][str(i)] for i in range(config.num_layers))
    return tuple(keys_values(layer, states, window, config.layer) for layer in layers)


def states_at(
    params: dict,
    tokens: jax.Array,
    anchors: jax.Array,
    context: tuple[tuple[jax.Array, jax.Array], ...],
    config: BlockConfig,
    model: Model,
    begins: jax.Array | None = None,
    *,
    is_remat: bool = False,
) -> jax.Array:
    """Runs the blocks at anchors.

    Args:
      params: ``{"head": ..., "target": ...}``.
      tokens: i32[B,W].
      anchors: i32[B,A].
      context: of ``context_keys``.
      config: the head's shape.
      model: the target's functions.
      begins: of ``context_keys``.
      is_remat: whether the backward pass computes each layer again instead of storing it.

    Returns:
      dtype[B,A,K,D], the states before the final norm that draft k is scored from.
    """
    B, A = anchors.shape
    S = config.block_size
    layer = config.layer
    cache = Blocks(context, anchors, config, origins(begins, anchors))
    window = Window.after(layer, None, B, A * S, positions=cache.positions)
    begin = slots(tokens, anchors, 0, 1)
    masks = ((0, 0), (0, 0), (0, S - 1))
    block = jnp.pad(begin, masks, constant_values=config.mask_token_id).reshape(B, A * S)
    x = embed_tokens(model.embedding(params["target"]), block)
    x = x.astype(params["head"]["norm"].dtype)
    for i in range(layer.num_hidden_layers):

        def run(weights, x, i=i):
            return block_layer(weights, x, cache, i, window, config, S)[0]

        x = (jax.checkpoint(run) if is_remat else run)(params["head"]["layers"][str(i)], x)
    return x.reshape(B, A, S, -1)[:, :, S - config.max_draft :]


def scores_at(
    params: dict, x: jax.Array, before: jax.Array, config: BlockConfig, model: Model
) -> tuple[jax.Array, jax.Array]:
    """Returns the block's logits f32[...,V] at states, and those given the tokens before them."""
    base = model.unembed(params["target"], normed(params["head"], x, config))
    return base, step_logits(params, base, x, before, config, model)


def candidate_loss(
    head: dict,
    base: jax.Array,
    x: jax.Array,
    before: jax.Array,
    labels: jax.Array,
    config: DFlash2Config,
) -> tuple[jax.Array, jax.Array]:
    """Computes the cross-entropy of labels among DFlash 2's candidates.

    A label that is no candidate takes the place of the least likely one.

    Args:
      head: its weights.
      base: f32[...,V], the block's logits.
      x: dtype[...,D], its states before the final norm.
      before: i32[...], the token before each position.
      labels: i32[...].
      config: the head's.

    Returns:
      f32[...] in nats, and bool[...], whether the label is a candidate.
    """
    _, ids = top_k(base, config.selector_top_k)
    is_candidate = (ids == labels[..., None]).any(axis=-1)
    ids = ids.at[..., -1].set(jnp.where(is_candidate, ids[..., -1], labels))
    scores = jnp.take_along_axis(base, ids, axis=-1) + pair_scores(head, x, before, ids, config)
    return cross_entropy(scores, jnp.argmax(ids == labels[..., None], axis=-1)), is_candidate


def block_loss(
    head: dict,
    batch: Batch,
    target: dict,
    *,
    config: BlockConfig,
    model: Model,
    num_anchors: int = 32,
    slot_weights: str = "decay",
    decay: float = math.exp(-1 / 4),
    text_weight: float = 1.0,
    target_weight: float = 0.0,
    base_weight: float = 0.0,
    l1_weight: float = 0.0,
    confidence_weight: float = 0.0,
    counts: Mapping[str, jax.Array] | None = None,
    has_every_anchor: bool = False,
    is_remat: bool = False,
) -> tuple[jax.Array, dict]:
    """Computes the weighted mean over the drafts of blocks at drawn anchors.

    A draft costs the cross-entropy of the text's token, in DFlash 2 among the candidates, and may
    cost the cross-entropy of the target's distribution, the distance of its own distribution from
    that, and the cross-entropy of the confidence in it from the probability that the target accepts
    it. A draft counts if its token and all before it in the block are to be predicted.

    Args:
      head: The head's weights; they are trained.
      batch: Windows with the target's view.
      target: The target's weights; they are not trained.
      config: The head's shape.
      model: The target's functions.
      num_anchors: A, the blocks of a window; other ones are drawn in every step.
      slot_weights: See ``train.anchors.weigh_slots``.
      decay: Likewise.
      text_weight: Of the cross-entropy of the text's token.
      target_weight: Of the cross-entropy of the target's distribution. It says more than one token
        does; no published loss of these heads has it.
      base_weight: Of the text's token by the logits that do not know the token before, among all
        tokens. The authors' trees of TreeFlash take their candidates from these; the trees here
        take them from the step's.
      l1_weight: Of the L1 distance from the target's distribution.
      confidence_weight: Of the confidence, whose label has no gradient.
      counts: See ``Objective``.
      has_every_anchor: Blocks begin at every ``block_size`` tokens, for evaluation.
      is_remat: Whether the backward pass computes each layer again instead of storing it.

    Returns:
      The loss, and f32[K] ``loss_by_step`` in nats, ``accuracy`` and ``teacher_forced_accept``; in
      DFlash 2 also ``recall``, how often the text's token is a candidate. Where the target's
      distribution is read also f32[K] ``acceptance`` and ``chain_acceptance``, how likely a round
      at temperature 1 accepts that many drafts; and f32[K] ``confidence_bias``, by how much the
      confidence exceeds the acceptance in the mean.

    Raises:
      ConfigError: DFlash 2 has a ``target_weight``.
    """
    K = config.max_draft
    every = config.block_size if has_every_anchor else None
    mask, anchors, is_kept = choose_anchors(batch, num_anchors, every)
    has_confidence = getattr(config, "has_confidence", False)
    has_candidates = isinstance(config, DFlash2Config)
    is_fit = not (has_candidates and target_weight)
    expected = "0, since DFlash 2 gives most tokens probability 0"
    check(is_fit, "target_weight", target_weight, expected)
    reads_target = has_every_anchor or max(target_weight, l1_weight, confidence_weight) > 0

    def chunk(params, _, rest):
        head, context = params
        anchors, is_kept = rest
        params = {"head": head, "target": target}
        given = batch.tokens, anchors, context, config, model, batch.begins
        x = states_at(params, *given, is_remat=is_remat)
        before, labels = (slots(batch.tokens, anchors, first, K) for first in (0, 1))
        base, q = scores_at(params, x, before, config, model)
        is_counted = counted(mask, anchors, is_kept, K)
        if has_candidates:  # the text's token is among them while training
            loss, is_candidate = candidate_loss(head, base, x, before, labels, config)
        else:
            loss = cross_entropy(q, labels)
        weights = weigh_slots(slot_weights, is_counted, jnp.exp(-loss), decay=decay)
        is_right = is_counted & (jnp.argmax(q, axis=-1) == labels)
        total = text_weight * loss
        if base_weight > 0:
            total += base_weight * cross_entropy(base, labels)
        reached, hits = chains(is_counted, is_right)
        sums = {"weight": weights, "count": is_counted, "loss": loss, "right": is_right}
        sums |= {"reached": reached, "hits": hits}
        if has_candidates:
            sums["recall"] = is_candidate
        if reads_target:
            p = model.unembed(target, slots(batch.view.hidden, anchors, 0, K))
            distance = total_variation(p, q)
            accepted = 1 - jax.lax.stop_gradient(distance)
            total += l1_weight * 2 * distance
            if target_weight > 0:
                total += target_weight * soft_cross_entropy(p, q)
            sums |= {"accepted": accepted, "chain": jnp.cumprod(accepted, axis=2)}
        if reads_target and has_confidence:
            logit = confidence_logits(head, x, before, config)
            total += confidence_weight * (jnp.logaddexp(0.0, logit) - accepted * logit)
            sums["bias"] = jax.nn.sigmoid(logit) - accepted
        return sum_slots(weights * total, is_counted).sum(), (sum_slots(sums, is_counted), ())

    size = blocks_at_once(batch.tokens, anchors, config.block_size, config.layer)
    blocks = cut_chunks(anchors, 1, size), cut_chunks(is_kept, 1, size)
    context = context_keys(head, batch.view.features, config, batch.begins)
    trained = {name: w for name, w in head.items() if name not in _CONTEXT}
    loss, sums, _ = sum_chunks(chunk, (trained, context), (), blocks)
    terms = {"drafts": Mean(loss, sums["weight"].sum())}
    figures = {"terms": terms, "teacher_forced_accept": Mean(sums["hits"], sums["reached"])}
    for name, figure in _FIGURES.items():
        if name in sums:
            figures[figure] = Mean(sums[name], sums["count"])
    return loss_of(terms, counts), figures


def text_drafts(
    params: dict,
    features: jax.Array,
    tokens: jax.Array,
    num_draft: int,
    *,
    config: BlockConfig,
    model: Model,
) -> jax.Array:
    """Returns the likeliest drafts at every place of a text, see ``Objective.drafts``."""
    context = context_keys(params["head"], features, config)

    def at(anchors):
        x = states_at(params, tokens, anchors, context, config, model)[:, :, :num_draft]
        before = slots(tokens, anchors, 0, num_draft)
        return jnp.argmax(scores_at(params, x, before, config, model)[1], axis=-1)

    return map_places(at, tokens, config.block_size, config.layer)


_LOSSES = {
    "dflash": {},
    "dspark": {"text_weight": 0.1, "l1_weight": 0.9, "confidence_weight": 1.0},
    "treeflash": {"base_weight": 0.5},
    "dflash2": {"base_weight": 1.0},
}
OBJECTIVES = {
    name: Objective(name, functools.partial(block_loss, **options), drafts=text_drafts)
    for name, options in _LOSSES.items()
}
