"""A decoder-only language model as pure functions over a nested dict of weights.

The layers are those of the config's family, see ``models/families``.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from spec_jax.contracts import Cache, ForwardOutput, Model
from spec_jax.models.caches.groups import group_of, with_group
from spec_jax.models.checks import require
from spec_jax.models.cpu_layout import matmul
from spec_jax.models.families import AnyConfig, init_cache, layer_kinds, places_of
from spec_jax.models.layers import Window, centred_norms, constrain_logits, embed_tokens, rms_norm
from spec_jax.models.moe import EXPERTS, StackedWeight
from spec_jax.models.params import Params, init_params
from spec_jax.models.runs import name_of, runs_of
from spec_jax.sharding import constrain, pin_tpu_layout

__all__ = ["forward", "init_cache", "init_params", "logits", "model", "unembed"]


def forward(
    params: Params,
    tokens: jax.Array,
    cache: Cache | None = None,
    *,
    config: AnyConfig,
    window_offset: int | jax.Array = 0,
    positions: jax.Array | None = None,
    window_mask: jax.Array | None = None,
    begins: jax.Array | None = None,
    taps: tuple[int, ...] = (),
    num_layers: int | None = None,
) -> ForwardOutput:
    """Feeds T tokens per row, after the tokens that the cache holds.

    Writes them into the cache from position ``length + window_offset`` on, and does not change
    ``length``. The caller ensures ``length + window_offset + T <= S``; in layers with a sliding
    window ``window_offset + T`` is at most ``max_pass`` of the config instead.

    Args:
      params: the weights.
      tokens: i32[B,T].
      cache: what was fed before; None if the tokens are whole sequences.
      config: the model's shape.
      window_offset: number of slots that earlier calls since the last commit have filled.
      positions: i32[B,T], rotary positions. By default a token's position is the number of tokens
        that it sees before itself, see ``Window.after``.
      window_mask: bool[B|1,T,W], which of the window's first W slots each token sees, beside all
        committed slots; every token sees its own slot. By default all slots up to its own.
      begins: i32[B,T], where each token's document begins, if a sequence has several documents,
        see ``Window.after``.
      taps: which states to return as features. 0..L-1 is the residual stream before that layer,
        L the stream after the last layer, and L+1 the state after the final norm.
      num_layers: how many of the layers are run, without taps; None: all of them.

    Returns:
      ``hidden`` dtype[B,T,D] after the final norm, the cache with the window written, and
      ``features`` dtype[B,T,E], the tapped states concatenated in the order of ``taps``.

    Raises:
      ConfigError: a sequence has several documents, and a layer keeps a state of all tokens; or
        layers are run by a loop that does not stop after ``num_layers``.
    """
    L = config.num_hidden_layers
    taps = taps if num_layers is None else ()
    end = L if num_layers is None else num_layers
    placed = window_offset, positions, window_mask, begins
    window = Window.after(config, cache, *tokens.shape, *placed)
    x = embed_tokens(params["embed"], tokens)
    if getattr(config, "residual_in_fp32", False):
        x = x.astype(jnp.float32)
    kinds = layer_kinds(config)
    places = places_of(kinds)
    is_centred = getattr(config, "has_zero_centred_norms", False)
    norms_as_factors = centred_norms if is_centred else lambda weights: weights

    def step(layer, weights, x, cache, place):
        """Runs a layer at its ``place`` in its group of the cache; returns x and the cache."""
        kind = kinds[layer]
        index, _ = places[layer]
        weights, group = norms_as_factors(weights), group_of(cache, index)
        x, group = kind.layer(weights, x, group, place, window, config)
        return constrain(x, "batch", None, None), with_group(cache, index, group)

    inner = {i for i in taps if i < L}
    tapped = {}
    if cache is not None and config.scan_layers:
        cache = cache.open_window(tokens.shape[1])  # a loop over layers cannot make room
    for run in runs_of(config):
        count = sum(i < end for i in run[0])
        if count == 0:
            break
        is_whole = count * len(run) == sum(i < end for layers in run for i in layers)
        period = f"{len(run)} layers are one step of a loop: expected a multiple of {len(run)}"
        require(is_whole, f"num_layers is {end}, and {period}, or scan_layers=False")
        weights = tuple(params["layers"][name_of(layers)] for layers in run)
        if len(run[0]) > 1:
            x, cache, states = _scan(step, run, count, weights, x, cache, places, inner)
            tapped |= states
            continue
        first = run[0].start
        tapped |= {first: x} if first in inner else {}
        x, cache = step(first, *weights, x, cache, places[first][1])
    final = norms_as_factors({"norm": params["final_norm"]})["norm"]
    hidden = rms_norm(x, final, config.rms_norm_eps)
    hidden = hidden.astype(params["embed"].dtype)  # a residual stream may be in float32
    tapped |= {L: x, L + 1: hidden}
    features = jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else None
    features = features if features is None else constrain(features, "batch", None, None)
    return ForwardOutput(hidden, cache, features)


def _scan(step, run, count, weights, x, cache, places, inner):
    """Runs layers that repeat by one loop of ``count`` periods of their pattern.

    Returns x, the cache, and by the number of each layer in ``inner`` the state before it.
    """
    # Each state that is read has a place in ``held``; all other states share the last place.
    read = sorted(i for layers in run for i in layers if i in inner)
    slots = {i: read.index(i) if i in inner else len(read) for layers in run for i in layers}
    held = jnp.zeros((len(read) + 1, *x.shape), x.dtype) if read else None

    def is_whole(name):
        return cache is not None and name in EXPERTS

    def as_array(numbers):
        return jnp.asarray([*numbers], jnp.int32)

    scanned = tuple(
        (
            {name: w for name, w in stacked.items() if not is_whole(name)},
            as_array(places[i][1] for i in layers),
            as_array(slots[i] for i in layers) if inner.intersection(layers) else None,
        )
        for layers, stacked in zip(run, weights)
    )

    def body(carry, scanned):
        x, cache, held = carry
        period, repeat = scanned
        for layers, stacked, (sliced, place, slot) in zip(run, weights, period):
            if slot is not None:
                held = jax.lax.dynamic_update_index_in_dim(held, x, slot, axis=0)
                held = constrain(held, None, "batch")
            layer = jax.tree.map(pin_tpu_layout, sliced)
            whole = {name: pin_tpu_layout(w) for name, w in stacked.items() if is_whole(name)}
            layer |= {name: StackedWeight(w, repeat) for name, w in whole.items()}
            x, cache = step(layers.start, layer, x, cache, place)
        return (x, cache, held), None

    def first(carry, repeat):  # of the stacks, since a slice of them would copy them
        def at(x):
            return jax.lax.dynamic_index_in_dim(x, repeat, keepdims=False)

        return body(carry, (jax.tree.map(at, scanned), repeat))

    repeats = jnp.arange(len(run[0]))
    over = (body, (scanned, repeats)) if count == len(repeats) else (first, repeats[:count])
    (x, cache, held), _ = jax.lax.scan(over[0], (x, cache, held), over[1])
    return x, cache, {i: held[slots[i]] for i in read}


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """Returns the logits f32[...,V] of final hidden states dtype[...,D]."""
    with jax.named_scope("unembed"):
        if "head" in params:
            logits = matmul(hidden, params["head"])
        else:
            logits = jnp.einsum("...d,vd->...v", hidden, params["embed"])
        return constrain_logits(logits).astype(jnp.float32)


def logits(params: Params, tokens: jax.Array, *, config: AnyConfig) -> jax.Array:
    """Returns the logits f32[B,T,V] of whole sequences i32[B,T], without a cache.

    Args:
      params: the weights.
      tokens: i32[B,T].
      config: the model's shape.
    """
    return unembed(params, forward(params, tokens, config=config).hidden)


@functools.cache
def model(config: AnyConfig, taps: tuple[int, ...] = (), num_tokens: int | None = None) -> Model:
    """Returns the ``Model`` of this shape: the functions that decoder and drafters call.

    Equal arguments return the same object, so compiled programs are shared.

    Args:
      config: the model's shape.
      taps: states that every pass returns as features, see ``forward``.
      num_tokens: how many ids are tokens, if the others pad the embedding; None: all are tokens.

    Raises:
      ConfigError: the model lacks one of the taps, or there are more tokens than ids.
    """
    wrong = [i for i in taps if not 0 <= i <= config.num_hidden_layers + 1]
    L = config.num_hidden_layers
    require(not wrong, f"taps {wrong} do not exist: a model of {L} layers has 0 to {L + 1}")
    is_fit = num_tokens is None or 0 < num_tokens <= config.vocab_size
    require(is_fit, f"num_tokens is {num_tokens}; the model has {config.vocab_size} ids")
    is_padded = num_tokens not in (None, config.vocab_size)

    def unembed_tokens(params, hidden):
        logits = unembed(params, hidden)
        return jnp.where(jnp.arange(config.vocab_size) < num_tokens, logits, -jnp.inf)

    return Model(
        vocab_size=config.vocab_size,
        max_length=config.max_position_embeddings,
        init_cache=lambda params, batch, slots: init_cache(
            config, batch, slots, params["embed"].dtype
        ),
        forward=functools.partial(forward, config=config, taps=taps),
        unembed=unembed_tokens if is_padded else unembed,
        num_tokens=num_tokens if is_padded else None,
        open_window=lambda cache, width: cache.open_window(width),
        config=config,
        embedding=operator.itemgetter("embed"),
        num_layers=L,
    )
