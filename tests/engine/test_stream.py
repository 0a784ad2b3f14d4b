"""Text streams whole characters, and a stream may be left at any time."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from support.circle import CIRCLE, NEW, TEXT, V, check_counts, check_whole

from spec_jax import Cancelled, DecodeQueue, decoding
from spec_jax.engine import stream as streams


def test_every_piece_is_whole_characters(decoder):
    pieces = []
    row = decoder.generate("a", NEW, on_token=pieces.append)
    assert set("".join(pieces[:-1])) == set(CIRCLE)
    assert "".join(pieces) == row.text == TEXT.decode(errors="replace")
    assert pieces == list(decoder.stream("a", NEW))


def test_the_first_piece_needs_one_round_at_most(decoder, on_round):
    calls = []
    on_round(calls.append)
    stream = decoder.stream("🎉", NEW)  # "a" is one byte: prefill's own token
    assert next(stream) == "a" and len(calls) == 1
    stream = decoder.stream("a", NEW)  # "é" is two
    assert next(stream) == "é" and len(calls) == 3


def test_rows_of_a_batch_stream_and_finish_for_themselves(decoder):
    pieces: dict[int, str] = {0: "", 1: ""}

    def on_token(row, piece):
        pieces[row] += piece

    rows = decoder.generate(["a", "數"], NEW, stop="🎉aé數🎉a", on_token=on_token)
    assert [pieces[0], pieces[1]] == [row.text for row in rows] == ["é數", ""]
    rows = decoder.generate(["數", "a"], max_length=20)
    assert [len(row.tokens) for row in rows] == [17, 19]


def test_calls_streams_and_queues_end_at_a_special_token_of_a_stop_string(decoder):
    table, data = decoder.target.params["logits"].copy(), CIRCLE.encode()
    end = decoder.target.tokenizer.token_id("</s>")  # comes after the circle, which then goes on
    table[data[-1]], table[end] = (9 * np.eye(V)[i] for i in (end, data[0]))
    decoder = decoder.with_params({"logits": jnp.asarray(table)})
    prompts, stops = ["a", "數"], ["🎉</s>", "</s>aé", "🎉a"]
    rows = decoder.generate(prompts, NEW, stop=stops)
    assert [row.text for row in rows] == ["é數", ""]
    assert {row.finish_reason for row in rows} == {"stop_string"}
    pieces = ["", ""]
    for row, piece in decoder.stream(prompts, NEW, stop=stops):
        pieces[row] += piece
    assert pieces == ["é數", ""]
    for refill in (1, 2):
        decoder.reset_stats()
        options = dict(batch=2, refill=refill, max_prompt_tokens=4, max_new_tokens=NEW)
        found = dict(DecodeQueue(decoder, [*prompts, "a"], stop=stops, **options))
        whole = lambda row: (row.text, row.tokens, row.finish_reason, row.stats.emitted)
        assert [whole(found[i]) for i in range(3)] == [whole(rows[i]) for i in (0, 1, 0)]
        assert decoder.stats.emitted == sum(len(row.tokens) for row in found.values())


def test_an_error_of_the_callback_reaches_the_caller_and_the_decoder_survives(decoder):
    def on_token(piece):
        raise KeyError(piece)

    decoder.reset_stats()
    with pytest.raises(KeyError, match="é"):
        decoder.generate("a", NEW, on_token=on_token)
    assert 2 <= decoder.stats.emitted <= 8
    decoder.reset_stats()
    with pytest.raises(KeyError, match="é"):
        asyncio.run(decoder.generate_async("a", NEW, on_token=on_token))
    assert 2 <= decoder.stats.emitted <= 8  # counted when the error arrives, not later
    assert decoder.generate("a", NEW).tokens == tuple(TEXT)


def test_a_stream_that_is_left_early_is_counted_when_it_is_closed(decoder):
    decoder.reset_stats()
    with decoder.stream("a", NEW) as stream:
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = stream.result
        for _ in stream:
            break
    row = stream.result
    check_whole(row)
    assert row.finish_reason == "cancelled" and next(stream, None) is None
    check_counts(decoder, [row])
    untouched = decoder.stream("a", NEW)
    untouched.close()
    with pytest.raises(Cancelled, match="closed before"):
        _ = untouched.result


def test_ctrl_c_between_two_rounds_loses_nothing(decoder, on_round):
    def interrupt(number):
        if number == 2:
            raise KeyboardInterrupt

    on_round(interrupt)
    decoder.reset_stats()
    with decoder.stream("a", NEW) as stream:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    check_whole(stream.result)
    assert stream.result.finish_reason == "cancelled" and len(stream.result.tokens) >= 2
    check_counts(decoder, [stream.result])
    assert decoder.generate("a", NEW).tokens == tuple(TEXT)


def test_ctrl_c_while_rows_are_collected_counts_each_once(decoder, monkeypatch):
    real = streams.collect
    calls = []

    def collect(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(streams, "collect", collect)
    decoder.reset_stats()
    with decoder.stream(["a", "a"], NEW) as stream:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    check_counts(decoder, stream.result)


def test_ctrl_c_within_a_round_is_named(decoder, monkeypatch):
    real = decoding.generate

    def generate(params, state, *args, **options):
        real(params, state, *args, **options)  # which has the state now
        raise KeyboardInterrupt

    stream = decoder.stream("a", NEW)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decoding, "generate", generate)
        list(stream)
    with pytest.raises(Cancelled, match="interrupted within a round"):
        _ = stream.result


def test_two_threads_that_share_a_stream_take_turns(decoder, monkeypatch):
    real, entered, calls = decoding.prefill, threading.Event(), []

    def prefill(*args, **options):
        calls.append(entered.set())
        time.sleep(0.05)
        return real(*args, **options)

    monkeypatch.setattr(decoding, "prefill", prefill)
    stream = decoder.stream("a", NEW)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(list, stream)
        assert entered.wait(60)
        pieces = [*stream, *other.result(60)]
    assert len(calls) == 1 and sorted("".join(pieces)) == sorted(stream.result.text)
