"""Drafts by name, for experiments that plan without weights."""

from __future__ import annotations

from typing import Any

from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError
from spec_jax.models.families import AnyConfig
from spec_jax.planning.presets import find_config


def find_draft(name: str, target: AnyConfig, draft_vocab_size: int = 32000) -> Any:
    """Returns what ``plan.Job`` and ``roofline.decode_round`` take as a draft.

    Args:
      name: "eagle3" or "mtp", a head with the target's layer; "ngram"; empty, for plain decoding;
        or a model, see ``presets.find_config``.
      target: the target's config.
      draft_vocab_size: U, of an EAGLE-3 head.

    Raises:
      ConfigError: there is none of this name.
    """
    heads = {
        "": lambda: None,
        "ngram": lambda: "ngram",
        "mtp": lambda: MtpConfig.of_target(target),
        "eagle3": lambda: EagleConfig.of_target(target, draft_vocab_size=draft_vocab_size),
    }
    if name in heads:
        return heads[name]()
    try:
        return find_config(name)
    except ConfigError as error:
        raise ConfigError(f"draft is none of eagle3, mtp and ngram: {error}") from error
