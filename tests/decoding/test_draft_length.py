"""Drafters with fewer positions than their target draft as far as they can, and no further."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import markov
from support.decoders import plain_tokens
from support.markov import DECODERS, TARGET, K

import spec_jax
from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, sharding
from spec_jax.engine.queue import DecodeQueue
from spec_jax.errors import ConfigError
from spec_jax.loading import load_draft, load_model
from spec_jax.overlap.overlap import Devices
from spec_jax.testing.oracles import toy_logits

LONGEST, NEW = 14, 12
PROMPTS = [[0, 1], [3, 2, 0, 1, 1, 2], [1] * 10, [2, 3] * 5, [0, 2, 1] * 6]
HOT = [SamplerConfig(temperature=t, seed=i) for i, t in enumerate((1, 0, 1, 0.7, 1))]
COLD = [SamplerConfig()] * len(PROMPTS)


def shortened(drafter, longest=LONGEST):
    """The drafter with a maximum length; whatever would pass it is nonsense, and says so."""

    def propose(params, state, context, num_draft):
        proposal, state = drafter.propose(params, state, context, num_draft)
        if num_draft == 0:
            return proposal, state
        is_past = context.length + 1 + proposal.depth > longest

        def bad(x, value):
            at = is_past.reshape(-1, *[1] * (x.ndim - 1)) if x is not None else None
            return None if x is None else jnp.where(at, jnp.asarray(value, x.dtype), x)

        sound = jnp.ones_like(is_past) if proposal.is_sound is None else proposal.is_sound
        return proposal.replace(
            tokens=bad(proposal.tokens, -7),
            n_draft=bad(proposal.n_draft, 99),
            probs=bad(proposal.probs, np.nan),
            logits=bad(proposal.logits, np.nan),
            parents=bad(proposal.parents, 50),
            confidence=bad(proposal.confidence, np.nan),
            is_sound=sound & ~is_past,
        ), state

    return drafter._replace(propose=propose, max_length=longest)


def short(decoder, longest=LONGEST):
    return decoder.with_parts(drafter=shortened(decoder.drafter, longest))


def check_offers(decoder, prompts, rows):
    """No draft stands past the maximum length; rounds without drafts for that reason count."""
    depth = decoder.system(COLD).depth
    for prompt, row in zip(prompts, rows, strict=True):
        begins = {len(prompt) + i: n for i, n in enumerate(row.trace.offered) if n >= 0}
        assert all(n == 0 or begin + n <= LONGEST for begin, n in begins.items())
        undrafted = [begin for begin, n in begins.items() if n == 0 and begin + depth > LONGEST]
        assert row.stats.undrafted_rounds == len(undrafted)
        assert row.finish_reason == "length"
    counts = [(row.stats.drafted, row.stats.undrafted_rounds) for row in rows]
    assert min(map(sum, zip(*counts))) > 0


def test_a_row_is_drafted_up_to_its_drafters_length_and_then_decoded_plainly(caplog):
    """Prompts before and past it; the target drafts for itself, so what is offered is accepted."""
    config = SpeculativeConfig(num_speculative_tokens=K)
    decoder = short(SpeculativeDecoder(TARGET, TARGET, config))
    sharding.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        rows = decoder.generate(PROMPTS, NEW)
        decoder.generate(PROMPTS, NEW)
    logits_of = functools.partial(toy_logits, TARGET.params)
    assert [list(row.tokens) for row in rows] == [plain_tokens(logits_of, x, NEW) for x in PROMPTS]
    check_offers(decoder, PROMPTS, rows)
    for prompt, row in zip(PROMPTS, rows):
        begins = {len(prompt) + i: n for i, n in enumerate(row.trace.offered) if n >= 0}
        assert all(n == (K if begin + K <= LONGEST else 0) for begin, n in begins.items())
    assert decoder.stats.acceptance_rate == 1
    (warning,) = [x for x in caplog.messages if "without drafts" in x]
    assert f"is {LONGEST}: rows are decoded without drafts after {LONGEST - K} tokens" in warning


def overlapped(rule):
    config = SpeculativeConfig(num_speculative_tokens=K, rejection_sampling_strategy=rule)
    return SpeculativeDecoder(TARGET, markov.DRAFT, config, devices=Devices(*jax.devices()[:2]))


KINDS = DECODERS | {"overlapped": overlapped}
NAMES = ("host", "adaptive", "chain", "tree", "dynamic-tree", "overlapped")


@functools.cache
def plain_rows(is_hot):
    rows = SpeculativeDecoder(TARGET).generate(PROMPTS, NEW, sampler=HOT if is_hot else COLD)
    return [row.tokens for row in rows]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_rows_longer_than_their_drafter_are_those_of_plain_decoding(name):
    decoder = short(KINDS[name]("match"))
    rows = decoder.generate(PROMPTS, NEW, sampler=HOT)
    assert [row.tokens for row in rows] == plain_rows(True)
    check_offers(decoder, PROMPTS, rows)
    if name == "chain":
        queue = dict(DecodeQueue(decoder, PROMPTS, batch=2, max_new_tokens=NEW, sampler=HOT))
        assert [queue[i].tokens for i in range(len(PROMPTS))] == plain_rows(True)
        assert [queue[i].stats.undrafted_rounds for i in queue] == [
            rows[i].stats.undrafted_rounds for i in queue
        ]
    if name == "adaptive":  # once no row has room, K is 0 and nothing is learned
        before = decoder.adaptive.tuner
        late = decoder.generate([1, 2, 3] * 6, NEW)
        assert set(late.trace.offered) == {-1, 0}
        after = decoder.adaptive.tuner
        assert after.settled == 0 and after.rates == pytest.approx(before.rates)


def test_another_maximum_length_may_be_stated_of_a_model_and_of_a_head():
    target = load_model("zoo/target")
    for name in ("zoo/draft", "zoo/eagle1"):
        for longest in (None, 7):
            draft = load_draft(name, target, max_length=longest)
            drafter = SpeculativeDecoder(target, draft).system().drafter
            assert drafter.max_length == draft.max_length == longest or longest is None
            assert draft.on_mesh("data:1").max_length == draft.max_length
    assert draft.config.max_length > 7  # as its checkpoint states
    with pytest.raises(ConfigError, match="max_length is 0; expected an integer of 1 or more"):
        load_draft("zoo/eagle1", target, max_length=0)


@pytest.mark.exhaustive
def test_a_comparison_says_where_a_draft_was_too_short():
    """Its prompts are not cut to what the draft holds."""
    draft = dataclasses.replace(markov.DRAFT, model=markov.DRAFT.model._replace(max_length=LONGEST))
    found = spec_jax.compare(
        TARGET, {"short": draft}, PROMPTS, ks=2, max_new_tokens=NEW, repeats=1, has_costs=False
    )
    plain, cell = found.results
    assert cell.stats.undrafted_rounds > plain.stats.undrafted_rounds == 0
    (note,) = found.notes
    rounds = f"{cell.stats.undrafted_rounds} of {cell.stats.rounds} rounds"
    assert f"{rounds} were without drafts, past the draft's maximum length" in note
