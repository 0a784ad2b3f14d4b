"""Layers that repeat are run by one loop, and give what they give one after the other."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import BAMBA, DEEPSEEK_TARGET, LLAMA, MAMBA2, QWEN35_MOE, random_weights

from spec_jax import load_model
from spec_jax.models import transformer
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.params import layer_weights, num_params, walk
from spec_jax.models.runs import name_of, runs_of, shortest_runs
from spec_jax.sharding import take_rows

_PATTERN = ("linear_attention", "full_attention")
HYBRID = dataclasses.replace(QWEN35_MOE, num_hidden_layers=4, layer_types=_PATTERN * 2)
MODELS = {
    "hybrid, experts": HYBRID,
    "latent, experts": dataclasses.replace(
        DEEPSEEK_TARGET, num_hidden_layers=5, first_k_dense_replace=2
    ),
    "recurrent": dataclasses.replace(MAMBA2, num_hidden_layers=3),
    "recurrent hybrid": dataclasses.replace(BAMBA, num_hidden_layers=5, attn_layer_indices=(1, 3)),
}
scanned = functools.partial(dataclasses.replace, scan_layers=True)
of_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
first_alone = pytest.mark.representatives("hybrid, experts")


def test_runs_are_the_shortest_that_hold_every_layer_in_order():
    """Against every way of cutting up to six layers of two kinds into repeated periods."""

    @functools.cache
    def fewest(layers):
        if not layers:
            return 0
        first, options = range(1, len(layers) + 1), []
        for period, count in itertools.product(first, first):
            size = period * count
            if size <= len(layers) and layers[:size] == layers[:period] * count:
                options.append(period + fewest(layers[size:]))
        return min(options)

    for length in range(1, 7):
        for layers in itertools.product("ab", repeat=length):
            runs = shortest_runs(layers)
            steps = [step for run in runs for step in zip(*run, strict=True)]
            assert list(itertools.chain(*steps)) == [*range(length)]
            assert all(len({layers[i] for i in stack}) == 1 for run in runs for stack in run)
            assert sum(map(len, runs)) == fewest(layers)


@pytest.mark.parametrize(
    "layers, names",
    [
        ("a" * 32, ["0:32"]),
        ("aaab" * 4 + "aa", ["0:16:4", "1:16:4", "2:16:4", "3:16:4", "16:18"]),
        ("abbbbb", ["0", "1:6"]),
        ("abcd", ["0", "1", "2", "3"]),
    ],
)
def test_stacks_are_named_by_the_layers_that_they_hold(layers, names):
    assert [name_of(stack) for run in shortest_runs(layers) for stack in run] == names


@first_alone
@of_model
def test_stacked_weights_are_those_of_the_layers(config):
    apart, stacked = random_weights(config), random_weights(scanned(config))
    assert len(stacked["layers"]) < len(apart["layers"]) == config.num_hidden_layers
    for a, b in zip(walk(config, apart), walk(scanned(config), stacked), strict=True):
        assert a[:2] == b[:2]
        np.testing.assert_array_equal(a[2], b[2])
    for i in range(config.num_hidden_layers):
        own = layer_weights(scanned(config), stacked, i)
        jax.tree.map(np.testing.assert_array_equal, own, apart["layers"][str(i)])
    assert num_params(scanned(config)) == num_params(config)


TOKENS = np.random.RandomState(0).randint(0, 31, (3, 7))
IN_TREE = jnp.asarray([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], bool)


@functools.partial(jax.jit, static_argnames="config")
def decode(params, cache, config):
    """A prompt; a window of several passes; a tree, of which a path is kept."""
    L, tokens = config.num_hidden_layers, jnp.asarray(TOKENS)
    forward = functools.partial(transformer.forward, params, config=config)
    prompt = forward(tokens, cache, taps=(0, 1, L - 1, L))
    cache = prompt.cache.commit(jnp.asarray([7, 5, 0])).open_window(4)
    steps = [forward(tokens[:, :1], cache)]
    steps.append(forward(tokens[:, 1:4], steps[0].cache, window_offset=jnp.int32(1)))
    tree = forward(
        tokens[:, :4], steps[1].cache.commit(jnp.asarray([0, 3, 1])), window_mask=IN_TREE, taps=(1,)
    )
    path = jnp.asarray([[0, 2, 3]] * 3)
    cache = tree.cache.commit(jnp.asarray([3, 2, 1]), path)
    seen = [prompt.features, *(step.hidden for step in steps), tree.hidden, tree.features]
    return seen, cache, forward(tokens[:, :1], cache).hidden


@pytest.mark.exhaustive
@of_model
def test_a_loop_over_layers_decodes_as_layers_in_turn(config):
    """States and taps of every pass; what a cache holds, restores, takes and gives away."""

    def run(config):
        cache = transformer.init_cache(config, 3, 16)
        return decode(random_weights(config), cache, config)

    close = functools.partial(np.testing.assert_allclose, atol=3e-5)
    (seen, cache, last), (expected, apart, after) = run(scanned(config)), run(config)
    jax.tree.map(close, (seen, last), (expected, after))
    jax.tree.map(close, cache.snapshot(), apart.snapshot())
    fresh = transformer.init_cache(scanned(config), 3, 16)
    restored = fresh.restore_from_snapshot(apart.snapshot())
    jax.tree.map(np.testing.assert_array_equal, restored.snapshot(), apart.snapshot())
    assert jax.tree.structure(restored) == jax.tree.structure(cache)
    moved = fresh.insert_row(1, take_rows(restored, jnp.asarray([1]))).snapshot()
    row = lambda tree: jax.tree.map(lambda x: np.asarray(x)[1], tree)
    jax.tree.map(np.testing.assert_array_equal, row(moved), row(apart.snapshot()))
    assert all(not np.asarray(x)[[0, 2]].any() for x in jax.tree.leaves(moved))


@pytest.mark.exhaustive
@of_model
def test_a_loop_over_layers_has_the_gradient_of_layers_in_turn(config):
    """To 2e-5 of the largest; weights off by one unit in the last place move it by 6e-5."""

    def gradient(config):
        def loss(params):
            logits = transformer.logits(params, jnp.asarray(TOKENS), config=config)
            return -jax.nn.log_softmax(logits)[..., 3].mean()

        return walk(config, jax.jit(jax.grad(loss))(random_weights(config)))

    for (_, layer, a), (*_, b) in zip(gradient(scanned(config)), gradient(config), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), err_msg=str(layer))


def test_a_residual_stream_in_float32_is_one_through_the_loop():
    """Weights in bfloat16, of a family whose first layer widens what it gets."""
    tokens, config = jnp.asarray(TOKENS), MODELS["recurrent"]
    logits = [
        jax.jit(transformer.logits, static_argnames="config")(
            random_weights(c, dtype="bfloat16"), tokens, config=c
        )
        for c in (config, scanned(config))
    ]
    np.testing.assert_allclose(*logits, atol=1e-2)


@pytest.mark.parametrize("name", ["hybrid, experts", "latent, experts"])
def test_stacked_layers_are_read_and_written_as_layers_apart(tmp_path, name):
    config = MODELS[name]
    save_pretrained(tmp_path / "apart", random_weights(config), config)
    stacked = load_model(tmp_path / "apart", scan_layers=True)
    assert stacked.config == scanned(config)
    jax.tree.map(np.testing.assert_array_equal, stacked.params, random_weights(scanned(config)))
    save_pretrained(tmp_path / "stacked", stacked.params, stacked.config)
    for file in ("config.json", "model.safetensors"):
        pair = [(tmp_path / at / file).read_bytes() for at in ("apart", "stacked")]
        assert pair[0] == pair[1]


def test_uniform_layers_are_one_loop_and_layers_apart_are_none():
    assert runs_of(scanned(LLAMA)) == ((range(2),),)
    assert runs_of(LLAMA) == ((range(1),), (range(1, 2),))
