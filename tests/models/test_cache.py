"""Every kind of cache: roll-back and snapshots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.tiny_models import (
    BAMBA,
    DEEPSEEK,
    LLAMA,
    MAMBA2,
    QWEN35,
    random_tokens,
    random_weights,
)

from spec_jax.errors import ShapeError, SnapshotError
from spec_jax.models import transformer
from spec_jax.models.caches import kv
from spec_jax.models.caches.replay import replay
from spec_jax.models.caches.snapshot import KVCacheSnapshot

LENGTHS = np.array([5, 2, 1])
K = 3
SLOTS = 16
KINDS = {"attention": LLAMA, "state": MAMBA2, "hybrid": BAMBA, "delta": QWEN35}
KINDS["latent"] = dataclasses.replace(DEEPSEEK, n_routed_experts=None, intermediate_size=24)
_IN_HYBRID = ("attention", "state")  # a hybrid has both, so it stands for them


of_kind = pytest.mark.parametrize(
    "config",
    [
        pytest.param(c, id=name, marks=pytest.mark.exhaustive if name in _IN_HYBRID else ())
        for name, c in KINDS.items()
    ],
)


@functools.partial(jax.jit, static_argnames="config")
def _feed(params, tokens, cache, n, config):
    output = transformer.forward(params, tokens, cache, config=config)
    return output.hidden, output.cache.commit(n)


def feed(config, tokens, cache, n):
    """The hidden states of a window, and the cache that has kept n of it."""
    weights = random_weights(config)
    return _feed(weights, jnp.asarray(tokens), cache, jnp.asarray(n, jnp.int32), config)


def prefill(config, tokens, lengths, n=None):
    """A fresh cache that holds the first ``lengths`` tokens of each row and nothing else."""
    padded = np.zeros((3, 12), np.int32)
    for row, (new, length) in enumerate(zip(tokens, lengths)):
        padded[row, :length] = new[:length]
    cache = transformer.init_cache(config, 3, SLOTS)
    return feed(config, padded, cache, lengths if n is None else n)[1]


def contents(snapshot):
    """What is committed, slots of the window left out."""
    is_held = np.arange(SLOTS) < np.asarray(snapshot.seq_len)[:, None]
    hide = lambda x: np.where(is_held[:, None, :, None], x, 0)
    if isinstance(snapshot, KVCacheSnapshot):
        groups = [dict(keys=snapshot.keys, values=snapshot.values)]
    else:
        groups = snapshot.groups
    shown = lambda group: jax.tree.map(hide if "keys" in group else np.asarray, group)
    return [*map(shown, groups), np.asarray(snapshot.seq_len)]


def what_follows(config, cache):
    """What a cache says next."""
    return np.asarray(feed(config, random_tokens(3, K + 1, seed=9), cache, [0] * 3)[0])


def assert_same_state(config, cache, other):
    """Equal in contents, and in the logits that come next."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-5),  # of values up to 6
        contents(cache.snapshot()),
        contents(other.snapshot()),
    )
    np.testing.assert_allclose(what_follows(config, cache), what_follows(config, other), atol=5e-5)


def after_a_round(config, n_accept, n_commit):
    """A state that saw K drafts and committed some, and a fresh prefill of what was accepted."""
    history, window = random_tokens(3, 5, seed=1), random_tokens(3, K + 1, seed=2)
    _, cache = feed(config, window, prefill(config, history, LENGTHS), n_commit)
    kept = [[*history[b, : LENGTHS[b]], *window[b, : n_accept[b] + 1]] for b in range(3)]
    return cache, prefill(config, kept, LENGTHS + n_accept + 1)


# Row 0 goes through every accept count; the other rows differ from it and from each other.
ROUNDS = [np.array([n, (n + 1) % (K + 1), (n + 3) % (K + 1)]) for n in range(K + 1)]


@of_kind
@pytest.mark.parametrize("n_accept", ROUNDS, ids=str)
def test_state_after_accept_and_roll_back_equals_a_fresh_prefill(config, n_accept):
    assert_same_state(config, *after_a_round(config, n_accept, n_accept + 1))


@of_kind
def test_a_row_that_commits_nothing_keeps_its_state(config):
    cache, _ = after_a_round(config, np.zeros(3, int), np.zeros(3, int))
    expected = contents(prefill(config, random_tokens(3, 5, seed=1), LENGTHS).snapshot())
    jax.tree.map(np.testing.assert_array_equal, contents(cache.snapshot()), expected)


