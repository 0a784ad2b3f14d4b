"""Observers of the round: they see every token once, and change none."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import prefill
from support.scripted import BUCKETS, Known, Script

from spec_jax import decoding, testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Observer, Round, TargetScores, Verdict
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.queue import DecodeQueue
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.meshes import make_mesh
from spec_jax.overlap.overlap import Devices

V, NEW = 7, 12
PROMPTS = [[1, 2], [3], [4, 4, 0]]
SAMPLERS = [
    SamplerConfig(),
    SamplerConfig(temperature=0.8, seed=3, top_k=4),
    SamplerConfig(temperature=1.0, seed=4, presence_penalty=0.5, repetition_penalty=1.2),
]


def count_rounds(seen, of):
    """Rounds in which the row was active, their tokens, drafts offered, and drafts accepted."""
    is_active = of.n_emit > 0
    offered = jnp.where(is_active, of.proposal.n_draft, 0)
    accepted = of.is_accepted.sum(axis=1, dtype=jnp.int32)
    return seen + jnp.stack([is_active.astype(jnp.int32), of.n_emit, offered, accepted], axis=1)


KINDS = np.asarray([0, 1, 2, 0, 1, 2, 2])
BY_KIND = decoding.acceptance_by_kind(KINDS)
COUNTS = Observer("counts", lambda batch, slots: jnp.zeros((batch, 4), jnp.int32), count_rounds)


@pytest.fixture(scope="module")
def mocks():
    return testing.mock_model(V, 0), testing.mock_model(V, 1)


@pytest.fixture(scope="module")
def decoder(mocks):
    options = dict(adaptive_buckets=BUCKETS, rejection_sampling_strategy="residual")
    config = SpeculativeConfig("standalone", 3, is_adaptive=True, **options)
    return SpeculativeDecoder(*mocks, config, observers=[COUNTS, BY_KIND])


def scripted(decoder):
    """The decoder with Ks of a script, 0 among them, and nothing learned."""
    decoder.adaptive.tuner, decoder.adaptive.costs = Script((3, 0, 1, 3)), Known()
    return decoder


def assert_kinds(rows):
    """The counts of a row are those of its trace, which knows nothing of kinds."""
    for row in rows:
        expected = np.zeros((3, 2), int)  # reached, accepted
        for token, origin, rejected in zip(row.tokens, row.trace.kinds, row.trace.rejected):
            if origin == "accepted":
                expected[KINDS[token]] += 1
            elif origin == "corrected":
                expected[KINDS[rejected], 0] += 1
        np.testing.assert_array_equal(row.seen["acceptance_by_kind"], expected)
        sums = (sum(row.stats.reached_at), sum(row.stats.accepted_at))
        assert tuple(expected.sum(axis=0)) == sums
    assert any(row.stats.accepted and row.stats.rejected for row in rows)


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
        context = (sampler, prompt, list(tokens[:i]))
        dist = testing.reference_distribution(logits.astype(np.float32), *context)
        processed.append(np.log(dist[token]))
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
    fixed = SpeculativeDecoder(*mocks, config, observers=[COUNTS, BY_KIND])
    make = lambda: fixed if k == "fixed" else scripted(decoder)
    plain = make().generate(PROMPTS, NEW, **options)
    rows = make().generate(PROMPTS, NEW, logprobs=True, rounds_per_sync=1, **options)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert plain[0].logprobs is None
    assert_logprobs(decoder.target, rows)
    for row in rows:  # the decoder's own observer saw every round, and no first token
        rounds, emitted, offered, accepted = row.seen["counts"]
        assert emitted == len(row.tokens) - 1 and rounds == row.stats.rounds
        assert (offered, accepted) == (sum(row.stats.offered_at), row.stats.accepted)
    assert_kinds(rows)


@pytest.mark.exhaustive
def test_drafts_of_a_tree_are_counted_by_kind(mocks):
    """At each level the draft that was accepted, or the first that was not."""
    config = SpeculativeConfig(tree=(2, 2), rejection_sampling_strategy="residual")
    decoder = SpeculativeDecoder(*mocks, config, observers=[BY_KIND])
    assert_kinds(decoder.generate(PROMPTS, NEW, sampler=SAMPLERS))


def overlapped(mocks, strategy, sides=None, **options):
    config = SpeculativeConfig("standalone", 3, rejection_sampling_strategy=strategy)
    devices = Devices(*(sides or jax.devices()[:2]))
    return SpeculativeDecoder(*mocks, config, devices=devices, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["devices", "meshes"])
def test_overlapped_sides_have_the_same_observers(mocks, kind):
    """Those that read probabilities and counts, in chunks, with stop tokens."""
    sides = None
    if kind == "meshes":
        sides = [make_mesh("data:2", jax.devices()[i : i + 2]) for i in (0, 2)]
    observers = [BY_KIND, COUNTS]
    decoder = overlapped(mocks, "residual", sides, has_expected=True, observers=observers)
    samplers = [SAMPLERS[1], dataclasses.replace(SAMPLERS[1], seed=7)]
    options = {"sampler": samplers, "stop_tokens": [6], "rounds_per_sync": 2}
    rows = decoder.generate(PROMPTS[:2], 2 * NEW, logprobs=True, **options)
    assert_logprobs(decoder.target, rows, PROMPTS[:2], samplers)
    assert_kinds(rows)
    tables = [np.asarray(model.params["logits"]) for model in mocks]
    for row, prompt, sampler in zip(rows, PROMPTS, samplers):
        assert row.seen["counts"][1] == len(row.tokens) - 1
        known = np.flatnonzero(~np.isnan(row.trace.expected))
        assert len(known) == sum(row.stats.reached_at)
        for i in known:  # of the residual rule: what both distributions have in common
            a, b = [*prompt, *row.tokens][len(prompt) + i - 2 : len(prompt) + i]
            context = (sampler, prompt, list(row.tokens[:i]))
            p, q = (testing.reference_distribution(t[a * V + b], *context) for t in tables)
            assert row.trace.expected[i] == pytest.approx(np.minimum(p, q).sum(), abs=1e-5)


@pytest.mark.exhaustive
def test_a_refilled_row_begins_anew(decoder):
    prompts = [[i % V, (2 * i) % V] for i in range(5)]
    samplers = [dataclasses.replace(x, seed=0) for x in SAMPLERS]
    queue = DecodeQueue(
        scripted(decoder), prompts, batch=2, max_new_tokens=NEW, sampler=samplers, logprobs=True
    )
    rows = dict(queue)
    for index, row in rows.items():
        sampler = samplers[index % len(samplers)]
        assert_logprobs(decoder.target, [row], [prompts[index]], [sampler])
        assert row.seen["counts"][1] == len(row.tokens) - 1
    assert len(rows) == len(prompts)
    assert_kinds(rows.values())


def start_rows(system, params, prompts, seeds):
    T = len(prompts[0])
    return prefill(system, params, prompts, NEW, SAMPLERS[1], seeds, slots=T + NEW + 4, width=T)


@pytest.mark.exhaustive
def test_an_observer_of_all_rows_sees_every_token_once_under_jit(mocks):
    """With prefill and a refilled row under the same jit, of traced seeds and rows."""

    def count(seen, of):
        token = jnp.where(of.columns >= 0, of.verdict.tokens, V)
        return seen.at[token].add(1, mode="drop")

    zeros = lambda batch, slots: jnp.zeros(V, jnp.int32)
    config = SpeculativeConfig("standalone", 3, rejection_sampling_strategy="residual")
    decoder = SpeculativeDecoder(*mocks, config, target_sampler=SAMPLERS[1])
    observers = (Observer("tokens", zeros, count, is_by_row=False),)
    system = decoder.system()._replace(observers=observers)

    @jax.jit
    def run(params, seeds, row):
        state = start_rows(system, params, [[1, 2], [3, 1]], seeds[:2])
        other = start_rows(system, params, [[3, 1]], seeds[2:])
        state = decoding.insert(state, row, other, system=system)
        none = jnp.zeros(2, jnp.int32)
        return decoding.generate(params, state, none, jnp.int32(99), system=system)[0]

    state = run(decoder.params(), jnp.uint32([3, 4, 4]), jnp.int32(1))
    plain = decoder.generate([[1, 2], [3, 1]], NEW, seeds=[3, 4])
    tokens = np.asarray(state.tokens)[:, 2 : 2 + NEW]
    np.testing.assert_array_equal(tokens, [row.tokens for row in plain])
    expected = np.bincount(tokens[:, 1:].ravel(), minlength=V)
    np.testing.assert_array_equal(state.seen["tokens"].value, expected)


def mine(**changes):
    return COUNTS._replace(**{"name": "mine", **changes})


REFUSED = [
    ([print], ConfigError, "expected spec_jax.Observer"),
    ([mine(name="logprobs")], ConfigError, r"reserved .*generate\(logprobs=True\)"),
    ([mine(name="expected")], ConfigError, "'expected' is reserved .*has_expected=True adds"),
    ([mine(is_by_row=False)], ConfigError, "watches all rows together"),
    ([COUNTS, COUNTS], ConfigError, "two observers are called 'counts'; rename one"),
    ([mine(init=lambda batch, slots: jnp.zeros(3))], ShapeError, r"state f32\[3\].*rows first"),
    ([mine(init=lambda batch, slots: {"n": 0})], ShapeError, r"init .*'mine' made state\['n'\] 0"),
    (
        [mine(init=lambda batch, slots: [jnp.zeros((batch, 2)), jnp.zeros((slots, batch))])],
        ShapeError,
        r"init of observer 'mine' made state\[1\] f32.*; expected the rows first",
    ),
    (
        [mine(update=lambda seen, of: seen.astype(jnp.float32))],
        ShapeError,
        "observer 'mine' made state f32",
    ),
    ([decoding.acceptance_by_kind([0, 1])], ConfigError, "kinds has 2 entries; the target has 7"),
]


@pytest.mark.parametrize("observers, error, words", REFUSED, ids=[row[-1] for row in REFUSED])
def test_an_observer_that_does_not_fit_is_refused_by_name(mocks, observers, error, words):
    with pytest.raises(error, match=words):
        SpeculativeDecoder(*mocks, observers=observers).generate([[1, 2], [3]], 4)


def draft_mass(seen, of):
    """The draft's probability of each draft, where it is known."""
    probs = of.proposal.probs
    if probs is None:
        return seen.at[:, 1].add(of.n_emit)
    own = jnp.take_along_axis(probs, of.proposal.tokens[:, :, None], axis=2)[:, :, 0]
    return seen.at[:, 0].add(jnp.where(of.proposal.is_offered, own, 0).sum(axis=1))


