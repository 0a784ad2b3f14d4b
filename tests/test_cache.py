"""The attention cache: roll-back, snapshots, rows put in."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import LLAMA, TINY, random_tokens, random_weights

from spec_jax.errors import SnapshotError
from spec_jax.models import transformer
from spec_jax.models.cache import KVCache, KVCacheSnapshot
from spec_jax.models.config import ModelConfig

LENGTHS = np.array([5, 2, 1])
K = 3
SLOTS = 16

forward = jax.jit(transformer.forward, static_argnames="config")
feed = functools.partial(forward, random_weights(LLAMA), config=LLAMA)


def prefill(tokens, lengths):
    """A fresh cache that holds the first ``lengths`` tokens of each row and nothing else."""
    padded = np.zeros((3, 12), np.int32)
    for row, (new, n) in enumerate(zip(tokens, lengths)):
        padded[row, :n] = new[:n]
    cache = KVCache.create(LLAMA, 3, SLOTS)
    return feed(jnp.asarray(padded), cache).cache.commit(jnp.asarray(lengths))


def stacked(cache, name):
    """Its keys or values as one array [L,B,G,S,H]."""
    B = cache.length.shape[0]
    return np.stack([x.reshape(B, -1, *x.shape[-2:]) for x in getattr(cache, name)])


def contents(cache):
    """Keys and values of the committed slots alone, and the lengths."""
    is_held = np.arange(cache.slots) < np.asarray(cache.length)[:, None]
    hide = lambda x: np.where(is_held[:, None, :, None], x, 0)
    return hide(stacked(cache, "keys")), hide(stacked(cache, "values")), np.asarray(cache.length)


def assert_same_state(cache, other):
    """Equal in what it holds and in what it says next."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), contents(cache), contents(other)
    )
    window = random_tokens(3, K + 1, seed=9)
    np.testing.assert_allclose(feed(window, cache).hidden, feed(window, other).hidden, atol=5e-5)


def after_a_round(n_accept, n_commit):
    """A state that saw K drafts and committed some, and a fresh prefill of what was accepted."""
    history, window = random_tokens(3, 5, seed=1), random_tokens(3, K + 1, seed=2)
    cache = feed(window, prefill(history, LENGTHS)).cache.commit(jnp.asarray(n_commit))
    kept = [[*history[b, : LENGTHS[b]], *window[b, : n_accept[b] + 1]] for b in range(3)]
    return cache, prefill(kept, LENGTHS + n_accept + 1)


# Row 0 goes through every accept count; the other rows differ from it and from each other.
ROUNDS = [np.array([n, (n + 1) % (K + 1), (n + 3) % (K + 1)]) for n in range(K + 1)]


@pytest.mark.parametrize("n_accept", ROUNDS, ids=str)
def test_state_after_accept_and_roll_back_equals_a_fresh_prefill(n_accept):
    assert_same_state(*after_a_round(n_accept, n_accept + 1))


def test_a_row_that_commits_nothing_keeps_its_state():
    cache, _ = after_a_round(np.array([0, 0, 0]), np.array([0, 0, 0]))
    assert_same_state(cache, prefill(random_tokens(3, 5, seed=1), LENGTHS))


@pytest.mark.parametrize("wrong", [1, -1], ids=["too much", "too little"])
def test_committing_another_number_is_seen(wrong):
    """The comparison above would catch a roll-back that is left out or goes too far."""
    n_accept = np.array([1, 2, 0])
    cache, fresh = after_a_round(n_accept, n_accept + 1 + wrong)
    with pytest.raises(AssertionError):
        assert_same_state(cache, fresh)
    window = random_tokens(3, K + 1, seed=9)  # not the length alone: what it says next
    said = [np.asarray(feed(window, c).hidden) for c in (cache, fresh)]
    assert (np.abs(said[0] - said[1]).max(axis=(1, 2)) > 1e-2).all()


def test_a_rejected_draft_in_the_place_of_the_token_that_replaced_it_is_seen():
    n_accept = np.array([1, 2, 0])
    cache, fresh = after_a_round(n_accept, n_accept + 2)
    replaced = feed(jnp.full((3, K + 1), 30), fresh).cache.commit(jnp.ones(3, jnp.int32))
    np.testing.assert_array_equal(cache.length, replaced.length)
    with pytest.raises(AssertionError):
        assert_same_state(cache, replaced)


def test_one_index_for_all_rows_is_seen():
    n_accept = np.array([1, 2, 0])
    cache, fresh = after_a_round(n_accept, np.full(3, 2))
    with pytest.raises(AssertionError):
        assert_same_state(cache, fresh)


SCANNED = dataclasses.replace(LLAMA, scan_layers=True)


@pytest.mark.parametrize("config", [LLAMA, SCANNED], ids=["apart", "stacked"])
def test_write_fills_the_slots_behind_each_row_and_no_other(config):
    draw = np.random.RandomState(0).standard_normal
    cache = KVCache.create(config, 3, 8)
    assert cache.is_stacked == config.scan_layers
    keys, values = (draw((3, 2, 3, 4)).astype(np.float32) for _ in range(2))
    start = np.array([0, 4, 5])  # the last row ends at the last slot
    cache = jax.jit(KVCache.write, static_argnums=1)(cache, 1, keys, values, start)
    for held, new in ((stacked(cache, "keys"), keys), (stacked(cache, "values"), values)):
        expected = np.zeros((2, 3, 2, 8, 4), np.float32)
        for b in range(3):
            expected[1, b, :, start[b] : start[b] + 3] = new[b]
        np.testing.assert_array_equal(held, expected)
    np.testing.assert_array_equal(cache.length, [0, 0, 0])


