"""The rules by name.

Rules are written for one row (``chain``, ``tree``) and mapped over the batch here. A
custom rule needs no entry here: pass its ``Rule`` record to the decoder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from spec_jax.config import SpeculativeConfig, TypicalConfig
from spec_jax.contracts import Rule, Verdict
from spec_jax.errors import ConfigError
from spec_jax.rules import chain, tree


def batched(accept_row: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """Maps a rule for one row over the batch.

    Args:
      accept_row: ``(scores, proposal, noise) -> Verdict``, arrays without the dimension B.
    """
    return jax.vmap(accept_row)


def chain_or_tree(
    on_chain: Callable[..., Verdict], on_tree: Callable[..., Verdict]
) -> Callable[..., Verdict]:
    """Joins a rule for chains and one for trees, each written for one row, over the batch.

    Args:
      on_chain: serves proposals without ``parents``.
      on_tree: serves the others.
    """
    chains = batched(on_chain)
    branched = batched(on_tree)

    @functools.wraps(on_chain)
    def accept(target, proposal, noise):
        is_chain = proposal.parents is None
        return (chains if is_chain else branched)(target, proposal, noise)

    return accept


MATCH = Rule(
    "match",
    chain_or_tree(chain.match, tree.match),
    is_lossless=True,
    expected_acceptance=chain.expected_match,
    is_coupled=True,
    has_trees=True,
)
GREEDY = Rule(
    "greedy",
    chain_or_tree(chain.greedy, tree.greedy),
    is_lossless=True,
    expected_acceptance=chain.expected_greedy,
    is_greedy=True,
    has_trees=True,
)
_FIXED = (
    GREEDY,
    Rule(
        "residual",
        chain_or_tree(chain.residual, tree.residual),
        is_lossless=True,
        expected_acceptance=chain.expected_residual,
        needs_probs=True,
        has_trees=True,
    ),
    Rule("block", batched(chain.block), is_lossless=True, needs_probs=True, is_joint=True),
    Rule(
        "traversal",
        chain_or_tree(chain.block, tree.traversal),
        is_lossless=True,
        needs_probs=True,
        is_joint=True,
        has_trees=True,
    ),
    MATCH,
    Rule("logit-comparison", batched(chain.logit_comparison), is_lossless=False, needs_logits=True),
)
_BY_NAME = {rule.name: rule for rule in _FIXED}


def make_rule(config: SpeculativeConfig) -> Rule:
    """Returns the rule that a resolved config names.

    Configs that are equal in all that a rule depends on return the same object, and so share
    compiled programs.

    Raises:
      ConfigError: the strategy is None; ``SpeculativeConfig.resolve`` fills it in.
    """
    strategy = config.rejection_sampling_strategy
    if strategy is None:
        raise ConfigError("the config has no rejection_sampling_strategy; resolve() fills it in")
    if strategy == "typical-acceptance":
        return _typical_rule(config.typical)
    if strategy == "synthetic":
        return _synthetic_rule(config.synthetic.rates(config.num_speculative_tokens))
    if strategy not in _BY_NAME:  # of the config of a decoder whose rule was its own
        raise ConfigError(f"unknown rule {strategy!r}; pass your own as rule=...")
    return _BY_NAME[strategy]


@functools.cache
def _typical_rule(config: TypicalConfig) -> Rule:
    args = (config.epsilon, config.delta)
    return Rule(
        "typical-acceptance",
        batched(chain.typical_acceptance(*args)),
        is_lossless=False,
        expected_acceptance=chain.expected_typical(*args),
    )


@functools.cache
def _synthetic_rule(conditional_rates: tuple[float, ...]) -> Rule:
    return Rule("synthetic", batched(chain.accept_at(conditional_rates)), is_lossless=False)
