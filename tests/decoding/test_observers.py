"""Observers of the round: they see every token once, and change none."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.sampling import processed_row
from support.decoders import prefill
from support.scripted import BUCKETS, Known, Script

from spec_jax import decoding, testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Observer
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.queue import DecodeQueue
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.overlap.overlap import Devices

V, NEW = 7, 12
PROMPTS = [[1, 2], [3], [4, 4, 0]]
SAMPLERS = [
    SamplerConfig(),
    SamplerConfig(temperature=0.8, seed=3, top_k=4),
    SamplerConfig(temperature=1.0, seed=4, presence_penalty=0.5, repetition_penalty=1.2),
]


def count_rounds(seen, of):
    """Rounds in which the row was active, their tokens, and the drafts that were offered."""
    is_active = of.n_emit > 0
    offered = jnp.where(is_active, of.proposal.n_draft, 0)
    return seen + jnp.stack([is_active.astype(jnp.int32), of.n_emit, offered], axis=1)


COUNTS = Observer("counts", lambda batch, slots: jnp.zeros((batch, 3), jnp.int32), count_rounds)


@pytest.fixture(scope="module")
def mocks():
    return testing.mock_model(V, 0), testing.mock_model(V, 1)


@pytest.fixture(scope="module")
def decoder(mocks):
    options = dict(adaptive_buckets=BUCKETS, rejection_sampling_strategy="residual")
    config = SpeculativeConfig("standalone", 3, is_adaptive=True, **options)
    return SpeculativeDecoder(*mocks, config, observers=[COUNTS])


def scripted(decoder):
    """The decoder with Ks of a script, 0 among them, and nothing learned."""
    decoder.adaptive.tuner, decoder.adaptive.costs = Script((3, 0, 1, 3)), Known()
    return decoder


def log_softmax(x):
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def teacher_forced(target, prompt, sampler, tokens):
    """Raw and processed log-probabilities, by the toy's table and an independent processor."""
    table, text = np.asarray(target.params["logits"], np.float64), [0, *prompt, *tokens]
    raw, processed = [], []
    for i, token in enumerate(tokens):
        a, b = text[len(prompt) - 1 + i : len(prompt) + 1 + i]
        logits = table[a * V + b]
        raw.append(log_softmax(logits)[token])
        x = processed_row(logits.astype(np.float32), sampler, prompt, list(tokens[:i]))[0]
        processed.append(log_softmax(np.asarray(x, np.float64))[token])
    return raw, processed


def assert_logprobs(target, rows, prompts=PROMPTS, samplers=SAMPLERS):
    for row, prompt, sampler in zip(rows, prompts, samplers, strict=True):
        assert len(row.logprobs.raw) == len(row.logprobs.processed) == len(row.tokens) > 0
        expected = teacher_forced(target, prompt, sampler, row.tokens)
        np.testing.assert_allclose(row.logprobs, expected, atol=2e-5)


@pytest.mark.representatives("fixed")
@pytest.mark.parametrize("k", ["fixed", "adaptive"])
def test_logprobs_equal_teacher_forcing_and_change_no_token(mocks, decoder, k):
    """In many chunks, also with adaptive K and rounds of K = 0; a stop token cuts a row."""
    options = {"sampler": SAMPLERS, "stop_tokens": [6]}
    config = SpeculativeConfig("standalone", 3, rejection_sampling_strategy="residual")
    fixed = SpeculativeDecoder(*mocks, config, observers=[COUNTS])
    make = lambda: fixed if k == "fixed" else scripted(decoder)
    plain = make().generate(PROMPTS, NEW, **options)
    rows = make().generate(PROMPTS, NEW, logprobs=True, rounds_per_sync=1, **options)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert plain[0].logprobs is None
    assert_logprobs(decoder.target, rows)
    for row in rows:  # the decoder's own observer saw every round, and no first token
        rounds, emitted, offered = row.seen["counts"]
        assert emitted == len(row.tokens) - 1 and rounds == row.stats.rounds
        assert offered == sum(row.stats.drafted_at)


def test_overlapped_greedy_rows_have_the_log_probabilities_of_their_distribution(mocks):
    """The greedy rule reads the argmax alone, the observer more."""
    sides = Devices(*jax.devices()[:2])
    config = SpeculativeConfig("standalone", 3, rejection_sampling_strategy="greedy")
    decoder = SpeculativeDecoder(*mocks, config, devices=sides)
    samplers = [SamplerConfig(), SamplerConfig(repetition_penalty=1.3)]
    rows = decoder.generate(PROMPTS[:2], NEW, sampler=samplers, logprobs=True)
    assert_logprobs(decoder.target, rows, PROMPTS[:2], samplers)


