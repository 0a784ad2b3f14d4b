"""A decoder whose greedy text is known: the target walks in a circle through the bytes of CIRCLE.

The draft knows a part of the way.
"""

import itertools
import threading
from collections.abc import Callable

import numpy as np
import pytest
from support.tiny_tokenizers import bytes_alone

from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, decoding
from spec_jax.loading import LoadedModel
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
