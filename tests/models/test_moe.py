"""Experts: those that a token chose, and no others."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.meshes import mesh

from spec_jax import sharding
from spec_jax.models import moe

X, D, F, M = 16, 12, 20, 4  # experts, widths, tokens


def draw(num_chosen, used=range(X), tokens=M, fewer=()):
    """Experts, inputs and weights of tokens that choose among ``used``; some choose fewer."""
    rng = np.random.default_rng(0)
    experts = tuple(
        rng.normal(size=shape).astype(np.float32) / 3 for shape in [(X, D, F)] * 2 + [(X, F, D)]
    )
    x = rng.normal(size=(tokens, D)).astype(np.float32)
    weights = np.zeros((tokens, X), np.float32)
    for row in weights:
        row[rng.choice(used, num_chosen, replace=False)] = rng.uniform(0.1, 1, num_chosen)
    for token, count in fewer:
        weights[token, np.flatnonzero(weights[token])[count:]] = 0
    return experts, x, weights


def expected(experts, x, weights):
    """Token by token, expert by expert."""
    gate, up, down = (w.astype(np.float64) for w in experts)
    out = np.zeros((len(x), D))
    for t, e in zip(*np.nonzero(weights)):
        h = x[t] @ gate[e]
        out[t] += weights[t, e] * ((h / (1 + np.exp(-h)) * (x[t] @ up[e])) @ down[e])
    return out


def mix(experts, x, weights, num_chosen):
    layer = dict(zip(moe.EXPERTS, map(jnp.asarray, experts)))
    return moe.mix_experts(layer, x[None], weights[None], num_chosen)[0]


WAYS = {
    "in turn": lambda experts, x, weights, k: moe.mix_in_turn(experts, x, weights),
    "sorted": moe.mix_sorted,
    "each": moe.mix_each,
    "all": lambda experts, x, weights, k: moe.mix_all(experts, x, weights),
    "chosen by platform": mix,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_chosen, tokens", [(2, M), (3, 40)], ids=["few", "many"])
def test_every_way_is_the_weighted_sum_of_each_tokens_experts(way, num_chosen, tokens):
    # Of the experts that a device holds a token may have chosen fewer than of all, or none.
    drawn = draw(num_chosen, tokens=tokens, fewer=[(1, 1), (2, 0)])
    out = WAYS[way](*jax.tree.map(jnp.asarray, drawn), num_chosen)
    np.testing.assert_allclose(out, expected(*drawn), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["in turn", "sorted", "each"])
def test_of_a_stack_the_experts_of_one_layer_are_computed(way):
    experts, x, weights = draw(2, fewer=[(1, 1), (2, 0)])
    layers = tuple(jnp.stack([w + 1, w, w - 1]) for w in map(jnp.asarray, experts))
    of_layer = tuple(moe.StackedWeight(w, jnp.int32(1)) for w in layers)
    out = WAYS[way](of_layer, jnp.asarray(x), jnp.asarray(weights), 2)
    np.testing.assert_allclose(out, expected(experts, x, weights), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["in turn", "each", "chosen by platform"])
def test_an_expert_that_no_token_chose_is_not_computed(way):
    """Its weights may be anything, even where a product with zero is not zero.

    Not of "sorted": a CPU computes ``ragged_dot`` of all experts and masks.
    """
    used = [1, 4, 5, 11]
    experts, x, weights = draw(2, used)
    spoiled = [np.array(w) for w in experts]
    for w in spoiled:
        w[np.setdiff1d(np.arange(X), used)] = np.nan
    out = WAYS[way](*jax.tree.map(jnp.asarray, (tuple(spoiled), x, weights)), 2)
    np.testing.assert_allclose(out, expected(experts, x, weights), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [M, 40])
def test_a_gpu_computes_groups_of_tokens_with_tokamax_and_single_ones_without(monkeypatch, tokens):
    """As it is lowered for one: a product of groups; without tokamax those of few tokens one by
    one, or all experts.
    """
    drawn, calls = jax.tree.map(jnp.asarray, draw(2, tokens=tokens)), []

    def ragged_dot(lhs, rhs, group_sizes, **options):
        assert not options
        calls.append((lhs.shape, rhs.shape, group_sizes.shape, group_sizes.dtype))
        return jax.lax.ragged_dot(lhs, rhs, group_sizes)

    def lowered():
        mixed = functools.partial(mix, num_chosen=2)
        return jax.jit(mixed).trace(*drawn).lower(lowering_platforms=("cuda",)).as_text()

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(ragged_dot=ragged_dot))
    assert "ragged_dot" in lowered()
    rows, groups = 2 * tokens, ((X,), jnp.int32)
    wide, narrow = ((rows, D), (X, D, F), *groups), ((rows, F), (X, F, D), *groups)
    assert sorted(calls) == sorted([wide, wide, narrow])
    monkeypatch.setitem(sys.modules, "tokamax", None)  # not installed
    text = lowered()
    assert "ragged_dot" not in text and ("gather" in text) == (tokens == M)


def test_rows_of_no_group_may_hold_anything():
    """A kernel may leave them unwritten; a device may hold fewer experts than a token chose."""
    experts, x, weights = draw(2)
    weights[::2] = np.where(
        weights[::2] == weights[::2].max(axis=1, keepdims=True), weights[::2], 0
    )

    def ragged_dot(lhs, rhs, group_sizes):
        out = jax.lax.ragged_dot(lhs, rhs, group_sizes)
        is_written = jnp.arange(len(lhs))[:, None] < group_sizes.sum()
        return jnp.where(is_written, out, jnp.nan)

    given = jax.tree.map(jnp.asarray, (experts, x, weights))
    out = moe.mix_sorted(*given, 2, ragged_dot)
    np.testing.assert_allclose(out, expected(experts, x, weights), rtol=0, atol=1e-5)


def test_gradients_are_those_of_all_experts():
    experts, x, weights = draw(2)
    chosen = lambda *args: (mix(*args, 2) ** 2).sum()
    everything = lambda *args: (moe.mix_all(*args) ** 2).sum()
    found = jax.grad(chosen, argnums=(0, 1, 2))(experts, x, weights)
    wanted = jax.grad(everything, argnums=(0, 1, 2))(experts, x, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)


def on_mesh(name, function, *args, rules=sharding.SHARDED):
    """The function, compiled for experts and rows on a mesh, and its arguments there."""
    with jax.set_mesh(mesh(name)), sharding.use_axis_rules(rules):
        put = lambda x, *axes: sharding.place(
            x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x),
            sharding.named(axes, x.shape, mesh(name)),
        )
        experts, x, weights = args
        axes = ("experts",) if experts[0].ndim == 3 else (None, "experts")
        placed = tuple(put(w, *axes) for w in experts), put(x, "batch"), put(weights, "batch")
        return jax.jit(function).lower(*placed).compile(), placed


MESHES = {
    "both axes": ("data:2,tensor:4", sharding.SHARDED),
    "of a stack of layers": ("data:2,tensor:4", sharding.SHARDED),
    "one expert a device": ("data:1,tensor:8", sharding.SHARDED),
    "replicated": ("data:2,tensor:4", sharding.REPLICATED),
    "experts over the axis of rows": ("data:4,tensor:2", {"batch": "data", "experts": "data"}),
}


@pytest.mark.representatives("of a stack of layers", "experts over the axis of rows")
@pytest.mark.parametrize("name", MESHES)
def test_on_a_mesh_each_device_computes_the_experts_that_it_holds_for_its_rows(name):
    """And of them those that were chosen; tokens may have more experts than a device holds."""
    on, rules = MESHES[name]
    used = [1, 4, 5, 9, 11, 12] if "one" not in name else range(X)
    experts, x, weights = draw(5, used, tokens=8)
    spoiled = [np.array(w) for w in experts]
    for w in spoiled:
        w[np.setdiff1d(np.arange(X), used)] = np.nan
    if "stack" in name:
        spoiled = [np.stack([np.full_like(w, np.nan), w]) for w in spoiled]
    rows = lambda array: array.reshape(4, 2, -1)

    def mix_rows(experts, x, weights):
        if "stack" in name:
            experts = [moe.StackedWeight(w, jnp.int32(1)) for w in experts]
        return moe.mix_experts(dict(zip(moe.EXPERTS, experts)), x, weights, 5)

    run, args = on_mesh(on, mix_rows, spoiled, rows(x), rows(weights), rules=rules)
    found = np.asarray(run(*args)).reshape(8, D)
    np.testing.assert_allclose(found, expected(experts, x, weights), rtol=0, atol=2e-5)


@pytest.mark.exhaustive
def test_gradients_on_a_mesh_are_those_of_one_device():
    experts, x, weights = draw(3, tokens=8)

    def loss(experts, x, weights):
        layer = dict(zip(moe.EXPERTS, experts))
        return (moe.mix_experts(layer, x, weights, 3) ** 2).sum()

    grad = jax.grad(loss, argnums=(0, 1, 2))
    args = jax.tree.map(jnp.asarray, (experts, x.reshape(4, 2, -1), weights.reshape(4, 2, -1)))
    run, placed = on_mesh("data:2,tensor:4", grad, *args, rules=sharding.FULLY_SHARDED)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-4), run(*placed), grad(*args)
    )
