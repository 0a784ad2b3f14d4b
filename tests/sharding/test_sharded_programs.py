"""What a round's compiled program says on eight CPU devices: what is sent between them, and that no
cache is copied. The same is counted of programs for TPUs in ``tests/parallel``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from support.meshes import mesh
from support.sharded import LLAMA, Case, make_decoder

from spec_jax import decoding
from spec_jax.planning import hlo
from spec_jax.planning.programs import find_caches
from spec_jax.sampling import make_sampler
from spec_jax.sharding import named, state_axes

L, B, T = LLAMA.num_hidden_layers, 8, 8
USUAL = dict(mesh="data:2,tensor:4", target="llama", member="first", tree="chain")
USUAL |= dict(sampling="bare", layers="separate", draft="sharded", rows="even", drive="call")


def round_of(**changes):
    """What one round moves, its program, and where the caches are among its results."""
    decoder = make_decoder(Case(**{**USUAL, **changes}), is_sharded=True)
    system, params, over = decoder.system(), decoder.params(), decoder.mesh
    sampler = make_sampler(decoder.target_sampler, B, system.target.vocab_size)
    row = jnp.full(B, T)

    def start(params, tokens, row, stop, sampler):
        return decoding.prefill(
            params, tokens, row, row + 20, stop, sampler, sampler, system=system, slots=40
        )

    with jax.set_mesh(over):
        tokens = jnp.zeros((B, T), jnp.int32)
        state = jax.eval_shape(start, params, tokens, row, row[:, None], sampler)
        placed = lambda x, axes: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=named(axes, x.shape, over)
        )
        state = jax.tree.map(placed, state, state_axes(state))
        args = (params, state, row, jnp.int32(9), jnp.int32(1))
        compiled = decoding.generate.lower(*args, system=system).compile()
    program = hlo.read(compiled.as_text())
    return hlo.traffic(program, program.round()), program, find_caches(state)[1]


K, COPY = 3, 2  # drafts a round; layers of the draft, which is a copy of the target
PLAIN = 2 * L + 6
DRAFTED = 2 * L + 2 * K * COPY + 3 * K + 6  # a draft's argmax takes two all-reduces
SAMPLED = DRAFTED + K + 4  # a draft: logits, token, soundness; then drafts' faults and the verdict


@pytest.mark.representatives("plain")
@pytest.mark.parametrize(
    ("bound", "changes"),
    [
        (PLAIN, dict(drafter="plain", rule="greedy")),
        (PLAIN, dict(drafter="plain", rule="match", sampling="filtered")),
        (DRAFTED, dict(drafter="standalone", rule="greedy")),
        (SAMPLED, dict(drafter="standalone", rule="residual", sampling="filtered")),
    ],
    ids=["plain", "plain sampled", "standalone", "standalone sampled"],
)
def test_a_round_sends_little_and_copies_no_cache(bound, changes):
    moved, program, caches = round_of(**changes)
    assert 2 * L < sum(c.times for c in moved.collectives) <= bound
    assert not moved.in_branches
    kinds = {"all-reduce", "all-gather", *["all-to-all"] * ("sampling" in changes)}
    assert {c.kind for c in moved.collectives} <= kinds
    # Logits are never gathered: each device samples its share of the rows, or finds an argmax.
    assert moved.largest_gather < 4 * LLAMA.vocab_size * B // mesh(USUAL["mesh"]).shape["data"]
    assert hlo.cache_copies(program, program.round(), caches) == []
