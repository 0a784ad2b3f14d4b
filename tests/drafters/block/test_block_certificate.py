"""Block drafters leave the target's distribution as it is, whatever the step and the rule."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from conformance.rounds import prove_rounds
from support.block_drafts import toy_maker, toy_params

import spec_jax
from spec_jax.config import SamplerConfig
from spec_jax.drafters.common.chain import with_confidence_stop

RULES = ("residual", "block")


@pytest.mark.representatives("block")
@pytest.mark.parametrize("rule", RULES)
def test_rounds_of_the_likeliest_drafts_are_proved(rule):
    """DFlash's default: the draft is cold, the target warm, filtered or penalised."""
    offered = prove_rounds(
        toy_maker("dflash"), toy_params("dflash"), rule, draft=SamplerConfig(temperature=0.0)
    )
    assert (offered == 2).all()


def stopping(make, threshold=0.4):
    return lambda target: with_confidence_stop(make(target), threshold)


@pytest.mark.representatives("block")
@pytest.mark.parametrize("rule", RULES)
def test_a_confidence_in_a_draft_may_decide_on_it_before_it_is_drawn(rule):
    offered = prove_rounds(stopping(toy_maker("dspark")), sure_after_some_drafts, rule)
    assert set(np.unique(offered)) == {0, 1, 2}


def sure_after_some_drafts(target):
    """A DSpark head whose confidence depends on the token before more than on the states."""
    made = toy_params("dspark")(target)
    weight = made["head"]["confidence"] * jnp.asarray([0.1, 0.1, 0.1, 4, 4])[:, None]
    return {**made, "head": {**made["head"], "confidence": weight}}


@pytest.mark.exhaustive
@pytest.mark.landing("dspark-match")
@pytest.mark.parametrize(("kind", "rule"), [("dspark", "match"), ("dflash2", "block")])
def test_its_distribution_is_certified(kind, rule):
    """By the loop too, with noise of its own, under all settings, and of fewer drafts than K; under
    ``match`` drafts share the target's noise."""
    make, params = toy_maker(kind), toy_params(kind)
    certificate = spec_jax.certify(rule, make, params=params, trials=500)
    assert certificate.failure is None and certificate.max_error <= 1e-6