@of_kind
def test_a_window_that_several_passes_fill_is_one_window(config):
    """Draft steps, each after the ones before, at offsets that are traced."""
    window, n = random_tokens(3, K + 1, seed=2), jnp.array([3, 4, 0])
    before = prefill(config, random_tokens(3, 5, seed=1), LENGTHS)
    weights = random_weights(config)

    @jax.jit
    def in_steps(cache):
        cache = cache.open_window(K + 1)
        first = transformer.forward(weights, window[:, :2], cache, config=config)

        def step(i, carry):
            cache, hidden = carry
            token = jax.lax.dynamic_slice_in_dim(window, i, 1, axis=1)
            output = transformer.forward(weights, token, cache, config=config, window_offset=i)
            return output.cache, hidden.at[:, i].set(output.hidden[:, 0])

        hidden = jnp.zeros((3, K + 1, config.hidden_size)).at[:, :2].set(first.hidden)
        cache, hidden = jax.lax.fori_loop(2, K + 1, step, (first.cache, hidden))
        return hidden, cache.commit(n)

    hidden, cache = in_steps(before)
    expected, whole = feed(config, window, before, n)
    np.testing.assert_allclose(hidden, expected, atol=2e-5)
    assert_same_state(config, cache, whole)


def test_a_window_without_room_is_refused():
    weights, cache = random_weights(MAMBA2), transformer.init_cache(MAMBA2, 3, SLOTS)
    window = jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(ShapeError, match="2 tokens at 1 do not fit a window of 0: open_window"):
        transformer.forward(weights, window, cache, config=MAMBA2, window_offset=1)


PATHS = [[0, 1, 4, 5], [0, 2, 0, 0], [0, 1, 3, 0]]  # one a row, of which so many count:
ON_PATH = np.array([4, 2, 3])


