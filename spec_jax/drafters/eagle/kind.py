"""The records that register EAGLE heads and P-EAGLE."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from spec_jax.config import SpeculativeConfig
from spec_jax.contracts import Drafter, Model
from spec_jax.drafters.eagle import model, parallel
from spec_jax.drafters.eagle.formats import EAGLE_FORMATS, FORMATS, has_masks
from spec_jax.drafters.eagle.model import EagleConfig, PEagleConfig
from spec_jax.drafters.registry import (
    DrafterKind,
    Drafting,
    DraftPass,
    HeadSpec,
    Training,
    recycled_passes,
)
from spec_jax.models.families import family_of
from spec_jax.tree import AnyTree

# Keys and tensors of drafters that also join states by an ``fc`` and draft several tokens a pass:
# DFlash and its kin, and P-EAGLE. A directory with one of them is no EAGLE head.
_BLOCK_KEYS = {"dflash_config", "block_size", "parallel_drafting", "mask_token_id", "ptd_token_id"}
_BLOCK_KEYS |= {"pard_token"}
_BLOCK_TENSORS = {"hidden_norm.weight", "mask_hidden"}
_JOIN = ("fc*", "input_norm")
_OPTIONS = ("draft_vocab_size", "taps")
_NORMS = ("norm_before_residual", "fc_norm", "norm_output")  # EAGLE-3.1 has the last two


def is_eagle(hf: Mapping[str, Any], names: AbstractSet[str]) -> bool:
    """Whether a directory holds an EAGLE head: ``fc``, one layer, and no sign of another drafter.

    Args:
      hf: the parsed config.json.
      names: the names of the tensors.
    """
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    is_other = hf.get("speculators_model_type", "eagle3") != "eagle3" or _BLOCK_TENSORS & names
    is_block = any(hf.get(key) is not None and hf[key] is not False for key in _BLOCK_KEYS)
    return "fc.weight" in names and layers <= {"0"} and not is_other and not is_block


def _passes(config: EagleConfig, num_draft: int, tree: AnyTree | None):
    """Later passes of EAGLE-3 read the head's own states, so the target's are not joined again."""
    skipped_weights = _JOIN if config.version == 3 else ()
    return recycled_passes(config, num_draft, tree, skipped_weights)


def _parallel_passes(config: PEagleConfig, num_draft: int, tree: AnyTree | None):
    """The refresh, and one pass of all masked pairs; the output head reads both at once.

    The masked state is the same in all rounds, so it is joined once a call.
    """
    levels = num_draft if tree is None else tree.depth
    if levels == 1:
        return (DraftPass("refresh", 2, 1, skipped_weights=("mask_hidden",)),)
    refresh = DraftPass("refresh", levels + 1, 0, skipped_weights=("mask_hidden", "norm", "head"))
    return refresh, DraftPass("draft", levels - 1, levels, skipped_weights=_JOIN)


def _parallel_drafter(draft, target: Model, config: SpeculativeConfig) -> Drafter:
    if config.tree_shape is None:  # the depth of a tree is checked with the tree
        parallel.check_depth(draft.config, max(config.buckets))
    return parallel.peagle(draft.config, target, config.tree_shape)


def _objective(name: str):
    from spec_jax.drafters.eagle import objective  # imports train

    return objective.OBJECTIVES[name]


def _training(
    name: str,
    heads: str,
    new: Callable[..., EagleConfig],
    *options: str,
    sizes: tuple[str, ...] = (),
) -> Training:
    return Training(
        objective=functools.partial(_objective, name),
        new=new,
        options=(*options, *sizes),
        sizes=sizes,
        formats=tuple(FORMATS[heads]),
        trains=lambda config: config.name == heads,
    )


EAGLE = DrafterKind(
    name="eagle",
    drafting=Drafting(
        drafter=lambda draft, target, config: model.eagle(draft.config, target, config.tree_shape),
        passes=_passes,
    ),
    head=HeadSpec(
        config_class=EagleConfig,
        table=model.head_table,
        functions=model.eagle_head,
        init=model.init_head,
        check=model.check_head,
        has_panels=lambda config: family_of(config.layer).has_panels,
    ),
    format=EAGLE_FORMATS.draft_format(is_eagle),
    training={
        "eagle1": _training(
            "eagle1", "eagle-1", functools.partial(EagleConfig.of_target, version=1)
        ),
        "eagle3": _training("eagle3", "eagle-3", EagleConfig.of_target, *_OPTIONS, *_NORMS),
    },
)

PEAGLE = DrafterKind(
    name="peagle",
    drafting=Drafting(drafter=_parallel_drafter, passes=_parallel_passes),
    head=dataclasses.replace(EAGLE.head, config_class=PEagleConfig, functions=None),
    format=EAGLE_FORMATS.draft_format(lambda hf, names: has_masks(names)),
    training={
        "peagle": _training(
            "peagle",
            "p-eagle",
            PEagleConfig.of_target,
            *_OPTIONS,
            "max_draft",
            *_NORMS[:2],
            sizes=("num_layers",),
        )
    },
)
