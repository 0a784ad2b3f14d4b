"""The acceptance rules: arrays in, a ``Verdict`` out."""

from spec_jax.rules.registry import GREEDY, MATCH, batched, chain_or_tree, make_rule

__all__ = ["GREEDY", "MATCH", "batched", "chain_or_tree", "make_rule"]
