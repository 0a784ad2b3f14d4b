"""The acceptance rules: arrays in, a ``Verdict`` out."""

from spec_jax.rules.registry import GREEDY, MATCH, batched, chain_or_tree, make_rule
from spec_jax.rules.synthetic import synthetic_rates

__all__ = ["GREEDY", "MATCH", "batched", "chain_or_tree", "make_rule", "synthetic_rates"]
