"""Experts: those that a token chose, and no others."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models import moe

X, D, F, M = 16, 12, 20, 4  # experts, widths, tokens


def draw(num_chosen, used=range(X), tokens=M):
    """Experts, inputs and weights of tokens that choose among ``used``."""
    rng = np.random.default_rng(0)
    experts = tuple(
        rng.normal(size=shape).astype(np.float32) / 3 for shape in [(X, D, F)] * 2 + [(X, F, D)]
    )
    x = rng.normal(size=(tokens, D)).astype(np.float32)
    weights = np.zeros((tokens, X), np.float32)
    for row in weights:
        row[rng.choice(used, num_chosen, replace=False)] = rng.uniform(0.1, 1, num_chosen)
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
    layer = dict(zip(("experts_gate", "experts_up", "experts_down"), map(jnp.asarray, experts)))
    return moe.mix_experts(layer, x[None], weights[None], num_chosen)[0]


WAYS = {
    "in turn": lambda experts, x, weights, k: moe.mix_in_turn(experts, x, weights),
    "sorted": moe.mix_sorted,
    "copied": moe.mix_copied,
    "all": lambda experts, x, weights, k: moe.mix_all(experts, x, weights),
    "chosen by platform": mix,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_chosen, tokens", [(2, M), (3, 40)], ids=["few", "many"])
def test_every_way_is_the_weighted_sum_of_each_tokens_experts(way, num_chosen, tokens):
    drawn = draw(num_chosen, tokens=tokens)
    out = WAYS[way](*jax.tree.map(jnp.asarray, drawn), num_chosen)
    np.testing.assert_allclose(out, expected(*drawn), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["in turn", "copied", "chosen by platform"])
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


def test_gradients_are_those_of_all_experts():
    experts, x, weights = draw(2)
    chosen = lambda *args: (mix(*args, 2) ** 2).sum()
    everything = lambda *args: (moe.mix_all(*args) ** 2).sum()
    found = jax.grad(chosen, argnums=(0, 1, 2))(experts, x, weights)
    wanted = jax.grad(everything, argnums=(0, 1, 2))(experts, x, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)


def test_no_copy_of_all_experts_is_made():
    """The program has their stacks as arguments and in the loop's state, and never computes one."""
    experts, x, weights = jax.tree.map(jnp.asarray, draw(2))
    program = jax.jit(functools.partial(mix, num_chosen=2)).lower(experts, x, weights).compile()
    made = re.findall(r"= f32\[16,(?:12,20|20,12)\]\S* ([\w-]+)\(", program.as_text())
    assert made and set(made) <= {"parameter", "get-tuple-element"}, made
    assert program.memory_analysis().temp_size_in_bytes < 8 * D * F * 4  # of one expert, and rows