def test_probabilities_are_absent_where_nothing_is_drawn(mocks):
    """In plain decoding, and of copied drafts; an observer that expects None there is served."""
    zeros = lambda batch, slots: jnp.zeros((batch, 2))
    observer = Observer("mass", zeros, draft_mass, needs_probs=True)
    careless = observer._replace(update=lambda seen, of: seen + of.proposal.probs[:, 0, :2])
    for config in (None, SpeculativeConfig("ngram", 3)):
        decoder = SpeculativeDecoder(mocks[0], None, config, observers=[observer])
        row = decoder.generate([1, 2, 1, 2], 6, logprobs=True)
        assert row.seen["mass"].tolist() == [0, 5] and len(row.logprobs.raw) == 6
        decoder = SpeculativeDecoder(mocks[0], None, config, observers=[careless])
        with pytest.raises(TypeError, match="NoneType") as raised:
            decoder.generate([1, 2, 1, 2], 6)
        notes = " ".join(raised.value.__notes__)
        assert "None in this round: proposal.probs" in notes and "observer 'mass'" in notes


def test_a_drafter_that_leaves_out_probabilities_is_named(mocks):
    silent = testing.scripted_drafter(lambda tokens, length, K: jnp.zeros((1, K), jnp.int32))
    config = SpeculativeConfig(num_speculative_tokens=2, rejection_sampling_strategy="match")
    options = {
        "drafter": silent._replace(is_sampled=True),
        "observers": [COUNTS._replace(name="mass", needs_probs=True)],
    }
    decoder = SpeculativeDecoder(mocks[0], config=config, **options)
    with pytest.raises(ConfigError, match="observer 'mass' needs the drafts' probs, which drafter"):
        decoder.generate([1, 2], 4)


