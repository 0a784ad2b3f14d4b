"""A drafter and a rule of the user's own: ``--config.drafter=module:make``, ``--config.rule=…``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from spec_jax import named
from spec_jax.config import GREEDY_BELOW, STRATEGIES
from spec_jax.contracts import Drafter, Rule
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel


class Own(NamedTuple):
    """What the user brings beside the methods and rules of the package.

    Attributes:
      drafter: A further drafter, or None.
      rule: A further rule, or None.
      given: What the command line says, by "drafter" and "rule".
    """

    drafter: Drafter | None = None
    rule: Rule | None = None
    given: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, config: Any, target: LoadedModel, taken: Collection[str] = ()) -> Own:
        """Resolves ``config.drafter`` and ``config.rule``; either may be empty.

        Args:
          config: A config with these two keys.
          target: The model that is drafted for.
          taken: Names that a drafter cannot have, since reports use them.

        Raises:
          ConfigError: One of them is not what it should be, or its name is taken.
        """
        drafter = named.to_drafter(config.drafter, target) if config.drafter else None
        rule = named.to_rule(config.rule) if config.rule else None
        if drafter is not None and drafter.name in taken:
            _refuse_name("drafter", config.drafter, drafter.name)
        if rule is not None and ":" in config.rule and rule.name in STRATEGIES:
            _refuse_name("rule", config.rule, rule.name)
        given = tuple((key, config[key]) for key in ("drafter", "rule") if config[key])
        return cls(drafter, rule, given)

    @property
    def tree(self) -> str | None:
        """A name for the tree that the drafter drafts; None for a chain or no drafter."""
        has_tree = self.drafter is not None and self.drafter.tree is not None
        return f"tree of {self.drafter.tree.num_nodes} nodes" if has_tree else None

    @property
    def limits(self) -> list[Drafter]:
        """The drafter, if it has a ``max_length``."""
        is_short = self.drafter is not None and self.drafter.max_length is not None
        return [self.drafter] if is_short else []

    def can_serve(self, temperature: float, *, is_tree: bool, has_logits: bool) -> bool:
        """Returns whether the rule, which is given, can accept such drafts.

        Args:
          temperature: The target's.
          is_tree: Whether the drafts are a tree.
          has_logits: Whether the drafter has logits.
        """
        is_cold = temperature < GREEDY_BELOW
        return (
            (is_cold or not self.rule.is_greedy)
            and (self.rule.has_trees or not is_tree)
            and (has_logits or not self.rule.needs_logits)
        )

    def facts(self) -> dict[str, dict[str, Any]]:
        """Returns both for a report, by "drafter" and "rule"."""
        given, found = dict(self.given), {}
        if self.drafter is not None:
            kind = "sampled" if self.drafter.is_sampled else "deterministic"
            found["drafter"] = {"name": self.drafter.name, "is": kind}
        if self.rule is not None:
            kind = "lossless, as it states" if self.rule.is_lossless else "lossy"
            found["rule"] = {"name": self.rule.name, "is": kind}
        return {key: {**facts, "given": given[key]} for key, facts in found.items()}


def lines(facts: dict[str, dict[str, Any]]) -> list[str]:
    """Returns a sentence on each part of ``Own.facts``."""
    return [f"{key} {own['name']}: {own['given']}, {own['is']}" for key, own in facts.items()]


def _refuse_name(what: str, given: str, name: str) -> None:
    raise ConfigError(
        f"{what} {given} has the name {name!r}, which tables use for another; give it a name of "
        f"its own: {what}._replace(name=...)"
    )
