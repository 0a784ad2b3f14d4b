"""How the logits of a block become those of each position, given the token before it.

The step is all that the heads of this folder differ in. It knows the token before and no other,
so one function serves chains, trees, and texts whose tokens are all known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec_jax.contracts import Model
from spec_jax.drafters.block.config import (
    BlockConfig,
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    TreeFlashConfig,
)
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.models.checks import require
from spec_jax.models.layers import constrain_logits, embed_tokens, linear, rms_norm
from spec_jax.models.specs import ParamSpec, linear_specs, norm_spec
from spec_jax.sampling import top_k

_EPS = 1e-6  # of TreeFlash's own norm
_UNLIKELY = 1e4  # how much less than its logit a token scores that is no candidate of DFlash 2
_CODEBOOKS = ("predecessor", "successor")  # of DFlash 2's scores of pairs


class Step(NamedTuple):
    """The step of a kind of head.

    Attributes:
      table: ``(config) -> {name: ParamSpec}``, the weights under ``params["head"]["step"]``.
      logits: see ``step_logits``.
      is_conditional: the token before changes them. Independent drafts can make incoherent blocks
        where each is sampled, so by default they are the likeliest tokens.
    """

    table: Callable[[BlockConfig], dict[str, ParamSpec]]
    logits: Callable[..., jax.Array]
    is_conditional: bool = True


def normed(head: dict, x: jax.Array, config: BlockConfig) -> jax.Array:
    """Returns the states that are scored, from those that the last layer returns."""
    return rms_norm(x, head["norm"], config.layer.rms_norm_eps)


def step_logits(
    params: dict,
    base: jax.Array,
    x: jax.Array,
    token: jax.Array,
    config: BlockConfig,
    target: Model,
) -> jax.Array:
    """Returns the logits f32[...,V] of positions, given the tokens before them.

    Args:
      params: the head's and the target's, by these names.
      base: f32[...,V], the logits of the block.
      x: dtype[...,D], its states before the final norm.
      token: i32[...], the token before each position: the pending one, or the draft before.
      config: the head's.
      target: whose output head scores.
    """
    return STEPS[type(config)].logits(params, base, x, token, config, target)


def confidence_logits(
    head: dict, x: jax.Array, token: jax.Array, config: DSparkConfig
) -> jax.Array:
    """Returns the logits f32[...] of how probably the draft at each position is accepted.

    They do not depend on the draft itself, only on the token before it.

    Args:
      head: its weights.
      x: dtype[...,D], the states before the final norm.
      token: i32[...], the token before each position.
      config: the head's.
    """
    h = normed(head, x, config)
    if config.confidence_with_markov:
        h = _beside(h, _embedded(head["step"]["embed"], token))
    return linear(h, head, "confidence")[..., 0].astype(jnp.float32)


def pair_scores(
    head: dict, x: jax.Array, token: jax.Array, ids: jax.Array, config: DFlash2Config
) -> jax.Array:
    """Returns DFlash 2's scores f32[...,C] of pairs, which are added to the logits of candidates.

    Args:
      head: its weights.
      x: dtype[...,D], the states before the final norm.
      token: i32[...], the token before each position.
      ids: i32[...,C], the candidates.
      config: the head's.
    """
    step = head["step"]
    read = _embedded(step["predecessor"], token) * linear(normed(head, x, config), step, "state")
    successor = _embedded(step["successor"], ids)  # [...,C,r]
    return jnp.einsum("...r,...cr->...c", read, successor).astype(jnp.float32)


def _embedded(table: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the embeddings dtype[...,D] of tokens i32[...], of whatever rank."""
    rows = embed_tokens(table, token.reshape(len(token), -1))
    return rows.reshape(*token.shape, -1)


def _beside(a: jax.Array, b: jax.Array) -> jax.Array:
    """Joins the last axes of two arrays whose other axes broadcast."""
    shape = jnp.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    wide = [jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in (a, b)]
    return jnp.concatenate(wide, axis=-1)


