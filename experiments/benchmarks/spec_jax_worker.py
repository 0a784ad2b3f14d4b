"""The process of the benchmark's part "peers" that decodes with this package.

It is a process of its own, so that its memory is its own; requests and answers are those of
``transformers_worker``, with these methods: "plain", "ngram", "standalone" and "head". The first
request also names the head and the draft, "" for none.
"""

from __future__ import annotations

import functools
import time

import jax

import spec_jax
from experiments.benchmarks.worker_lines import serve
from spec_jax.config import SpeculativeConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import load_draft, load_model


def load(setup: dict):
    """Returns the versions, and what answers requests."""
    jax.config.update("jax_enable_compilation_cache", False)  # the first run compiles everything
    target = load_model(setup["target"], setup["dtype"])
    draft = load_model(setup["draft"], setup["dtype"]) if setup["draft"] else None

    @functools.cache
    def decoder(method: str, k: int, ngram_max: int) -> SpeculativeDecoder:
        if method == "plain":
            return SpeculativeDecoder(target)
        if method == "ngram":
            config = SpeculativeConfig("ngram", k, ngram_max=ngram_max, ngram_min=1)
            return SpeculativeDecoder(target, None, config)
        drafts = load_draft(setup["head"], target) if method == "head" else draft
        return SpeculativeDecoder(target, drafts, SpeculativeConfig(drafts.method, k))

    def answer(request: dict) -> dict:
        decode = decoder(request["method"], request["k"], request["ngram_max"])
        decode.reset_stats()
        begin = time.perf_counter()
        rows = [decode.generate(ids, request["max_new_tokens"]) for ids in request["prompts"]]
        seconds = time.perf_counter() - begin
        tokens = [list(map(int, row.tokens)) for row in rows]
        return {"seconds": seconds, "tokens": tokens, "tau": decode.stats.tau}

    return {"spec_jax": spec_jax.__version__, "jax": jax.__version__}, answer


if __name__ == "__main__":
    serve(load)
