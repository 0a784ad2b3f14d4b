"""The benchmark's part "streaming": what it costs to hand out text after every round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from experiments.benchmarks.synthetic import random_model
from experiments.common.timing import Line, interleave, spread
from spec_jax.config import SpeculativeConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedModel
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.progress import Progress

_NO_STOP = 2**31 - 1


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer of so many ids: every byte, and then invented words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*letters, *(f"Ġw{i}" for i in range(vocab_size))][:vocab_size]
    vocab = {text: i for i, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def _drain(stream) -> int:
    return sum(1 for _ in stream)


def _drain_async(stream) -> int:
    async def run():
        return len([piece async for piece in stream])

    return asyncio.run(run())


def timer(
    decoder: SpeculativeDecoder, prompt: list[int], new_tokens: int, *,
    drain: Callable[..., int] | None = None,
) -> Callable[[], float]:  # fmt: skip
    """Times whole generations; ms a token, prefill left out.

    Args:
      decoder: with a tokenizer.
      prompt: ids.
      new_tokens: of every generation; stop tokens do not end it.
      drain: takes every piece of a stream; None: one uninterrupted loop, and no stream.
    """
    options = {"stop_tokens": ()}

    def run() -> float:
        decoder.reset_stats()
        begin = time.perf_counter()
        if drain is None:
            decoder.generate(prompt, new_tokens, rounds_per_sync=_NO_STOP, **options)
        elif drain(decoder.stream(prompt, new_tokens, **options)) < 2:
            raise ValueError("the text came in one piece: nothing was streamed")
        seconds = time.perf_counter() - begin - decoder.stats.prefill_s
        return seconds * 1e3 / (decoder.stats.emitted - 1)

    run()
    return run


def measure(part: str, config, bars) -> tuple[list[Line], dict]:
    """Times streaming beside the uninterrupted loop, turn by turn.

    Args:
      part: its name in the table.
      config: ``target`` and ``draft`` shapes, ``prompt_tokens``, ``new_tokens``, ``k``,
        ``conditional_rate``, ``repeats``, ``seed``.
      bars: ``streaming``.

    Returns:
      The lines, and what the record keeps beside them.
    """
    target = random_model("target", config.target, config.seed)
    draft = random_model("draft", config.draft, config.seed + 1)
    tokenizer = word_tokenizer(target.model.vocab_size)
    target = LoadedModel("target", target.model, target.params, tokenizer, target.config)
    rates = (config.conditional_rate,) * config.k
    decoder = SpeculativeDecoder(
        target, draft,
        SpeculativeConfig(num_speculative_tokens=config.k, synthetic_conditional_rates=rates),
    )  # fmt: skip
    prompt = np.random.default_rng(config.seed).integers(
        target.model.vocab_size, size=config.prompt_tokens
    ).tolist()
    with Progress(config.repeats + 3, part) as bar:
        timers = {}
        for name, drain in (("whole", None), ("stream", _drain), ("async", _drain_async)):
            timers[name] = timer(decoder, prompt, config.new_tokens, drain=drain)
            bar.step(f"compiled {name}")
        times = interleave(timers, config.repeats, bar.step)
    stats = decoder.stats
    line = lambda what, values, *args, **more: Line(part, what, spread(values), *args, **more)
    note = f"K={config.k}, tau {stats.tau:.2f}; text handed out after every round"
    lines = [
        line(
            "for piece in stream / one uninterrupted loop", times["stream"] / times["whole"],
            bar=bars.streaming, note=note,
        ),
        line(
            "async for piece in stream / one uninterrupted loop", times["async"] / times["whole"],
            bar=bars.streaming, note="the same, through an event loop and the decoder's thread",
        ),
        line("one uninterrupted loop", times["whole"], "ms", note="a token"),
    ]  # fmt: skip
    record = {
        "stats": stats.to_dict(),
        "times_ms": {name: values.tolist() for name, values in times.items()},
    }
    return lines, record
