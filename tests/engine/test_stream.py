"""Text streams whole characters, and any moment is a moment to cancel.

The target walks in a circle through the bytes of CIRCLE, so its greedy text is known; the draft
knows a part of the way.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.tiny_tokenizers import bytes_alone

from spec_jax import (
    CancellationToken,
    Cancelled,
    SamplerConfig,
    SpeculativeConfig,
    SpeculativeDecoder,
    decoding,
)
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.testing import toy_model

CIRCLE = "aé數🎉"  # every byte stands in it once
V, NEW, FEW = 258, 24, 14
TEXT = (CIRCLE * 9).encode()[1 : NEW + 1]  # after the prompt "a"; ends within a character
SOFT = SamplerConfig(temperature=1.0, seed=3)


def circle(name: str, num_wrong: int) -> LoadedModel:
    table = np.random.default_rng(0).standard_normal((V, V)).astype(np.float32)
    data = CIRCLE.encode()
    for i, byte in enumerate(data):
        table[byte, data[(i + 1 + (i < num_wrong)) % len(data)]] = 8.0
    return LoadedModel(name, toy_model(V), {"logits": table}, bytes_alone())


@pytest.fixture(scope="module")
def decoder():
    config = SpeculativeConfig(num_speculative_tokens=3)
    return SpeculativeDecoder(circle("target", 0), circle("draft", 4), config)


@pytest.fixture
def on_round(monkeypatch):
    """Sets a function that is called with a number before each stop of the loop."""
    real, calls = decoding.generate, itertools.count()
    hook: list[Callable[[int], None]] = []

    def generate(*args, **options):
        for function in hook:
            function(next(calls))
        return real(*args, **options)

    monkeypatch.setattr(decoding, "generate", generate)
    return hook.append


def within(seconds: float, act: Callable[[], object]):
    """What ``act`` returns or raises; an assertion fails if it hangs."""
    found = []

    def run():
        try:
            found.append((act(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"still running after {seconds} s"
    if found[0][1] is not None:
        raise found[0][1]
    return found[0][0]


def check_whole(row, tokens=tuple(TEXT)) -> None:
    """A row that was cancelled: the beginning of the known one, to a whole character."""
    assert row.tokens == tokens[: len(row.tokens)]
    if row.finish_reason == "cancelled":
        assert row.text == bytes(row.tokens).decode(errors="ignore")
    else:
        assert row.finish_reason == "length" and len(row.tokens) == len(tokens)


def check_counts(decoder, rows) -> None:
    s = decoder.stats
    assert s.emitted == sum(len(row.tokens) for row in rows) == sum(r.stats.emitted for r in rows)
    assert s.emitted == s.first + s.accepted + s.corrected + s.bonus


# -------------------------------------------------------------------------- streaming


@pytest.mark.exhaustive
def test_pieces_of_500_random_prompts_join_to_the_final_text(decoder):
    rng, letters = np.random.default_rng(0), list("ab é數🎉\u200d½\n")
    num_pieces = 0
    for batch in range(10):
        prompts = ["".join(rng.choice(letters, rng.integers(1, 6))) for _ in range(50)]
        options = dict(sampler=SamplerConfig(1.0, seed=batch), pad_to=32)
        stops = {"stop": ["數🎉a", "\ufffd\ufffd"]} if batch % 2 else {}
        pieces: list[list[str]] = [[] for _ in prompts]
        stream = decoder.stream(prompts, FEW, **options, **stops)
        for row, piece in stream:
            pieces[row].append(piece)
        alone = decoder.generate(prompts, FEW, **options, **stops)
        for row, sent in zip(stream.result, pieces):
            assert "".join(sent) == row.text
            num_pieces += len(sent)
        assert [(r.text, r.tokens, r.finish_reason) for r in stream.result] == [
            (r.text, r.tokens, r.finish_reason) for r in alone
        ]
        for prompt, row in zip(prompts, alone):
            text = decoder.target.tokenizer.decode_after(decoder.encode(prompt), row.tokens)
            assert text == row.text if not stops else text.startswith(row.text)
    assert num_pieces > 500


def test_every_piece_is_whole_characters(decoder):
    pieces = []
    row = decoder.generate("a", NEW, on_token=pieces.append)
    assert set("".join(pieces[:-1])) == set(CIRCLE)
    assert "".join(pieces) == row.text == TEXT.decode(errors="replace")
    assert pieces == list(decoder.stream("a", NEW))


def test_characters_that_are_not_held_back_are_caught(decoder, monkeypatch):
    monkeypatch.setattr(Tokenizer, "settled_after", Tokenizer.decode_after)
    assert "".join(decoder.stream("a", NEW)) != TEXT.decode(errors="replace")


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
    rows = decoder.generate(["數", "a"], max_tokens=20)
    assert [len(row.tokens) for row in rows] == [17, 19]


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


def test_text_is_needed_to_stream_it(decoder):
    bare = SpeculativeDecoder(LoadedModel("bare", toy_model(4), {"logits": np.eye(4)}))
    with pytest.raises(ConfigError, match="no tokenizer"):
        bare.stream([1])


# ----------------------------------------------------------------------- cancellation


def test_a_cancelled_token_ends_a_call_before_its_first_token(decoder, on_round):
    calls = []
    on_round(calls.append)
    for token in (CancellationToken(), decoder.cancellation_token):
        token.cancel()
        assert token.is_cancelled
        with pytest.raises(Cancelled, match=r"reset\(\)"):
            decoder.generate("a", NEW, cancellation_token=token)
        with pytest.raises(Cancelled):
            asyncio.run(decoder.generate_async("a", NEW, cancellation_token=token))
        assert not calls
        token.reset()
        assert decoder.generate("a", NEW, cancellation_token=token).tokens == tuple(TEXT)
        calls.clear()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_cancelling_in_a_round_ends_the_call_after_it(decoder, on_round, at):
    token = CancellationToken()
    decoder.reset_stats()

    def cancel(number):
        assert number <= at + 1  # the last one ends the rows, without a round
        if number == at:
            token.cancel()
            token.reset()  # what was cancelled stays so

    on_round(cancel)
    pieces = []
    row = decoder.generate("a", NEW, cancellation_token=token, on_token=pieces.append)
    assert row.finish_reason == "cancelled" and 1 <= len(row.tokens) <= 1 + 4 * at
    check_whole(row)
    assert "".join(pieces) == row.text
    check_counts(decoder, [row])


def test_the_decoders_token_may_be_asked_for_while_a_call_runs(on_round):
    decoder = SpeculativeDecoder(circle("target", 0))
    on_round(lambda number: decoder.cancellation_token.cancel() if number == 1 else None)
    row = decoder.generate("a", 200)
    assert row.finish_reason == "cancelled" and len(row.tokens) == 1 + 2 * 32


def test_rows_are_cancelled_for_themselves(decoder):
    tokens = [CancellationToken(), CancellationToken(), CancellationToken()]
    tokens[2].cancel()
    decoder.reset_stats()

    def on_token(row, piece):
        if row == 1:
            tokens[1].cancel()

    rows = decoder.generate(["a"] * 3, NEW, on_token=on_token, cancellation_token=tokens)
    assert [row.finish_reason for row in rows] == ["length", "cancelled", "cancelled"]
    assert rows[0].tokens == tuple(TEXT) and 1 < len(rows[1].tokens) < NEW
    assert rows[2].tokens == () and rows[2].text == ""
    for row in rows[:2]:
        check_whole(row)
    check_counts(decoder, rows)
    with pytest.raises(ConfigError, match="list of 2, one a row"):
        decoder.generate(["a", "a"], NEW, cancellation_token=tokens)


@pytest.mark.exhaustive
def test_1000_random_moments(decoder):
    """From another thread, from the callback, by closing the stream and by cancelling the task."""
    rng, rows, reasons = np.random.default_rng(1), [], []
    begin = time.perf_counter()
    for _ in range(5):
        decoder.generate("a", FEW, on_token=lambda piece: None)
    longest_s = 1.2 * (time.perf_counter() - begin) / 5
    decoder.reset_stats()

    def by_thread(token):
        delay = rng.uniform(0, longest_s)
        done = canceller.submit(lambda: (time.sleep(delay), token.cancel()))
        try:
            return decoder.generate("a", FEW, cancellation_token=token)
        finally:
            done.result()
            token.reset()

    def by_callback():
        token, at = CancellationToken(), itertools.count(rng.integers(-6, 1))

        def on_token(piece):
            assert piece.encode().decode() == piece and "\ufffd" not in piece[:-1]
            if next(at) == 0:
                token.cancel()

        return decoder.generate("a", FEW, on_token=on_token, cancellation_token=token)

    def by_closing():
        with decoder.stream("a", FEW) as stream:
            for _ in itertools.islice(stream, rng.integers(1, 8)):
                pass
        return stream.result

    def by_task():
        async def run():
            stream = decoder.stream("a", FEW)
            task = asyncio.create_task(stream.drain_async())
            await asyncio.sleep(rng.uniform(0, longest_s))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
            return stream.result

        return asyncio.run(run())

    ways = [
        lambda: by_thread(CancellationToken()), lambda: by_thread(decoder.cancellation_token),
        by_callback, by_closing, by_task,
    ]  # fmt: skip

    with ThreadPoolExecutor(1) as canceller:
        for i in range(1000):
            try:
                rows.append(within(60, ways[i % len(ways)]))
            except Cancelled:
                reasons.append("before")
    for row in rows:
        check_whole(row, tuple(TEXT[:FEW]))
    reasons += [row.finish_reason for row in rows]
    assert reasons.count("cancelled") > 300 and reasons.count("length") > 20
    check_counts(decoder, rows)
    assert decoder.generate("a", NEW).tokens == tuple(TEXT)


def test_a_token_that_nobody_looks_at_is_caught(decoder, monkeypatch):
    monkeypatch.setattr(CancellationToken, "watch", lambda self: lambda: False)
    token = CancellationToken()
    row = decoder.generate(
        "a", NEW, cancellation_token=token, on_token=lambda piece: token.cancel()
    )
    with pytest.raises(AssertionError):
        assert row.finish_reason == "cancelled"


# ----------------------------------------------------------------------- asynchronous


def test_the_event_loop_goes_on_while_a_round_runs(decoder, on_round):
    """Each stop of the loop waits for a task of the event loop, so blocking it would hang."""
    ticked = threading.Event()

    def wait(number):
        ticked.clear()
        assert ticked.wait(60)

    async def tick():
        while True:
            ticked.set()
            await asyncio.sleep(0.001)

    async def run():
        ticker, pieces = asyncio.create_task(tick()), []

        async def on_token(piece):
            await asyncio.sleep(0)
            pieces.append(piece)

        row = await decoder.generate_async("a", NEW, on_token=on_token)
        streamed = [piece async for piece in decoder.stream("a", NEW)]
        ticker.cancel()
        assert pieces == streamed and "".join(pieces) == str(row) == row.text
        assert row.tokens == tuple(TEXT)

    on_round(wait)
    within(120, lambda: asyncio.run(run()))


@pytest.mark.exhaustive
def test_calls_at_once_give_what_each_gives_alone(decoder):
    prompts = ["a", "é", "數", "🎉", "aé", "ab"]
    alone = [decoder.generate(p, NEW, sampler=SOFT, pad_to=8) for p in prompts]
    decoder.reset_stats()

    async def run():
        calls = (decoder.generate_async(p, NEW, sampler=SOFT, pad_to=8) for p in prompts)
        return await asyncio.gather(*calls)

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(decoder.generate, p, NEW, sampler=SOFT, pad_to=8) for p in prompts]
        tasks = within(120, lambda: asyncio.run(run()))
        in_threads = [thread.result(60) for thread in threads]
    assert [r.tokens for r in tasks] == [r.tokens for r in in_threads] == [r.tokens for r in alone]
    check_counts(decoder, [*tasks, *in_threads])


def test_a_cancelled_task_ends_its_call_and_leaves_the_decoder_usable(decoder, on_round):
    started, rounds = threading.Event(), []
    on_round(lambda number: (rounds.append(number), started.set()))

    async def run():
        started.clear()
        task = asyncio.create_task(decoder.generate_async("a", 100))
        while not started.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = len(rounds)
        row = await decoder.generate_async("a", NEW)
        assert row.tokens == tuple(TEXT)
        assert len(rounds) - before <= NEW + 2  # the cancelled one adds its end at most

    decoder.reset_stats()
    within(120, lambda: asyncio.run(run()))
    s = decoder.stats
    assert s.first == 2 and s.emitted == s.first + s.accepted + s.corrected + s.bonus


def test_a_stream_goes_on_in_another_event_loop(decoder):
    stream, text = decoder.stream("a", NEW), ""
    for _ in range(3):
        loop = asyncio.new_event_loop()
        text += loop.run_until_complete(anext(stream))
        loop.close()
    text += "".join(stream)
    assert text == stream.result.text == TEXT.decode(errors="replace")


@pytest.mark.representatives("True")
@pytest.mark.parametrize("is_stream", [True, False])
def test_an_event_loop_may_be_closed_while_a_round_runs(decoder, on_round, is_stream):
    started, goes_on = threading.Event(), threading.Event()
    on_round(lambda number: (started.set(), goes_on.wait(60)))
    decoder.reset_stats()
    stream = decoder.stream("a", NEW)
    loop, told = asyncio.new_event_loop(), []
    loop.set_exception_handler(lambda loop, context: told.append(context["message"]))

    async def wait():
        while not started.is_set():
            await asyncio.sleep(0)

    call = anext(stream) if is_stream else decoder.generate_async("a", NEW, on_token=print)
    task = loop.create_task(call)
    loop.run_until_complete(wait())
    loop.close()
    del task, call
    goes_on.set()
    if is_stream:
        assert "".join(stream) == stream.result.text == TEXT.decode(errors="replace")
    row = within(60, lambda: asyncio.run(decoder.generate_async("a", NEW)))
    assert row.tokens == tuple(TEXT)
    gc.collect()
    assert all("pending" in message for message in told)
    s = decoder.stats
    assert s.emitted == s.first + s.accepted + s.corrected + s.bonus >= NEW
