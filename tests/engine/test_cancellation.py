"""Any moment is a moment to cancel."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.circle import FEW, NEW, TEXT, check_counts, check_whole, circle, within

from spec_jax import CancellationToken, Cancelled, SpeculativeDecoder
from spec_jax.errors import ConfigError


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
    """From another thread, and by cancelling the task of an event loop."""
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
        lambda: by_thread(CancellationToken()),
        lambda: by_thread(decoder.cancellation_token),
        by_task,
    ]

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
