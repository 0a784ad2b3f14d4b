"""Overlapped drafting on devices of its own: tokens, counts, and what runs where."""

from __future__ import annotations

import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import MIXED_SAMPLERS, plain_tokens
from support.runs import check_run_files
from support.tiny_models import MISTRAL, loaded

from experiments import overlap as experiment
from spec_jax import decoding, testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.decoding import Finish, Kind
from spec_jax.drafters.standalone.model import standalone
from spec_jax.engine import stats
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import make_request
from spec_jax.errors import ConfigError
from spec_jax.overlap import overlap
from spec_jax.rules import MATCH
from spec_jax.sampling import make_sampler
from spec_jax.testing import mocks
from spec_jax.testing.oracles import toy_logits

V, K, NEW = 11, 3, 16
MODEL = testing.toy_model(V)
PARAMS = {"target": testing.toy_params(V, 0), "draft": testing.toy_params(V, 0)}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 5], [9], [3, 1]]
# In the last row three tokens take turns, so what is ahead says which one is next.
IN_TURNS = dict(frequency_penalty=5.0, logit_bias=((1, 30.0), (2, 30.0), (5, 30.0)))
SAMPLERS = [*MIXED_SAMPLERS, SamplerConfig(temperature=1.3, seed=14, **IN_TURNS)]
LENGTHS = np.asarray([len(p) for p in PROMPTS], np.int32)


@functools.cache
def devices():
    target, draft = jax.devices()[:2]
    return overlap.Devices(draft=draft, target=target)


def erring(rewind=None):
    """The target as its own draft, with the match rule's noise: right but at each fifth position.

    By where it stands it offers no draft, two or K of them.
    """
    honest = standalone(MODEL)

    def propose(params, state, context, num_draft):
        proposal, state = honest.propose(params, state, context, num_draft)
        position = context.length[:, None] + 1 + jnp.arange(num_draft)
        wrong = (proposal.tokens + 1) % V
        return proposal.replace(tokens=jnp.where(position % 5 == 0, wrong, proposal.tokens)), state

    sync = honest.sync._replace(rewind=rewind or honest.sync.rewind)
    drafter = honest._replace(name="erring", propose=propose, sync=sync)
    few = lambda length: jnp.where(length % 4 == 1, 2, K)
    return testing.ragged(drafter, lambda length: jnp.where(length % 7 == 3, 0, few(length)))


ERRING = erring()


