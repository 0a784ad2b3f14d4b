"""A product with panels is the product with the matrix, and the layout never leaves memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import LLAMA, random_weights

from spec_jax.loading import LoadedModel
from spec_jax.models import layout as panels
from spec_jax.models import transformer
from spec_jax.models.checkpoint import load_pretrained, save_pretrained


@pytest.mark.parametrize("shape", [(24, 64), (24, 48), (512, 1024)], ids=str)
@pytest.mark.parametrize("lead", [(1,), (1, 1), (5,), (2, 3), (4, 32)], ids=str)
def test_a_product_with_panels_is_the_product_with_the_matrix(shape, lead):
    draw = np.random.default_rng(0)
    w = draw.normal(size=shape).astype(np.float32)
    x = draw.normal(size=(*lead, shape[0])).astype(np.float32)
    cut = panels.to_panels(jnp.asarray(w))
    if np.prod(shape) < 1 << 18 or jax.__version_info__ >= (0, 12):
        assert cut.ndim == 3 and cut.shape[2] in (16, 32)
    np.testing.assert_array_equal(panels.from_panels(cut), w)
    found = jax.jit(panels.matmul)(jnp.asarray(x), cut)
    assert found.shape == (*lead, shape[1])
    np.testing.assert_allclose(found, x.astype(np.float64) @ w, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "w", [jnp.ones((8, 24)), jnp.ones((8, 32), jnp.bfloat16)], ids=["width", "bfloat16"]
)
def test_a_matrix_that_gains_nothing_stays_as_it_is(w):
    assert panels.to_panels(w) is w


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_layout_for_a_cpu_changes_no_logits_and_is_not_saved(tmp_path, is_tied):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 31}
    config = dataclasses.replace(LLAMA, head_dim=8, tie_word_embeddings=is_tied, **sizes)
    params = random_weights(config)
    loaded = LoadedModel("tiny", transformer.model(config), params, config=config)
    ours = loaded.decoding_params(1)
    assert any(w.ndim == 3 for w in jax.tree.leaves(ours["layers"]))
    jax.tree.map(np.testing.assert_array_equal, panels.in_panels(ours), ours)
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
    want = transformer.logits(params, tokens, config=config)
    for layout in (ours, loaded.decoding_params(), loaded.decoding_params(17)):
        found = transformer.logits(layout, tokens, config=config)
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)
    assert loaded.decoding_params(16) is ours and loaded.decoding_params(17) is not ours
    assert ("head" in loaded.params) is not is_tied  # what may be trained is not touched
    save_pretrained(tmp_path, ours, config)
    saved, _ = load_pretrained(tmp_path, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, saved, params)


def test_the_copies_of_the_rows_never_outgrow_the_matrix():
    w = panels.to_panels(jnp.ones((256, 1024)))
    for num_rows in (5, panels.MAX_ROWS, panels.MAX_ROWS + 1, 100):
        compiled = jax.jit(panels.matmul).lower(jnp.ones((num_rows, 256)), w).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= 1.2 * w.nbytes


def test_weights_that_do_not_lie_on_a_cpu_stay_as_they_are():
    elsewhere = {"embed": jax.ShapeDtypeStruct((32, 32), jnp.float32)}  # no array of a CPU's
    lay_out = panels.by_rows(elsewhere, is_tied=True, has_panels=True)
    assert lay_out(1) is lay_out(None) is elsewhere
