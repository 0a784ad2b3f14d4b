"""The record that registers EAGLE heads."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from spec_jax.drafters.common.formats import first_that_can_express
from spec_jax.drafters.eagle import model
from spec_jax.drafters.eagle.checkpoint import read_head, write_head
from spec_jax.drafters.eagle.formats import SPECULATORS, formats_of, head_json
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.drafters.registry import (
    DrafterKind,
    DraftFormat,
    Drafting,
    HeadSpec,
    Training,
    recycled_passes,
)
from spec_jax.models.families import family_of
from spec_jax.models.loaded import LoadedModel
from spec_jax.tree import AnyTree

# Keys and tensors of drafters that also join states by an ``fc`` and draft several tokens a pass:
# DFlash and its kin, and P-EAGLE. A directory with one of them is no EAGLE head.
_BLOCK_KEYS = {"dflash_config", "block_size", "parallel_drafting", "mask_token_id", "ptd_token_id"}
_BLOCK_KEYS |= {"pard_token"}
_BLOCK_TENSORS = {"hidden_norm.weight", "mask_hidden"}
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


def pick_format(
    config: EagleConfig, target: LoadedModel, format: str | None, num_speculative_tokens: int
) -> str:
    """Returns the format to write a head in: the given one, or the first that can express it.

    Raises:
      ConfigError: no format can express this config.
    """
    names = (format,) if format else formats_of(config.version)
    write = lambda name: head_json(config, name, target.config, num_speculative_tokens, target.name)
    return first_that_can_express(names, write)


def _write(
    head: LoadedHead, directory: pathlib.Path, target: LoadedModel, *, format: str | None, **options
) -> None:
    format = pick_format(head.config, target, format, options["num_speculative_tokens"])
    options |= {"format": format, "target_config": target.config, "verifier": target.name}
    if format == SPECULATORS:
        options["target_embed"] = target.params["embed"]
    write_head(directory, head.config, head.params, **options)


def _passes(config: EagleConfig, num_draft: int, tree: AnyTree | None):
    """Later passes of EAGLE-3 read the head's own states, so the target's are not joined again."""
    unread = ("fc*", "input_norm") if config.version == 3 else ()
    return recycled_passes(config, num_draft, tree, unread)


def _objective(version: int):
    from spec_jax.drafters.eagle import objective  # imports train

    return {1: objective.EAGLE1, 3: objective.EAGLE3}[version]


def _training(version: int, *options: str) -> Training:
    return Training(
        objective=functools.partial(_objective, version),
        new=functools.partial(EagleConfig.of_target, version=version),
        options=options,
        formats=formats_of(version),
        trains=lambda config: config.version == version,
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
    format=DraftFormat(
        detect=is_eagle,
        read=lambda directory, target, dtype, **overrides: read_head(
            directory, target.config, dtype, target_embed=target.params["embed"], **overrides
        ),
        reads_in_parts=True,
        write=_write,
        pick=pick_format,
    ),
    training={"eagle1": _training(1), "eagle3": _training(3, "draft_vocab_size", "taps", *_NORMS)},
)
