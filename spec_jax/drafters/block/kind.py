"""The records that register DFlash, DSpark and TreeFlash."""

from __future__ import annotations

from spec_jax.drafters.block import model
from spec_jax.drafters.block.config import BlockConfig, DFlashConfig, DSparkConfig, TreeFlashConfig
from spec_jax.drafters.registry import DrafterKind, Drafting, DraftPass, HeadSpec
from spec_jax.models.families import family_of
from spec_jax.tree import AnyTree

_CONTEXT, _STEP = ("fc", "context_norm"), ("step.*", "confidence*")
_BLOCK = ("attention_norm", "q", "q_*", "o", "o_*", "mlp_norm", "gate", "up", "down")


def _passes(config: BlockConfig, num_draft: int, tree: AnyTree | None) -> tuple[DraftPass, ...]:
    """The injection, the block, and a step for each draft; the last two are one pass in DFlash."""
    levels = num_draft if tree is None else tree.depth
    unread = ("norm", *_STEP, *(f"layers.*.{name}" for name in _BLOCK))
    inject = DraftPass("refresh", levels + 1, 0, unread=unread, attends=False)
    block = DraftPass("draft", config.block_width(levels), levels, unread=(*_CONTEXT, *_STEP))
    if isinstance(config, DFlashConfig):
        return inject, block
    is_scored = isinstance(config, TreeFlashConfig)  # again, by the target's output head
    unread = (*_CONTEXT, "norm", "layers.*", "step.embed")
    return (
        inject,
        block,
        DraftPass("draft", 1, int(is_scored), levels, unread=unread, attends=False),
    )


def _kind(config_class: type[BlockConfig]) -> DrafterKind:
    return DrafterKind(
        name=config_class.name,
        drafting=Drafting(
            drafter=lambda draft, target, config: model.block_drafter(
                draft.config, target, config.tree_shape
            ),
            passes=_passes,
        ),
        head=HeadSpec(
            config_class=config_class,
            table=model.block_table,
            has_panels=lambda config: family_of(config.layer).has_panels,
        ),
    )


DFLASH, DSPARK, TREEFLASH = map(_kind, (DFlashConfig, DSparkConfig, TreeFlashConfig))
