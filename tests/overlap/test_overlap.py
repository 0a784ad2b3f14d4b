"""Overlapped drafting: what it refuses, and what it does with a single device."""

from __future__ import annotations

import jax
import pytest

from spec_jax import DecodeQueue, SpeculativeDecoder, decoding, testing
from spec_jax.config import SpeculativeConfig
from spec_jax.contracts import DraftShape, Sync
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.ngram import ngram
from spec_jax.drafters.standalone.model import StandaloneState, standalone
from spec_jax.drafters.suffix import suffix
from spec_jax.errors import ConfigError
from spec_jax.overlap import overlap
from spec_jax.rules import make_rule
from spec_jax.tree import Tree

TOY, MOCKS = testing.toy_model(4), (testing.mock_model(4), testing.mock_model(4, 1))
FIRST, SECOND = jax.devices()[:2]
SHARED = overlap.Devices(FIRST, FIRST)
ADAPTIVE = SpeculativeConfig("standalone", 3, is_adaptive=True)


def check(drafter, strategy="match", num_draft=3):
    rule = make_rule(SpeculativeConfig(rejection_sampling_strategy=strategy))
    overlap.check(decoding.System(TOY, drafter, rule, num_draft))


def apart(*args):
    return SpeculativeDecoder(*args, devices=overlap.Devices(draft=SECOND, target=FIRST))


REFUSED = [
    (lambda: check(standalone(TOY), "block"), "'block' looks at drafts past the first rejection"),
    (lambda: check(standalone(TOY, Tree.branching((2, 1))), num_draft=4), "drafts trees"),
    (lambda: check(standalone(TOY)._replace(shape=DraftShape((1,)))), "reads the target's states"),
    (lambda: check(standalone(TOY)._replace(sync=Sync())), "has no `rewind`"),
    (lambda: check(NO_DRAFT, num_draft=0), "drafts nothing"),
    (lambda: check(suffix(4), "residual"), "drafts from earlier outputs, which overlapped draft"),
    (
        lambda: standalone(TOY).sync.rewind(StandaloneState({}), 1),
        "keeps a dict, which cannot forget",
    ),
    (lambda: apart(MOCKS[0]), "drafts nothing"),
    (lambda: apart(*MOCKS, ADAPTIVE), "an overlapped draft needs a fixed K"),
    (lambda: DecodeQueue(apart(*MOCKS), [[1]], batch=1), "a queue refills rows"),
    (lambda: overlap.Overlap(SHARED), "share"),
    (lambda: overlap.make_loop((FIRST, SECOND)), "expected overlap.Devices"),
    (lambda: overlap.Devices(FIRST, "cpu:0"), "the target's devices are 'cpu:0'"),
    (
        lambda: overlap.Devices(jax.sharding.Mesh([FIRST], ("x",)), SECOND),
        "the mesh has axes 'x'; expected data and tensor",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_run_ahead_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_chains_of_copies_and_of_a_small_model_can_run_ahead():
    for drafter in (standalone(TOY), ngram(), suffix(4)):
        check(drafter)


def test_one_device_falls_back_to_the_usual_loop_and_says_so():
    with pytest.warns(UserWarning, match="share .*the usual loop decodes"):
        assert overlap.make_loop(SHARED) is decoding
