"""Drafters and rules of a user's own, which know of no mesh: the same tokens on one."""

from __future__ import annotations

import asyncio

import jax
import numpy as np
import pytest
from support.meshes import mesh
from support.tiny_models import LLAMA, loaded

from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, host_drafter
from spec_jax.contracts import Rule
from spec_jax.errors import InvalidDraftError
from spec_jax.rules import chain

V, K = LLAMA.vocab_size, 3
TARGET = loaded(LLAMA, "target")
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 5], [9], [3, 1]]
SAMPLERS = [SamplerConfig(0.5, seed=row) for row in range(4)]


def after_each(prefix, k, seed):
    """Drawn from a distribution of its own; the seed says which, and what is drawn."""
    draw = np.random.default_rng([seed, prefix[-1]])
    probs = draw.dirichlet(np.ones(V), k)
    return [int(draw.choice(V, p=p / p.sum())) for p in probs], probs


HOST = host_drafter(after_each, is_sampled=True, vocab_size=V)
# Mapped over the batch by jax.vmap alone, as a user would.
RULE = Rule("mine", jax.vmap(chain.residual), is_lossless=True, needs_probs=True)


def decoder(where, rule=None):
    config = SpeculativeConfig(num_speculative_tokens=K, rejection_sampling_strategy="residual")
    return SpeculativeDecoder(
        TARGET, config=config, drafter=HOST, rule=rule, target_sampler=SAMPLERS, mesh=where
    )


@pytest.mark.exhaustive
def test_the_same_tokens_and_counts_as_without_a_mesh():
    ours, theirs = decoder(mesh("data:2,tensor:4"), RULE), decoder(None, RULE)
    given, expected = ours.generate(PROMPTS, 14), theirs.generate(PROMPTS, 14)
    assert [row.tokens for row in given] == [row.tokens for row in expected]
    counts = lambda stats: (stats.rounds, stats.drafted, stats.accepted, stats.bonus)
    assert counts(ours.stats) == counts(theirs.stats) and ours.stats.accepted > 0


@pytest.mark.exhaustive
def test_calls_of_one_event_loop_take_turns_on_a_mesh():
    async def both(decoder):
        calls = [decoder.generate_async(prompts, 14) for prompts in (PROMPTS, PROMPTS[::-1])]
        return [row.tokens for rows in await asyncio.gather(*calls) for row in rows]

    ours, theirs = (asyncio.run(both(decoder(where))) for where in (mesh("data:2,tensor:4"), None))
    assert ours == theirs


@pytest.mark.exhaustive
def test_an_error_of_a_hosts_function_reaches_the_caller_from_a_mesh():
    wrong = host_drafter(lambda prefix, k, seed: [V + 1])
    config = SpeculativeConfig(num_speculative_tokens=K)
    one = SpeculativeDecoder(TARGET, config=config, drafter=wrong, mesh=mesh("data:2,tensor:4"))
    with pytest.raises(InvalidDraftError, match=r"outside of the vocabulary.*in rows \[0, 1\]"):
        one.generate(PROMPTS[:2], 6)
    wrong = host_drafter(lambda prefix, k, seed: {}["no such key"])
    one = SpeculativeDecoder(TARGET, config=config, drafter=wrong, mesh=mesh("data:2,tensor:4"))
    with pytest.raises(InvalidDraftError, match=r"KeyError: 'no such key', in rows \[0, 1\]") as it:
        one.generate(PROMPTS[:2], 6)
    assert type(it.value.__cause__) is KeyError
