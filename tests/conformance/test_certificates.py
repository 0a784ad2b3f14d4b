"""Every kind of head leaves the target's distribution as it is, in chains and in trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.rounds import prove_rounds, run_of
from support import toys

from spec_jax.config import SamplerConfig
from spec_jax.drafters.common.chain import with_confidence_stop

SHAPES = {"chain": {"num_speculative_tokens": 2}, "tree": {"tree": ((0,), (1,), (0, 0))}}
# A rule and a kind know nothing of each other, so half of the kinds have one rule, half another.
RESIDUAL = ("eagle1", "eagle3", "dspark", "dflash2")
CHAINS = [f"{x}-chain-{'residual' if x in RESIDUAL else 'block'}" for x in toys.WAYS]
TREES = [f"{x}-tree-{'traversal' if x in RESIDUAL else 'residual'}" for x in toys.WAYS]


@pytest.mark.representatives(
    "eagle3-chain-residual", "dflash-chain-block", "treeflash-tree-residual", "peagle-chain-block"
)
@pytest.mark.parametrize("case", [*CHAINS, *TREES])
def test_a_round_is_proved(case):
    name, shape, rule = case.split("-")
    prove_rounds(*toys.maker(name, SHAPES[shape]), rule)


@pytest.mark.representatives("block")
@pytest.mark.parametrize("rule", ["residual", "block"])
def test_rounds_of_the_likeliest_drafts_are_proved(rule):
    """DFlash's default: the draft is cold, the target warm, filtered or penalised."""
    make, params = toys.maker("dflash", SHAPES["chain"])
    offered = prove_rounds(make, params, rule, draft=SamplerConfig(temperature=0.0))
    assert (offered == 2).all()


@pytest.mark.representatives("block")
@pytest.mark.parametrize("rule", ["residual", "block"])
def test_a_confidence_in_a_draft_may_decide_on_it_before_it_is_drawn(rule):
    make, params = toys.maker("dspark", SHAPES["chain"])

    def of_the_token_before(target):
        """It depends on that token more than on the states."""
        made, V = params(target), target.model.vocab_size
        weight = jax.random.normal(jax.random.key(1), made["head"]["confidence"].shape)
        weight = weight * jnp.where(jnp.arange(len(weight)) < V, 0.3, 3.0)[:, None]
        return {**made, "head": {**made["head"], "confidence": weight}}

    stopping = lambda target: with_confidence_stop(make(target), 0.4)
    assert set(np.unique(prove_rounds(stopping, of_the_token_before, rule))) == {0, 1, 2}


@pytest.mark.exhaustive
@pytest.mark.landing
def test_a_kind_is_certified():
    """Under all settings, with fewer drafts too, and by the loop.

    Under ``match`` drafts share the target's noise: see ``test_drafters.py``.
    """
    make, params = toys.maker("peagle", SHAPES["tree"])
    run = run_of("traversal", make, None, params=params)
    run._enumerate(run.main, run.main.drafter.shape.tree.num_nodes)
    run._loop(run.main)
    assert run.certificate(None).max_error <= 1e-6
