"""The record that registers MTP modules."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from spec_jax.config import SpeculativeConfig
from spec_jax.contracts import Drafter, Head, Model
from spec_jax.drafters.common.sequential import check_num_draft
from spec_jax.drafters.formats import Reading
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.drafters.mtp.formats import MTP_FORMATS, TARGET_EMBED
from spec_jax.drafters.mtp.model import MtpConfig, init_mtp, mtp, mtp_head, mtp_tables
from spec_jax.drafters.registry import (
    DrafterKind,
    Drafting,
    DraftPass,
    HeadSpec,
    Training,
    recycled_passes,
)
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.families import family_of
from spec_jax.tree import AnyTree

_TARGET_EMBEDS = {TARGET_EMBED, "model.language_model.embed_tokens.weight"}


def is_mtp(hf: Mapping[str, Any], names: AbstractSet[str]) -> bool:
    """Whether a directory holds MTP modules without their model, see ``holds_modules``."""
    return holds_modules(hf, names) and names.isdisjoint(_TARGET_EMBEDS)


def holds_modules(hf: Mapping[str, Any], names: AbstractSet[str]) -> bool:
    """Whether a directory holds MTP modules, with or without their model.

    Args:
      hf: the parsed config.json.
      names: of the tensors.
    """
    try:
        MTP_FORMATS.find(Reading(hf, names, None))
    except (ConfigError, WeightsError):
        return False
    return True


def _drafter(draft: LoadedHead, target: Model, config: SpeculativeConfig) -> Drafter:
    if draft.config.protocol == "sequential":
        check_num_draft(config.num_speculative_tokens, draft.config.num_modules)
    return mtp(draft.config, target, config.tree_shape)


def _head(config: MtpConfig, target: Model) -> Head | None:
    return mtp_head(config, target) if config.protocol == "recycled" else None


def _passes(config: MtpConfig, num_draft: int, tree: AnyTree | None) -> list[DraftPass]:
    """Recycled: one module drafts all. Sequential: every module is refreshed, and draft i + 1
    feeds i tokens to module i.
    """
    if config.protocol == "recycled":
        return [*recycled_passes(config, num_draft, tree)]
    passes = []
    for i in range(config.num_modules):
        passes.append(DraftPass("refresh", num_draft + 1, int(i == 0), part=str(i)))
        if 0 < i < num_draft:
            passes.append(DraftPass("draft", i, 1, part=str(i)))
    return passes


def _objective():
    from spec_jax.drafters.mtp import objective  # imports train

    return objective.MTP


MTP = DrafterKind(
    name="mtp",
    drafting=Drafting(drafter=_drafter, passes=_passes),
    head=HeadSpec(
        config_class=MtpConfig,
        table=mtp_tables,
        functions=_head,
        parts=mtp_tables,
        init=init_mtp,
        has_panels=lambda config: family_of(config.layer).has_panels,
    ),
    format=MTP_FORMATS.draft_format(is_mtp),
    training={
        "mtp": Training(
            objective=_objective,
            new=MtpConfig.of_target,
            options=("taps", "num_modules", "protocol"),
        )
    },
)
