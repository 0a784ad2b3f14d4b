"""Configuration: frozen, validated where it enters, readable from a file."""

from __future__ import annotations

import dataclasses
import json
import numbers
import operator
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from spec_jax.errors import ConfigError
from spec_jax.tree import DynamicTree, Tree

_MOST = 2**31 - 1
GREEDY_BELOW = 1e-5  # a temperature under this is argmax; it is never divided by
_FLOAT32 = 3.4e38
METHODS = ("standalone", "ngram", "suffix", "eagle", "mtp")
BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # Ks that adaptive decoding has programs for
STRATEGIES = (
    "greedy", "residual", "block", "traversal", "match", "typical-acceptance",
    "logit-comparison", "synthetic",
)


def _check(ok: bool, name: str, value: Any, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


def check_integer(name: str, value, least: int) -> int:
    """The value as an int.

    Raises:
      ConfigError: it is none, or less than ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    is_fit = number is not None and not isinstance(value, bool) and least <= number <= _MOST
    _check(is_fit, name, value, f"an integer of {least} or more")
    return number


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_int(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value) -> bool:
    """A number that is not NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def _is_finite(value) -> bool:
    """A number that float32 can hold."""
    return _is_number(value) and abs(value) <= _FLOAT32


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """How one model's logits become a token.

    Applied in this order: logit bias, repetition penalty (over prompt and output), presence
    and frequency penalties (over the output), temperature, top-k, top-p, min-p. Where
    transformers has the processor, the result is transformers'.

    Attributes:
      temperature: 0 means argmax, and so does anything below 1e-5.
      top_k: keep the k largest; 0 keeps all.
      top_p: keep the smallest set whose mass reaches p; 1 keeps all.
      min_p: drop tokens less likely than ``min_p`` times the likeliest; 0 keeps all.
      repetition_penalty: divides positive logits and multiplies negative ones of tokens in
        the prompt or the output; 1 is off.
      presence_penalty: subtracted once from tokens in the output.
      frequency_penalty: subtracted once for each time a token is in the output.
      logit_bias: added to the logits of these token ids; -inf forbids one.
      seed: one config for a whole batch seeds row i with ``seed + i``; in a list of configs
        each row has its own.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(self, name)
            _check(_is_finite(value), name, value, "a finite number")
        _check(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        is_count = _is_int(self.top_k) and 0 <= self.top_k < 2**31
        _check(is_count, "top_k", self.top_k, "an integer of 0 or more")
        _check(1e-30 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        _check(
            self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0"
        )
        _check(
            _is_int(self.seed) and 0 <= self.seed < 2**32,
            "seed", self.seed, "an integer in [0, 2**32)",
        )


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """What drafts, how many tokens a round, and which rule accepts them.

    Attributes:
      speculative_method: "standalone" (a smaller model of the same vocabulary), "ngram"
        (copies what followed the same tokens before), "suffix" (copies what most often did, in
        this request and in past outputs), "eagle" or "mtp" (heads).
      num_speculative_tokens: K, tokens drafted a round; the most of them where K is adaptive.
      rejection_sampling_strategy: the acceptance rule. None: "greedy" at temperature 0;
        above it "residual" for a sampled draft, "match" for a deterministic one.
      is_adaptive: choose K from chunk to chunk of rounds, for the whole batch, by what was accepted
        lately and what a round costs; K = 0, plain decoding, included. The law of the output
        stays what it is, and under "greedy" and "match" so do its tokens; under the others the
        tokens of a seed depend on the Ks.
      adaptive_buckets: the Ks to choose among, ascending; each is a program to compile. K is the
        last of them. None: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 up to K, and K.
      confidence_threshold: a row offers no draft behind one to which the draft gave less
        probability, by its raw logits; 0: all K are offered. The drafting passes end where no
        row goes on. Lossless under every lossless rule.
      synthetic_acceptance_rate: for benchmarks: accept by coin, not by token, so that the
        mean of acceptance over the K positions is this rate.
      synthetic_acceptance_rates: the same by unconditional rate of each position,
        non-increasing.
      synthetic_conditional_rates: the same by conditional rate of each position; does not
        change with K.
      synthetic_mean_length: the same by mean tokens a round, the target's included, in
        [1, K+1].
      typical_epsilon, typical_delta: Medusa's threshold is min(epsilon, delta * exp(-H)).
      tree: draft a tree in place of a chain: how many children the nodes of each depth have,
        as ``(3, 2, 1)``, or every node by its ranks, as ``((0,), (1,), (0, 0))``. K is then the
        number of its nodes.
      tree_depth: draft EAGLE-2's dynamic tree of K nodes and so many levels.
      tree_top_k: nodes that a level of it expands, and children of each; None: 10.
      ngram_max, ngram_min: suffix lengths that are looked up, the longest first.
      suffix_max_depth: longest match that suffix decoding tries.
      suffix_max_factor, suffix_max_offset: a match of m tokens drafts at most
        ``factor * m + offset`` tokens, and never more than K.
      suffix_min_prob: drafting ends before the product of the drafts' frequencies falls below.
      suffix_history_tokens: of past outputs that are kept, the latest; 0 keeps none.
      config_file, section_name: where ``from_file`` read this from; for the record.
    """

    speculative_method: str = "standalone"
    num_speculative_tokens: int = 2
    rejection_sampling_strategy: str | None = None
    is_adaptive: bool = False
    adaptive_buckets: tuple[int, ...] | None = None
    confidence_threshold: float = 0.0
    synthetic_acceptance_rate: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_conditional_rates: tuple[float, ...] | None = None
    synthetic_mean_length: float | None = None
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    tree: tuple | None = None
    tree_depth: int | None = None
    tree_top_k: int | None = None
    ngram_max: int = 3
    ngram_min: int = 1
    suffix_max_depth: int = 24
    suffix_max_factor: float = 1.0
    suffix_max_offset: float = 0.0
    suffix_min_prob: float = 0.1
    suffix_history_tokens: int = 4096
    config_file: str | None = None
    section_name: str | None = None

    def __post_init__(self):
        K = self.num_speculative_tokens
        _check(_is_int(K) and K >= 1, "num_speculative_tokens", K, "an integer of 1 or more")
        self._set_buckets()
        self._set_tree_size()
        K, strategy = self.num_speculative_tokens, self.rejection_sampling_strategy
        _check(
            self.speculative_method in METHODS, "speculative_method", self.speculative_method,
            f"one of {', '.join(METHODS)}",
        )
        _check(
            strategy is None or strategy in STRATEGIES, "rejection_sampling_strategy", strategy,
            f"None or one of {', '.join(STRATEGIES)}",
        )
        for name in ("typical_epsilon", "typical_delta"):
            value = getattr(self, name)
            _check(_is_finite(value) and value > 0, name, value, "a number above 0")
        sizes = (self.ngram_min, self.ngram_max)
        is_range = all(map(_is_int, sizes)) and 1 <= sizes[0] <= sizes[1]
        _check(is_range, "(ngram_min, ngram_max)", sizes, "integers, 1 <= ngram_min <= ngram_max")
        self._check_suffix()
        self._check_confidence()
        for name in ("synthetic_acceptance_rates", "synthetic_conditional_rates"):
            rates = getattr(self, name)
            if rates is None:
                continue
            _check(_is_list(rates), name, rates, "a sequence of rates, one a position")
            object.__setattr__(self, name, tuple(rates))
            ok = len(rates) >= K and all(_is_number(r) and 0 <= r <= 1 for r in rates)
            _check(ok, name, rates, f"at least {K} rates in [0, 1]")
        rates = self.synthetic_acceptance_rates
        if rates is not None:
            ok = all(a >= b for a, b in zip(rates, rates[1:]))
            _check(ok, "synthetic_acceptance_rates", rates, "a non-increasing sequence")
        rate, length = self.synthetic_acceptance_rate, self.synthetic_mean_length
        if rate is not None:
            ok = _is_number(rate) and 0 <= rate <= 1
            _check(ok, "synthetic_acceptance_rate", rate, "a rate in [0, 1]")
        if length is not None:
            ok = _is_number(length) and 1 <= length <= K + 1
            _check(ok, "synthetic_mean_length", length, f"a length in [1, {K + 1}]")
        given = [n for n in _SYNTHETIC if getattr(self, n) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given; name one of them")
        if given and strategy not in (None, "synthetic"):
            raise ConfigError(
                f"{given[0]} is given, so rejection_sampling_strategy must be None or "
                f"'synthetic', not {strategy!r}"
            )
        if strategy == "synthetic" and not given:
            raise ConfigError(f"strategy 'synthetic' needs one of {', '.join(_SYNTHETIC)}")

    def _set_buckets(self) -> None:
        """Checks the Ks to choose among, and takes the largest K from them."""
        _check(isinstance(self.is_adaptive, bool), "is_adaptive", self.is_adaptive, "a bool")
        given, name = self.adaptive_buckets, "adaptive_buckets"
        if given is not None:
            expected = "ascending integers of 0 or more, the last of them positive"
            _check(_is_list(given) and len(given) > 0, name, given, expected)
            ok = all(_is_int(k) and k >= 0 for k in given) and given[-1] > 0
            _check(ok and all(a < b for a, b in zip(given, given[1:])), name, given, expected)
            _check(self.is_adaptive, name, given, "None where is_adaptive is not set")
            K, default = self.num_speculative_tokens, type(self).num_speculative_tokens
            if K not in (default, given[-1]):
                raise ConfigError(
                    f"num_speculative_tokens is {K}; adaptive_buckets end with {given[-1]}: leave "
                    "it out"
                )
            object.__setattr__(self, name, tuple(given))
            object.__setattr__(self, "num_speculative_tokens", given[-1])
        if self.is_adaptive and (self.tree is not None or self.tree_depth is not None):
            raise ConfigError("is_adaptive and a tree are given; adaptive K drafts chains")

    @property
    def buckets(self) -> tuple[int, ...]:
        """The Ks that programs are compiled for."""
        K = self.num_speculative_tokens
        if not self.is_adaptive:
            return (K,)
        return self.adaptive_buckets or (*(k for k in BUCKETS if k < K), K)

    def _check_confidence(self) -> None:
        name, value = "confidence_threshold", self.confidence_threshold
        _check(_is_number(value) and 0 <= value <= 1, name, value, "a probability, 0 for none")
        if value and (self.copies_tokens or self.tree_shape is not None):
            what = "copies tokens" if self.copies_tokens else "drafts a tree"
            raise ConfigError(
                f"{name} is {value}; it is for chains of a model or a head, and "
                f"{self.speculative_method!r} {what} here"
            )

    def _check_suffix(self) -> None:
        for name, least in (("suffix_max_depth", 1), ("suffix_history_tokens", 0)):
            value = getattr(self, name)
            ok = _is_int(value) and least <= value < 2**31
            _check(ok, name, value, f"an integer of {least} or more")
        for name in ("suffix_max_factor", "suffix_max_offset"):
            _check(_is_finite(getattr(self, name)), name, getattr(self, name), "a finite number")
        factor, prob = self.suffix_max_factor, self.suffix_min_prob
        _check(factor >= 0, "suffix_max_factor", factor, "0 or more")
        _check(_is_number(prob) and 0 <= prob <= 1, "suffix_min_prob", prob, "a number in [0, 1]")

    def _set_tree_size(self) -> None:
        """Takes K from a static tree; checks the shape of either kind."""
        is_given = self.tree is not None
        _check(not is_given or _is_list(self.tree), "tree", self.tree, "None or a sequence")
        if is_given:
            freeze = lambda x: tuple(map(freeze, x)) if _is_list(x) else x
            object.__setattr__(self, "tree", freeze(self.tree))
            kinds = {isinstance(x, tuple) for x in self.tree}
            flat = [i for x in self.tree for i in (x if isinstance(x, tuple) else (x,))]
            ok = len(kinds) == 1 and all(_is_int(i) and i >= 0 for i in flat)
            _check(ok, "tree", self.tree, "children by depth, or nodes by their ranks")
        for name in ("tree_depth", "tree_top_k"):
            value = getattr(self, name)
            ok = value is None or (_is_int(value) and value >= 1)
            _check(ok, name, value, "an integer of 1 or more")
        if self.tree_top_k is not None and self.tree_depth is None:
            raise ConfigError(
                f"tree_top_k is {self.tree_top_k} without tree_depth: give the dynamic tree's "
                "levels too, or leave it out"
            )
        if self.tree is not None and self.tree_depth is not None:
            raise ConfigError("tree and tree_depth are given; name one of them")
        shape = self.tree_shape
        if shape is None:
            return
        if self.copies_tokens:
            raise ConfigError(
                f"speculative_method {self.speculative_method!r} drafts chains; trees are for "
                "'standalone', 'eagle' and 'mtp'"
            )
        K, default = self.num_speculative_tokens, type(self).num_speculative_tokens
        if K not in (default, shape.num_nodes):
            raise ConfigError(
                f"num_speculative_tokens is {K}; the tree has {shape.num_nodes} nodes: leave it out"
            )
        object.__setattr__(self, "num_speculative_tokens", shape.num_nodes)

    @property
    def tree_shape(self) -> Tree | DynamicTree | None:
        """What is drafted; None for a chain."""
        if self.tree_depth is not None:
            return DynamicTree(self.num_speculative_tokens, self.tree_depth, self.tree_top_k or 10)
        if self.tree is None:
            return None
        is_listed = isinstance(self.tree[0], tuple)
        return (Tree.from_paths if is_listed else Tree.branching)(self.tree)

    @property
    def is_synthetic(self) -> bool:
        return any(getattr(self, name) is not None for name in _SYNTHETIC)

    def is_standalone(self) -> bool:
        return self.speculative_method == "standalone"

    def is_eagle(self) -> bool:
        return self.speculative_method == "eagle"

    def is_mtp(self) -> bool:
        return self.speculative_method == "mtp"

    def is_ngram(self) -> bool:
        return self.speculative_method == "ngram"

    def is_suffix(self) -> bool:
        return self.speculative_method == "suffix"

    @property
    def copies_tokens(self) -> bool:
        """The method has no model: its drafts have neither probabilities nor logits."""
        return self.is_ngram() or self.is_suffix()

    def uses_greedy_rejection(self) -> bool:
        return self.rejection_sampling_strategy == "greedy"

    def uses_typical_acceptance(self) -> bool:
        return self.rejection_sampling_strategy == "typical-acceptance"

    def uses_logit_comparison(self) -> bool:
        return self.rejection_sampling_strategy == "logit-comparison"

    def resolve(self, temperature: float, *, is_sampled: bool) -> SpeculativeConfig:
        """Fills in the strategy.

        Args:
          temperature: the highest of the target's temperatures in the batch.
          is_sampled: the drafter draws from a distribution.

        Raises:
          ConfigError: the strategy cannot serve this temperature or this drafter.
        """
        strategy = self.rejection_sampling_strategy
        if strategy is None and self.is_synthetic:
            strategy = "synthetic"
        elif strategy is None and temperature < GREEDY_BELOW:
            strategy = "greedy"
        elif strategy is None:
            strategy = "residual" if is_sampled else "match"
        if strategy == "greedy" and temperature >= GREEDY_BELOW:
            raise ConfigError(
                f"strategy 'greedy' emits argmax tokens, yet the temperature is {temperature}; "
                "use 'residual', 'block' or 'match', or temperature 0"
            )
        if strategy == "logit-comparison" and not is_sampled:
            raise ConfigError(
                "strategy 'logit-comparison' compares the draft's logits, and a drafter that "
                f"takes the likeliest or copies ({self.speculative_method}) has none; use 'match'"
            )
        return dataclasses.replace(self, rejection_sampling_strategy=strategy)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Builds a config from plain values; strings that spell a number are taken as one.

        Raises:
          ConfigError: an unknown key (the known ones are listed) or a wrong value.
        """
        return build(cls, values)

    @classmethod
    def from_file(
        cls, config_file: str | pathlib.Path, section_name: str = "speculative"
    ) -> SpeculativeConfig:
        """Reads one section of a .yaml, .toml or .json file.

        Raises:
          ConfigError: an unreadable file, a missing section, an unknown key, a wrong value.
        """
        path = pathlib.Path(config_file)
        parsers = {
            ".yaml": yaml.safe_load, ".yml": yaml.safe_load, ".toml": tomllib.loads,
            ".json": json.loads,
        }
        if path.suffix not in parsers:
            raise ConfigError(f"config_file {path} has no known suffix: {', '.join(parsers)}")
        try:
            sections = parsers[path.suffix](path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"config_file {path} cannot be read: {error}") from error
        section = sections.get(section_name) if isinstance(sections, Mapping) else None
        if not isinstance(section, Mapping):
            have = ", ".join(map(str, sections)) if isinstance(sections, Mapping) else "none"
            raise ConfigError(f"{path} has no section {section_name!r}; its sections: {have}")
        return cls.from_dict(
            {**section, "config_file": str(path), "section_name": section_name}
        )


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """Sorted (token id, bias) pairs of a mapping or of pairs; JSON's string ids are taken."""
    expected = "pairs of a token id of 0 or more and a number or -inf"
    try:
        pairs = [
            (int(t) if isinstance(t, str) else t, v)
            for t, v in (bias.items() if isinstance(bias, Mapping) else bias)
        ]
    except (TypeError, ValueError):
        raise ConfigError(f"logit_bias is {bias!r}; expected {expected}") from None
    for token, value in pairs:
        is_pair = _is_int(token) and token >= 0 and _is_number(value) and value <= _FLOAT32
        _check(is_pair, "logit_bias", (token, value), expected)
    return tuple(sorted((token, float(value)) for token, value in pairs))


_SYNTHETIC = (
    "synthetic_acceptance_rate", "synthetic_acceptance_rates", "synthetic_conditional_rates",
    "synthetic_mean_length",
)


def build(cls, values: Mapping[str, Any]):
    """Builds a frozen config class from plain values, coercing where it is harmless.

    A number spelled as a string, a whole float for an int and a list for a tuple are
    taken; anything else is left to the class's own checks.

    Raises:
      ConfigError: an unknown key, with the known ones listed.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(
            f"unknown key {', '.join(map(repr, unknown))} in {cls.__name__}; "
            f"known keys: {', '.join(fields)}"
        )

    def coerce(name: str, value: Any) -> Any:
        kind = str(fields[name].type)
        if isinstance(value, str) and ("int" in kind or "float" in kind):
            try:
                value = float(value)
            except ValueError:
                return value
        if isinstance(value, float) and kind.startswith("int") and value.is_integer():
            return int(value)
        if isinstance(value, int) and kind.startswith("float") and not isinstance(value, bool):
            return float(value)
        return tuple(value) if _is_list(value) and "tuple" in kind else value

    return cls(**{name: coerce(name, value) for name, value in values.items()})
