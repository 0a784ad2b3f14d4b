"""The rule library: arrays in, a ``Verdict`` out.

Rules are written for one row (``chain``, ``tree``) and mapped over the batch here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from spec_jax.config import SpeculativeConfig
from spec_jax.contracts import Rule, Verdict
from spec_jax.errors import ConfigError
from spec_jax.rules import chain, tree


def batched(accept_row: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """Maps a rule for one row over the batch; every field it takes begins with B."""

    @functools.wraps(accept_row)
    def accept(target, proposal, noise):
        return jax.vmap(accept_row)(target, proposal, noise)

    return accept


def by_shape(on_chain: Callable[..., Verdict], on_tree: Callable[..., Verdict]):
    """One rule of a chain and of a tree, each for one row, over the batch."""
    chains, branched = batched(on_chain), batched(on_tree)

    @functools.wraps(on_chain)
    def accept(target, proposal, noise):
        is_chain = proposal.parents is None
        return (chains if is_chain else branched)(target, proposal, noise)

    return accept


def make_rule(config: SpeculativeConfig) -> Rule:
    """The rule that a resolved config names.

    Configs that are equal in all that a rule depends on give the same object, and so share
    compiled programs.

    Raises:
      ConfigError: the strategy is None; ``SpeculativeConfig.resolve`` fills it in.
    """
    parts = ("num_", "rejection_", "synthetic_", "typical_")
    names = [field.name for field in dataclasses.fields(config) if field.name.startswith(parts)]
    return _rule_of(SpeculativeConfig(**{name: getattr(config, name) for name in names}))


@functools.cache
def _rule_of(config: SpeculativeConfig) -> Rule:
    K = config.num_speculative_tokens
    match config.rejection_sampling_strategy:
        case "greedy":
            return _GREEDY
        case "residual":
            return _RESIDUAL
        case "block":
            return _BLOCK
        case "traversal":
            return _TRAVERSAL
        case "match":
            return MATCH
        case "logit-comparison":
            return _LOGIT_COMPARISON
        case "typical-acceptance":
            args = (config.typical_epsilon, config.typical_delta)
            return Rule(
                "typical-acceptance", batched(chain.typical_acceptance(*args)),
                is_lossless=False, expected_acceptance=chain.expected_typical(*args),
            )
        case "synthetic":
            rates = synthetic_rates(config, K)
            return Rule("synthetic", batched(chain.synthetic(rates)), is_lossless=False)
    raise ConfigError("the config has no rejection_sampling_strategy; resolve() fills it in")


_GREEDY = Rule(
    "greedy", by_shape(chain.greedy, tree.greedy), is_lossless=True,
    expected_acceptance=chain.expected_greedy, is_greedy=True, has_trees=True,
)
_RESIDUAL = Rule(
    "residual", by_shape(chain.residual, tree.residual), is_lossless=True,
    expected_acceptance=chain.expected_residual, needs_probs=True, has_trees=True,
)
_BLOCK = Rule("block", batched(chain.block), is_lossless=True, needs_probs=True, is_joint=True)
_TRAVERSAL = Rule(
    "traversal", by_shape(chain.block, tree.traversal), is_lossless=True, needs_probs=True,
    is_joint=True, has_trees=True,
)
_LOGIT_COMPARISON = Rule(
    "logit-comparison", batched(chain.logit_comparison), is_lossless=False, needs_logits=True
)
MATCH = Rule(
    "match", by_shape(chain.match, tree.match), is_lossless=True,
    expected_acceptance=chain.expected_match, is_coupled=True, has_trees=True,
)


def synthetic_rates(config: SpeculativeConfig, num_draft: int) -> tuple[float, ...]:
    """The conditional acceptance rate of each position for any way of stating it.

    A mean rate r solves ``(1/K) sum_{i=1..K} b**i = r`` for b; a mean length counts the
    target's own token and fills positions from the front.
    """
    K = num_draft
    if config.synthetic_conditional_rates is not None:
        return config.synthetic_conditional_rates[:K]
    if config.synthetic_acceptance_rates is not None:
        rates = config.synthetic_acceptance_rates[:K]
        before = (1.0, *rates)
        return tuple(r / b if b > 0 else 0.0 for r, b in zip(rates, before))
    if config.synthetic_mean_length is not None:
        drafts = config.synthetic_mean_length - 1
        return tuple(min(max(drafts - i, 0.0), 1.0) for i in range(K))
    rate = config.synthetic_acceptance_rate
    if rate in (0, 1):
        return (float(rate),) * K
    low, high = 0.0, 1.0
    for _ in range(60):
        b = (low + high) / 2
        mean = sum(b**i for i in range(1, K + 1)) / K
        low, high = (b, high) if mean < rate else (low, b)
    return ((low + high) / 2,) * K
