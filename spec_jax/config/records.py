"""The parts of a ``SpeculativeConfig``: small frozen records that check their own values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from spec_jax.config.checks import (
    check,
    integer,
    is_count,
    is_list,
    is_number,
    is_probability,
    number,
    option,
)
from spec_jax.config.read import ConfigRecord
from spec_jax.errors import ConfigError
from spec_jax.tree import DynamicTree, Tree

BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # Ks that adaptive decoding has programs for


def _is_counts(x: Any) -> bool:
    return is_list(x) and len(x) > 0 and all(map(is_count, x))


def _is_paths(x: Any) -> bool:
    return is_list(x) and len(x) > 0 and all(map(_is_counts, x))


def _is_ascending(x: Any) -> bool:
    return _is_counts(x) and x[-1] > 0 and all(a < b for a, b in zip(x, x[1:]))


def _are_rates(x: Any) -> bool:
    return is_list(x) and all(map(is_probability, x))


def _is_above_zero(x: Any) -> bool:
    return is_number(x) and x > 0


@dataclasses.dataclass(frozen=True)
class NgramConfig(ConfigRecord):
    """Which suffixes of the text n-gram drafting looks up.

    Attributes:
      max: longest suffix, tried first.
      min: shortest suffix.
    """

    _prefix = "ngram."
    max: int = integer(3, 1)
    min: int = integer(1, 1)

    def __post_init__(self):
        super().__post_init__()
        check(self.min <= self.max, "ngram.min", self.min, f"at most ngram.max, {self.max}")


@dataclasses.dataclass(frozen=True)
class SuffixConfig(ConfigRecord):
    """How far suffix decoding follows a match, and what it remembers.

    Attributes:
      max_depth: longest match that is tried.
      max_factor, max_offset: a match of m tokens drafts at most ``factor * m + offset`` tokens,
        and never more than K.
      min_prob: drafting ends before the product of the drafts' frequencies falls below this.
      history_tokens: how many of the latest tokens of past outputs are kept; 0 keeps none.
    """

    _prefix = "suffix."
    max_depth: int = integer(24, 1)
    max_factor: float = number(1.0, 0)
    max_offset: float = number(0.0)
    min_prob: float = number(0.1, 0, 1)
    history_tokens: int = integer(4096)


@dataclasses.dataclass(frozen=True)
class TreeConfig(ConfigRecord):
    """Which tree is drafted: exactly one of ``children``, ``ranks`` and ``depth`` is given.

    Example:
      ```python
      import spec_jax
      from spec_jax.config import TreeConfig

      config = spec_jax.SpeculativeConfig(tree=TreeConfig(children=(3, 2, 1)))
      print(config.num_speculative_tokens)  # 15 nodes
      ```

    Attributes:
      children: of a static tree, how many children the nodes of each depth have: ``(3, 2, 1)``.
      ranks: of a static tree, every node by the ranks on its path: ``((0,), (1,), (0, 0))``.
      depth: levels of EAGLE-2's dynamic tree, which has K nodes.
      top_k: nodes that a level of the dynamic tree expands, and children of each; None means 10.
    """

    _prefix = "tree."
    children: tuple[int, ...] | None = option(
        None, _is_counts, "the number of children of each depth, as (3, 2, 1)"
    )
    ranks: tuple[tuple[int, ...], ...] | None = option(
        None, _is_paths, "the ranks on each node's path, as ((0,), (1,), (0, 0))"
    )
    depth: int | None = integer(None, 1)
    top_k: int | None = integer(None, 1)

    def __post_init__(self):
        super().__post_init__()
        if self.top_k is not None and self.depth is None:
            raise ConfigError(
                f"tree.top_k is {self.top_k} without tree.depth: give the dynamic tree's levels "
                "too, or leave it out"
            )
        given = [
            f"tree.{n}" for n in ("children", "ranks", "depth") if getattr(self, n) is not None
        ]
        if len(given) != 1:
            raise ConfigError(
                "of tree.children, tree.ranks and tree.depth, "
                f"{' and '.join(given) or 'none of them'} are given; name one of them"
            )
        if self.depth is None:
            self.shape(0)  # raises where there is no such tree

    @classmethod
    def of(cls, value: Any, name: str) -> Any:
        """Also takes the children by depth, or the nodes by their ranks, as one sequence."""
        if not is_list(value):
            return super().of(value, name)
        is_valid = _is_counts(value) or _is_paths(value)
        check(is_valid, name, value, "children by depth, or nodes by their ranks")
        return cls(ranks=value) if _is_paths(value) else cls(children=value)

    def shape(self, num_nodes: int) -> Tree | DynamicTree:
        """Returns the tree; only the dynamic one depends on ``num_nodes``, which is K."""
        if self.depth is not None:
            return DynamicTree(num_nodes, self.depth, self.top_k or 10)
        if self.ranks is not None:
            return Tree.from_paths(self.ranks)
        return Tree.branching(self.children)


@dataclasses.dataclass(frozen=True)
class SyntheticConfig(ConfigRecord):
    """For benchmarks: accept by coin, not by token. Exactly one of the rates is given.

    Attributes:
      acceptance_rate: mean of acceptance over the K positions.
      acceptance_rates: unconditional rate of each position, non-increasing.
      conditional_rates: rate of each position given that all before it were accepted; these
        do not change with K.
      mean_length: mean tokens a round, the target's included, in [1, K+1].
    """

    _prefix = "synthetic."
    acceptance_rate: float | None = number(None, 0, 1)
    acceptance_rates: tuple[float, ...] | None = option(
        None, _are_rates, "rates in [0, 1], one a position"
    )
    conditional_rates: tuple[float, ...] | None = option(
        None, _are_rates, "rates in [0, 1], one a position"
    )
    mean_length: float | None = number(None, 1)

    def __post_init__(self):
        super().__post_init__()
        rates = self.acceptance_rates or ()
        is_falling = all(a >= b for a, b in zip(rates, rates[1:]))
        check(is_falling, "synthetic.acceptance_rates", rates, "a non-increasing sequence")
        given = self.given
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given; name one of them")
        if not given:
            names = [f"synthetic.{field.name}" for field in dataclasses.fields(self)]
            raise ConfigError(f"synthetic acceptance needs one of {', '.join(names)}")

    @property
    def given(self) -> list[str]:
        """The full names of what is given, which is one."""
        return [f"synthetic.{name}" for name, x in vars(self).items() if x is not None]

    def check_num_draft(self, num_draft: int) -> None:
        """Raises a ``ConfigError`` where the rates do not cover ``num_draft`` positions."""
        for name in ("acceptance_rates", "conditional_rates"):
            rates = getattr(self, name)
            is_fit = rates is None or len(rates) >= num_draft
            check(is_fit, f"synthetic.{name}", rates, f"at least {num_draft} rates in [0, 1]")
        length = self.mean_length
        is_fit = length is None or length <= num_draft + 1
        check(is_fit, "synthetic.mean_length", length, f"a length in [1, {num_draft + 1}]")


@dataclasses.dataclass(frozen=True)
class TypicalConfig(ConfigRecord):
    """Medusa's threshold is ``min(epsilon, delta * exp(-H))``."""

    _prefix = "typical."
    epsilon: float = option(0.09, _is_above_zero, "a number above 0")
    delta: float = option(0.3, _is_above_zero, "a number above 0")


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig(ConfigRecord):
    """K is chosen from chunk to chunk of rounds.

    Attributes:
      buckets: the Ks to choose among, ascending; each is a program to compile, and K is the last
        of them. None: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 up to K, and K.
    """

    _prefix = "adaptive."
    buckets: tuple[int, ...] | None = option(
        None, _is_ascending, "ascending integers of 0 or more, the last of them positive"
    )

    @classmethod
    def of(cls, value: Any, name: str) -> Any:
        """Also takes a bool: False means a fixed K."""
        if isinstance(value, bool):
            return cls() if value else None
        check(isinstance(value, cls | Mapping), name, value, "a bool or an AdaptiveConfig")
        return super().of(value, name)
