"""EAGLE's objectives.

EAGLE-1 learns the target's next feature, and the distribution that the target's output head reads
from it. EAGLE-3 is trained by training-time test: K drafts from every pair are compared with the
target's distribution. P-EAGLE has masked pairs in the place of its later drafts, after some of the
pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from spec_jax.contracts import Model
from spec_jax.drafters.common.vocabulary import draft_ids
from spec_jax.drafters.eagle import model as eagle
from spec_jax.drafters.eagle.parallel import masked_pairs
from spec_jax.drafters.eagle.start import start_of
from spec_jax.models.checks import require
from spec_jax.models.layers import constrain_logits
from spec_jax.train.anchors import chains, choose_anchors, counted, slots, sum_slots
from spec_jax.train.blocks import Blocks, BlockShape, KeptKeys, blocks_at_once, map_places, origins
from spec_jax.train.chunks import chain_loss, cut_chunks, sum_chunks
from spec_jax.train.losses import make_divergence, soft_cross_entropy
from spec_jax.train.means import Mean, loss_of, reciprocal
from spec_jax.train.objective import Batch, Objective, row_keys
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
    config: eagle.EagleConfig,
    model: Model,
    feature_weight: float = 1.0,
    token_weight: float = 0.1,
    noise: float = 0.0,
    counts: Mapping[str, jax.Array] | None = None,
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
      counts: See ``Objective``.

    Returns:
      The loss, and ``feature_loss``, ``token_loss`` in nats and ``teacher_forced_accept`` f32[1].
    """
    T = batch.tokens.shape[1] - 2
    params = {"head": head, "target": target}
    features = batch.view.features
    if noise:

        def draw(key):
            return jax.random.uniform(key, features.shape[1:], jnp.float32, -0.5, 0.5)

        uniform = jax.vmap(draw)(row_keys(batch.key, len(features)))
        features = features + (noise * 512 / T * uniform).astype(features.dtype)
    x = unroll(eagle.eagle_head(config, model), params, features, batch.tokens, 1, batch.begins)
    weight = shifted(batch.mask, 2, T) & (batch.place(2, T) >= 2)
    next_features = shifted(batch.view.features, 1, T).astype(jnp.float32)
    regression = smooth_l1(x[0].astype(jnp.float32) - next_features).mean(axis=-1)
    feature_loss = Mean.of(regression, weight)

    def measure(_, states, hidden):
        q = model.unembed(target, states)
        p = model.unembed(target, hidden)[:, None]
        return soft_cross_entropy(p, q), jnp.argmax(q, axis=-1)

    hidden = batch.view.hidden[:, 1 : 1 + T]
    share = jnp.full(1, token_weight)
    over = counts and counts["tokens"]
    loss, figures = chain_loss(measure, {}, x, batch, hidden, share, over)
    features = {"features": Mean(feature_weight * feature_loss.total, feature_loss.count)}
    figures["terms"] |= features
    token_loss = jax.tree.map(lambda x: x[0], figures.pop("loss_by_step"))
    figures |= {"feature_loss": feature_loss, "token_loss": token_loss}
    return loss + loss_of(features, counts), figures


