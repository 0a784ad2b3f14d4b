"""Drafts a block in one pass, with a head that reads the target's states in every layer.

The states of a committed token become keys and values of each layer at the token's slot; nothing
else of a token is kept. A round feeds the block [pending | masks] once, and what that writes after
the committed slots is overwritten by the states of the tokens that are accepted.

Source: DFlash, arXiv 2602.06036, section 3.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Defaults, Drafter, DraftShape, Model, Prompt, Sync
from spec_jax.drafters.block.config import BlockConfig, DFlash2Config
from spec_jax.drafters.block.steps import STEPS, confidence_logits, normed, step_logits
from spec_jax.drafters.common.chain import Drafted, draft_chain
from spec_jax.drafters.common.tree import draft_tree
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.checks import require
from spec_jax.models.chunks import over_chunks
from spec_jax.models.families.llama import decoder_layer, layer_table
from spec_jax.models.layers import (
    Window,
    attention,
    embed_tokens,
    gated,
    keys_values,
    linear,
    rms_norm,
)
from spec_jax.models.specs import ParamSpec, linear_specs, norm_spec
from spec_jax.tree import AnyTree, DynamicTree, check_children


def block_table(config: BlockConfig) -> dict[str, Any]:
    """Returns the weights of a head by name, those of its layers and its step nested.

    In a checkpoint "layers.{i}." is the prefix of a layer's tensors.
    """
    D = config.layer.hidden_size
    E = len(config.taps) * config.target_hidden_size
    table: dict[str, Any] = {}
    linear_specs(table, "fc", E, D, ("features", "embed"), "fc")
    table |= {"context_norm": norm_spec(D, "hidden_norm"), "norm": norm_spec(D, "norm")}
    layers = range(config.layer.num_hidden_layers)
    table["layers"] = {str(i): layer_table(config.layer) | conv_table(config) for i in layers}
    if step := STEPS[type(config)].table(config):
        table["step"] = step
    if getattr(config, "has_confidence", False):
        width = D + (config.markov_rank if config.confidence_with_markov else 0)
        axes = ("embed", "one")
        name = "confidence_head.proj"
        linear_specs(table, "confidence", width, 1, axes, name, has_bias=True)
    return table


def conv_table(config: BlockConfig) -> dict[str, Any]:
    """Returns the weights of a layer's convolutions; none but in DFlash 2."""
    table: dict[str, Any] = {}
    if not isinstance(config, DFlash2Config):
        return table
    D = config.layer.hidden_size
    taps = config.conv_kernel_size
    for name in ("attention_conv", "mlp_conv"):
        hf = f"model.layers.{{i}}.{name}"
        axes = ("side", "reach", "embed")
        table[f"{name}_base"] = ParamSpec((2, taps, D), axes, f"{hf}.base_kernel", init="first tap")
        size = 2 * taps * (D // config.conv_group_size)
        axes = ("embed", "taps")
        linear_specs(table, name, D, size, axes, f"{hf}.kernel_projection", init="zeros")
    return table


def block_layer(
    layer: dict[str, Any],
    x: jax.Array,
    cache: Any,
    index: int,
    window: Window,
    config: BlockConfig,
    width: int,
) -> tuple[jax.Array, Any]:
    """Runs a layer over rows dtype[B,T,D] of whole blocks, of ``width`` tokens each.

    In DFlash 2 attention and feed-forward part each stand between two convolutions. Other
    arguments and what is returned are those of ``layers.attention``.
    """
    shape = config.layer
    eps = config.layer.rms_norm_eps
    if not isinstance(config, DFlash2Config):
        return decoder_layer(layer, x, cache, index, window, shape)
    h = rms_norm(x, layer["attention_norm"], eps)
    before, after = _convolutions(layer, "attention_conv", h, config, width)
    out, cache = attention(layer, before(h), cache, index, window, shape)
    x = x + after(out)
    h = rms_norm(x, layer["mlp_norm"], eps)
    before, after = _convolutions(layer, "mlp_conv", h, config, width)
    return x + after(gated(layer, before(h))), cache


def _convolutions(layer, name, h, config, width):
    """Convolutions along each block, of what enters a part of the layer and of what leaves it.

    A channel's taps are its own, and what the token's state adds for its group.
    """
    taps = config.conv_kernel_size
    size = config.conv_group_size
    added = linear(h, layer, name).reshape(*h.shape[:2], 2, taps, -1)
    kernel = layer[f"{name}_base"] + jnp.repeat(added, size, axis=-1)  # [B,T,2,taps,D]

    def convolve(x, side):
        blocks = x.reshape(len(x), -1, width, x.shape[-1])

        def shifted(tap):
            return jnp.pad(blocks, ((0, 0), (0, 0), (tap, 0), (0, 0)))[:, :, :width]

        return sum(kernel[:, :, side, tap] * shifted(tap).reshape(x.shape) for tap in range(taps))

    return (lambda x: convolve(x, 0)), (lambda x: convolve(x, 1))


def context_states(head: dict, features: jax.Array, config: BlockConfig) -> jax.Array:
    """Returns the states dtype[B,T,D] that every layer reads, from tapped states dtype[B,T,E]."""
    states = linear(features.astype(head["context_norm"].dtype), head, "fc")
    return rms_norm(states, head["context_norm"], config.layer.rms_norm_eps)


def inject(
    head: dict, cache: KVCache, features: jax.Array, n: jax.Array, config: BlockConfig
) -> KVCache:
    """Returns the cache with the first n (i32[B]) of the next tokens committed.

    Args:
      head: its weights.
      cache: of the head's layers.
      features: dtype[B,T,E], the target's states of the next tokens.
      n: how many of them count.
      config: the head's.
    """
    with jax.named_scope("inject"):
        states = context_states(head, features, config)
        window = Window.after(config.layer, cache, *states.shape[:2])
        for i in range(config.layer.num_hidden_layers):
            # Or, on CUDA, XLA writes the matrices of all layers side by side, in every round.
            states = jax.lax.platform_dependent(
                states, cuda=jax.lax.optimization_barrier, default=lambda x: x
            )
            new = keys_values(head["layers"][str(i)], states, window, config.layer)
            cache = cache.write(i, *new, window.sees.start)
        return cache.commit(n)


def block_states(
    params: dict, pending: jax.Array, cache: KVCache, width: int, config: BlockConfig, target: Model
) -> tuple[jax.Array, KVCache]:
    """Runs the block of each row.

    Args:
      params: the head's and the target's, by these names.
      pending: i32[B], the first token of each block.
      cache: with the states of the tokens before it.
      width: T, the tokens of the block.
      config: the head's.
      target: the model that it drafts for.

    Returns:
      dtype[B,T,D], the states before the final norm, and the cache with the block written after
      the committed slots.
    """
    head = params["head"]
    masks = ((0, 0), (0, width - 1))
    tokens = jnp.pad(pending[:, None], masks, constant_values=config.mask_token_id)
    windows = _windows(config, cache, *tokens.shape)
    x = embed_tokens(target.embedding(params["target"]), tokens).astype(head["norm"].dtype)
    for i, key in enumerate(zip(config.windows, config.is_causal)):
        weights = head["layers"][str(i)]
        x, cache = block_layer(weights, x, cache, i, windows[key], config, width)
    return x, cache


def _windows(config, cache, B, T) -> dict[tuple[int | None, bool], Window]:
    """What the layers of each sort see of the slots."""
    index = jnp.arange(T)
    windows = {}
    at = cache.length[:, None] + index
    for size, is_causal in dict.fromkeys(zip(config.windows, config.is_causal)):
        ahead = index - index[:, None]  # of each token, how far each other one is
        seen = None if is_causal else (ahead < (size or T))[None]
        window = Window.after(config.layer, cache, B, T, positions=at, window_mask=seen)
        if size is not None:
            window = window._replace(sees=window.sees.replace(first=at - size + 1))
        windows[size, is_causal] = window
    return windows


@functools.cache
def block_drafter(config: BlockConfig, target: Model, tree: AnyTree | None = None) -> Drafter:
    """Returns the drafter of a head.

    Its parameters are ``{"head": the head's, "target": the target's}``, whose embedding and output
    head it shares. Its proposals have the distributions that drafts were drawn from: given the
    draft before, or in DFlash given the text alone.

    Args:
      config: the head's shape.
      target: the model that it drafts for, with this config's taps.
      tree: the tree that it drafts; None means a chain.

    Raises:
      ConfigError: the tree is deeper than a block, or a node has more children than the target has
        tokens.
    """
    depth = None if tree is None else tree.depth
    check_depth(config, depth or 0)
    candidates = getattr(config, "selector_top_k", target.last_id + 1)
    check_children(tree, min(candidates, target.last_id + 1), "the draft")
    has_confidence = getattr(config, "has_confidence", False)
    first = 0 if config.is_anchor_first else 1  # the slot that predicts the first draft

    def propose(params, state, context: Context, num_draft: int):
        def at(position):  # x and base are those of the block, below
            return x[:, position], base[:, position]

        def scores(position, token):
            """The logits at a position, and the confidence in what is drawn there."""
            x, base = at(position)
            logits = step_logits(params, base, x, token, config, target)
            if not has_confidence:
                return logits, None
            return logits, jax.nn.sigmoid(confidence_logits(params["head"], x, token, config))

        def advance(confidence, token, node):
            del confidence  # of the draft before
            return scores(node - 1, token)

        def advance_tree(position, tokens, parent, seen):
            del parent, seen  # a step reads the node's token alone
            x, base = (array[:, None] for array in at(position))
            logits = step_logits(params, base, x, tokens, config, target)
            shape = (*tokens.shape, target.vocab_size)
            return jnp.broadcast_to(logits, shape), position + 1

        levels = num_draft if depth is None or num_draft == 0 else depth
        check_depth(config, levels)
        pending = jnp.take_along_axis(context.tokens, context.length[:, None], axis=1)[:, 0]
        if num_draft == 0:
            return Drafted.none(context, 0, target.vocab_size).proposal(), state
        with jax.named_scope("draft_pass"):
            width = config.block_width(levels)
            x, cache = block_states(params, pending, state, width, config, target)
            x = x[:, first : first + levels]
        with jax.named_scope("unembed"):
            base = target.unembed(params["target"], normed(params["head"], x, config))
        logits, confidence = scores(0, pending)
        if tree is not None:
            return draft_tree(logits, 1, advance_tree, context, num_draft, tree)[0], cache
        estimate = (lambda confidence: confidence) if has_confidence else None
        return draft_chain(logits, confidence, advance, context, num_draft, estimate)[0], cache

    def commit(params, state, tokens, n, features, path):
        del tokens, path  # the features are those of the path
        return inject(params["head"], state, features, n, config)

    def prefill(params, state, prompt: Prompt):
        def step(cache, _, n, features):
            return inject(params["head"], cache, features, n, config)

        return over_chunks(step, state, (prompt.features,), prompt.lengths, prompt.chunk)

    def init(params, batch, slots):
        return KVCache.create(config.layer, batch, slots, params["head"]["norm"].dtype)

    return Drafter(
        name=config.name,
        vocab_size=config.target_vocab_size,
        max_length=config.max_length,
        is_sampled=not isinstance(tree, DynamicTree),
        init=init,
        prefill=prefill,
        propose=propose,
        commit=commit,
        insert_row=KVCache.insert_row,
        shape=DraftShape(config.taps, tree, config.block_size),
        sync=Sync(rewind=KVCache.rewind),
        defaults=Defaults(
            strategy="block" if tree is None else None,
            draft_temperature=None if STEPS[type(config)].is_conditional else 0.0,
        ),
    )


def check_depth(config: BlockConfig, levels: int) -> None:
    """Raises a ConfigError if more drafts follow each other than a block predicts."""
    K = config.max_draft
    why = f"which a block of {config.block_size} tokens was trained to predict"
    require(levels <= K, f"{levels} drafts in a row are more than {K}, {why}")
