"""``prefill`` and ``generate`` within a caller's program: under jit, vmap and export."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import spec_jax
from docs.examples import my_model
from spec_jax import decoding
from spec_jax.errors import ConfigError, PromptError, ShapeError
from spec_jax.sampling import make_sampler

SLOTS = 32
NEW = 8
PROMPTS = jnp.array([[3, 1, 4], [7, 7, 2]])


def decoder(draft: bool) -> spec_jax.SpeculativeDecoder:
    config = spec_jax.SpeculativeConfig(num_speculative_tokens=2)
    return spec_jax.SpeculativeDecoder(
        my_model.make(), my_model.make(1) if draft else None, config if draft else None
    )


def make_rollout(decoder):
    """``(params, tokens i32[T]) -> i32[SLOTS]``, of one prompt."""
    system = decoder.system()
    sampler = make_sampler(spec_jax.SamplerConfig(), 1, my_model.VOCABULARY)

    def rollout(params, tokens):
        lengths = jnp.full(1, len(tokens))
        stop_tokens = jnp.zeros((1, 0), jnp.int32)
        rows = tokens[None], lengths, lengths + NEW, stop_tokens, sampler, sampler
        state = decoding.prefill(params, *rows, system=system, slots=SLOTS)
        running = jnp.zeros(1, jnp.int32)
        return decoding.generate(params, state, running, 100, system=system)[1].tokens[0]

    return rollout


def expected() -> list[list[int]]:
    rows = decoder(False).generate(PROMPTS, NEW)
    return [[*prompt, *row.tokens] for prompt, row in zip(PROMPTS.tolist(), rows)]


def test_a_callers_program_decodes_what_a_decoder_does():
    speculative = decoder(True)
    params = speculative.params(batch=1)
    rollout = make_rollout(speculative)
    rows = jax.jit(jax.vmap(rollout, in_axes=(None, 0)))(params, PROMPTS)
    assert rows[:, : 3 + NEW].tolist() == expected()
    np.testing.assert_array_equal(jax.jit(rollout)(params, PROMPTS[0]), rows[0])


@pytest.mark.exhaustive
def test_a_callers_program_is_exported_for_three_platforms():
    speculative = decoder(True)
    params = speculative.params(batch=1)
    platforms = ["cpu", "cuda", "tpu"]
    program = jax.jit(make_rollout(speculative))
    exported = jax.export.export(program, platforms=platforms)(params, PROMPTS[0])
    assert exported.call(params, PROMPTS[0])[: 3 + NEW].tolist() == expected()[0]


def test_weights_on_a_mesh_of_explicit_axes_decode_as_on_one_of_automatic_axes():
    mesh = jax.make_mesh((2,), ("tensor",))
    assert mesh.axis_types == (AxisType.Explicit,)
    own = my_model.make()

    def split(x):
        axis = PartitionSpec(*[None] * (x.ndim - 1), "tensor")
        return jax.device_put(x, NamedSharding(mesh, axis))

    params = jax.tree.map(split, own.params)
    target = dataclasses.replace(own, params=params)
    pointers = [
        [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
        for tree in (params, target.params)
    ]
    assert pointers[0] == pointers[1]  # nothing is copied
    rows = spec_jax.SpeculativeDecoder(target).generate(PROMPTS, NEW)
    assert [[*prompt, *row.tokens] for prompt, row in zip(PROMPTS.tolist(), rows)] == expected()
    again = spec_jax.SpeculativeDecoder(own).with_params(target=params).target.params
    where = {x.sharding.mesh.axis_types for x in jax.tree.leaves(again)}
    assert where == {(AxisType.Auto,)}


def test_weights_that_were_donated_are_named_with_the_remedy():
    target = my_model.make()
    target = dataclasses.replace(target, params=jax.tree.map(jnp.copy, target.params))
    living = spec_jax.SpeculativeDecoder(target)
    train = jax.jit(lambda params: jax.tree.map(lambda x: x + 0, params), donate_argnums=0)
    new = train(target.params)
    with pytest.raises(ConfigError, match=r"target my_model were donated .*with_params\(target="):
        living.generate(PROMPTS, NEW)
    rows = living.with_params(target=new).generate(PROMPTS, NEW)
    assert [[*prompt, *row.tokens] for prompt, row in zip(PROMPTS.tolist(), rows)] == expected()


def test_what_cannot_work_within_a_program_is_refused():
    plain = decoder(False)
    with pytest.raises(PromptError, match="decoding.prefill and decoding.generate"):
        jax.jit(lambda tokens: plain.generate(tokens, 4).tokens)(PROMPTS)
    sampler = make_sampler(spec_jax.SamplerConfig(), 1, my_model.VOCABULARY)
    lengths = jnp.full(1, 3)
    rows = PROMPTS[:1], lengths, lengths + NEW, jnp.zeros((1, 0), jnp.int32), sampler, sampler
    options = dict(system=plain.system(), slots=3 + NEW)
    with pytest.raises(ShapeError, match="limit is 11, and a round may write 1 more slots"):
        decoding.prefill(plain.params(batch=1), *rows, **options)
