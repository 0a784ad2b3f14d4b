"""Overlapped drafting: what it refuses, and what it does with a single device."""

from __future__ import annotations

import jax
import pytest

from spec_jax import decoding, testing
from spec_jax.config import SpeculativeConfig
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.ngram import ngram
from spec_jax.drafters.standalone.model import StandaloneState, standalone
from spec_jax.drafters.suffix import suffix
from spec_jax.errors import ConfigError
from spec_jax.overlap import overlap
from spec_jax.rules import MATCH, make_rule
from spec_jax.tree import Tree

TOY = testing.toy_model(4)


def test_one_device_falls_back_to_the_usual_loop_and_says_so():
    devices = overlap.Devices(jax.devices()[0], jax.devices()[0])
    with pytest.warns(UserWarning, match="share .*the usual loop decodes"):
        assert overlap.make_loop(devices) is decoding
    with pytest.raises(ConfigError, match="share"):
        overlap.Overlap(devices)


def test_what_are_no_devices_is_named():
    with pytest.raises(ConfigError, match="the target's devices are 'cpu:0'"):
        overlap.Devices(jax.devices()[0], "cpu:0")
    with pytest.raises(ConfigError, match="expected overlap.Devices"):
        overlap.make_loop((jax.devices()[0], jax.devices()[0]))
    with pytest.raises(ConfigError, match="the draft keeps a dict, which cannot forget"):
        standalone(TOY).rewind(StandaloneState({}), 1)


@pytest.mark.parametrize(
    ("drafter", "strategy", "K", "message"),
    [
        (standalone(TOY), "block", 3, "'block' looks at drafts past the first rejection"),
        (standalone(TOY, Tree.branching((2, 1))), "match", 4, "drafts trees"),
        (standalone(TOY)._replace(taps=(1,)), "match", 3, "reads the target's states"),
        (standalone(TOY)._replace(rewind=None), "match", 3, "has no `rewind`"),
        (NO_DRAFT, "match", 0, "drafts nothing"),
    ],
    ids=["joint rule", "tree", "head", "no rewind", "plain"],
)
def test_what_cannot_run_ahead_is_refused(drafter, strategy, K, message):
    rule = make_rule(SpeculativeConfig(rejection_sampling_strategy=strategy))
    with pytest.raises(ConfigError, match=message):
        overlap.check(decoding.System(TOY, drafter, rule, K))


def test_chains_of_copies_and_of_a_small_model_can_run_ahead():
    for drafter in (standalone(TOY), ngram(), suffix(4)):
        overlap.check(decoding.System(TOY, drafter, MATCH, 3))
