"""Decoders of every kind of drafter for a target that remembers two tokens.

The target prefers ``(b + 1) % V`` after ``b``, so text repeats itself: drafters that copy find
something to copy, which is now right and now wrong.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from oracles import markov
from support.scripted import Known

from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, host_drafter, testing
from spec_jax.engine.stats import Stats
from spec_jax.loading import LoadedModel

V, K = 4, 3


def table(seed: int, preferred: float = 1.5) -> np.ndarray:
    """f32[V * V, V], logits after two tokens."""
    logits = 0.7 * np.random.default_rng(seed).standard_normal((V * V, V))
    logits[np.arange(V * V), (np.arange(V * V) + 1) % V] += preferred
    return logits.astype(np.float32)


def model(name: str, logits: np.ndarray) -> LoadedModel:
    return LoadedModel(name, testing.toy_model(V), {"logits": jnp.asarray(logits)})


TABLE, DRAFT_TABLE = table(0), table(1, preferred=1.0)
TARGET, DRAFT = model("target", TABLE), model("draft", DRAFT_TABLE)


def count_on(prefix, k, seed):
    """Drafts that count on; how many depends on the tokens before them."""
    del seed
    return [(prefix[-1] + 1 + i) % V for i in range(k - sum(prefix) % 2)]


def draw_from(table):
    """A function that drafts from a table of logits, with distributions."""
    table = np.asarray(table)
    V = table.shape[1]

    def draw(prefix, k, seed):
        text, dists = list(prefix), []
        for uniform in np.random.default_rng(seed).random(k):
            dists.append(markov.distribution(table[text[-2] * V + text[-1]]))
            text.append(min(int(np.searchsorted(np.cumsum(dists[-1]), uniform)), V - 1))
        return text[len(prefix) :], np.asarray(dists)

    return draw


def _config(method, rule, **options):
    if not options.keys() & {"tree", "tree_depth"}:
        options["num_speculative_tokens"] = K
    return SpeculativeConfig(method, rejection_sampling_strategy=rule, **options)


def _of_method(method, draft=None, mesh=None, **options):
    config = lambda rule: _config(method, rule, **options)
    return lambda rule: SpeculativeDecoder(TARGET, draft, config(rule), mesh=mesh)


def _of_host(function, **options):
    own = {"drafter": host_drafter(function, **options)}
    return lambda rule: SpeculativeDecoder(TARGET, None, _config("standalone", rule), **own)


def _adaptive(rule):
    options = {"is_adaptive": True, "adaptive_buckets": (0, 1, K)}
    decoder = SpeculativeDecoder(TARGET, DRAFT, _config("standalone", rule, **options))
    # At these costs K turns with every few acceptances.
    decoder.adaptive.costs = Known({0: 1.0, 1: 1.62, 3: 2.37})
    return decoder


DECODERS: dict[str, Callable[[str], SpeculativeDecoder]] = {
    "suffix": _of_method("suffix", suffix_history_tokens=64),
    "ngram": _of_method("ngram"),
    "host": _of_host(count_on),
    "sampled-host": _of_host(draw_from(DRAFT_TABLE), is_sampled=True, vocab_size=V),
    "adaptive": _adaptive,
    "confidence": _of_method("standalone", DRAFT, confidence_threshold=0.5),
    "chain": _of_method("standalone", DRAFT),
    "chain-on-mesh": _of_method("standalone", DRAFT, "data:2,tensor:4"),
    "tree": _of_method("standalone", DRAFT, tree=(2, 1)),
    "dynamic-tree": _of_method("standalone", DRAFT, tree_depth=2, tree_top_k=2),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt of two tokens or more, how many tokens follow it, and how they are drawn."""

    prompt: tuple[int, ...]
    num_tokens: int
    sampler: SamplerConfig = SamplerConfig(temperature=1.0)

    @functools.cached_property
    def distribution(self) -> np.ndarray:
        """Probability of every output."""
        config = self.sampler
        return markov.output_distribution(
            TABLE, self.prompt, self.num_tokens, config.temperature, config.top_k
        )


def calls(
    make: Callable[[], SpeculativeDecoder],
    rows: Sequence[Row],
    trials: int,
    batch: int,
    **options: Any,
) -> Iterator[tuple[list[np.ndarray], Stats]]:
    """Decodes rows of each kind in turn, every row of every call with a seed of its own.

    Args:
      make: a decoder for each call, which has learned nothing.
      rows: kinds of rows.
      trials: number of rows in all.
      batch: rows of a call.
      **options: of ``generate``.

    Yields:
      Outputs i32[n,N] of each kind of row, and what the call counted.
    """
    kinds = [rows[i % len(rows)] for i in range(batch)]
    prompts, samplers = [list(r.prompt) for r in kinds], [r.sampler for r in kinds]
    for first in range(0, trials, batch):
        decoder = make()
        found = decoder.generate(
            prompts,
            sampler=samplers,
            seeds=range(first, first + batch),
            has_progress=False,
            **options,
        )
        assert {row.finish_reason for row in found} == {"length"}
        tokens = [row.tokens for row in found]
        yield [np.asarray(tokens[i :: len(rows)]) for i in range(len(rows))], decoder.stats