def eagle3_loss(
    head: dict,
    batch: Batch,
    target: dict,
    *,
    config: eagle.EagleConfig,
    model: Model,
    num_steps: int = 7,
    decay: float = 0.8,
    divergence: str = "cross-entropy",
    counts: Mapping[str, jax.Array] | None = None,
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
      counts: See ``Objective``.
      is_remat: See ``unroll``.

    Returns:
      The loss, and its figures, see ``chain_loss``.
    """
    params = {"head": head, "target": target}
    given = batch.view.features, batch.tokens, num_steps, batch.begins
    states = unroll(eagle.eagle_head(config, model), params, *given, is_remat=is_remat)
    compare = _compare(head, target, config, model, divergence)
    hidden = batch.view.hidden[:, 1:-1]
    shares = decay ** jnp.arange(num_steps)
    return _compare_chains(compare, head, states, batch, hidden, shares, counts)


def _compare_chains(compare, head, states, batch: Batch, hidden, shares, counts):
    """``chain_loss`` of states dtype[K,B,T,D], by what ``_compare`` returns."""

    def measure(scored, states, hidden):
        return compare(scored, states, hidden[:, None])

    over = counts and counts["tokens"]
    return chain_loss(measure, _scored(head), states, batch, hidden, shares, over)


def _scored(head: dict) -> dict:
    """The weights that ``eagle.score`` reads."""
    return {name: head[name] for name in ("norm", "head")}


def _compare(head: dict, target: dict, config: eagle.EagleConfig, model: Model, divergence: str):
    """``(scored, states dtype[...,D], hidden dtype[...,D]) -> (losses f32[...], drafts i32[...])``.

    ``scored`` is that of ``_scored``, and ``hidden`` the target's states before its output head.
    """
    ids = draft_ids(head)
    compare = make_divergence(divergence)
    is_drafted = ids if ids is None else jnp.zeros((model.vocab_size,), bool).at[ids].set(True)

    def measure(scored, states, hidden):
        q = eagle.score({"head": head | scored}, states, config, model)
        p = model.unembed(target, hidden)
        draft = jnp.argmax(q, axis=-1)
        if ids is None:
            return compare(p, q), draft
        is_known, p = is_drafted[jnp.argmax(p, axis=-1)], constrain_logits(p[..., ids])
        return jnp.where(is_known, compare(p, q), 0.0), ids[draft]

    return measure


def true_pairs(
    params: dict,
    features: jax.Array,
    tokens: jax.Array,
    config: eagle.PEagleConfig,
    model: Model,
    begins: jax.Array | None = None,
) -> tuple[jax.Array, tuple[tuple[jax.Array, jax.Array], ...]]:
    """Returns the states dtype[B,T,D] of the T pairs of a window, and their keys and values.

    Args:
      params: ``{"head": ..., "target": ...}``.
      features: dtype[B,T+2,E], the target's tapped states.
      tokens: i32[B,T+2].
      config: the head's shape.
      model: the target's functions.
      begins: i32[B,T+2], see ``Batch``.
    """
    head = params["head"]
    T = tokens.shape[1] - 2
    embed = eagle.embedding(params, config, model)
    state = eagle.join_features(head, features[:, :T], config)
    begins = None if begins is None else begins[:, :T]
    cache = KeptKeys(jnp.zeros((len(tokens),), jnp.int32), begins=begins)
    x, cache = eagle.forward(head, embed, state, tokens[:, 1 : 1 + T], cache, config=config)
    return x, cache.layers


def states_at(
    params: dict,
    x: jax.Array,
    context: tuple[tuple[jax.Array, jax.Array], ...],
    anchors: jax.Array,
    num_draft: int,
    config: eagle.PEagleConfig,
    model: Model,
    begins: jax.Array | None = None,
    *,
    is_remat: bool = False,
) -> jax.Array:
    """Returns the states dtype[B,A,K,D] that K drafts after each anchor are scored from.

    Args:
      params: ``{"head": ..., "target": ...}``.
      x: of ``true_pairs``.
      context: likewise.
      anchors: i32[B,A], the tokens that stand for pending ones. The pair of the token before each
        scores its first draft, and masked pairs after that pair the others.
      num_draft: K.
      config: the head's shape.
      model: the target's functions.
      begins: of ``true_pairs``.
      is_remat: whether the backward pass computes the masked pairs again instead of storing them.
    """
    B, A = anchors.shape
    S = num_draft - 1
    M = config.num_layers
    first = slots(x, jnp.maximum(anchors - 1, 0), 0, 1)
    if S == 0:
        return first
    shape = BlockShape(S, config.layer.windows, (True,) * M)
    blocks = Blocks(context, anchors, shape, origins(begins, anchors))

    def run(head, embed, blocks):
        pairs = masked_pairs(head, B, A * S, config)
        at = blocks.positions
        return eagle.forward(head, embed, *pairs, blocks, config=config, positions=at)[0]

    embed = eagle.embedding(params, config, model)
    masked = (jax.checkpoint(run) if is_remat else run)(params["head"], embed, blocks)
    return jnp.concatenate([first, masked.reshape(B, A, S, -1)], axis=2)


def peagle_loss(
    head: dict,
    batch: Batch,
    target: dict,
    *,
    config: eagle.PEagleConfig,
    model: Model,
    num_anchors: int = 32,
    decay: float = 0.7,
    floor: float = 0.2,
    divergence: str = "forward-kl",
    counts: Mapping[str, jax.Array] | None = None,
    has_every_anchor: bool = False,
    is_remat: bool = False,
) -> tuple[jax.Array, dict]:
    """Computes the weighted mean over K drafts of the divergence from the target's distribution.

    The first draft is compared after every pair. The others are after some pairs, drawn anew in
    every step; draft k + 1 weighs ``max(decay ** k, floor)``, the share of the pairs after which
    the authors' sampling keeps it. A draft counts if its token and all before it after the anchor
    are to be predicted. Tokens that cannot be drafted count as in ``eagle3_loss``.

    Source: P-EAGLE, arXiv 2602.01469, section 4; the decay and floor are those of its code.

    Args:
      head: The head's weights; all but ``d2t`` are trained.
      batch: Windows with the target's view.
      target: The target's weights; they are not trained.
      config: The head's shape, which says K as ``max_draft``.
      model: The target's functions.
      num_anchors: A, the pairs of a window that masked ones follow.
      decay: See above.
      floor: Likewise.
      divergence: A key of ``losses.DIVERGENCES``.
      counts: See ``Objective``.
      has_every_anchor: Masked pairs follow every K-th pair, for evaluation.
      is_remat: See ``states_at``.

    Returns:
      The loss, and f32[K] ``loss_by_step`` in nats and ``teacher_forced_accept``.

    Raises:
      ConfigError: The config does not say K.
    """
    K = config.max_draft
    require(K is not None, "max_draft is None; a head is trained for a number of drafts")
    every = K if has_every_anchor else None
    mask, anchors, is_kept = choose_anchors(batch, num_anchors, every)
    shares = jnp.maximum(decay ** jnp.arange(K), floor)
    shares = shares / shares.sum()
    params = {"head": head, "target": target}
    hidden = batch.view.hidden
    compare = _compare(head, target, config, model, divergence)
    given = batch.view.features, batch.tokens, config, model, batch.begins
    x, context = true_pairs(params, *given)
    after = hidden[:, 1:-1]
    loss, first = _compare_chains(compare, head, x[None], batch, after, shares[:1], counts)
    is_counted = counted(mask, anchors, is_kept, K)
    own = is_counted.sum(axis=(0, 1)).astype(jnp.float32)
    later = jnp.where(jnp.arange(K) > 0, shares, 0.0)
    weights = later * reciprocal(counts["drafts"] if counts else own)

    def chunk(params, _, rest):
        head, x, context = params
        anchors, is_counted = rest
        both = {"head": head, "target": target}
        given = x, context, anchors, K, config, model, batch.begins
        states = states_at(both, *given, is_remat=is_remat)
        losses, drafts = compare(_scored(head), states, slots(hidden, anchors, 0, K))
        is_right = is_counted & (drafts == slots(batch.tokens, anchors, 1, K))
        reached, hits = chains(is_counted, is_right)
        sums = sum_slots({"loss": losses, "reached": reached, "hits": hits}, is_counted)
        return (weights * sums["loss"]).sum(), (sums, ())

    trained, _ = PEAGLE.split(head)
    size = blocks_at_once(batch.tokens, anchors, K, config.layer)
    rest = cut_chunks(anchors, 1, size), cut_chunks(is_counted, 1, size)
    others, sums, _ = sum_chunks(chunk, (trained, x, context), (), rest)
    both = Mean(sums["loss"], own), first["loss_by_step"]
    by_step = jax.tree.map(lambda x, of_first: x.at[0].set(of_first[0]), *both)
    terms = first["terms"] | {"drafts": Mean(later * sums["loss"], own)}
    accept = Mean(sums["hits"], sums["reached"])
    figures = {"terms": terms, "loss_by_step": by_step, "teacher_forced_accept": accept}
    return loss + others, figures


def parallel_drafts(
    params: dict,
    features: jax.Array,
    tokens: jax.Array,
    num_draft: int,
    *,
    config: eagle.PEagleConfig,
    model: Model,
) -> jax.Array:
    """Returns the likeliest drafts at every place of a text, see ``Objective.drafts``."""
    x, context = true_pairs(params, features, tokens, config, model)

    def at(anchors):
        states = states_at(params, x, context, anchors, num_draft, config, model)
        return jnp.argmax(eagle.unembed(params, states, config, model), axis=-1)

    return map_places(at, tokens, num_draft, config.layer)


EAGLE1 = Objective("eagle1", eagle1_loss, start=start_of)
EAGLE3 = Objective("eagle3", eagle3_loss, constants=("d2t",), start=start_of)
PEAGLE = Objective("peagle", peagle_loss, constants=("d2t",), drafts=parallel_drafts)
OBJECTIVES = {objective.name: objective for objective in (EAGLE1, EAGLE3, PEAGLE)}