def test_kinds_that_do_not_fit_are_refused(mocks):
    for kinds in ([[0, 1]], [0, -1], [0.5], [], "ab"):
        with pytest.raises(ConfigError, match="expected an integer from 0 to 1023 for each id"):
            decoding.acceptance_by_kind(kinds)


def test_log_probabilities_of_a_tree_are_those_of_the_accepted_path():
    """Of a round that accepts node 2 and its child 4; the token after them is cut."""
    logits = np.random.default_rng(0).standard_normal((1, 5, V)).astype(np.float32)
    tokens, path = jnp.asarray([[3, 5, 1]]), jnp.asarray([[0, 2, 4]])
    scores = TargetScores(jnp.asarray(logits), jnp.asarray(2 * logits))
    verdict = Verdict(jnp.asarray([2]), tokens, None, None, path)
    of = Round(None, scores, verdict, jnp.asarray([4]), jnp.asarray([2]))
    seen = decoding.LOGPROBS.update(decoding.LOGPROBS.init(1, 8), of)
    for found, x in ((seen.raw, logits), (seen.processed, 2 * logits)):
        expected = np.zeros(8)
        expected[4:6] = [log_softmax(x[0, node])[token] for node, token in ((0, 3), (2, 5))]
        np.testing.assert_allclose(found[0], expected, atol=1e-5)


def test_a_first_token_that_is_not_emitted_has_no_log_probability(mocks):
    """A row whose logits are NaN ends before its first token; the other goes on."""
    table = mocks[0].params["logits"].at[1 * V + 2].set(jnp.nan)
    target = dataclasses.replace(mocks[0], params={"logits": table})
    decoder = SpeculativeDecoder(target, mocks[1], target_sampler=SAMPLERS[1])
    system = decoder.system()._replace(observers=(decoding.LOGPROBS,))
    state = start_rows(system, decoder.params(), [[1, 2], [3, 1]], [3, 4])
    seen = state.seen["logprobs"]
    assert not np.asarray(seen.raw[0]).any() and not np.asarray(seen.processed[0]).any()
    assert float(seen.raw[1, 2]) < 0 and not np.isnan(seen.raw).any()
