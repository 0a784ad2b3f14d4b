"""Every dimension of every weight and state has a rule or is known to stay whole, and what is large
is split over all devices."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from support import block_drafts, eagle_heads, mtp_modules, parallel_heads, tiny_models
from support.meshes import NAMES, mesh
from support.sharded import Case, make_decoder

from spec_jax import decoding
from spec_jax.drafters import registry as kinds
from spec_jax.drafters.early_exit import ExitConfig
from spec_jax.models.config import ModelConfig
from spec_jax.models.families import registry as families
from spec_jax.models.families.bamba import BambaConfig
from spec_jax.models.families.qwen3_5 import Qwen35Config
from spec_jax.models.families.qwen3_moe import Qwen3MoeConfig
from spec_jax.models.params import init_params, layer_tables, param_shardings, param_table
from spec_jax.sampling import make_sampler
from spec_jax.sharding import FULLY_SHARDED, REPLICATED, SHARDED, spec, state_axes

# Dimensions that no device has a part of, with a reason for each.
WHOLE = dict(embed="the residual stream; FULLY_SHARDED splits it in training")
WHOLE |= dict(head_dim="heads are split as a whole", latent="every head reads all of it")
WHOLE |= dict(channels="of a convolution, whose parts are not those of the heads")
WHOLE |= dict(reach="of a convolution: four, or two", one="of size one")
WHOLE |= dict(side="of a part of a layer: before and after it", taps="of groups of channels")
WHOLE |= dict(rank="of a bias of low rank, whose ids are split")
WHOLE |= dict(layers="a scan goes through them", slots="every token attends to all of them")
TARGETS = [*tiny_models.FAMILIES, *tiny_models.STATE_FAMILIES, *tiny_models.SPARSE_FAMILIES]
LAYERS = [tiny_models.DEEPSEEK, tiny_models.QWEN3_NEXT]
HEADS = [*eagle_heads.CONFIGS.values(), *mtp_modules.CONFIGS.values(), *block_drafts.HEADS.values()]
HEADS += [*parallel_heads.HEADS.values(), ExitConfig(tiny_models.FAMILIES[0], 1)]


def tables():
    """The declared weights of every family and of every kind of head."""
    found = [(c, param_table(c)) for c in TARGETS]
    found += [(c, table) for c in LAYERS for table in layer_tables(c)]
    found += [(c, kinds.kind_of(c).head.table(c)) for c in HEADS]
    return found


def specs(table):
    for entry in table.values():
        yield from [entry] if hasattr(entry, "axes") else specs(entry)


def test_every_axis_of_every_weight_has_a_rule_or_stays_whole():
    for owner, table in tables():
        for entry in specs(table):
            assert len(entry.axes) == len(entry.shape), (owner, entry)
            assert set(entry.axes) <= {*SHARDED, *WHOLE}, (owner, entry)
    assert not set(SHARDED) & set(WHOLE)
    assert set(REPLICATED) < set(SHARDED) and set(FULLY_SHARDED) - set(SHARDED) == {"embed"}


def test_every_family_and_kind_of_head_is_looked_at():
    looked_at = {type(config) for config in TARGETS + LAYERS + HEADS}
    ours = lambda classes: {c for c in classes if c and c.__module__.startswith("spec_jax.")}
    assert ours(families._FAMILIES) <= looked_at
    assert ours(kind.head.config_class for kind in kinds._KINDS.values() if kind.head) <= looked_at


def test_every_rule_is_used():
    used = {name for _, table in tables() for entry in specs(table) for name in entry.axes}
    assert set(FULLY_SHARDED) - used == {"batch"}


def case(drafter, target, **changes):
    usual = dict(mesh="data:2,tensor:4", member="first", tree="chain", rule="residual")
    usual |= dict(
        sampling="filtered", layers="separate", draft="sharded", rows="even", drive="call"
    )
    return Case(drafter=drafter, target=target, **{"drive": "call", **usual, **changes})


CASES = {
    "plain": case("plain", "grouped", rule="match"),
    "scanned": case("plain", "llama", rule="match", layers="scanned"),
    "ngram": case("copies", "llama"),
    "suffix": case("copies", "llama", member="second"),
    "standalone": case("standalone", "llama"),
    "standalone tree": case("standalone", "mamba2", tree="static"),
    "standalone whole": case("standalone", "bamba", draft="replicated"),
    "eagle3": case("eagle", "llama"),
    "eagle1": case("eagle", "llama", member="second"),
    "eagle3 adaptive": case("eagle", "bamba", drive="adaptive"),
    "recycled": case("mtp", "mamba2"),
    "sequential": case("mtp", "grouped", member="second"),
}
B, SLOTS = 24, 192  # no other dimension has 24


@functools.cache
def states_of(name):
    """The shapes of a state before a round and within it, by tracing alone."""
    decoder = make_decoder(CASES[name], is_sharded=True)
    system, params = decoder.system(), decoder.params()
    configs = [decoder.target_sampler[i % 8] for i in range(B)]
    sampler = make_sampler(configs, B, system.target.vocab_size)
    tokens, row = jnp.zeros((B, 8), jnp.int32), jnp.full(B, 8)

    def both(params, tokens, row, stop, sampler):
        state = decoding.prefill(
            params, tokens, row, row + 9, stop, sampler, sampler, system=system, slots=SLOTS
        )
        proposal, within = decoding.draft(params, state, system)
        return state, decoding.verify(params["target"], within, proposal, system)[1]

    with jax.set_mesh(decoder.mesh):
        return jax.eval_shape(both, params, tokens, row, row[:, None], sampler)


def leaves(name):
    """Path, array and logical axes of every leaf of the states of a case."""
    found = []
    for state in states_of(name):
        arrays = jax.tree_util.tree_leaves_with_path(state)
        is_axes = lambda x: isinstance(x, PartitionSpec)
        axes = jax.tree.leaves(state_axes(state), is_leaf=is_axes)
        assert len(arrays) == len(axes)
        found += [(jax.tree_util.keystr(path), x, a) for (path, x), a in zip(arrays, axes)]
    return found


@pytest.mark.representatives("scanned", "standalone whole")
@pytest.mark.parametrize("name", CASES)
def test_every_array_of_every_state_says_its_axes(name):
    for path, x, axes in leaves(name):
        where = (path, x.shape, axes)
        assert set(axes) <= {*SHARDED, *WHOLE, None} and len(axes) <= x.ndim, where
        assert axes.index("batch") == x.shape.index(B), where


# Of a token, or of the few that a convolution and a window hold: split by rows alone.
BY_ROWS = (".conv", ".raw", ".b", ".last", ".features")


@pytest.mark.representatives("scanned")
@pytest.mark.parametrize(
    "name",
    [name for name, case in CASES.items() if case.target != "grouped" and case.draft == "sharded"],
)
def test_what_is_large_in_a_state_is_split_over_all_devices(name):
    found = [leaf for leaf in leaves(name) if leaf[1].size > B * SLOTS]
    assert found
    for path, x, axes in found:
        # Of a latent every device along "tensor" has a copy: on the mesh that it is made for.
        is_latent = name == "recycled" and ".draft.cache.keys" in path
        for over in map(mesh, (CASES[name].mesh,) if is_latent else NAMES):
            split = split_into(spec(axes, x.shape, over), over)
            is_by_rows = path.endswith(BY_ROWS)
            assert split == (over.shape["data"] if is_by_rows else 8), (path, x.shape, axes, over)


def split_into(parts, mesh):
    return math.prod(mesh.shape[axis] for axis in parts if axis is not None)


BIG = dict(vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=2)
BIG |= dict(num_attention_heads=8)
DELTA = dict(num_key_value_heads=4, head_dim=32, linear_num_key_heads=4, linear_key_head_dim=32)
DELTA |= dict(linear_num_value_heads=8, linear_value_head_dim=32)
DELTA |= dict(layer_types=("linear_attention", "full_attention"))
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
CONFIGS = {
    "separate": ModelConfig(**BIG),
    "scanned": ModelConfig(**BIG, scan_layers=True),
    "bamba": BambaConfig(**BIG, attn_layer_indices=(1,), mamba_n_heads=32, mamba_d_state=16),
    "qwen3.5": Qwen35Config(**BIG, **DELTA),
    "experts": Qwen3MoeConfig(**BIG, num_key_value_heads=4, **EXPERTS),
}


@pytest.mark.parametrize("rules", [SHARDED, FULLY_SHARDED], ids=["sharded", "fully"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_device_holds_its_part_of_the_weights(name, rules):
    """All of them but norms, biases and convolutions: a hundredth of the bytes at most."""
    over, config = mesh("data:2,tensor:4"), CONFIGS[name]
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    where = param_shardings(config, over, rules)
    assert jax.tree.structure(shapes) == jax.tree.structure(where)
    total, whole = 0, []
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, x), sharding in zip(leaves, jax.tree.leaves(where)):
        total += x.size
        if x.size < (8 if rules is FULLY_SHARDED else 4) * math.prod(sharding.shard_shape(x.shape)):
            whole.append((x.size, jax.tree_util.keystr(path), x.shape))
    assert sum(size for size, *_ in whole) < total / 100, sorted(whole)[::-1]