def _markov_table(config: DSparkConfig) -> dict[str, ParamSpec]:
    D = config.layer.hidden_size
    V = config.target_vocab_size
    r = config.markov_rank
    name = "markov_head.markov_w1.weight"
    table = {"embed": ParamSpec((V, r), ("vocab", "rank"), name)}
    linear_specs(table, "out", r, V, ("rank", "vocab"), "markov_head.markov_w2")
    if config.markov_head_type == "gated":
        axes = ("embed", "rank")
        name = "markov_head.gate_proj"
        linear_specs(table, "gate", D + r, r, axes, name, has_bias=True)
    return table


def _markov(params, base, x, token, config, target):
    """A bias W2 W1[token]; if it is gated, by the state and the token before."""
    head = params["head"]
    step = params["head"]["step"]
    e = _embedded(step["embed"], token)
    if config.markov_head_type == "gated":
        e = e * jax.nn.sigmoid(linear(_beside(normed(head, x, config), e), step, "gate"))
    return base + constrain_logits(linear(e, step, "out")).astype(jnp.float32)


def _pairs_table(config: DFlash2Config) -> dict[str, ParamSpec]:
    D = config.layer.hidden_size
    V = config.target_vocab_size
    r = config.selector_rank

    def name(which):
        return f"candidate_selector.{which}_codebook"

    table = {which: ParamSpec((V, r), ("vocab", "rank"), name(which)) for which in _CODEBOOKS}
    table["successor"] = table["successor"]._replace(init="zeros")
    linear_specs(table, "state", D, r, ("embed", "rank"), "candidate_selector.hidden_projection")
    return table


def _pairs(params, base, x, token, config, target):
    """The likeliest tokens alone, each with a score of it beside the token before and the state."""
    value, ids = top_k(base, config.selector_top_k)
    value, ids = (jnp.broadcast_to(y, (*token.shape, y.shape[-1])) for y in (value, ids))
    value = value + pair_scores(params["head"], x, token, ids, config)
    # The others are drafted only where a processor bans all candidates.
    others = jnp.broadcast_to(base - _UNLIKELY, (*token.shape, base.shape[-1]))
    return constrain_logits(jnp.put_along_axis(others, ids, value, axis=-1, inplace=False))


def _swiglu_table(config: TreeFlashConfig) -> dict[str, ParamSpec]:
    D = config.layer.hidden_size
    F = config.layer.intermediate_size
    table = {"norm": norm_spec(D, "ar_approximation.norm")}
    axes = ("features", "mlp")
    linear_specs(table, "ug", 2 * D, 2 * F, axes, "ar_approximation.ug", has_bias=True)
    linear_specs(table, "down", F, D, ("mlp", "embed"), "ar_approximation.d", init="zeros")
    return table


def _swiglu(params, base, x, token, config, target):
    """Scores the state again, with a gated map of [embedding of the token before; state] added."""
    head = params["head"]
    step = params["head"]["step"]
    e = _embedded(target.embedding(params["target"]), token).astype(x.dtype)
    h = _beside(rms_norm(e, step["norm"], _EPS), normed(head, x, config))
    up, gate = jnp.split(linear(h, step, "ug"), 2, axis=-1)
    x = x + linear(jax.nn.silu(gate) * up, step, "down")
    return target.unembed(params["target"], normed(head, x, config))


STEPS = {
    DFlashConfig: Step(lambda config: {}, lambda params, base, *_: base, is_conditional=False),
    DFlash2Config: Step(_pairs_table, _pairs),
    DSparkConfig: Step(_markov_table, _markov),
    TreeFlashConfig: Step(_swiglu_table, _swiglu),
}


def without_step(head: LoadedHead) -> LoadedHead:
    """Returns a head's block alone, as DFlash: drafts that do not know each other.

    Beside the head it shows what the step contributes. ``save`` writes it as any other.

    Args:
      head: a DSpark or TreeFlash head.

    Raises:
      ConfigError: it is another kind of head.
    """
    require(
        isinstance(head.config, (DSparkConfig, TreeFlashConfig)),
        f"{head.name} has no step of DSpark or TreeFlash that could be left out",
    )
    own = (field.name for field in dataclasses.fields(DFlashConfig))
    config = DFlashConfig(**{name: getattr(head.config, name) for name in own})
    left_out = ("step", "confidence", "confidence_bias")
    params = {name: w for name, w in head.params.items() if name not in left_out}
    name = f"{head.name} without its step"
    return LoadedHead(name, config, params, stated_length=head.stated_length)
