"""Objectives of heads: they unroll what the decoder drafts, from the same round starts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_heads import CONFIG, TARGET, UNROLLED

from spec_jax.drafters.eagle.model import eagle_head
from spec_jax.drafters.eagle.objective import eagle1_loss, eagle3_loss, smooth_l1
from spec_jax.drafters.mtp.objective import mtp_loss
from spec_jax.errors import ConfigError
from spec_jax.loading import random_head
from spec_jax.models import transformer
from spec_jax.models.attention import block_size
from spec_jax.models.sees import Sees
from spec_jax.train import chunks, losses
from spec_jax.train.objective import Batch, Objective, View, target_view
from spec_jax.train.unroll import UnrolledCache, unroll

K, W = 4, 40


OBJECTIVES = {
    "eagle-1": functools.partial(eagle1_loss, noise=0.2),
    "eagle-3": functools.partial(eagle3_loss, num_steps=K),
    "eagle-3, reduced, normed": functools.partial(eagle3_loss, num_steps=K),
    "mtp": functools.partial(mtp_loss, num_steps=K, labels="target"),
}


def objective(name):
    return functools.partial(OBJECTIVES[name], config=UNROLLED[name], model=TARGET.model)


def view_of(config, tokens, mask=None):
    view = target_view(TARGET.params, tokens, model=transformer.model(CONFIG), taps=config.taps)
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    return Batch(tokens, mask, jax.random.key(0), view)


def tokens_of(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 31, shape), jnp.int32)


def untrained(name):
    return random_head(UNROLLED[name], jax.random.key(3))


@pytest.mark.representatives("mtp")
@pytest.mark.parametrize("name", UNROLLED)
def test_masked_tokens_have_no_influence(name):
    """Neither as labels nor, after the last token that counts, as inputs."""
    head, config, run = untrained(name), UNROLLED[name], jax.jit(objective(name))
    tokens = tokens_of(2, W)
    mask = jnp.arange(W)[None] < jnp.asarray([[W], [20]])
    loss = lambda tokens: run(head.params, view_of(config, tokens, mask), TARGET.params)[0]
    other = tokens.at[1, 20:].set(tokens_of(W - 20, seed=5))
    assert float(loss(tokens)) == pytest.approx(float(loss(other)), rel=1e-6)
    counted = tokens.at[1, 10:20].set(tokens_of(10, seed=6))
    assert float(loss(tokens)) != pytest.approx(float(loss(counted)), rel=2e-5)


def test_losses_agree_with_their_definitions():
    rng = np.random.default_rng(0)
    p, q = (rng.normal(size=(3, 5)).astype(np.float32) * 2 for _ in range(2))
    softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    P, Q, labels = softmax(p), softmax(q), np.array([0, 4, 2])
    definitions = {
        "cross-entropy": -(P * np.log(Q)).sum(-1),
        "forward-kl": (P * np.log(P / Q)).sum(-1),
        "reverse-kl": (Q * np.log(Q / P)).sum(-1),
        "total-variation": 0.5 * np.abs(P - Q).sum(-1),
        "acceptance": -np.log(np.minimum(P, Q).sum(-1)),
    }
    assert set(definitions) == set(losses.DIVERGENCES)
    cool = np.minimum(softmax(p / 0.5), softmax(q / 0.5)).sum(-1)
    same = p.argmax(-1) == q.argmax(-1)
    for found, expected in [
        *((losses.make_divergence(name)(p, q), x) for name, x in definitions.items()),
        (losses.cross_entropy(q, labels), -np.log(Q[np.arange(3), labels])),
        (losses.expected_acceptance(p, q), np.minimum(P, Q).sum(-1)),
        (losses.expected_acceptance(p, q, temperature=0.5), cool),
        (losses.expected_acceptance(p, q, temperature=0.0), same),
    ]:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="'kl'; expected one of cross-entropy"):
        losses.make_divergence("kl")


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_ids_that_pad_the_target_cost_nothing(name):
    p = jnp.asarray([1.0, 2.0, -jnp.inf])
    value, gradient = jax.value_and_grad(lambda q: losses.make_divergence(name)(p, q))(p)
    expected, known = jax.value_and_grad(lambda q: losses.make_divergence(name)(p[:2], q))(p[:2])
    np.testing.assert_allclose(value, expected, atol=1e-6)
    np.testing.assert_allclose(gradient, [*known, 0], atol=1e-6)


def test_smooth_l1_is_quadratic_then_linear():
    x = jnp.asarray([-3.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    np.testing.assert_allclose(smooth_l1(x), [2.5, 0.125, 0, 0.125, 0.5, 1.5])


def test_a_row_of_the_unrolling_sees_no_later_token():
    """By gradients: row t of step j depends on tokens up to t + 1 + j alone."""
    head = untrained("eagle-3")
    functions = eagle_head(head.config, transformer.model(CONFIG, head.config.taps))
    tokens = tokens_of(1, 10)
    features = view_of(head.config, tokens).view.features
    embed = jax.nn.one_hot(tokens, 31) @ TARGET.params["embed"]

    def outputs(features, rows):
        params = {"head": head.params, "target": {**TARGET.params, "embed": rows}}
        return jnp.stack(unroll(functions, params, features, jnp.arange(10)[None], 3))

    by_feature, by_token = jax.jit(jax.jacobian(outputs, argnums=(0, 1)))(features, embed[0])
    touched = np.abs(np.asarray(by_token)).sum(axis=(1, 3, 5)) > 0  # j, B, T, D, token, D
    for step in range(3):
        for row in range(8 - step):
            last = row + 1 + step
            assert touched[step, row, last] and not touched[step, row, last + 1 :].any()
    touched = np.abs(np.asarray(by_feature)).sum(axis=(1, 3, 4, 6)) > 0
    for step in range(3):
        np.testing.assert_array_equal(touched[step][:, :8], np.tril(np.ones((8, 8), bool)))


@pytest.mark.parametrize("is_remat, stored", [(False, 2), (True, 0)])
def test_a_step_of_the_unrolling_stores_products_and_no_elementwise_values(is_remat, stored):
    head, tokens = untrained("eagle-3"), tokens_of(1, W)
    view = view_of(head.config, tokens).view

    def states(params):
        params = {"head": params, "target": TARGET.params}
        functions = eagle_head(head.config, TARGET.model)
        return unroll(functions, params, view.features, tokens, K, is_remat=is_remat)

    kept = jax.eval_shape(lambda params: jax.vjp(states, params)[1], head.params)
    wide = (K, 1, W - 2, CONFIG.intermediate_size)  # the gate, and what it multiplies
    shapes = [x.shape for x in jax.tree.leaves(kept)]
    assert shapes.count(wide) == stored
    # Attention's sums of values: steps, blocks, rows, key-value heads, their queries, tokens, H.
    heads = (CONFIG.num_key_value_heads, CONFIG.num_attention_heads // CONFIG.num_key_value_heads)
    assert [s for s in shapes if len(s) == 7] == [(K, 1, 1, *heads, 64, CONFIG.head_dim)]


@pytest.mark.parametrize("size", [None, 2])
def test_rows_of_several_blocks_see_earlier_true_rows_and_their_own_drafts(size):
    """Values and gradients, against one explicit mask over the keys of all steps."""
    steps, B, T, G, H = 3, 1, 70, 2, 4
    assert block_size(T) < T
    q, k, v, by_out = jax.random.normal(jax.random.key(0), (4, steps, B, T, 2 * G, H))
    k, v = (x[:, :, :, :G].transpose(0, 1, 3, 2, 4) for x in (k, v))
    is_causal, is_own = np.tril(np.ones((T, T), bool)), np.eye(T, dtype=bool)

    def unrolled(q, k, v):
        sees = lambda step: Sees(jnp.full((B,), step), T, jnp.asarray(step), size=size)
        attend = lambda cache, step: cache.attend(q[step], k[step], v[step], 0, sees(step))
        alone, cache = attend(UnrolledCache(jnp.zeros((B,), jnp.int32)), 0)
        cache, outs = cache.of_steps(steps), []
        for step in range(steps):
            out, cache = attend(cache, step)
            outs.append(out)
        return jnp.stack([alone, *outs])

    def defined(q, k, v):
        outs = []
        for step in range(steps):
            keys, values = (jnp.concatenate(x[: step + 1], axis=2).repeat(2, 1) for x in (k, v))
            scores = jnp.einsum("btnh,bnsh->bnts", q[step], keys) / H**0.5
            mask = np.concatenate([is_causal, *[is_own] * step], axis=1)
            if size is not None:  # of positions, which a later step shifts
                position = np.arange(T)
                keys_at = np.concatenate([position + i for i in range(step + 1)])
                mask &= keys_at > position[:, None] + step - size
            weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
            outs.append(jnp.einsum("bnts,bnsh->btnh", weights, values).reshape(B, T, -1))
        return jnp.stack([outs[0], *outs])  # of a lone step too

    @functools.partial(jax.jit, static_argnums=0)
    def both(attend):
        pull = lambda *x: (attend(*x)[1:] * by_out.reshape(steps, B, T, -1)).sum()
        return attend(q, k, v), jax.grad(pull, argnums=(0, 1, 2))(q, k, v)

    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, both(unrolled), both(defined))


@pytest.mark.parametrize("rows", [1, 10**6], ids=["two chunks, one padded", "one chunk"])
def test_a_chains_loss_in_chunks_is_the_weighted_mean_of_all_drafts(rows, monkeypatch):
    """With its gradients, against a loop over drafts: row t of step j is compared at t + 2 + j."""
    monkeypatch.setattr(chunks, "_ROWS", rows)
    steps, B, T, D, V = 3, 2, 21, 4, 5
    rng = np.random.default_rng(5)
    states, w = (rng.normal(size=dims).astype(np.float32) for dims in ((steps, B, T, D), (D, V)))
    mask, tokens = rng.random((B, T + 2)) < 0.7, rng.integers(0, V, (B, T + 2)).astype(np.int32)
    shares = np.asarray([0.5, 2.0, 1.0], np.float32)
    batch = Batch(jnp.asarray(tokens), jnp.asarray(mask), jax.random.key(0))

    def measure(w, states, true):
        logits = states @ w
        labels = jnp.broadcast_to(true[:, None], logits.shape[:-1])
        return losses.cross_entropy(logits, labels), jnp.argmax(logits, axis=-1)

    def in_chunks(w, states):
        loss, figures = chunks.chain_loss(measure, w, states, batch, batch.tokens[:, 2:], shares)
        return 3 * loss, figures["loss_by_step"].value

    def defined(w, states):
        log_p = jax.nn.log_softmax(states @ w)
        drafts = [np.argwhere(mask[:, 2 + step :]).T for step in range(steps)]
        chosen = [(*at, tokens[at[0], at[1] + 2 + step]) for step, at in enumerate(drafts)]
        by_step = jnp.stack([-log_p[step][at].mean() for step, at in enumerate(chosen)])
        return 3 * (by_step * shares).sum(), by_step

    run = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(w, states)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, run(in_chunks), run(defined))


def test_the_program_of_a_training_step_grows_neither_with_the_window_nor_with_the_steps():
    head = untrained("eagle-3")

    def size(num_steps, width, has_documents=False):
        shape = lambda *dims: jnp.zeros(dims, jnp.float32)
        view = View(shape(1, width, 3 * CONFIG.hidden_size), shape(1, width, CONFIG.hidden_size))
        tokens = jnp.zeros((1, width), jnp.int32)
        begins = tokens if has_documents else None
        batch = Batch(tokens, tokens == 0, jax.random.key(0), view, begins)
        loss = functools.partial(objective("eagle-3"), num_steps=num_steps)
        traced = jax.make_jaxpr(jax.grad(lambda p: loss(p, batch, TARGET.params)[0]))(head.params)
        return str(traced).count(" = ")  # equations, of inner programs too

    small = size(3, 130)
    assert small == size(3, 4098)
    assert size(3, 4098, has_documents=True) < 1.1 * small
    assert size(7, 130) < 1.2 * small  # the figures of each step are apart


def test_an_objective_takes_its_own_options_and_keeps_its_constants():
    def loss(head, batch, target, *, config, model, scale=1.0):
        return scale * (head["w"] + head["d2t"]) * config * model * target * batch, {}

    objective = Objective("toy", loss, constants=("d2t",))
    trained, constants = objective.split({"w": 1.0, "d2t": 2.0})
    assert (trained, constants) == ({"w": 1.0}, {"d2t": 2.0})
    with pytest.raises(ConfigError, match="noise is not an option of .* toy; its options: scale"):
        objective.bind(3.0, 5.0, {"scale": 2.0, "noise": 9.0}, constants)
    run = objective.bind(3.0, 5.0, objective.known({"scale": 2.0, "noise": 9.0}), constants)
    assert run(trained, 7.0, 11.0) == (2.0 * 3.0 * 3.0 * 5.0 * 11.0 * 7.0, {})
