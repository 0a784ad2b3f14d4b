"""A drafter kind from outside of the package: it drafts a block in one pass, as DFlash does.

The target's states become keys and values of every layer of the draft when tokens are committed.
A block [pending | masks] sees them and itself, in both directions, and every one of its tokens
scores the token after it: K distributions at once, none of which knows the other drafts.
"""

import dataclasses
import functools

import jax.numpy as jnp

from spec_jax.contracts import Drafter, DraftShape
from spec_jax.drafters import DrafterKind, Drafting, DraftPass, HeadSpec
from spec_jax.drafters.common.chain import draft_block
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.config import ModelConfig
from spec_jax.models.families.llama import decoder_layer, layer_table
from spec_jax.models.layers import Window, embed_tokens, keys_values, linear, rms_norm
from spec_jax.models.specs import ParamSpec, norm_spec


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The draft's layers are of the target's width; the last id of their vocabulary is the mask."""

    layer: ModelConfig
    target_vocab_size: int
    taps: tuple[int, ...]
    target_hidden_size = property(lambda self: self.layer.hidden_size)
    max_length = property(lambda self: self.layer.max_position_embeddings)


def table(config):
    D, layer = config.layer.hidden_size, config.layer
    fc = ParamSpec((len(config.taps) * D, D), ("features", "embed"), "fc", is_linear=True)
    embed = ParamSpec((layer.vocab_size, D), ("vocab", "embed"), "embed")
    layers = {str(i): layer_table(layer) for i in range(layer.num_hidden_layers)}
    return {"fc": fc, "embed": embed, "norm": norm_spec(D, "norm"), "layers": layers}


@functools.cache
def block_drafter(config, target):
    layer, names = config.layer, [str(i) for i in range(config.layer.num_hidden_layers)]

    def inject(params, cache, features, n):
        head = params["head"]
        states = linear(features, head, "fc")
        window = Window.after(layer, cache, *states.shape[:2])
        for i, name in enumerate(names):
            new = keys_values(head["layers"][name], states, window, layer)
            cache = cache.write(i, *new, window.sees.start)
        return cache.commit(n)

    def propose(params, cache, context, num_draft):
        head, K = params["head"], max(num_draft, 1)
        pending = jnp.take_along_axis(context.tokens, context.length[:, None], axis=1)
        block = jnp.pad(pending, ((0, 0), (0, K - 1)), constant_values=layer.vocab_size - 1)
        at, sees = context.length[:, None] + jnp.arange(K), jnp.ones((1, K, K), bool)
        window = Window.after(layer, cache, *block.shape, positions=at, window_mask=sees)
        x = embed_tokens(head["embed"], block)
        for i, name in enumerate(names):
            x, cache = decoder_layer(head["layers"][name], x, cache, i, window, layer)
        logits = target.unembed(params["target"], rms_norm(x, head["norm"], layer.rms_norm_eps))
        return draft_block(logits, context, num_draft), cache

    return Drafter(
        name="block",
        vocab_size=config.target_vocab_size,
        max_length=config.max_length,
        is_sampled=True,
        init=lambda params, B, S: KVCache.create(layer, B, S, params["head"]["fc"].dtype),
        prefill=lambda p, cache, new: inject(p, cache, new.features, new.lengths),
        propose=propose,
        commit=lambda params, cache, tokens, n, features, path: inject(params, cache, features, n),
        insert_row=KVCache.insert_row,
        shape=DraftShape(config.taps),
    )


UNUSED = [f"*.{name}" for name in "q o attention_norm mlp_norm gate up down".split()]
KIND = DrafterKind(
    name="block",
    drafting=Drafting(
        drafter=lambda draft, target, config: block_drafter(draft.config, target),
        passes=lambda config, num_draft, tree: (
            DraftPass(
                "refresh", num_draft + 1, 0, skipped_weights=("norm", *UNUSED), attends=False
            ),
            DraftPass("draft", num_draft, num_draft, skipped_weights=("fc",)),
        ),
    ),
    head=HeadSpec(config_class=BlockConfig, table=table),
)