@of_kind
def test_a_path_through_a_tree_equals_the_same_tokens_in_a_chain(config):
    """Outputs of every node on it, and the state that committing it leaves."""
    nodes = random_tokens(3, 6, seed=4)
    mask = np.eye(6, dtype=bool)
    for node, parent in enumerate([0, 0, 1, 1, 4], start=1):
        mask[node] |= mask[parent]
    before = prefill(config, random_tokens(3, 5, seed=1), LENGTHS)
    path = jnp.asarray(PATHS)

    @jax.jit
    def in_tree(cache):
        output = transformer.forward(
            random_weights(config), nodes, cache, config=config, window_mask=mask[None]
        )
        return output.hidden, output.cache.commit(jnp.asarray(ON_PATH), path)

    hidden, cache = in_tree(before)
    chain = jnp.take_along_axis(nodes, path, axis=1)
    expected, alone = feed(config, chain, before, ON_PATH)
    for b, n in enumerate(ON_PATH):
        np.testing.assert_allclose(hidden[b, path[b, :n]], expected[b, :n], atol=2e-5)
    assert_same_state(config, cache, alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scan_layers", [False, True], ids=["apart", "stacked"])
def test_many_rows_are_written_and_masked_as_few_are(scan_layers, monkeypatch):
    """Of more than ``UNROLLED_ROWS`` rows they are one scatter; trees among them."""
    config = dataclasses.replace(LLAMA, scan_layers=scan_layers)
    tokens = random_tokens(3, 12)
    window_mask = jnp.asarray([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)

    def run():
        cache = prefill(config, tokens, LENGTHS)
        weights, new = random_weights(config), jnp.asarray(tokens[:, :3])
        output = transformer.forward(weights, new, cache, config=config, window_mask=window_mask)
        return output.hidden, output.cache

    few = run()
    monkeypatch.setattr(kv, "UNROLLED_ROWS", 2)
    _feed.clear_cache()
    many = run()
    _feed.clear_cache()
    jax.tree.map(np.testing.assert_array_equal, many, few)


def filled(config, dtype="float32", batch=2):
    """A cache of any kind with something everywhere."""
    cache = transformer.init_cache(config, batch, 6, jnp.dtype(dtype))
    draw = np.random.RandomState(7).standard_normal

    def fill(x):
        is_length = x.dtype == jnp.int32  # the same in all groups
        return 5 + jnp.arange(batch) if is_length else jnp.asarray(draw(x.shape) * 9, x.dtype)

    return jax.tree.map(fill, cache)


@functools.partial(jax.jit, donate_argnums=0)
def overwrite(cache):
    return jax.tree.map(lambda x: x * 0 - 1, cache)


@pytest.mark.parametrize("layers, scan_layers", [(1, False), (2, False), (2, True)])
def test_a_snapshot_outlives_the_donated_cache_and_what_was_restored_from_it(layers, scan_layers):
    cache = filled(dataclasses.replace(LLAMA, num_hidden_layers=layers, scan_layers=scan_layers))
    expected = jax.tree.map(np.array, cache)
    snapshot = cache.snapshot()
    for _ in range(2):
        gone, cache = cache, overwrite(cache)
        assert all(x.is_deleted() for x in jax.tree.leaves(gone))
        assert all((np.asarray(x) == -1).all() for x in jax.tree.leaves(cache))
        cache = cache.restore_from_snapshot(snapshot)
        jax.tree.map(np.testing.assert_array_equal, cache, expected)


@of_kind
def test_a_restored_snapshot_and_the_tokens_since_give_a_fresh_prefill(config):
    """Delta synchronisation, of rows with none, some and all of the tokens, in several passes."""
    history = random_tokens(3, 9, seed=1)
    cache = prefill(config, history, LENGTHS)
    snapshot = cache.snapshot()
    _, elsewhere = feed(config, random_tokens(3, K + 1, seed=6), cache, [4, 1, 2])
    n = np.array([4, 0, 3])
    since = np.stack([history[b, LENGTHS[b] : LENGTHS[b] + 4] for b in range(3)])
    model = transformer.model(config)
    restored = elsewhere.restore_from_snapshot(snapshot)
    caught_up = replay(model, random_weights(config), restored, since, n, chunk=3)
    assert_same_state(config, caught_up, prefill(config, history, LENGTHS + n))


@of_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_snapshot_loads_bit_for_bit(tmp_path, config, dtype):
    cache = filled(config, dtype)
    snapshot = cache.snapshot()
    snapshot.save(tmp_path / "state.safetensors")
    loaded = type(snapshot).load(tmp_path / "state.safetensors")
    same = lambda a, b: np.testing.assert_array_equal(a, b) or a.dtype == b.dtype
    assert all(jax.tree.leaves(jax.tree.map(same, loaded, snapshot)))
    restored = overwrite(filled(config, dtype)).restore_from_snapshot(loaded)
    assert all(jax.tree.leaves(jax.tree.map(same, restored, cache)))


def test_a_saved_snapshot_keeps_the_order_of_more_than_ten_layers(tmp_path):
    layers = tuple(np.full((1, 1, 1, 1), i, np.float32) for i in range(12))
    KVCacheSnapshot(layers, layers, np.ones(1, np.int32)).save(tmp_path / "state.safetensors")
    loaded = KVCacheSnapshot.load(tmp_path / "state.safetensors")
    assert [int(x.item()) for x in loaded.keys] == list(range(12))


REFUSED = [  # a cache, one whose snapshot it does not take, and what is said
    (LLAMA, LLAMA, dict(batch=3), r"this cache has 4 x float32\[2, 2, 6, 4\], 1 x int32\[2\]"),
    (LLAMA, LLAMA, dict(dtype="bfloat16"), "4 x bfloat16"),
    (BAMBA, BAMBA, dict(batch=3), r"\[3, 4, 8, 6\].*this cache has"),
    (LLAMA, MAMBA2, {}, "this cache takes a KVCacheSn"),
    (MAMBA2, LLAMA, {}, "KVCacheSnapshot; this cache takes a"),
    (BAMBA, LLAMA, {}, "KVCacheSnapshot; this cache takes a"),
]


@pytest.mark.parametrize("config, other, changes, words", REFUSED)
def test_another_snapshot_is_refused(tmp_path, config, other, changes, words):
    cache, snapshot = filled(config), filled(other, **changes).snapshot()
    with pytest.raises(SnapshotError, match=words):
        cache.restore_from_snapshot(snapshot)
    kind = type(cache.snapshot())
    if type(snapshot) is not kind:
        snapshot.save(tmp_path / "state.safetensors")
        with pytest.raises(SnapshotError, match=f"state.safetensors is no {kind.__name__}: its fo"):
            kind.load(tmp_path / "state.safetensors")


def test_a_file_that_is_no_snapshot_is_an_error_that_names_it(tmp_path):
    whole, file = tmp_path / "whole.safetensors", tmp_path / "state.safetensors"
    with pytest.raises(SnapshotError, match="state.safetensors"):
        KVCacheSnapshot.load(file)
    filled(LLAMA).snapshot().save(whole)
    for size in (0, 4, 100, whole.stat().st_size - 1):
        file.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(SnapshotError, match="state.safetensors"):
            KVCacheSnapshot.load(file)
    save_file({"weight": np.zeros(3)}, file)
    with pytest.raises(SnapshotError, match="state.safetensors"):
        KVCacheSnapshot.load(file)
