"""Drafts with a smaller language model of the same vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter, DraftShape, Model, Prompt, Sync
from spec_jax.drafters.common.levels import draft_with
from spec_jax.drafters.common.vocabulary import aligned
from spec_jax.drafters.registry import DrafterKind, DraftFormat, Drafting, DraftPass, level_passes
from spec_jax.errors import ConfigError
from spec_jax.models.checks import require
from spec_jax.models.chunks import over_chunks
from spec_jax.models.families import family_of_type
from spec_jax.models.tensors import renamed
from spec_jax.tree import AnyTree, DynamicTree, check_children

FIRST_TOKENS = 2  # a row, fed by the first pass of a round


@flax.struct.dataclass
class StandaloneState:
    """The draft's cache, and the positions of the tree's drafts in its window."""

    cache: Any
    fed_at: jax.Array | None = None  # i32[B,K], see ``draft_tree``; None: a chain


@functools.cache
def standalone(model: Model, tree: AnyTree | None = None) -> Drafter:
    """Returns the drafter that decodes ``model``: K passes for a chain, one a level for a tree.

    Its cache holds one token less than the target's, and the first pass of a round feeds the last
    two tokens. So the slot that a fully accepted round leaves empty (its last draft was never fed)
    is filled without an extra pass, and every row feeds the same number of tokens.

    Args:
      model: the functions of the draft.
      tree: the tree that it drafts; None means a chain.

    Raises:
      ConfigError: a node of the tree has more children than the draft has tokens, or the model
        cannot forget rejected tokens.
    """
    message = "the draft's model cannot rewind, so nothing can be drafted with it"
    require(model.can_rewind, message)
    for option in ("window_offset", *["window_mask"] * (tree is not None)):
        if not model.takes(option):
            raise ConfigError(f"forward of the draft's model takes no {option}, so it cannot draft")
    check_children(tree, model.last_id + 1, "the draft's")

    def init(params, batch, slots):
        cache = model.init_cache(params, batch, slots)
        return StandaloneState(cache, tree and jnp.zeros((batch, tree.num_nodes), jnp.int32))

    def prefill(params, state, prompt: Prompt):
        def step(cache, _, n, tokens):
            return model.forward(params, tokens, cache).cache.commit(n)

        rows = (prompt.tokens,), prompt.lengths - 1
        cache = over_chunks(step, state.cache, *rows, prompt.chunk)
        return state.replace(cache=cache)

    def propose(params, state, context: Context, num_draft: int):
        # With num_draft = 0 it feeds what is committed all the same, so it never lags; where the
        # whole round is skipped (``model_free.without_drafts``) it catches up later.
        width = max(FIRST_TOKENS, num_draft + 1) if tree is None else FIRST_TOKENS + tree.num_fed
        proposal, cache, fed_at = draft_with(
            functools.partial(model.forward, params),
            functools.partial(model.unembed, params),
            model.open_window(state.cache, width),
            FIRST_TOKENS,
            context,
            num_draft,
            tree,
        )
        return proposal, StandaloneState(cache, state.fed_at if fed_at is None else fed_at)

    def commit(params, state, tokens, n, features, path):
        del params, tokens, features
        if path is None:
            return state.replace(cache=state.cache.commit(n))
        # The window begins with the last two tokens; the accepted draft before the last node
        # of the path is the last one that is needed, and has been fed.
        drafts = jnp.take_along_axis(state.fed_at, jnp.maximum(path[:, 1:-1] - 1, 0), axis=1)
        two = jnp.broadcast_to(jnp.arange(FIRST_TOKENS), (len(n), FIRST_TOKENS))
        at = jnp.concatenate([two, drafts + FIRST_TOKENS], axis=1)
        return state.replace(cache=state.cache.commit(n, at))

    def catch_up(params, state, tokens, length, width):
        """Feeds what the skipped rounds committed, except the last committed token."""

        def lag(cache):
            return jnp.clip(length - 1 - cache.length, 0, width)

        def feed_next(cache):
            at = cache.length[:, None] + jnp.arange(width)
            fed = jnp.take_along_axis(tokens, at, axis=1, mode="clip")
            return model.forward(params, fed, cache).cache.commit(lag(cache))

        start = state.cache
        cache = jax.lax.while_loop(lambda cache: (lag(cache) > 0).any(), feed_next, start)
        return state.replace(cache=cache)

    def insert_row(state, row, other):
        fed_at = state.fed_at if tree is None else state.fed_at.at[row].set(other.fed_at[0])
        return StandaloneState(state.cache.insert_row(row, other.cache), fed_at)

    def rewind(state, n):
        kind = type(state.cache).__name__
        message = f"the draft keeps a {kind}, which cannot forget what it has committed"
        require(hasattr(state.cache, "rewind"), message)
        return state.replace(cache=state.cache.rewind(n))

    return Drafter(
        name="standalone",
        vocab_size=model.vocab_size,
        max_length=model.max_length,
        is_sampled=not isinstance(tree, DynamicTree),
        init=init,
        prefill=prefill,
        propose=propose,
        commit=commit,
        insert_row=insert_row,
        shape=DraftShape((), tree, 0 if tree is None else FIRST_TOKENS + tree.num_fed),
        sync=Sync(catch_up, rewind=rewind),
    )


def is_model(hf: Mapping[str, Any], names: AbstractSet[str]) -> bool:
    """Whether a directory holds a whole model.

    Args:
      hf: the parsed config.json.
      names: of the tensors.
    """
    if "model.embed_tokens.weight" in names:
        return True
    try:
        family = family_of_type(hf.get("model_type"))
        embed = family.outer_table(family.config.from_hf(hf))["embed"].hf_name
        return embed in renamed(dict.fromkeys(names), family.prefixes)
    except ConfigError:
        return False


STANDALONE = DrafterKind(
    name="standalone",
    drafting=Drafting(
        draft="model",
        drafter=lambda draft, target, config: standalone(
            aligned(draft.model, target), config.tree_shape
        ),
        passes=lambda config, num_draft, tree: (
            DraftPass("draft", FIRST_TOKENS, 1),
            *level_passes(num_draft, tree),
        ),
    ),
    format=DraftFormat(detect=is_model),
)
