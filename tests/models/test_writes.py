"""How caches are written on each platform; whether the installed jax writes in place, and what is
said where it does not."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import writes
from support.eagle_heads import CONFIGS, head_of
from support.tiny_models import LLAMA, random_weights

from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.models import transformer
from spec_jax.models.caches import kv
from spec_jax.models.caches import write as kernels
from spec_jax.models.caches.kv import put_rows
from spec_jax.models.caches.rewriting import is_rewritten

DTYPES = (jnp.float32, jnp.bfloat16)
NAMES = {(0, 0): "", (1, 0): "target", (0, 1): "draft", (1, 1): "target and draft"}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_write_touches_its_slot_alone_unless_it_is_known_to_rewrite(dtype):
    """By the bytes that the compiler counts for one step of a loop."""
    cost = writes.lower(2, 4096, dtype, put_rows).compile().cost_analysis()
    whole = 2 * 4096 * writes.WIDTH * jnp.dtype(dtype).itemsize
    assert (cost["bytes accessed"] > whole / 2) == is_rewritten(dtype, "cpu")


@pytest.mark.parametrize("is_head", [False, True], ids=["model", "head"])
@pytest.mark.parametrize("dtypes", NAMES, ids=lambda pair: NAMES[pair] or "none")
def test_rewritten_caches_are_named_with_the_remedy(dtypes, is_head, monkeypatch):
    """Where jax is known to rewrite them, and nowhere else."""
    cast = lambda params, i: jax.tree.map(
        lambda x: x.astype(DTYPES[i]) if x.dtype == jnp.float32 else x, params
    )
    model = transformer.model(LLAMA)
    target, draft = (
        LoadedModel("a model", model, cast(random_weights(LLAMA), i), None, LLAMA) for i in dtypes
    )
    if is_head:
        config = CONFIGS["eagle-3"]
        draft = LoadedHead("a head", config, cast(head_of(config), dtypes[1]))
    for version in ((0, 10, 2), (0, 11, 2)):
        known = functools.partial(is_rewritten, version=version)
        monkeypatch.setattr("spec_jax.models.caches.rewriting.is_rewritten", known)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            SpeculativeDecoder(target, draft)
        assert len(caught) == (version < (0, 11) and any(dtypes))
        for warning in caught:
            name = f"load {NAMES[dtypes]} in float32, or install jax 0.11.2 or newer"
            assert name in str(warning.message)
            assert warning.filename == __file__  # points at who makes the decoder
        assert not is_rewritten(jnp.bfloat16, "tpu", version)


@pytest.mark.measure
def test_writes_take_as_long_however_many_slots_there_are(capsys):
    """The check of a new release of jax: 0.11.1 fails it in float32, and its program looks well."""
    times = writes.table(put_rows, DTYPES)
    with capsys.disabled():
        print(f"\njax {jax.__version__}, microseconds a write at {writes.SLOTS} slots: {times}")
    for name, times_us in times.items():
        expected = not is_rewritten(name.split()[-1], "cpu")
        assert writes.is_in_place(times_us) == expected, (name, times_us)


STARTS = np.array([0, 13, 45, 31, 16, 15])  # at edges of tiles of 8 and of 16, and the end
WRITES = [(1, "float32"), (3, "bfloat16"), (19, "bfloat16")]


@pytest.mark.representatives("3-bfloat16")
@pytest.mark.parametrize("num_tokens, dtype", WRITES)
def test_a_tpus_kernel_writes_what_a_loop_over_the_rows_does(num_tokens, dtype, monkeypatch):
    """In the interpreter: one layer of a stack, and all of them; rows in groups of two."""
    monkeypatch.setattr(kernels, "GROUP_BYTES", 2 * 2 * 48 * 128 * 2)
    L, B, G, S, T = 3, len(STARTS), 2, 64, num_tokens
    draw = np.random.default_rng(0).normal
    old = draw(size=(L, B, G, S, 128)).astype(jnp.dtype(dtype))
    run = functools.partial(kernels.write_rows, is_interpreted=True)
    for first, count in ((1, 1), (0, L)):
        new = draw(size=(count, B, G, T, 128)).astype(jnp.dtype(dtype))
        expected = old.copy()
        for b, start in enumerate(STARTS):
            expected[first : first + count, b, :, start : start + T] = new[:, b]
        written = run(*map(jnp.asarray, (old, new, STARTS, np.int32(first))))
        np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("is_rolling", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 2, 16, 4), (3, 2, 16, 4), (6, 16, 4)])
def test_one_scatter_writes_what_a_loop_over_the_rows_does(shape, is_rolling):
    start, layer = jnp.array([2, 13, 0]), jnp.int32(len(shape) == 5)
    draw = np.random.default_rng(0).normal
    old, new = (jnp.asarray(draw(size=(*shape[:-2], n, 4))) for n in (16, 3))
    new = new[:1] if layer else new
    options = dict(update=kv._roll_in) if is_rolling else {}
    both = (kv._put_by_row, kv._put_at_once)
    by_row, at_once = (put(old, new, start, layer, **options) for put in both)
    np.testing.assert_array_equal(at_once, by_row)
    assert (by_row != old).any()


def test_a_rolling_write_goes_on_at_the_first_slot():
    """From every slot, each row from another, and nothing else is written."""
    draw = np.random.default_rng(0).normal
    old, new = (draw(size=(2, 1, n, 3)).astype(np.float32) for n in (7, 5))
    put = jax.jit(functools.partial(put_rows, is_rolling=True))
    for begin in range(20):
        start = np.array([begin, 2 * begin + 1])
        expected = old.copy()
        for row, at in enumerate(start):
            expected[row, :, (at + np.arange(5)) % 7] = new[row].swapaxes(0, 1)
        np.testing.assert_array_equal(put(old, new, jnp.asarray(start)), expected)


@pytest.mark.parametrize("platform, batch", [("cpu", 40), ("cuda", 40), ("tpu", 8), ("tpu", 40)])
def test_a_pass_has_as_few_writes_as_its_platform_needs(platform, batch):
    """Lowered without the device: a scatter for each array, a kernel, or an update a row."""
    heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=128)
    config = dataclasses.replace(LLAMA, **heads, scan_layers=False)
    shapes = (config, batch, 64, jnp.bfloat16)
    cache = jax.eval_shape(lambda: transformer.init_cache(*shapes))
    params = jax.eval_shape(lambda: transformer.init_params(config, jax.random.key(0)))
    forward = jax.jit(functools.partial(transformer.forward, config=config))
    traced = forward.trace(params, jax.ShapeDtypeStruct((batch, 3), jnp.int32), cache)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    kinds = ("stablehlo.dynamic_update_slice", '"stablehlo.scatter"(', "tpu_custom_call")
    arrays = 2 * config.num_hidden_layers
    by_row = {"cpu": batch, "tpu": batch if batch <= kv.KERNEL_ROWS else 0, "cuda": 0}[platform]
    at_once = (
        arrays if platform == "cuda" else 0,
        arrays if platform == "tpu" and not by_row else 0,
    )
    assert tuple(map(text.count, kinds)) == (arrays * by_row, *at_once)
    assert text.count("unique_indices = true") == at_once[0]


@pytest.mark.parametrize("shape", [(2, 3, 2, 16, 4), (3, 2, 16, 4), (6, 16, 4)])
def test_slots_are_read_alike_on_every_platform(shape):
    """A TPU slices what others gather."""
    at = np.array([[5, 6, 9, 10], [2, 4, 2, 2], [1, 2, 4, 1]])  # of three rows
    cache = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    by_row = cache.reshape(-1, 3, 2, 16, 4)
    expected = [by_row[:, b].take(slots, axis=-2) for b, slots in enumerate(at)]
    expected = np.stack(expected, axis=1).reshape(*shape[:-2], 4, 4)
    for read in (kv.take_slots, kv._slice_slots, kv._gather_slots):
        np.testing.assert_array_equal(read(jnp.asarray(cache), jnp.asarray(at)), expected)
