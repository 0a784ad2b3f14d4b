"""The record that registers EAGLE heads."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import jax.numpy as jnp

from spec_jax.drafters.eagle.model import (
    EagleConfig,
    check_head,
    eagle,
    eagle_head,
    head_table,
    init_head,
)
from spec_jax.drafters.eagle.read import read_head
from spec_jax.drafters.eagle.read_config import EAGLE_1, EAGLE_3, SPECFORGE, SPECULATORS
from spec_jax.drafters.eagle.write import write_head
from spec_jax.drafters.eagle.write_config import head_json
from spec_jax.drafters.loaded import LoadedHead, LoadedModel
from spec_jax.drafters.registry import DrafterKind, Training
from spec_jax.errors import ConfigError
from spec_jax.models.families import family_of

# What config.json or the tensors of drafters have that join states by an ``fc`` too: DFlash and
# its kin draft a block of masks, P-EAGLE continues an EAGLE-3 head with them.
_OTHER_KEYS = ("dflash_config", "block_size", "parallel_drafting", "mask_token_id", "ptd_token_id",
               "pard_token")  # fmt: skip
_OTHER_TENSORS = {"hidden_norm.weight", "mask_hidden"}
# The layouts of each version, the first by default.
LAYOUTS = {1: (EAGLE_1,), 3: (SPECFORGE, EAGLE_3, SPECULATORS)}


def is_eagle(hf: Mapping[str, Any], names: AbstractSet[str]) -> bool:
    """Whether a directory holds an EAGLE head.

    Its states are joined by ``fc``, as other drafters' are, and it has one layer. It says nothing
    of masks, blocks, or another kind of speculators'.

    Args:
      hf: the parsed config.json.
      names: of the tensors.
    """
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    is_other = hf.get("speculators_model_type", "eagle3") != "eagle3" or any(
        hf.get(key) is not None and hf[key] is not False for key in _OTHER_KEYS
    )
    return "fc.weight" in names and layers <= {"0"} and not (is_other or _OTHER_TENSORS & names)


def pick_layout(
    config: EagleConfig, target: LoadedModel, layout: str | None, num_speculative_tokens: int
) -> str:
    """The layout to write a head in: the one that is asked for, or the first that can say it.

    Raises:
      ConfigError: none has words for the whole config.
    """
    refusals = []
    for name in (layout,) if layout else LAYOUTS[config.version]:
        try:
            head_json(
                config, name, target.config, verifier=target.name,
                num_speculative_tokens=num_speculative_tokens,
            )  # fmt: skip
            return name
        except ConfigError as error:
            refusals.append(error)
    raise refusals[-1]


def _read(
    directory: pathlib.Path, target: LoadedModel, dtype: jnp.dtype, **overrides
) -> LoadedHead:
    embed = target.params["embed"]
    return read_head(directory, target.config, dtype, target_embed=embed, **overrides)


def _write(
    head: LoadedHead, directory: pathlib.Path, target: LoadedModel, *, layout: str | None,
    dtype: str | None, num_speculative_tokens: int,
) -> None:  # fmt: skip
    layout = pick_layout(head.config, target, layout, num_speculative_tokens)
    named = {"target_embed": target.params["embed"], "verifier": target.name}
    write_head(
        directory, head.config, head.params, layout=layout, target_config=target.config,
        dtype=dtype, num_speculative_tokens=num_speculative_tokens,
        **(named if layout == SPECULATORS else {}),
    )  # fmt: skip


def _training(version: int, *options: str) -> Training:
    return Training(
        objective=f"spec_jax.drafters.eagle.objective:EAGLE{version}",
        new=functools.partial(EagleConfig.of_target, version=version),
        options=options,
        layouts=LAYOUTS[version],
        trains=lambda config: config.version == version,
    )


EAGLE = DrafterKind(
    name="eagle",
    drafter=lambda draft, target, config: eagle(draft.config, target, config.tree_shape),
    detect=is_eagle,
    config_class=EagleConfig,
    head=eagle_head,
    table=head_table,
    init=init_head,
    check=check_head,
    has_panels=lambda config: family_of(config.layer).has_panels,
    read=_read,
    reads_in_parts=True,
    write=_write,
    pick_layout=pick_layout,
    training={
        "eagle1": _training(1),
        "eagle3": _training(3, "draft_vocab_size", "taps", "norm_before_residual"),
    },
)
