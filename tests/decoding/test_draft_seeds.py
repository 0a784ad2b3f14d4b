"""Drafts are drawn anew for every request, whatever the seeds of the draft's samplers.

Draft noise that requests share shows only over many requests, so each has a row of one batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import markov
from support import toys
from support.markov import draw_from

from spec_jax import (
    AsyncSpecConfig,
    DecodeQueue,
    SamplerConfig,
    SpeculativeConfig,
    SpeculativeDecoder,
    host_drafter,
    rng,
)
from spec_jax.contracts import Proposal
from spec_jax.drafters.model_free import NO_DRAFT, model_free
from spec_jax.overlap.overlap import Devices
from spec_jax.sampling import process, sample

TARGET, V, K, SIZE = toys.TARGET, toys.V, 3, 4000
WARM = SamplerConfig(temperature=1.0, seed=3)
DRAFT = SamplerConfig(temperature=1.2, seed=5)
PROMPT, NUM_TOKENS = [0, 1], 3
EXPECTED = markov.output_distribution(TARGET.params["logits"], PROMPT, NUM_TOKENS)


def tokens_of(rows) -> np.ndarray:
    return np.asarray([row.tokens for row in rows])


def test_one_draft_sampler_draws_other_drafts_for_every_request():
    config = SpeculativeConfig(num_speculative_tokens=1)
    decoder = SpeculativeDecoder(TARGET, toys.DRAFT, config, target_sampler=WARM)
    prompts = [PROMPT] * 256

    def outputs(draft, **options):
        return tokens_of(decoder.generate(prompts, NUM_TOKENS, draft_sampler=draft, **options))

    of_equal_ones = outputs([DRAFT] * len(prompts))
    assert markov.p_value(of_equal_ones, EXPECTED) > 1e-3
    np.testing.assert_array_equal(outputs(DRAFT), of_equal_ones)
    seeds = [WARM.seed + i for i in range(len(prompts))]
    np.testing.assert_array_equal(outputs(DRAFT, seeds=seeds[::-1]), of_equal_ones[::-1])
    assert (outputs(dataclasses.replace(DRAFT, seed=6)) != of_equal_ones).any()
    of_requests = outputs([SamplerConfig(temperature=1.0, seed=seed) for seed in seeds])
    np.testing.assert_array_equal(of_requests, outputs(None))


def draw_by_hand(params, state, context, num_draft):
    """A drafter that keys its noise itself, by the seed of the sampler that it is given."""
    if num_draft == 0:
        return NO_DRAFT.propose(params, state, context, num_draft)
    logits = jnp.tile(jnp.linspace(0.0, 1.0, V), (len(context.length), 1))
    dist = process(logits[:, None], context.sampler)[:, 0]
    keys = lambda node: rng.keys(context.sampler.seed, rng.Purpose.DRAFT, context.length, node)
    drafts = [sample(dist, rng.gumbel(keys(1 + i), V)) for i in range(num_draft)]
    probs = jnp.tile(jax.nn.softmax(dist)[:, None], (1, num_draft, 1))
    n_draft = jnp.full_like(context.length, num_draft)
    return Proposal(jnp.stack(drafts, axis=1), n_draft, probs=probs), state


def ways(kind, shape):
    """Yields the name and the outputs of every way to decode one prompt with SIZE seeds."""
    draw = draw_from(toys.DRAFT.params["logits"])
    own = {
        "host": lambda: host_drafter(draw, is_sampled=True, vocab_size=V),
        "custom": lambda: model_free("custom", draw_by_hand, V)._replace(is_sampled=True),
    }
    drafter, draft = (own[kind](), None) if kind in own else toys.parts_of(kind)
    prompts, equal_ones = [PROMPT] * SIZE, [DRAFT] * SIZE

    def decoder(config, **options):
        return SpeculativeDecoder(TARGET, draft, config, drafter=drafter, **options)

    config = SpeculativeConfig(**toys.SHAPES[shape])
    made = decoder(config, target_sampler=WARM)
    yield "generate", made.generate(prompts, NUM_TOKENS, draft_sampler=equal_ones)
    options = {"num_samples": SIZE, "draft_sampler": equal_ones}
    yield "samples", made.generate([PROMPT], NUM_TOKENS, **options)
    # Counted up with the prompts, their seeds would be one.
    turns = [dataclasses.replace(DRAFT, seed=SIZE - i) for i in range(SIZE)]
    options = {"batch": SIZE, "max_new_tokens": NUM_TOKENS, "draft_sampler": turns}
    yield "queue", [row for _, row in sorted(DecodeQueue(made, prompts, **options))]
    own = {"target_sampler": WARM, "draft_sampler": equal_ones}
    yield "decoder", decoder(config, **own).generate(prompts, NUM_TOKENS)
    if shape == "chain" and kind not in ("host", "custom"):
        yield "asynchronous", decoder(AsyncSpecConfig(K, DRAFT, WARM)).generate(prompts, NUM_TOKENS)
    if shape == "chain" and kind == "standalone":
        devices = Devices(*jax.devices()[:2])
        yield "overlapped", decoder(config, devices=devices, **own).generate(prompts, NUM_TOKENS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind,shape",
    [
        ("standalone", "small"),
        *((kind, "chain") for kind in ("standalone", "dspark", "host", "custom")),
    ],
)
def test_4000_requests_of_one_draft_sampler_have_the_targets_distribution(kind, shape):
    found = {name: tokens_of(rows) for name, rows in ways(kind, shape)}
    p_values = {name: markov.p_value(outputs, EXPECTED) for name, outputs in found.items()}
    print(f"{kind}, {shape}: p {p_values}")
    assert min(p_values.values()) > 1e-4
    second = EXPECTED.sum(axis=(0, 2))
    of_two_samples = found["samples"][:, 1].reshape(-1, 2)
    assert markov.p_value(of_two_samples, np.outer(second, second)) > 1e-4
    # The draft samplers of the queue have other seeds, and overlapped blocks begin elsewhere.
    for name in found.keys() - {"queue", "overlapped"}:
        np.testing.assert_array_equal(found[name], found["generate"], err_msg=name)
