"""Twenty optimizer steps of block drafters, against an independent torch training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch (extra 'parity')")
pytest.importorskip("transformers", reason="parity needs transformers (extra 'parity')")
import oracles.torch_blocks as oracle  # noqa: E402
from test_training import RATES, batches, check, ours, save_target  # noqa: E402

from spec_jax.drafters.block import config as block  # noqa: E402
from spec_jax.drafters.block.model import block_table  # noqa: E402
from spec_jax.drafters.block.objective import OBJECTIVES  # noqa: E402
from spec_jax.loading import load_model  # noqa: E402
from spec_jax.train.anchors import draw_anchors  # noqa: E402

A, SHAPE = 5, dict(block_size=4, taps=(0, 2, 3))
SLIDING = dict(windows=(None, 3), is_causal=(False, True))
PAIRS = dict(conv_kernel_size=3, conv_group_size=4, selector_rank=5, selector_top_k=6)
DSPARK = dict(text_weight=0.1, l1_weight=0.9, confidence_weight=1.0)
RUNS = {
    "dflash": (block.DFlashConfig, {}, {}, {}),
    "dflash, sliding": (block.DFlashConfig, SLIDING, {"slot_weights": "dpace"}, {"is_dpace": True}),
    "dspark": (block.DSparkConfig, {"markov_rank": 6, "windows": (3, None)}, {}, DSPARK),
    "treeflash": (block.TreeFlashConfig, {}, *[{"base_weight": 0.5, "target_weight": 0.3}] * 2),
    "dflash2": (block.DFlash2Config, {**PAIRS, "windows": (3, None)}, {}, {"base_weight": 1.0}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = save_target(tmp_path_factory.mktemp("target"))
    return path, load_model(path)


def drawn(table):
    draw = np.random.RandomState(3)
    fill = lambda spec: (0.3 * draw.standard_normal(spec.shape) + (spec.init == "ones")).astype(
        np.float32
    )
    return jax.tree.map(fill, table, is_leaf=lambda x: hasattr(x, "init"))


def modules_of(head):
    """Two levels, as the oracle trains them."""
    layers = {f"layers.{i}": w for i, w in head["layers"].items()}
    flat = {name: w for name, w in head.items() if not isinstance(w, dict)}
    return {"head": flat, **layers, **({"step": head["step"]} if "step" in head else {})}


def head_of(modules):
    layers = {name.split(".")[1]: w for name, w in modules.items() if name.startswith("layers.")}
    step = {"step": modules["step"]} if "step" in modules else {}
    return {**modules["head"], "layers": layers, **step}


@pytest.mark.parametrize("name", RUNS)
def test_training_follows_torch(target, name):
    """Losses of every step to 1e-4, and the trained weights, under a dense mask."""
    path, model = target
    config_class, shape, options, theirs = RUNS[name]
    config = config_class.of_target(model.config, **SHAPE, **shape)
    head = drawn(block_table(config))
    places = []
    for _, mask in batches():  # every step has the same key here, and another mask
        at, is_kept = map(np.asarray, draw_anchors(jax.random.key(1), jnp.asarray(mask), A))
        places.append([row[kept].tolist() for row, kept in zip(at, is_kept)])
    assert len({str(row) for row in places}) > 15
    loss = functools.partial(
        OBJECTIVES[config.name].loss, config=config, model=model.model, num_anchors=A, **options
    )
    options = dict(anchors=places, lrs=RATES, **theirs)
    losses, modules = oracle.block_losses(path, modules_of(head), config, batches(), **options)
    check(ours(model, head, config, loss), (losses, head_of(modules)))
