"""Windows of several documents: each is trained on as if it had a window of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_heads import BLOCKS, CONFIG, TARGET, UNROLLED, random_params
from support.tiny_models import MAMBA2

from spec_jax.drafters import registry
from spec_jax.drafters.eagle.model import EagleConfig, PEagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.models.attention import block_size
from spec_jax.models.layers import Window
from spec_jax.train.objective import Batch, row_keys, target_view, with_view
from spec_jax.train.placement import Placement
from spec_jax.train.unroll import UnrolledCache

HEADS = {
    "eagle3": (EagleConfig.of_target(CONFIG, 3, 20), {"num_steps": 4}),
    "mtp": (UNROLLED["mtp"], {"num_steps": 3, "labels": "target"}),
    "sequential": (MtpConfig.of_target(CONFIG, num_modules=2, protocol="sequential"), {}),
    "peagle": (PEagleConfig.of_target(CONFIG, max_draft=4), {"num_anchors": 90}),
    "dspark": (BLOCKS["dspark"], {"num_anchors": 90}),
    "treeflash": (BLOCKS["treeflash"], {"num_anchors": 90}),
}
LENGTHS = [[5, 41, 1, 33, 10], [64, 2, 20, 4]]  # of the documents of each window
W = sum(LENGTHS[0])
MESH = "data:2,tensor:2"


@functools.cache
def batches():
    """Documents packed, and the same ones in windows of their own, padded after their end."""
    rng = np.random.default_rng(3)
    tokens, mask = rng.integers(0, 31, (2, W)).astype(np.int32), rng.random((2, W)) < 0.8
    begins, alone = np.zeros((2, W), np.int32), []
    for row, lengths in enumerate(LENGTHS):
        starts = np.cumsum([0, *lengths])
        begins[row] = np.repeat(starts[:-1], lengths)
        alone += [(row, slice(*starts[i : i + 2])) for i in range(len(lengths))]
    alone += [(0, slice(0, 0))] * (-len(alone) % 2)  # a number of rows that a mesh divides

    def own(x):
        parts = [x[row, part] for row, part in alone]
        return np.stack([np.pad(part, (0, 66 - len(part))) for part in parts])

    keys = row_keys(jax.random.key(0), len(alone))
    packed = Batch(tokens, mask, keys[:2], begins=begins)
    return packed, Batch(own(tokens), own(mask), keys)


def run(name, batch, mesh=None):
    """Loss, figures and gradients; the target's pass is part of it."""
    config, options = HEADS[name]
    objective, placement = registry.objective_of(config, None), Placement.of(mesh)
    if name in ("dspark", "treeflash"):
        objective = registry.objective_of(config, name)
    params = random_params(config)
    if name == "eagle3":
        params["d2t"] = jnp.arange(20, dtype=jnp.int32) // 2
    trained, constants = objective.split(params)
    loss = objective.bind(config, transformer.model(CONFIG, config.taps), options, constants)
    loss = with_view(loss, transformer.model(CONFIG), config.taps)
    graded = placement.jit(jax.value_and_grad(loss, has_aux=True))
    return jax.device_get(graded(trained, placement.place(batch), TARGET.params))


CASES = [(name, None) for name in HEADS] + [("eagle3", MESH), ("dspark", MESH)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_packed_window_is_trained_on_as_its_documents_are_alone(name, mesh):
    """Loss, figures and gradients; borders lie inside of the attention's blocks and on them."""
    assert block_size(W - 2) == 64
    packed, alone = batches()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    found, expected = run(name, packed, mesh), run(name, alone)
    assert expected[0][1]["teacher_forced_accept"].count[0] > 99
    jax.tree.map(close, found, expected)
    joined = run(name, packed.replace(begins=0 * packed.begins), mesh)
    assert abs(joined[0][0] - expected[0][0]) > 1e-3


def test_positions_begin_anew_with_each_document():
    """Of tokens, and of a head's later steps; attention by rotary positions would not show it."""
    begins = batches()[0].begins
    alone = Window.after(CONFIG, None, 1, W + 3)
    for step in (0, 3):
        cache = UnrolledCache(jnp.zeros((2,), jnp.int32), jnp.asarray(begins))
        window = Window.after(CONFIG, cache, 2, W, step)
        at = np.arange(W) - begins + step
        np.testing.assert_array_equal(window.sin, np.asarray(alone.sin)[0, at])


@pytest.mark.parametrize("given", ["cache", "window_mask"])
def test_documents_cannot_be_fed_over_a_cache_or_under_a_mask(given):
    cache = transformer.model(CONFIG).init_cache(TARGET.params, 2, 8)
    options = {"cache": dict(cache=cache), "window_mask": dict(window_mask=jnp.ones((1, 4, 4)))}
    tokens = jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ConfigError, match="begins= is for whole sequences"):
        transformer.forward(
            TARGET.params, tokens, config=CONFIG, begins=tokens, **{"cache": None} | options[given]
        )


def test_a_recurrent_target_refuses_windows_of_several_documents():
    config = MAMBA2
    params = jax.eval_shape(lambda: transformer.init_params(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, 4), "int32")
    view = functools.partial(target_view, model=transformer.model(config), taps=(0,))
    jax.eval_shape(view, params, tokens)
    with pytest.raises(ConfigError, match="recurrent state would carry it from one document"):
        jax.eval_shape(view, params, tokens, tokens)
