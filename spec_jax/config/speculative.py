"""What drafts, how many tokens a round, and which rule accepts them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from spec_jax.config.checks import (
    check,
    check_name,
    check_options,
    integer,
    is_count,
    is_integer,
    is_list,
    is_number,
    is_probability,
    number,
    option,
)
from spec_jax.config.read import ConfigOfRecords, ConfigRecord, reads_flat_names
from spec_jax.config.sampler import GREEDY_BELOW, SamplerConfig
from spec_jax.errors import ConfigError
from spec_jax.show.summary import short_repr
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
        self._one_given("children", "ranks", "depth")
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
        self._one_given(*self.__dataclass_fields__)

    @property
    def given(self) -> str:
        """The full name of what is given."""
        return self._one_given(*self.__dataclass_fields__)

    def check_num_draft(self, num_draft: int) -> None:
        """Raises a ``ConfigError`` where the rates do not cover ``num_draft`` positions."""
        for name in ("acceptance_rates", "conditional_rates"):
            rates = getattr(self, name)
            is_fit = rates is None or len(rates) >= num_draft
            check(is_fit, f"synthetic.{name}", rates, f"at least {num_draft} rates in [0, 1]")
        length = self.mean_length
        is_fit = length is None or length <= num_draft + 1
        check(is_fit, "synthetic.mean_length", length, f"a length in [1, {num_draft + 1}]")

    def rates(self, num_draft: int) -> tuple[float, ...]:
        """Returns the conditional acceptance rate of each of K positions.

        A mean rate r solves ``(1/K) sum_{i=1..K} b**i = r`` for b; a mean length counts the
        target's own token and fills positions from the front.

        Args:
          num_draft: K.
        """
        K = num_draft
        if self.conditional_rates is not None:
            return self.conditional_rates[:K]
        if self.acceptance_rates is not None:
            rates = self.acceptance_rates[:K]
            return tuple(r / b if b > 0 else 0.0 for r, b in zip(rates, (1.0, *rates)))
        if self.mean_length is not None:
            drafts = self.mean_length - 1
            return tuple(min(max(drafts - i, 0.0), 1.0) for i in range(K))
        rate = self.acceptance_rate
        if rate in (0, 1):
            return (float(rate),) * K
        low = 0.0
        high = 1.0
        for _ in range(60):
            b = (low + high) / 2
            mean = sum(b**i for i in range(1, K + 1)) / K
            low, high = (b, high) if mean < rate else (low, b)
        return ((low + high) / 2,) * K


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


# Methods that may be named, and whether they copy tokens; ``drafters.register`` adds to them.
METHODS: dict[str, bool] = {}
STRATEGIES = (
    "greedy",
    "residual",
    "block",
    "traversal",
    "match",
    "typical-acceptance",
    "logit-comparison",
    "synthetic",
)


@reads_flat_names
@dataclasses.dataclass(frozen=True)
class SpeculativeConfig(ConfigOfRecords):
    """What drafts, how many tokens a round, and which rule accepts them.

    Each record may be given as itself, as a mapping of its fields, or by flat names:
    ``ngram_max=4`` is ``ngram=NgramConfig(max=4)``, ``is_adaptive=True`` is
    ``adaptive=AdaptiveConfig()``, and ``tree=(3, 2, 1)`` is ``tree=TreeConfig((3, 2, 1))``. Flat
    names are attributes too. Each method has a predicate: ``is_standalone()``, ``is_eagle()``.

    Example:
      ```python
      import spec_jax

      chain = spec_jax.SpeculativeConfig(num_speculative_tokens=4)
      tree = spec_jax.SpeculativeConfig("eagle", 59, tree_depth=6)  # EAGLE-2: 59 drafts, 6 levels
      adaptive = spec_jax.SpeculativeConfig("ngram", 8, is_adaptive=True)
      print(chain, tree, adaptive)
      ```

    Attributes:
      speculative_method: "standalone" (a smaller model of the same vocabulary), "ngram"
        (copies what followed the same tokens before), "suffix" (copies what most often did, in
        this request and in past outputs), "self" (the target's own first layers), "eagle" or "mtp"
        (heads), "peagle", "dflash", "dflash2", "dspark" or "treeflash" (heads that draft all
        tokens in one pass).
      num_speculative_tokens: K, tokens drafted a round; with adaptive K the largest. Leave it
        out where a static tree or buckets settle it.
      rejection_sampling_strategy: the acceptance rule. None: "greedy" at temperature 0; above it
        the drafter's own default ("block" for heads that draft all tokens in one pass), or else
        "residual" for a sampled draft and "match" for a deterministic one.
      adaptive: choose K anew every few rounds, for the whole batch, from recent acceptance and the
        measured costs of a round; K may be 0, plain decoding. The output's distribution does not
        change, and with "greedy" and "match" neither do its tokens; with other rules the tokens of
        a seed depend on the chosen Ks. None: K is fixed.
      confidence_threshold: a row stops drafting after a draft whose probability, by the draft
        model's raw logits, is below this; 0: all K are offered. Drafting passes end when no row
        continues. "dspark" heads compare their estimate of the draft's acceptance instead; other
        heads that draft a block refuse it, but for "peagle". Lossless with every lossless rule.
      synthetic: for benchmarks: accept at given rates, whatever the tokens.
      typical: the threshold of "typical-acceptance".
      tree: draft a tree in place of a chain. K is the number of its nodes.
      ngram: which suffixes "ngram" looks up.
      suffix: how far "suffix" follows a match.
      config_file: a .yaml, .toml or .json file; arguments that are not given are read from its
        section ``section_name``. An argument replaces a whole record of the file if that record may
        be None, and otherwise only the fields that it names.
      section_name: of the file; None means "speculative".

    Raises:
      ConfigError: an invalid value, values that contradict each other, an unknown name
        (the known ones are listed), or a file that cannot be read.
    """

    speculative_method: str = "standalone"
    num_speculative_tokens: int = option(
        2,
        lambda x: is_integer(x, 1),
        "an integer of 1 or more (for plain decoding, give no draft and no config)",
    )
    rejection_sampling_strategy: str | None = None
    adaptive: AdaptiveConfig | None = None
    confidence_threshold: float = number(0.0, 0, 1)
    synthetic: SyntheticConfig | None = None
    typical: TypicalConfig = TypicalConfig()
    tree: TreeConfig | None = None
    ngram: NgramConfig = NgramConfig()
    suffix: SuffixConfig = SuffixConfig()
    config_file: str | None = None
    section_name: str | None = None

    __repr__ = short_repr("speculative_method", "num_speculative_tokens")

    def __post_init__(self):
        method = self.speculative_method
        strategy = self.rejection_sampling_strategy
        check_options(self)
        check_name("speculative_method", method, list(METHODS))
        if strategy is not None:
            check_name("rejection_sampling_strategy", strategy, STRATEGIES, "None or ")
        if self.tree is not None:
            if self.is_adaptive:
                raise ConfigError("adaptive and a tree are given; adaptive K drafts chains")
            if self.copies_tokens:
                raise ConfigError(
                    f"speculative_method {method!r} drafts chains; trees are for methods with a "
                    "model or a head"
                )
            num_nodes = self.tree_shape.num_nodes
            self._set_num_draft(num_nodes, f"the tree has {num_nodes} nodes")
        elif self.is_adaptive and self.adaptive.buckets:
            largest = self.adaptive.buckets[-1]
            self._set_num_draft(largest, f"adaptive.buckets end with {largest}")
        threshold = self.confidence_threshold
        if threshold and (self.copies_tokens or self.tree is not None):
            what = "copies tokens" if self.copies_tokens else "drafts a tree"
            raise ConfigError(
                f"confidence_threshold is {threshold}; it is for chains of a model or a head, and "
                f"{method!r} {what} here"
            )
        if self.synthetic is not None:
            self.synthetic.check_num_draft(self.num_speculative_tokens)
            if strategy not in (None, "synthetic"):
                raise ConfigError(
                    f"{self.synthetic.given} is given, so rejection_sampling_strategy must be "
                    f"None or 'synthetic', not {strategy!r}"
                )
        elif strategy == "synthetic":
            SyntheticConfig()  # raises: it needs one of its rates
        if self.section_name is not None and self.config_file is None:
            raise ConfigError(f"section_name is {self.section_name!r} without a config_file")

    def _set_num_draft(self, num_draft: int, because: str) -> None:
        """Sets K from another field; a K that the caller gave must agree with it."""
        K = self.num_speculative_tokens
        default = type(self).num_speculative_tokens
        if K not in (default, num_draft):
            raise ConfigError(f"num_speculative_tokens is {K}; {because}: leave it out")
        object.__setattr__(self, "num_speculative_tokens", num_draft)

    def __getattr__(self, name):
        method = name.removeprefix("is_")
        if method != name and method in METHODS:
            return lambda: self.speculative_method == method
        return super().__getattr__(name)

    def __dir__(self):
        return [*super().__dir__(), *(f"is_{method}" for method in METHODS)]

    @property
    def is_adaptive(self) -> bool:
        return self.adaptive is not None

    @property
    def buckets(self) -> tuple[int, ...]:
        """The Ks that programs are compiled for."""
        K = self.num_speculative_tokens
        if self.adaptive is None:
            return (K,)
        return self.adaptive.buckets or (*(k for k in BUCKETS if k < K), K)

    @property
    def tree_shape(self) -> Tree | DynamicTree | None:
        """The tree that is drafted; None for a chain."""
        return None if self.tree is None else self.tree.shape(self.num_speculative_tokens)

    @property
    def is_synthetic(self) -> bool:
        return self.synthetic is not None

    @property
    def copies_tokens(self) -> bool:
        """The method has no model: its drafts have neither probabilities nor logits."""
        return METHODS.get(self.speculative_method, False)

    def uses_greedy_rejection(self) -> bool:
        return self.rejection_sampling_strategy == "greedy"

    def uses_typical_acceptance(self) -> bool:
        return self.rejection_sampling_strategy == "typical-acceptance"

    def uses_logit_comparison(self) -> bool:
        return self.rejection_sampling_strategy == "logit-comparison"

    def resolve(
        self,
        temperature: float,
        *,
        is_sampled: bool,
        default: str | None = None,
        drafter: str | None = None,
        rule: str | None = None,
    ) -> SpeculativeConfig:
        """Fills in the strategy, and the names of a custom drafter and rule.

        Args:
          temperature: the highest of the target's temperatures in the batch.
          is_sampled: the drafter draws from a distribution.
          default: the drafter's own strategy above temperature 0, if it names one.
          drafter: the name of a custom drafter, which replaces the method; None if there is none.
          rule: the name of a custom rule, which replaces the strategy; None if there is none.

        Raises:
          ConfigError: the strategy cannot serve this temperature or this drafter.
        """
        strategy = self.rejection_sampling_strategy if rule is None else rule
        if strategy is None and self.is_synthetic:
            strategy = "synthetic"
        elif strategy is None and temperature < GREEDY_BELOW:
            strategy = "greedy"
        elif strategy is None:
            strategy = default or ("residual" if is_sampled else "match")
        if rule is None and strategy == "greedy" and temperature >= GREEDY_BELOW:
            raise ConfigError(
                f"strategy 'greedy' emits argmax tokens, yet the temperature is {temperature}; "
                "use 'residual', 'block' or 'match', or temperature 0"
            )
        if rule is None and strategy == "logit-comparison" and not is_sampled:
            raise ConfigError(
                "strategy 'logit-comparison' needs the draft's logits; "
                f"{self.speculative_method!r} drafts without them: use 'match'"
            )
        resolved = copy.copy(self)  # names of your own are none that a new config may have
        object.__setattr__(resolved, "rejection_sampling_strategy", strategy)
        object.__setattr__(resolved, "speculative_method", drafter or self.speculative_method)
        return resolved


@reads_flat_names
@dataclasses.dataclass(frozen=True)
class AsyncSpecConfig(ConfigOfRecords):
    """Config of an engine that drafts and verifies asynchronously: K, both samplers and the limit.

    The draft model or head says what drafts, and the rule is ``SpeculativeConfig``'s default.

    Attributes:
      spec_k: K, tokens drafted a round.
      draft_sampler: how drafts are drawn; None: as the target's tokens.
      target_sampler: how the target's tokens are drawn.
      force_n1: draft nothing: the target decodes one token a pass.
      max_tokens: maximum tokens of a row, prompt and output together (what a call names
        ``max_length``), where a call names no limit; None: the call's default holds.
    """

    spec_k: int = integer(4, 1)
    draft_sampler: SamplerConfig | None = None
    target_sampler: SamplerConfig = SamplerConfig()
    force_n1: bool = option(False, lambda x: isinstance(x, bool), "True or False")
    max_tokens: int | None = integer(None, 2)

    __repr__ = short_repr("spec_k")

    def __post_init__(self):
        check_options(self)