def run(loop, drafter=ERRING, stop=-1, limits=(NEW,) * 4, rounds=2**30, ending=None, look=None):
    """What the rows of ``PROMPTS`` decode to: records of the rows, and the rounds it took.

    ``look`` is shown the state after each call, ``ending`` is given to each.
    """
    system = decoding.System(MODEL, drafter, MATCH, K)
    tokens = np.zeros((4, 8), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    sampler = make_sampler(SAMPLERS, 4, V)
    state = loop.prefill(
        PARAMS,
        jnp.asarray(tokens),
        jnp.asarray(LENGTHS),
        jnp.asarray(LENGTHS + limits),
        jnp.full((4, 1), stop),
        sampler,
        sampler,
        system=system,
        slots=8 + NEW + system.lookahead_slots,
    )
    total, end = 0, jnp.zeros(4, jnp.int32)
    while True:
        state, chunk = loop.generate(PARAMS, state, end, jnp.int32(rounds), system=system)
        total += int(chunk.rounds)
        if look is not None:
            look(state)
        end = end if ending is None else jnp.asarray(ending, jnp.int32)
        if (np.asarray(chunk.finish) != Finish.RUNNING).all():
            break
    record = jax.tree.map(np.asarray, decoding.Record.of(state))
    return [jax.tree.map(lambda x: x[row], record) for row in range(4)], total


def output(record):
    begin = int(record.prompt_length)
    return record.tokens[begin : begin + int((record.kind > 0).sum())].tolist()


@pytest.fixture(scope="module")
def plain():
    logits_of = functools.partial(toy_logits, PARAMS["target"])
    return [plain_tokens(logits_of, *row) for row in zip(PROMPTS, [NEW] * 4, SAMPLERS)]


@pytest.fixture(scope="module")
def loop():
    return overlap.make_loop(devices())


@pytest.fixture(scope="module")
def decoded(loop):
    return run(loop)


def test_emits_exactly_the_plain_stream_for_mixed_rows(decoded, plain):
    assert [output(row) for row in decoded[0]] == plain


def test_accepts_all_that_is_right_and_counts_it(decoded):
    """Fails where a block is not drafted behind its true prefix."""
    total = stats.Stats()
    for row in decoded[0]:
        position, kind = np.arange(len(row.kind)), row.kind
        assert (position[kind == Kind.CORRECTED] % 5 == 0).all()
        assert (position[kind == Kind.ACCEPTED] % 5 != 0).all()
        begin, n = int(row.prompt_length), int((kind > 0).sum())
        s = stats.row_stats(kind[begin : begin + n], row.offered[begin : begin + n], K)
        assert s.emitted == NEW == s.first + s.accepted + s.corrected + s.bonus and s.first == 1
        total += s
    assert total.corrected > 0 and total.bonus > 0 and min(total.lengths) > 0
    assert max(row.offered.max() for row in decoded[0]) == K


def check_side(state):
    """The draft's cache is a token behind what is ahead, and holds what is committed."""
    side = jax.tree.map(np.asarray, state.draft.side)
    cache = side.draft.cache
    np.testing.assert_array_equal(cache.length, side.length + side.ahead.n_draft - 1)
    for row, n in enumerate(np.minimum(cache.length, side.length + 1)):
        np.testing.assert_array_equal(cache.tokens[row, :n], side.tokens[row, :n])


def test_the_drafts_state_is_that_of_its_prefix_kept_or_rolled_back(loop):
    run(loop, rounds=1, look=check_side)


def test_stop_tokens_limits_and_chunks_of_ticks_cut_the_plain_stream(loop, plain):
    limits = (NEW, 5, 1, 9)
    stop = plain[0][6]
    expected = [out[:limit] for out, limit in zip(plain, limits)]
    expected = [out[: out.index(stop) + 1] if stop in out else out for out in expected]
    rows, whole = run(loop, stop=stop, limits=limits)
    assert [output(row) for row in rows] == expected
    reasons = [Finish.STOP_TOKEN if stop in out else Finish.LENGTH for out in expected]
    assert [int(row.finish) for row in rows] == reasons
    pieces, total = run(loop, stop=stop, limits=limits, rounds=2)
    assert [output(row) for row in pieces] == expected and total == whole


def test_a_row_that_is_cancelled_leaves_the_others_as_they_are(loop, plain):
    rows, _ = run(loop, rounds=2, ending=[0, Finish.CANCELLED, 0, 0])
    assert [output(rows[i]) for i in (0, 2, 3)] == [plain[i] for i in (0, 2, 3)]
    assert output(rows[1]) == plain[1][: len(output(rows[1]))]
    assert rows[1].finish == Finish.CANCELLED


def test_draft_and_verify_of_a_tick_run_at_the_same_time(loop, monkeypatch):
    """Once both prompts are fed, each side waits in its pass until the other is in one."""
    here, met, is_waiting = {1: threading.Event(), 2: threading.Event()}, [], []

    def meet(side):
        if is_waiting:
            here[side].set()
            met.append(here[3 - side].wait(60))

    monkeypatch.setattr(mocks, "time", types.SimpleNamespace(sleep=meet))
    draft, target = (testing.slow_model(MODEL, side) for side in (1, 2))
    system = decoding.System(target, standalone(draft), MATCH, 2)
    sampler = make_sampler(SAMPLERS[0], 1, V)
    *arrays, slots, _ = make_request(system, [[1, 2]], 8, sampler, sampler)
    state = loop.prefill(PARAMS, *arrays, system=system, slots=slots)
    is_waiting.append(True)
    loop.generate(PARAMS, state, jnp.zeros_like(state.finish), 1, system=system)
    assert len(met) > 1 and all(met)


@pytest.mark.exhaustive
def test_the_experiment_measures_ticks(tmp_path):
    record = experiment.run(tmp_path, draft_ms=20, verify_ms=40, k=2, tokens=6)
    assert check_run_files(tmp_path, "overlap")["tick_ms"] == record["tick_ms"]


def test_a_draft_whose_window_cannot_forget_a_block_is_refused():
    """Of K + 1 tokens that are dropped, after K - 1 that were ahead."""
    target = loaded(MISTRAL)
    config = SpeculativeConfig("standalone", MISTRAL.max_pass // 2 + 1)
    decoder = SpeculativeDecoder(target, target, config, devices=devices())
    with pytest.raises(ConfigError, match="forgets up to 14 tokens; .* can forget 13"):
        decoder.generate([[*range(20)]], 60)
