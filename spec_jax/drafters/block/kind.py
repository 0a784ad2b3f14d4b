"""The records that register DFlash, DFlash 2, DSpark and TreeFlash."""

from __future__ import annotations

import functools

from spec_jax.config import SpeculativeConfig
from spec_jax.contracts import Drafter, Model
from spec_jax.drafters.block import model
from spec_jax.drafters.block.config import (
    BlockConfig,
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    TreeFlashConfig,
)
from spec_jax.drafters.block.formats import BLOCK_FORMATS, FORMATS, SIZES_2, find_kind
from spec_jax.drafters.registry import DrafterKind, Drafting, DraftPass, HeadSpec, Training
from spec_jax.errors import ConfigError
from spec_jax.models.families import family_of
from spec_jax.tree import AnyTree

_CONTEXT = ("fc", "context_norm")
_STEP = ("step.*", "confidence*")
_BLOCK = ("attention_norm", "q", "q_*", "o", "o_*", "mlp_norm", "gate", "up", "down", "*_conv*")
_NOT_CONTEXT = ("norm", *_STEP, *(f"layers.*.{name}" for name in _BLOCK))
_LOOKED_UP = ("step.embed", "step.*cessor")  # tables of which a step reads rows


def _passes(config: BlockConfig, num_draft: int, tree: AnyTree | None) -> tuple[DraftPass, ...]:
    """The injection, the block, and a step for each draft; the last two are one pass in DFlash.

    TreeFlash's steps score what the block would: the target's output head is read once a draft.
    """
    levels = num_draft if tree is None else tree.depth
    inject = DraftPass("refresh", levels + 1, 0, skipped_weights=_NOT_CONTEXT, attends=False)
    is_scored = isinstance(config, TreeFlashConfig)
    skipped = (*_CONTEXT, *_STEP)
    scored = 0 if is_scored else levels
    block = DraftPass("draft", config.block_width(levels), scored, skipped_weights=skipped)
    if isinstance(config, DFlashConfig):
        return inject, block
    skipped = (*_CONTEXT, "norm", "layers.*", *_LOOKED_UP)
    step = DraftPass("draft", 1, int(is_scored), levels, skipped_weights=skipped, attends=False)
    return inject, block, step


def _drafter(draft, target: Model, config: SpeculativeConfig) -> Drafter:
    if config.tree_shape is None:  # the depth of a tree is checked with the tree
        model.check_depth(draft.config, max(config.buckets))
    if config.confidence_threshold > 0 and not getattr(draft.config, "has_confidence", False):
        raise ConfigError(
            f"confidence_threshold is {config.confidence_threshold}; this {draft.config.name!r} "
            "head does not estimate how probably its drafts are accepted: a 'dspark' head that was "
            "trained with a confidence does"
        )
    return model.block_drafter(draft.config, target, config.tree_shape)


def _objective(name: str):
    from spec_jax.drafters.block import objective  # imports train

    return objective.OBJECTIVES[name]


def _kind(config_class: type[BlockConfig], *options: str) -> DrafterKind:
    return DrafterKind(
        name=config_class.name,
        drafting=Drafting(drafter=_drafter, passes=_passes),
        head=HeadSpec(
            config_class=config_class,
            table=model.block_table,
            has_panels=lambda config: family_of(config.layer).has_panels,
        ),
        format=BLOCK_FORMATS.draft_format(lambda hf, names: find_kind(hf, names) is config_class),
        training={
            config_class.name: Training(
                objective=functools.partial(_objective, config_class.name),
                new=config_class.of_target,
                options=("taps", "num_layers", "block_size", *options),
                formats=tuple(FORMATS[config_class.name]),
                sizes=("num_layers", *options),
            )
        },
    )


DFLASH = _kind(DFlashConfig)
TREEFLASH = _kind(TreeFlashConfig)
DSPARK = _kind(DSparkConfig, "markov_rank")
DFLASH2 = _kind(DFlash2Config, *SIZES_2)
