"""A queue of prompts gives each prompt's own tokens, and keeps its rows busy."""

from __future__ import annotations

import dataclasses
import itertools
import operator

import numpy as np
import pytest
from support.eagle_heads import CONFIGS, head_of
from support.meshes import mesh
from support.tiny_models import LLAMA, loaded

from spec_jax import (
    DecodeQueue,
    SamplerConfig,
    SpeculativeConfig,
    SpeculativeDecoder,
    decoding,
    rng,
)
from spec_jax.config import AsyncSpecConfig
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.engine import Engine
from spec_jax.engine.queue import ROUNDS_BETWEEN, sampler_of
from spec_jax.engine.stats import Stats
from spec_jax.errors import Cancelled, PromptError
from spec_jax.loading import LoadedHead
from spec_jax.sampling import make_samplers
from spec_jax.testing import mock_model

V, NEW = 29, 9
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 5], [9], list(range(20)), [11, 3], [2] * 5, [8, 1]]
STOPS = (5, 6, 7)  # met now and then, so that rows finish at different times
LIMITS = dict(max_prompt_tokens=20, max_new_tokens=NEW, stop_tokens=STOPS)


def speculative(target, draft, strategy, temperature=1.0):
    sampler = SamplerConfig(temperature, seed=40)
    config = strategy and SpeculativeConfig(rejection_sampling_strategy=strategy)
    return SpeculativeDecoder(target, draft if strategy else None, config, target_sampler=sampler)


def alone(decoder, index, prompt):
    sampler = SamplerConfig(decoder.target_sampler.temperature, seed=40 + index)
    row = decoder.generate(prompt, NEW, stop_tokens=STOPS, sampler=sampler)
    return row.tokens, row.finish_reason, row.stats.rounds


def summary(generation):
    return generation.tokens, generation.finish_reason, generation.stats.rounds


stats_of = operator.attrgetter("stats")


def sum_of(found):
    return sum(map(stats_of, found.values()), Stats())


def counts(stats):
    return dataclasses.replace(stats, prefill_s=0.0, decode_s=0.0, compile_s=0.0)


def test_every_prompt_gives_its_greedy_stream():
    decoder = speculative(mock_model(V, 0), mock_model(V, 1), "greedy", 0.0)
    expected = {i: alone(decoder, i, prompt) for i, prompt in enumerate(PROMPTS)}
    assert len({len(tokens) for tokens, *_ in expected.values()}) > 2
    pairs = list(enumerate(PROMPTS))
    for order, refill in ((pairs, 1), (pairs[::-1], 1), (pairs, 2), (pairs, 3)):
        decoder.reset_stats()
        rows = dict(DecodeQueue(decoder, order, batch=3, refill=refill, **LIMITS))
        assert {i: summary(g) for i, g in rows.items()} == expected
        assert counts(decoder.stats) == counts(sum_of(rows))


def test_seeds_of_a_list_of_samplers_are_those_of_a_call_and_then_others():
    """Prompts share a seed only where the list repeats one; a sampler alone counts up in both."""
    turns, one = [SamplerConfig(1.0, seed=seed) for seed in (7, 3, 7)], SamplerConfig(1.0, seed=9)
    seed_of = lambda samplers, index: sampler_of(samplers, index).seed
    for samplers, count in ((turns, 3), (one, 5)):
        in_call = make_samplers(samplers, None, count, V)[0].seed.tolist()
        assert in_call == [seed_of(samplers, index) for index in range(count)]
    seeds = [seed_of(turns, index) for index in range(3 * 200)]
    assert seeds[::3] == seeds[2::3] and len({*seeds}) == 2 * 200