@pytest.mark.parametrize("scan_layers", [False, True])
def test_insert_row_replaces_that_row_alone(scan_layers):
    cache = small_cache(batch=3, scan_layers=scan_layers)
    one = small_cache(batch=1, scan_layers=scan_layers).replace(length=jnp.asarray([4]))
    insert = jax.jit(KVCache.insert_row)
    for row in range(3):
        mixed = insert(cache, row, one)
        for name in ("keys", "values"):
            expected = stacked(cache, name)
            expected[:, row] = stacked(one, name)[:, 0]
            np.testing.assert_array_equal(stacked(mixed, name), expected)
        expected = np.array(cache.length)
        expected[row] = 4
        np.testing.assert_array_equal(mixed.length, expected)


def small_cache(dtype="float32", batch=2, layers=2, slots=6, scan_layers=False):
    """A cache with something in every slot."""
    config = ModelConfig(
        **{**TINY, "num_hidden_layers": layers}, num_attention_heads=4, scan_layers=scan_layers
    )
    cache = KVCache.create(config, batch, slots, jnp.dtype(dtype))
    draw = np.random.RandomState(5 + batch).standard_normal
    cache = jax.tree.map(lambda x: jnp.asarray(draw(x.shape), x.dtype), cache)
    return cache.replace(length=jnp.arange(1, batch + 1, dtype=jnp.int32))


@functools.partial(jax.jit, donate_argnums=0)
def overwrite(cache):
    return jax.tree.map(lambda x: x * 0 - 1, cache)


@pytest.mark.parametrize("layers, scan_layers", [(1, False), (2, False), (2, True)])
def test_a_snapshot_outlives_the_donated_cache_and_what_was_restored_from_it(layers, scan_layers):
    cache = small_cache(layers=layers, scan_layers=scan_layers)
    expected = jax.tree.map(np.array, cache)
    snapshot = cache.snapshot()
    for _ in range(2):
        gone, cache = cache, overwrite(cache)
        assert all(x.is_deleted() for x in jax.tree.leaves(gone))
        assert (stacked(cache, "keys") == -1).all()
        cache = cache.restore_from_snapshot(snapshot)
        jax.tree.map(np.testing.assert_array_equal, cache, expected)


def test_decoding_goes_on_from_a_restored_cache_as_from_the_original():
    cache = prefill(random_tokens(3, 5, seed=1), LENGTHS)
    snapshot = cache.snapshot()
    moved = feed(random_tokens(3, K + 1, seed=6), cache).cache.commit(jnp.array([4, 1, 2]))
    with pytest.raises(AssertionError):
        assert_same_state(moved, cache)
    assert_same_state(moved.restore_from_snapshot(snapshot), cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_snapshot_loads_bit_for_bit(tmp_path, dtype):
    snapshot = small_cache(dtype).snapshot()
    snapshot.save(tmp_path / "state.safetensors")
    loaded = KVCacheSnapshot.load(tmp_path / "state.safetensors")
    assert jax.tree.structure(loaded) == jax.tree.structure(snapshot)
    jax.tree.map(np.testing.assert_array_equal, loaded, snapshot)
    assert loaded.keys[0].dtype == dtype and loaded.seq_len.dtype == jnp.int32
    restored = overwrite(small_cache(dtype)).restore_from_snapshot(loaded)
    jax.tree.map(np.testing.assert_array_equal, restored, small_cache(dtype))


@pytest.mark.parametrize(
    "other", [dict(batch=3), dict(slots=7), dict(layers=3), dict(dtype="bfloat16")], ids=str
)
def test_a_snapshot_of_another_shape_is_refused_and_both_are_named(other):
    snapshot = small_cache(**other).snapshot()
    with pytest.raises(SnapshotError) as error:
        small_cache().restore_from_snapshot(snapshot)
    assert "this cache has 4 x float32[2, 4, 6, 4], 1 x int32[2]" in str(error.value)
    assert f"{2 * len(snapshot.keys)} x {snapshot.keys[0].dtype}[" in str(error.value)


def test_an_empty_snapshot_is_refused():
    with pytest.raises(SnapshotError, match="this cache has"):
        small_cache().restore_from_snapshot(KVCacheSnapshot((), (), jnp.zeros(2, jnp.int32)))


def test_a_file_that_is_no_snapshot_is_an_error_that_names_it(tmp_path):
    whole, file = tmp_path / "whole.safetensors", tmp_path / "state.safetensors"
    with pytest.raises(SnapshotError, match="state.safetensors"):
        KVCacheSnapshot.load(file)
    small_cache().snapshot().save(whole)
    for size in (0, 4, 100, whole.stat().st_size - 1):
        file.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(SnapshotError, match="state.safetensors"):
            KVCacheSnapshot.load(file)
    save_file({"weight": np.zeros(3)}, file)
    with pytest.raises(SnapshotError, match="state.safetensors"):
        KVCacheSnapshot.load(file)
