"""The benchmark's part "streaming": what it costs to hand out text after every round."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping

import tokenizers
from ml_collections import ConfigDict
from tokenizers import decoders, models, pre_tokenizers

from experiments.benchmarks.shapes import listed, random_pair, random_prompt, synthetic_chain
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.evaluation.timing import Timer, measure_all
from spec_jax.models.tokenizer import Tokenizer

_NO_STOP = 2**31 - 1


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a byte-level tokenizer of ``vocab_size`` ids: every byte, then invented words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*letters, *(f"Ġw{i}" for i in range(vocab_size))][:vocab_size]
    vocab = {text: i for i, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def _drain_async(stream) -> int:
    async def run():
        return len([piece async for piece in stream])

    return asyncio.run(run())


def timer(
    decoder: SpeculativeDecoder,
    prompt: list[int],
    new_tokens: int,
    *,
    drain: Callable[..., int] | None = None,
) -> Timer:
    """Returns the timer of whole generations, in milliseconds per token, without prefill.

    Args:
      decoder: A decoder with a tokenizer.
      prompt: The prompt as ids.
      new_tokens: Tokens of every generation, which stop tokens do not end.
      drain: Reads every piece of a stream; None for one uninterrupted loop without a stream.
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


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    cli.require_positive(config, "prompt_tokens new_tokens k repeats", "streaming")


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times streaming in turns with the uninterrupted loop."""
    bars, config = config.bars, config.streaming
    target, draft = random_pair(config)
    target = dataclasses.replace(target, tokenizer=word_tokenizer(target.model.vocab_size))
    speculative = synthetic_chain(config.k, config.conditional_rate)
    decoder = SpeculativeDecoder(target, draft, speculative)
    make = functools.partial(timer, decoder, random_prompt(target, config), config.new_tokens)
    _, times = measure_all(
        "streaming",
        {
            "whole": make,
            "stream": functools.partial(make, drain=lambda stream: sum(1 for _ in stream)),
            "async": functools.partial(make, drain=_drain_async),
        },
        config.repeats,
    )
    stats, name = decoder.stats, "for piece in stream / one uninterrupted loop"
    lines = [
        Line(
            name,
            times["stream"] / times["whole"],
            bar=bars.streaming,
            note=f"K={config.k}, tau {stats.tau:.2f}; text handed out after every round",
        ),
        Line(
            f"async {name}",
            times["async"] / times["whole"],
            bar=bars.streaming,
            note="the same, through an event loop and the decoder's thread",
        ),
        Line("one uninterrupted loop", times["whole"], "ms", note="per token"),
    ]
    return Result(lines, {"stats": stats.to_dict(), "times_ms": listed(times)})
