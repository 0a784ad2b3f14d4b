"""Drafts by name, for experiments that plan without weights."""

from __future__ import annotations

from typing import Any

from spec_jax.drafters import registry
from spec_jax.errors import ConfigError
from spec_jax.evaluation.cells import copying_methods
from spec_jax.models.families import AnyConfig
from spec_jax.planning.presets import find_config


def find_draft(name: str, target: AnyConfig, draft_vocab_size: int = 32000) -> Any:
    """Returns what ``plan.Job`` and ``roofline.decode_round`` take as a draft.

    Args:
      name: an objective such as "eagle3" or "mtp", for a new head of the target; a method that
        copies tokens, such as "ngram"; empty, for plain decoding; or a model, see
        ``presets.find_config``.
      target: the target's config.
      draft_vocab_size: U, of a head that can have a vocabulary of its own.

    Raises:
      ConfigError: there is none of this name.
    """
    if not name:
        return None
    if name in copying_methods():
        return name
    ways = registry.objectives()
    if name in ways:
        _, training = ways[name]
        options = {"draft_vocab_size": draft_vocab_size}
        return training.new(target, **{n: x for n, x in options.items() if n in training.options})
    try:
        return find_config(name)
    except ConfigError as error:
        known = ", ".join([*ways, *copying_methods()])
        raise ConfigError(f"draft is none of {known}: {error}") from error
