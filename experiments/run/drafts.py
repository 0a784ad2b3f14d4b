"""What drafts for a target, by the name that an experiment is given."""

from __future__ import annotations

from typing import Any

from spec_jax.config import SpeculativeConfig
from spec_jax.evaluation.cells import copying_methods
from spec_jax.loading import LoadedHead, LoadedModel, load_draft


def load_drafts(
    name: str, target: LoadedModel, num_draft: int, rule: str | None, **options: Any
) -> tuple[LoadedModel | LoadedHead | None, SpeculativeConfig]:
    """Returns a draft, None for a method that copies tokens, and the config that decodes with it.

    Args:
      name: Such a method, or what ``load_draft`` takes.
      target: The model that it drafts for.
      num_draft: K.
      rule: The name of the rule; None: the default of the method.
      **options: Of ``load_draft``.

    Raises:
      ConfigError: The draft does not fit the target, or a value is out of range.
      WeightsError: There is no such draft.
    """
    draft = None if name in copying_methods() else load_draft(name, target, **options)
    method = name if draft is None else draft.method
    return draft, SpeculativeConfig(method, num_draft, rejection_sampling_strategy=rule)