@pytest.mark.exhaustive
def test_a_refilled_row_begins_anew(decoder):
    prompts = [[i % V, (2 * i) % V] for i in range(5)]
    samplers = [dataclasses.replace(x, seed=0) for x in SAMPLERS]
    queue = DecodeQueue(
        scripted(decoder), prompts, batch=2, max_new_tokens=NEW, sampler=samplers, logprobs=True
    )
    for index, row in queue:
        sampler = samplers[index % len(samplers)]
        assert_logprobs(decoder.target, [row], [prompts[index]], [sampler])
        assert row.seen["counts"][1] == len(row.tokens) - 1


@pytest.mark.exhaustive
def test_rows_on_a_mesh_see_what_they_see_on_one_device(mocks):
    config = SpeculativeConfig("standalone", 3, rejection_sampling_strategy="residual")
    outputs = []
    for mesh in (None, "data:2"):
        decoder = SpeculativeDecoder(*mocks, config, observers=[COUNTS], mesh=mesh)
        outputs.append(decoder.generate(PROMPTS[:2], NEW, sampler=SAMPLERS[:2], logprobs=True))
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        np.testing.assert_array_equal(ours.seen["counts"], theirs.seen["counts"])


def start_rows(system, params, prompts, seeds):
    T = len(prompts[0])
    return prefill(system, params, prompts, NEW, SAMPLERS[1], seeds, slots=T + NEW + 4, width=T)


def test_a_replay_buffer_of_all_rows_is_filled_under_jit(mocks):
    """A stranger's observer: the last tokens of any row with the target's logits, in a ring."""
    size, (target, draft) = 64, mocks

    def init(batch, slots):
        del batch, slots
        return {"tokens": jnp.zeros(size, jnp.int32), "logits": jnp.zeros((size, V)), "n": 0}

    def update(seen, of):
        is_new = (of.columns >= 0).ravel()
        at = seen["n"] + jnp.cumsum(is_new) - 1
        at = jnp.where(is_new, at % size, size)
        rows = jnp.arange(len(of.n_emit))[:, None]
        logits = of.scores.logits[rows, of.nodes].reshape(-1, V)
        return {
            "tokens": seen["tokens"].at[at].set(of.verdict.tokens.ravel(), mode="drop"),
            "logits": seen["logits"].at[at].set(logits, mode="drop"),
            "n": seen["n"] + is_new.sum(dtype=jnp.int32),
        }

    ring = Observer("ring", init, update, is_by_row=False)
    config = SpeculativeConfig("standalone", 3, rejection_sampling_strategy="residual")
    decoder = SpeculativeDecoder(target, draft, config, target_sampler=SAMPLERS[1])
    system = decoder.system()._replace(observers=(ring,))

    @jax.jit
    def run(params, seeds, row):
        """Prefill, generate and a refilled row under one jit, with traced seeds and rows."""
        begin = lambda prompts, seeds: start_rows(system, params, prompts, seeds)
        go = lambda state: decoding.generate(
            params, state, jnp.zeros(2, jnp.int32), jnp.int32(99), system=system
        )[0]
        state = begin([[1, 2], [3, 1]], seeds[:2])
        state = decoding.insert(state, row, begin([[3, 1]], seeds[2:]), system=system)
        return go(state)

    state = run(decoder.params(), jnp.uint32([3, 4, 4]), jnp.int32(1))
    plain = decoder.generate([[1, 2], [3, 1]], NEW, seeds=[3, 4])
    for row, tokens in zip(plain, np.asarray(state.tokens)):
        assert tuple(tokens[2 : 2 + NEW]) == row.tokens
    seen = state.seen["ring"].value
    n, table = int(seen["n"]), np.asarray(target.params["logits"])
    assert n == 2 * (NEW - 1)
    rows = np.asarray(state.tokens)
    expected = sorted(
        (int(row[i]), *table[row[i - 2] * V + row[i - 1]].tolist())
        for row in rows
        for i in range(3, 2 + NEW)
    )
    found = zip(np.asarray(seen["tokens"][:n]).tolist(), np.asarray(seen["logits"][:n]).tolist())
    np.testing.assert_allclose(sorted((t, *x) for t, x in found), expected, rtol=1e-6)


OBSERVERS = [
    (print, "expected spec_jax.Observer"),
    (COUNTS._replace(name="logprobs"), "two observers are called 'logprobs'; rename one"),
    (COUNTS._replace(is_by_row=False), "watches all rows together"),
]


@pytest.mark.parametrize("observer, message", OBSERVERS)
def test_refuses_what_it_cannot_return(mocks, observer, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(*mocks, observers=[observer])


def test_an_observer_that_changes_its_carry_is_named(mocks):
    wrong = COUNTS._replace(name="mine", update=lambda seen, of: seen.astype(jnp.float32))
    decoder = SpeculativeDecoder(*mocks, observers=[wrong])
    with pytest.raises(ShapeError, match="observer 'mine' made state f32"):
        decoder.generate([1, 2], 4)
