"""P-EAGLE: an EAGLE-3 head that drafts K tokens in one pass.

After the pair of the pending token it is fed K - 1 masked pairs, of a state that it has learned
and the mask's embedding. The output of the last true pair scores the first draft and that of each
masked pair one of the next, so no draft depends on another. What the masked pairs write to the
cache lies after its committed pairs; the true pairs of the next round take its place.

Source: P-EAGLE, arXiv 2602.01469, section 3.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Defaults, Drafter, DraftShape, Model
from spec_jax.drafters.common.chain import draft_block
from spec_jax.drafters.common.head import head_drafter
from spec_jax.drafters.common.tree import draft_tree
from spec_jax.drafters.eagle.model import PEagleConfig, eagle_head, join_features
from spec_jax.models.checks import require
from spec_jax.tree import AnyTree, check_children


def masked_pairs(
    head: dict, batch: int, count: int, config: PEagleConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns the states dtype[B,count,D] and tokens i32[B,count] of masked pairs.

    Args:
      head: its weights.
      batch: B.
      count: how many pairs a row.
      config: the head's.
    """
    state = join_features(head, head["mask_hidden"], config)
    state = jnp.broadcast_to(state, (batch, count, state.shape[-1]))
    return state, jnp.full((batch, count), config.mask_token_id, jnp.int32)


@functools.cache
def peagle(config: PEagleConfig, target: Model, tree: AnyTree | None = None) -> Drafter:
    """Returns the drafter of a head, which feeds true pairs as EAGLE does.

    Its parameters are those of ``eagle``. All nodes of a level of a tree have one distribution.

    Args:
      config: the head's shape.
      target: the model that it drafts for, with this config's taps.
      tree: the tree that it drafts; None means a chain.

    Raises:
      ConfigError: the tree is deeper than the head was trained for, or a node has more children
        than the draft vocabulary has tokens.
    """
    head = eagle_head(config, target)
    depth = None if tree is None else tree.depth
    check_depth(config, depth or 0)
    check_children(tree, min(config.layer.vocab_size, target.last_id + 1), "the draft")

    def propose(params, state, context: Context, num_draft: int):
        levels = num_draft if depth is None or num_draft == 0 else depth
        check_depth(config, levels)
        x = state.last[:, None]
        cache = state.cache
        if levels > 1:
            with jax.named_scope("draft_pass"):
                pairs = masked_pairs(params["head"], len(x), levels - 1, config)
                masked, cache = head.feed(params, *pairs, cache, 0, None)
                x = jnp.concatenate([x, masked.astype(x.dtype)], axis=1)
        with jax.named_scope("unembed"):
            logits = head.unembed(params, x)

        def advance(level, tokens, parent, seen):
            del parent, seen  # no draft depends on another
            shape = (*tokens.shape, logits.shape[-1])
            return jnp.broadcast_to(logits[:, level, None], shape), level + 1

        if tree is None or num_draft == 0:
            proposal = draft_block(logits, context, num_draft)
        else:
            proposal, *_ = draft_tree(logits[:, 0], 1, advance, context, num_draft, tree)
        return proposal, state.replace(cache=cache)

    return head_drafter(head, tree)._replace(
        propose=propose,
        shape=DraftShape(head.taps, tree),
        defaults=Defaults("block" if tree is None else None, draft_temperature=0.0),
    )


def check_depth(config: PEagleConfig, levels: int) -> None:
    """Raises a ConfigError if more drafts follow each other than the head was trained for."""
    K = config.max_draft
    why = "which the head was trained for; max_draft=None lifts the limit"
    require(K is None or levels <= K, f"{levels} drafts in a row are more than {K}, {why}")
