"""Drafts with the target's own first layers, its norm and its output head: a draft without weights.

It reads the target's keys and values, which are its own, so it keeps nothing between two rounds.

Source: LayerSkip, arXiv 2404.16710, section 4.3, without its training.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from spec_jax.contracts import Context, Drafter, DraftShape, Model
from spec_jax.drafters.common.levels import draft_with
from spec_jax.drafters.model_free import model_free
from spec_jax.drafters.registry import (
    DrafterKind,
    DraftFormat,
    Drafting,
    DraftPass,
    HeadSpec,
    level_passes,
)
from spec_jax.errors import ConfigError
from spec_jax.models.caches.beside import open_beside
from spec_jax.models.checks import require
from spec_jax.tree import AnyTree, DynamicTree, check_children


@dataclasses.dataclass(frozen=True)
class ExitConfig:
    """Where the draft leaves the target.

    Attributes:
      target: the target's config.
      num_layers: N, how many of its layers draft.
    """

    target: Any
    num_layers: int
    taps = ()
    name = "self"

    @classmethod
    def of_target(cls, target: Any, option: str = "") -> ExitConfig:
        """Returns the config of ``self:N``, or of ``self``: a quarter of the layers.

        Raises:
          ConfigError: the target has no config, or no N from 1 to one less than its layers.
        """
        require(target is not None, "'self' drafts with layers of the target, which has no config")
        L = target.num_hidden_layers
        N = max(1, L // 4) if not option else int(option) if option.isdecimal() else 0
        name = f"self:{option}" if option else "self"
        require(L > 1, f"the draft is {name!r}; the target has one layer, and none can be left out")
        require(0 < N < L, f"the draft is {name!r}; expected 'self:N' with N from 1 to {L - 1}")
        return cls(target, N)

    target_hidden_size = property(lambda self: self.target.hidden_size)
    target_vocab_size = property(lambda self: self.target.vocab_size)
    max_length = property(lambda self: self.target.max_position_embeddings)


@functools.cache
def early_exit(target: Model, num_layers: int, tree: AnyTree | None = None) -> Drafter:
    """Returns the drafter that decodes with the target's first layers.

    Args:
      target: whose ``forward`` takes ``num_layers``.
      num_layers: N.
      tree: the tree that it drafts; None means a chain.

    Raises:
      ConfigError: the target cannot stop early, it has no more than N layers, or a node has more
        children than it has tokens.
    """
    if not target.takes("num_layers"):
        raise ConfigError("forward of the target takes no num_layers, so its layers cannot draft")
    if target.config is not None:
        L = target.config.num_hidden_layers
        message = f"the first {num_layers} layers are to draft; the target has {L}: leave some out"
        require(0 < num_layers < L, message)
    check_children(tree, target.last_id + 1, "the target's")

    def propose(params, state, context: Context, num_draft: int):
        del params
        view = context.target
        forward = functools.partial(target.forward, view.params, num_layers=num_layers)
        unembed = functools.partial(target.unembed, view.params)
        width = num_draft if tree is None else 1 + tree.num_fed
        cache = open_beside(view.cache, max(width, 1))
        proposal, *_ = draft_with(forward, unembed, cache, 1, context, num_draft, tree)
        return proposal, state

    return model_free("self", propose, target.vocab_size)._replace(
        max_length=target.max_length,
        is_sampled=not isinstance(tree, DynamicTree),
        shape=DraftShape(tree=tree, reads_target=True),
    )


def _passes(config: ExitConfig, num_draft: int, tree: AnyTree | None) -> list[DraftPass]:
    passes = (DraftPass("draft", 1, 1), *level_passes(num_draft, tree))
    return [one._replace(num_layers=config.num_layers) for one in passes]


SELF = DrafterKind(
    name="self",
    drafting=Drafting(
        drafter=lambda draft, target, config: early_exit(
            target, draft.config.num_layers, config.tree_shape
        ),
        passes=_passes,
    ),
    head=HeadSpec(config_class=ExitConfig, table=lambda config: {}),
    format=DraftFormat(of_target=ExitConfig.of_target),
)
