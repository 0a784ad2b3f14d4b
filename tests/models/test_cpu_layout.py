"""A product is the same in every layout, and the layout never leaves memory."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import LLAMA, random_weights

from spec_jax.loading import LoadedModel
from spec_jax.models import cpu_layout, transformer
from spec_jax.models.checkpoint import load_pretrained, save_pretrained
from spec_jax.models.layers import linear
from spec_jax.planning import hlo

DTYPES = ("float32", "bfloat16")
ROWS = (*range(1, 10), 16, 32, 33)


@functools.partial(jax.jit, static_argnames="counts")
def products(x, w, counts=ROWS):
    return [cpu_layout.matmul(x[:n], w) for n in counts]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24, 64), (24, 48), (520, 1024)], ids=str)
def test_a_product_in_the_layout_of_any_pass_is_the_product_with_the_matrix(shape, dtype):
    draw = np.random.default_rng(0)
    w = jnp.asarray(draw.normal(size=shape), dtype)
    x = jnp.asarray(draw.normal(size=(ROWS[-1], shape[0])), dtype)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    error = {"float32": 1e-4, "bfloat16": 2**-7 * np.abs(want).max()}[dtype]
    cuts = filter(None, (cpu_layout.to_panels([w], n) for n in ROWS))
    layouts = {(cut.w.shape, cut.min_rows): cut for cut in cuts}
    assert layouts or jax.__version_info__ < (0, 12)
    for cut in layouts.values():
        np.testing.assert_array_equal(cpu_layout.from_panels(cut), w)
        for n, found in zip(ROWS, products(x, cut), strict=True):
            assert found.dtype == w.dtype
            np.testing.assert_allclose(np.asarray(found, np.float64), want[:n], 0, error)


@pytest.mark.parametrize("dtype", DTYPES)
def test_joined_maps_give_what_each_gives_alone_in_one_product(dtype):
    draw = np.random.default_rng(1)
    sizes = {"q": 32, "k": 16, "v": 16, "o": 32}
    layer = {n: jnp.asarray(draw.normal(size=(8, m)), dtype) for n, m in sizes.items()}
    layer["k_bias"] = jnp.ones((16,), dtype)
    ours = cpu_layout.in_panels(layer, 5)
    if jax.__version_info__ >= (0, 12):
        assert set(ours) == {"q+k+v", "o", "k_bias"}
    apply = jax.jit(lambda layer, x: [linear(x, layer, name) for name in ("q", "k", "v")])
    x = jnp.asarray(draw.normal(size=(5, 8)), dtype)
    for found, want in zip(apply(ours, x), apply(layer, x), strict=True):
        found, want = (np.asarray(y, np.float64) for y in (found, want))
        np.testing.assert_allclose(found, want, 0, {"float32": 1e-5, "bfloat16": 0.1}[dtype])
    if "q+k+v" in ours:
        program = hlo.read(apply.lower(ours, x).compile().as_text())
        assert [i.opcode for i in program.instructions.values()].count("dot") == 1
    for name in sizes:
        held, columns = cpu_layout.find(ours, name)
        whole = cpu_layout.from_panels(held)
        np.testing.assert_array_equal(whole if columns is None else whole[:, columns], layer[name])


@pytest.mark.skipif(not cpu_layout.TABLE, reason="this jax has no layouts")
@pytest.mark.exhaustive
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_layout_for_a_cpu_changes_no_logits_and_is_not_saved(tmp_path, is_tied):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 31}
    config = dataclasses.replace(LLAMA, head_dim=8, tie_word_embeddings=is_tied, **sizes)
    params = random_weights(config)
    loaded = LoadedModel("tiny", transformer.model(config), params, config=config)
    ours = loaded.cpu_layout.prepare(1)
    assert any(w.ndim == 3 for w in jax.tree.leaves(ours["layers"]))
    jax.tree.map(np.testing.assert_array_equal, cpu_layout.in_panels(ours, 1), ours)
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
    want = transformer.logits(params, tokens, config=config)
    many = cpu_layout.MAX_ROWS + 1
    for laid_out in (ours, *map(loaded.cpu_layout.prepare, (None, 8, many))):
        found = transformer.logits(laid_out, tokens, config=config)
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)
    assert loaded.cpu_layout.prepare(4) is loaded.cpu_layout.prepare(5)
    assert loaded.cpu_layout.prepare(many) is loaded.cpu_layout.prepare() is not ours
    assert ("head" in loaded.params) is not is_tied  # what may be trained is not touched
    save_pretrained(tmp_path, ours, config)
    saved, _ = load_pretrained(tmp_path, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, saved, params)


def test_the_copies_of_the_rows_never_outgrow_the_matrix():
    matrix = jnp.ones((256, 1024))
    for num_rows in (5, cpu_layout.MAX_ROWS, cpu_layout.MAX_ROWS + 1, 100):
        w = cpu_layout.to_panels([matrix], num_rows)
        w = matrix if w is None else w
        compiled = jax.jit(cpu_layout.matmul).lower(jnp.ones((num_rows, 256)), w).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= 1.2 * matrix.nbytes


def test_weights_that_no_panels_divide_or_that_do_not_lie_on_a_cpu_stay_as_they_are():
    odd = jnp.ones((8, 24))
    assert cpu_layout.to_panels([odd], 1) is None
    elsewhere = {"embed": jax.ShapeDtypeStruct((32, 32), jnp.float32)}  # no array of a CPU's
    ours = cpu_layout.CpuLayout(elsewhere, is_tied=True, has_panels=True)
    assert ours.prepare(1) is ours.prepare(None) is elsewhere


@pytest.mark.skipif(not cpu_layout.TABLE, reason="this jax has no layouts")
def test_layouts_of_several_numbers_of_rows_hold_a_matrix_once():
    """Also where threads ask at once. Small matrices may be cut otherwise for other rows."""
    key = jax.random.key(0)
    params = {"embed": jax.random.normal(key, (64, 32)), "up": jax.random.normal(key, (640, 1024))}
    params["layers"] = {"0": {"o": jnp.ones((64, 64))}}
    layout = cpu_layout.CpuLayout(params, is_tied=True, has_panels=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        laid_out = [*pool.map(layout.prepare, (1, 1, 4, 5, 9, 9, 20))]
    arrays = {id(x): x.nbytes for one in laid_out for x in jax.tree.leaves(one)}
    small = params["embed"].nbytes + 5 * params["layers"]["0"]["o"].nbytes
    assert sum(arrays.values()) <= params["up"].nbytes + 3 * params["embed"].nbytes + small
