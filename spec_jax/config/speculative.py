"""What drafts, how many tokens a round, and which rule accepts them."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from spec_jax.config.checks import check_name, check_options, is_integer, number, option
from spec_jax.config.read import DEFAULT_SECTION, build, flat_attribute, reads_flat_names
from spec_jax.config.records import (
    BUCKETS,
    AdaptiveConfig,
    NgramConfig,
    SuffixConfig,
    SyntheticConfig,
    TreeConfig,
    TypicalConfig,
)
from spec_jax.config.sampler import GREEDY_BELOW
from spec_jax.errors import ConfigError
from spec_jax.show.summary import short_repr
from spec_jax.tree import DynamicTree, Tree

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
class SpeculativeConfig:
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
        this request and in past outputs), "eagle" or "mtp" (heads), "peagle", "dflash",
        "dflash2", "dspark" or "treeflash" (heads that draft all tokens in one pass).
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
                    f"{self.synthetic.given[0]} is given, so rejection_sampling_strategy must be "
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
        return flat_attribute(self, name)

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
        strategy = self._strategy(temperature, is_sampled, default) if rule is None else rule
        resolved = copy.copy(self)  # names of your own are none that a new config may have
        object.__setattr__(resolved, "rejection_sampling_strategy", strategy)
        object.__setattr__(resolved, "speculative_method", drafter or self.speculative_method)
        return resolved

    def _strategy(self, temperature: float, is_sampled: bool, default: str | None) -> str:
        strategy = self.rejection_sampling_strategy
        if strategy is None and self.is_synthetic:
            strategy = "synthetic"
        elif strategy is None and temperature < GREEDY_BELOW:
            strategy = "greedy"
        elif strategy is None:
            strategy = default or ("residual" if is_sampled else "match")
        if strategy == "greedy" and temperature >= GREEDY_BELOW:
            raise ConfigError(
                f"strategy 'greedy' emits argmax tokens, yet the temperature is {temperature}; "
                "use 'residual', 'block' or 'match', or temperature 0"
            )
        if strategy == "logit-comparison" and not is_sampled:
            raise ConfigError(
                "strategy 'logit-comparison' needs the draft's logits; "
                f"{self.speculative_method!r} drafts without them: use 'match'"
            )
        return strategy

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Builds a config from plain values; strings that spell a number are taken as one.

        Raises:
          ConfigError: an unknown key (the known ones are listed) or a wrong value.
        """
        return build(cls, values)

    @classmethod
    def from_file(
        cls, config_file: str | pathlib.Path, section_name: str = DEFAULT_SECTION
    ) -> SpeculativeConfig:
        """Reads one section of a .yaml, .toml or .json file.

        Raises:
          ConfigError: an unreadable file, a missing section, an unknown key, a wrong value.
        """
        return cls(config_file=config_file, section_name=section_name)
