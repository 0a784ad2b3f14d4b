"""Where arrays lie: weights stay as they were split, and states from round to round."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import sharded
from support.tiny_models import GLM4_MOE

from spec_jax import SpeculativeDecoder, load_draft, load_model
from spec_jax.engine.request import make_request
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.meshes import make_mesh, to_mesh, use_mesh
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.params import placement
from spec_jax.sampling import make_sampler
from spec_jax.sharding import (
    FULLY_SHARDED,
    REPLICATED,
    SHARDED,
    check_divides,
    constrain_state,
    named,
    shard_map_rows,
    state_axes,
)

MESH = "data:2,tensor:2"


def test_a_decoder_leaves_weights_as_they_are_split():
    target = load_model("zoo/draft", mesh=MESH, axis_rules=FULLY_SHARDED)
    draft = load_draft("zoo/draft", target, mesh=MESH, axis_rules=REPLICATED)
    decoder = SpeculativeDecoder(target, draft)
    assert decoder.target.params is target.params
    assert decoder.draft.params is draft.params
    moved = SpeculativeDecoder(target, draft, mesh=MESH)
    assert moved.target.params["embed"].sharding != target.params["embed"].sharding


def test_what_has_no_rows_is_refused_by_row():
    with jax.set_mesh(make_mesh(MESH)):
        with pytest.raises(ShapeError, match="of 4 rows, .* expected the rows"):
            jax.eval_shape(shard_map_rows(lambda x: x.sum()), jnp.ones((4, 2)))
        with pytest.raises(ShapeError, match=r"shapes \[\(3,\)\] are given"):
            jax.eval_shape(
                shard_map_rows(lambda x, table: x + table[0]), jnp.ones((4, 2)), jnp.ones(3)
            )


def test_a_snapshot_has_each_head_once_and_moves_between_meshes():
    create = lambda: KVCache.create(sharded.GROUPED, 4, 8)
    restore = lambda snapshot: constrain_state(create().restore_from_snapshot(snapshot))
    random = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype)
    first = snapshot = jax.tree.map(draw, create().snapshot())
    assert first.keys[0].shape[1] == 2
    for name in ("data:1,tensor:8", "data:2,tensor:4", "data:4,tensor:2", None):
        with use_mesh(to_mesh(name)):
            cache = jax.jit(lambda x: restore(x))(snapshot)  # a function of its own a mesh
            snapshot = jax.device_get(cache.snapshot())
        if name is not None:
            assert {shard.data.shape[1] for shard in cache.keys[0].addressable_shards} == {1}
        jax.tree.map(np.testing.assert_array_equal, snapshot, first)


def test_what_a_mesh_does_not_divide_is_refused_with_a_size_that_does():
    over, of_experts = make_mesh("tensor:8"), dataclasses.replace(GLM4_MOE, num_attention_heads=8)
    for counts, words in (
        ({"heads": 12, "kv_heads": 4}, "12 heads, .* tensor:8 does not divide; .* 3, 4, 6, 12"),
        (
            {"heads": 24, "kv_heads": 3},
            "3 key-value heads, .* tensor:8 does not divide; .* 1, 3 and multiples of 3",
        ),
    ):
        with pytest.raises(ConfigError, match=f"a model has {words}"):
            check_divides("a model", counts, over, SHARDED)
        check_divides("a model", counts, over, REPLICATED)
    for kv_heads in (4, 24):
        check_divides("a model", {"heads": 24, "kv_heads": kv_heads}, over, SHARDED)
    with pytest.raises(ConfigError, match="glm has 6 experts, .* does not divide; .* 1, 2, 3, 6"):
        placement("glm", of_experts, over, SHARDED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft", ["zoo/draft", "zoo/eagle3"])
def test_a_state_lies_as_it_declares_after_prefill_and_after_rounds(draft):
    target = load_model("zoo/target", mesh=MESH)
    decoder = SpeculativeDecoder(target, load_draft(draft, target, mesh=MESH))
    engine, V = decoder.engine(), target.model.vocab_size
    ids = [decoder.encode(text) for text in ("def f(x):", "import os", "for i in", "class A:")]
    sampler = make_sampler(decoder.target_sampler, 4, V)
    state = engine.prefill(make_request(engine.system, ids, [12] * 4, sampler, sampler))
    for _ in range(2):
        declared = jax.tree.map(
            lambda x, axes: named(axes, x.shape, decoder.mesh), state, state_axes(state)
        )
        lies = lambda x, where: x.sharding.is_equivalent_to(where, x.ndim)
        assert all(jax.tree.leaves(jax.tree.map(lies, state, declared)))
        assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(state.target))
        state, _ = engine.generate(state, jnp.zeros(4, jnp.int32), 2)