@pytest.mark.exhaustive
def test_samplers_take_turns_and_may_differ_in_what_they_have():
    decoder = SpeculativeDecoder(mock_model(V, 0))
    turns = [
        SamplerConfig(1.0, seed=3),
        SamplerConfig(0.0, repetition_penalty=1.5),
        SamplerConfig(0.7, top_k=5, logit_bias=((4, -np.inf),), seed=9),
    ]
    options = dict(
        sampler=[turns[i % 3] for i in range(len(PROMPTS))],
        seeds=[rng.turn_seed(turns[i % 3].seed, i // 3) for i in range(len(PROMPTS))],
    )
    rows = decoder.generate(PROMPTS, NEW, stop_tokens=STOPS, **options)
    decoder.reset_stats()
    queue = DecodeQueue(decoder, enumerate(PROMPTS), batch=2, sampler=turns, **LIMITS)
    found = {}
    for index, row in queue:
        found[index] = row
        assert counts(decoder.stats) == counts(sum_of(found))
    assert {i: g.tokens for i, g in found.items()} == {i: r.tokens for i, r in enumerate(rows)}
    assert counts(decoder.stats) == counts(sum(map(stats_of, rows), Stats()))
    assert decoder.stats.prefill_s > 0 < decoder.stats.decode_s


def test_plain_prompts_are_numbered_from_0_and_the_longest_of_a_list_is_found():
    decoder = SpeculativeDecoder(mock_model(V, 0))
    expected = dict(DecodeQueue(decoder, enumerate(PROMPTS), batch=2, **LIMITS))
    tuples = [tuple(prompt) for prompt in PROMPTS]  # (11, 3) is two ids, no number and prompt
    for prompts in (PROMPTS, tuples, iter(PROMPTS), np.array(PROMPTS, object)):
        assert dict(DecodeQueue(decoder, prompts, batch=2, **LIMITS)) == expected
    found = dict(DecodeQueue(decoder, tuples, batch=2, **LIMITS | {"max_prompt_tokens": None}))
    assert found == expected


def test_results_come_as_they_finish_and_prompts_are_pulled_as_rows_are_free():
    decoder, pulled = SpeculativeDecoder(mock_model(V, 0)), []
    lengths = itertools.cycle((3, 1, 20, 2))

    def prompts():
        for index in itertools.count():
            pulled.append(index)
            yield index, [index % V] * next(lengths)

    sampler = SamplerConfig(1.0)
    queue = DecodeQueue(decoder, prompts(), batch=3, sampler=sampler, **LIMITS)
    assert pulled == []
    order = []
    for index, _ in itertools.islice(queue, 40):
        order.append(index)
        assert len(pulled) <= len(order) + 2 * 3
    assert len(set(order)) == 40 and order != sorted(order)
    assert queue.usage.share == 1 and np.isnan(queue.tail.share)


BADS = [
    ([1] * 21, "prompt 77 has 21 tokens; max_prompt_tokens is 20"),
    ([], "prompt 77: the prompt is empty"),
    ([V], f"prompt 77: the prompt holds id {V}"),
]


@pytest.mark.parametrize("bad, message", BADS)
@pytest.mark.parametrize("position", [0, 1, 5])
def test_a_bad_prompt_is_named_after_what_was_running_is_yielded(bad, message, position):
    decoder = SpeculativeDecoder(mock_model(V, 0))
    prompts = list(enumerate(PROMPTS))
    prompts.insert(position, (77, bad))
    found = []
    with pytest.raises(PromptError, match=message):
        for index, _ in DecodeQueue(decoder, prompts, batch=3, **LIMITS):
            found.append(index)
    assert sorted(found) == list(range(position))


def test_an_error_of_the_prompts_is_raised_after_what_was_running_is_yielded():
    def prompts():
        yield from enumerate(PROMPTS[:4])
        raise OSError("the disk is gone")

    decoder, found = SpeculativeDecoder(mock_model(V, 0)), []
    with pytest.raises(OSError, match="the disk is gone"):
        for index, _ in DecodeQueue(decoder, prompts(), batch=3, **LIMITS):
            found.append(index)
    assert sorted(found) == [0, 1, 2, 3]


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_own", [True, False])
def test_cancelling_ends_the_rows_that_are_running_and_pulls_no_more(is_own):
    decoder, pulled = SpeculativeDecoder(mock_model(V, 0)), []

    def prompts():
        for index in itertools.count():
            pulled.append(index)
            yield index, [1 + index % 3]

    token = CancellationToken() if is_own else decoder.cancellation_token
    limits = dict(max_prompt_tokens=1, max_new_tokens=200, sampler=SamplerConfig(1.0))
    queue = DecodeQueue(
        decoder,
        prompts(),
        batch=4,
        cancellation_token=token if is_own else None,
        stop_tokens=STOPS,
        **limits,
    )
    first = [next(queue) for _ in range(3)]
    assert all(row.finish_reason == "stop_token" for _, row in first)
    token.cancel()
    rest = list(queue)
    found = dict(first + rest)
    assert sorted(found) == pulled and len(rest) < 9  # as many as ran, or waited to be yielded
    assert {row.finish_reason for _, row in rest} >= {"cancelled"}
    assert counts(decoder.stats) == counts(sum_of(found))
    token.reset()
    whole = DecodeQueue(
        decoder, ((i, [1 + i % 3]) for i in pulled), batch=4, stop_tokens=STOPS, **limits
    )
    for index, row in whole:
        cut = found[index].tokens
        assert cut == row.tokens[: len(cut)] and 0 < len(cut)


def test_a_token_that_was_cancelled_before_the_queue_began_is_named():
    decoder = SpeculativeDecoder(mock_model(V, 0))
    token = CancellationToken()
    token.cancel()
    with pytest.raises(Cancelled, match="before its first prompt"):
        list(DecodeQueue(decoder, enumerate(PROMPTS), batch=2, cancellation_token=token, **LIMITS))


def test_an_error_of_decoding_is_raised_after_what_had_finished_is_yielded(monkeypatch):
    decoder = SpeculativeDecoder(mock_model(V, 0))
    expected = dict(DecodeQueue(decoder, enumerate(PROMPTS), batch=2, **LIMITS))
    real, calls = decoding.generate, itertools.count()

    def generate(*args, **options):
        if next(calls) == 3:
            raise RuntimeError("the device is gone")
        return real(*args, **options)

    monkeypatch.setattr(decoding, "generate", generate)
    found = {}
    with pytest.raises(RuntimeError, match="the device is gone"):
        for index, row in DecodeQueue(decoder, enumerate(PROMPTS), batch=2, **LIMITS):
            found[index] = row
    assert len(found) >= 3  # one or more of each chunk
    assert all(row == expected[index] for index, row in found.items())


@pytest.mark.exhaustive
def test_max_length_and_the_limit_of_the_decoders_config_count_the_prompt():
    decoder = SpeculativeDecoder(
        mock_model(V, 0),
        config=AsyncSpecConfig(max_tokens=25, force_n1=True, target_sampler=SamplerConfig(1.0)),
    )
    for options, limit in (({}, 25), ({"max_length": 23}, 23)):
        queue = DecodeQueue(
            decoder, enumerate(PROMPTS), batch=3, max_prompt_tokens=20, stop_tokens=(), **options
        )
        assert {i: len(row.tokens) for i, row in queue} == {
            i: limit - len(prompt) for i, prompt in enumerate(PROMPTS)
        }


def prefilled(monkeypatch):
    """The list that gets the number of rows of every prefill."""
    rows, prefill = [], Engine.prefill

    def count(engine, request, *fed):
        if not fed:
            rows.append(len(request.tokens))
        return prefill(engine, request, *fed)

    monkeypatch.setattr(Engine, "prefill", count)
    return rows


@pytest.mark.exhaustive
def test_prompts_of_rows_that_are_free_at_once_are_prefilled_together(monkeypatch):
    decoder = SpeculativeDecoder(mock_model(V, 0), target_sampler=SamplerConfig(1.0, seed=40))
    expected = {i: row.tokens for i, row in enumerate(decoder.generate(PROMPTS, NEW))}
    limits = LIMITS | {"stop_tokens": ()}
    for batch, calls in ((3, [3, 3, 1]), (4, [4, 4]), (1, [1] * 7)):
        rows = prefilled(monkeypatch)
        found = {i: row.tokens for i, row in DecodeQueue(decoder, PROMPTS, batch=batch, **limits)}
        assert found == expected and rows == calls
        monkeypatch.undo()


def test_a_target_that_cannot_forget_padding_takes_prompts_of_one_length_together(monkeypatch):
    target = mock_model(V, 0)
    target = dataclasses.replace(target, model=target.model._replace(can_rewind=False))
    decoder, rows = SpeculativeDecoder(target), prefilled(monkeypatch)
    prompts = [[1, 2], [3], [4, 5], [6], [7], [8]]
    found = dict(DecodeQueue(decoder, prompts, batch=3, max_new_tokens=NEW, stop_tokens=()))
    assert rows == [3, 3, 3]  # the shortest prompt in all rows, the others, the next three
    alone = {i: decoder.generate(prompt, NEW, stop_tokens=()) for i, prompt in enumerate(prompts)}
    assert {i: x.tokens for i, x in found.items()} == {i: x.tokens for i, x in alone.items()}


FEEDING = {"plain": (None, None), "mesh": ("head", "data:2,tensor:1")}
COUNT = lambda begin, n: [i % 31 for i in range(begin, begin + n)]
# The second and the third end first; the two after them are fed while the first decodes.
LONG = [[1, 2, 3], COUNT(2, 50), COUNT(3, 52), COUNT(4, 20), COUNT(5, 24), [8]]
LONG_LIMITS = dict(max_length=60, stop_tokens=())


def in_chunks(drafts=None, where=None):
    """A decoder with small chunks, which do not divide the prompts."""
    head = drafts and LoadedHead("head", CONFIGS["eagle-3"], head_of(CONFIGS["eagle-3"]))
    config = head and SpeculativeConfig("eagle", rejection_sampling_strategy="match")
    return SpeculativeDecoder(
        loaded(LLAMA, "target"),
        head,
        config,
        target_sampler=SamplerConfig(1.0, seed=40),
        prefill_chunk=7,
        **({} if where is None else {"mesh": mesh(where)}),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FEEDING)
def test_a_long_prompt_is_fed_while_other_rows_decode(name, monkeypatch):
    """And gives what it gives alone."""
    decoder = in_chunks(*FEEDING[name])
    expected = [
        decoder.generate(prompt, sampler=SamplerConfig(1.0, seed=40 + i), **LONG_LIMITS)
        for i, prompt in enumerate(LONG)
    ]
    events, feed, generate = [], decoding.feed_in_passes, Engine.generate

    def fed(params, tokens, lengths, *more):
        begin = 0
        for end, state in feed(params, tokens, lengths, *more):
            events.append(("chunk", begin, min(end, int(lengths.max())) - begin))
            yield end, state
            begin = end

    def decoded(engine, *args):
        state, chunk = generate(engine, *args)
        events.append(("rounds", int(chunk.rounds), int(chunk.row_rounds)))
        return state, chunk

    monkeypatch.setattr(decoding, "feed_in_passes", fed)
    monkeypatch.setattr(Engine, "generate", decoded)
    rows = dict(DecodeQueue(decoder, LONG, batch=3, **LONG_LIMITS))
    for i, row in enumerate(expected):
        assert summary(rows[i]) == summary(row)
    chunks = [event[1:] for event in events if event[0] == "chunk"]
    assert {(0, 7), (7, 7), (14, 7), (21, 3)} <= {*chunks} <= {(14, 6), *chunks}
    assert [begin for begin, _ in chunks].count(0) <= 2
    between = 0
    for before, (kind, rounds, active), after in zip(events, events[1:], events[2:]):
        if before[0] == after[0] == "chunk" and after[1] > 0:
            assert kind == "rounds" and 1 <= rounds <= ROUNDS_BETWEEN and active >= rounds
            between += 1
    assert between >= 3
    assert not any(one[0] == other[0] == "chunk" for one, other in itertools.pairwise(events))


def test_a_short_prompt_does_not_wait_for_a_long_one_that_is_fed():
    queue = DecodeQueue(in_chunks(), LONG, batch=3, **LONG_LIMITS)
    taken = {0: (3, LONG[3]), 1: (5, LONG[5]), 2: (4, LONG[4])}
    assert queue._together(taken, lambda ids: len(ids) > 7, 3) == [[0, 2], [1]]
    assert queue._together(taken, lambda ids: False, 3) == [[0, 1, 2]]


@pytest.mark.exhaustive
def test_a_cancelled_queue_feeds_no_further_chunk(monkeypatch):
    """And yields no prompt that was not fed to its end."""
    token, feed, chunks = CancellationToken(), decoding.feed_in_passes, []

    def fed(*args):
        for passed in feed(*args):
            token.cancel()
            chunks.append(passed)
            yield passed

    monkeypatch.setattr(decoding, "feed_in_passes", fed)
    queue = DecodeQueue(in_chunks(), LONG, batch=3, cancellation_token=token, **LONG_LIMITS)
    reasons = {i: row.finish_reason for i, row in queue}
    assert set(reasons) == {0, 1, 2} and len(chunks) == 1
    assert reasons[0] == "cancelled" != reasons[2]
