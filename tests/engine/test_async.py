"""Event loops: they stay free, may be closed, and cancel what they wait for."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.circle import NEW, SOFT, TEXT, check_counts, within


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
