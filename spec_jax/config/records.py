"""The parts of a ``SpeculativeConfig``: small frozen records that check their own values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from spec_jax.config.checks import check, is_finite, is_integer, is_list, is_probability
from spec_jax.config.read import ConfigRecord
from spec_jax.errors import ConfigError
from spec_jax.tree import DynamicTree, Tree

BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # Ks that adaptive decoding has programs for


@dataclasses.dataclass(frozen=True)
class NgramConfig(ConfigRecord):
    """Which suffixes of the text n-gram drafting looks up.

    Attributes:
      max: longest suffix, tried first.
      min: shortest suffix.
    """

    max: int = 3
    min: int = 1

    def __post_init__(self):
        sizes = (self.min, self.max)
        is_range = all(is_integer(size, 1) for size in sizes) and self.min <= self.max
        check(is_range, "(ngram.min, ngram.max)", sizes, "integers, 1 <= ngram.min <= ngram.max")


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

    max_depth: int = 24
    max_factor: float = 1.0
    max_offset: float = 0.0
    min_prob: float = 0.1
    history_tokens: int = 4096

    def __post_init__(self):
        for name, least in (("max_depth", 1), ("history_tokens", 0)):
            value = getattr(self, name)
            expected = f"an integer of {least} or more"
            check(is_integer(value, least), f"suffix.{name}", value, expected)
        for name in ("max_factor", "max_offset"):
            value = getattr(self, name)
            check(is_finite(value), f"suffix.{name}", value, "a finite number")
        check(self.max_factor >= 0, "suffix.max_factor", self.max_factor, "0 or more")
        is_fit = is_probability(self.min_prob)
        check(is_fit, "suffix.min_prob", self.min_prob, "a number in [0, 1]")


@dataclasses.dataclass(frozen=True)
class TreeConfig(ConfigRecord):
    """Which tree is drafted: exactly one of ``children``, ``ranks`` and ``depth`` is given.

    Attributes:
      children: of a static tree, how many children the nodes of each depth have: ``(3, 2, 1)``.
      ranks: of a static tree, every node by the ranks on its path: ``((0,), (1,), (0, 0))``.
      depth: levels of EAGLE-2's dynamic tree, which has K nodes.
      top_k: nodes that a level of the dynamic tree expands, and children of each; None means 10.
    """

    children: tuple[int, ...] | None = None
    ranks: tuple[tuple[int, ...], ...] | None = None
    depth: int | None = None
    top_k: int | None = None

    def __post_init__(self):
        def freeze(x):
            return tuple(map(freeze, x)) if is_list(x) else x

        for name in ("children", "ranks"):
            object.__setattr__(self, name, freeze(getattr(self, name)))
        given = [n for n in ("children", "ranks", "depth") if getattr(self, n) is not None]
        if self.top_k is not None and self.depth is None:
            raise ConfigError(
                f"tree.top_k is {self.top_k} without tree.depth: give the dynamic tree's levels "
                "too, or leave it out"
            )
        if len(given) != 1:
            what = " and ".join(f"tree.{name}" for name in given) or "none of them"
            raise ConfigError(
                f"of tree.children, tree.ranks and tree.depth, {what} are given; name one of them"
            )

        def is_counts(x):
            return isinstance(x, tuple) and len(x) > 0 and all(map(is_integer, x))

        value = self.children
        expected = "the number of children of each depth, as (3, 2, 1)"
        check(value is None or is_counts(value), "tree.children", value, expected)
        value = self.ranks
        expected = "the ranks on each node's path, as ((0,), (1,), (0, 0))"
        is_paths = value is None or (is_list(value) and value and all(map(is_counts, value)))
        check(is_paths, "tree.ranks", value, expected)
        for name in ("depth", "top_k"):
            value = getattr(self, name)
            is_fit = value is None or is_integer(value, 1)
            check(is_fit, f"tree.{name}", value, "an integer of 1 or more")
        if self.depth is None:
            self.shape(0)  # raises where there is no such tree

    @classmethod
    def of(cls, value: Any, name: str) -> Any:
        """Also takes the children by depth, or the nodes by their ranks, as one sequence."""
        if not is_list(value):
            return super().of(value, name)
        kinds = {is_list(x) for x in value}
        flat = [i for x in value for i in (x if is_list(x) else (x,))]
        expected = "children by depth, or nodes by their ranks"
        check(len(kinds) == 1 and all(map(is_integer, flat)), name, value, expected)
        return cls(ranks=value) if kinds.pop() else cls(children=value)

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

    acceptance_rate: float | None = None
    acceptance_rates: tuple[float, ...] | None = None
    conditional_rates: tuple[float, ...] | None = None
    mean_length: float | None = None

    def __post_init__(self):
        for name in ("acceptance_rates", "conditional_rates"):
            rates = getattr(self, name)
            if rates is not None:
                is_rates = is_list(rates) and all(map(is_probability, rates))
                check(is_rates, f"synthetic.{name}", rates, "rates in [0, 1], one a position")
                object.__setattr__(self, name, tuple(rates))
        rates = self.acceptance_rates or ()
        is_falling = all(a >= b for a, b in zip(rates, rates[1:]))
        check(is_falling, "synthetic.acceptance_rates", rates, "a non-increasing sequence")
        rate = self.acceptance_rate
        length = self.mean_length
        is_fit = rate is None or is_probability(rate)
        check(is_fit, "synthetic.acceptance_rate", rate, "a rate in [0, 1]")
        is_fit = length is None or (is_finite(length) and length >= 1)
        check(is_fit, "synthetic.mean_length", length, "a length of 1 or more")
        names = [f"synthetic.{field.name}" for field in dataclasses.fields(self)]
        given = self.given
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given; name one of them")
        if not given:
            raise ConfigError(f"synthetic acceptance needs one of {', '.join(names)}")

    @property
    def given(self) -> list[str]:
        """The full names of what is given, which is one."""
        names = [field.name for field in dataclasses.fields(self)]
        return [f"synthetic.{name}" for name in names if getattr(self, name) is not None]

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

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            check(is_finite(value) and value > 0, f"typical.{name}", value, "a number above 0")


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig(ConfigRecord):
    """K is chosen from chunk to chunk of rounds.

    Attributes:
      buckets: the Ks to choose among, ascending; each is a program to compile, and K is the last
        of them. None: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 up to K, and K.
    """

    buckets: tuple[int, ...] | None = None

    def __post_init__(self):
        given = self.buckets
        if given is None:
            return
        is_fit = is_list(given) and len(given) > 0 and all(map(is_integer, given))
        is_fit = is_fit and given[-1] > 0 and all(a < b for a, b in zip(given, given[1:]))
        expected = "ascending integers of 0 or more, the last of them positive"
        check(is_fit, "adaptive.buckets", given, expected)
        object.__setattr__(self, "buckets", tuple(given))

    @classmethod
    def of(cls, value: Any, name: str) -> Any:
        """Also takes a bool: False means a fixed K."""
        if isinstance(value, bool):
            return cls() if value else None
        check(isinstance(value, cls | Mapping), name, value, "a bool or an AdaptiveConfig")
        return super().of(value, name)
