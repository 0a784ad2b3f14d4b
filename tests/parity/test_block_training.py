"""Twenty optimizer steps of block drafters, against an independent torch training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch (extra 'parity')")
pytest.importorskip("transformers", reason="parity needs transformers (extra 'parity')")
import oracles.torch_blocks as oracle  # noqa: E402
from test_torch_training import save_target  # noqa: E402
from test_training import RATES, batches, check, ours  # noqa: E402

from spec_jax.config import SamplerConfig  # noqa: E402
from spec_jax.contracts import Context  # noqa: E402
from spec_jax.drafters.block.config import (  # noqa: E402
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    TreeFlashConfig,
)
from spec_jax.drafters.block.model import block_drafter, block_table  # noqa: E402
from spec_jax.drafters.block.objective import OBJECTIVES  # noqa: E402
from spec_jax.loading import load_model  # noqa: E402
from spec_jax.sampling import make_sampler  # noqa: E402
from spec_jax.train.anchors import draw_anchors  # noqa: E402

A, SHAPE = 5, dict(block_size=4, taps=(0, 2, 3))
SLIDING = dict(windows=(None, 3), is_causal=(False, True))
PAIRS = dict(conv_kernel_size=3, conv_group_size=4, selector_rank=5, selector_top_k=6)
RUNS = {
    "dflash": (DFlashConfig, {}, {}, {}),
    "dflash, sliding": (DFlashConfig, SLIDING, {"slot_weights": "dpace"}, {"is_dpace": True}),
    "dspark": (
        DSparkConfig,
        {"markov_rank": 6, "windows": (3, None)},
        {},
        {"text_weight": 0.1, "l1_weight": 0.9, "confidence_weight": 1.0},
    ),
    "treeflash": (TreeFlashConfig, {}, *[{"base_weight": 0.5, "target_weight": 0.3}] * 2),
    "dflash2": (DFlash2Config, {**PAIRS, "windows": (3, None)}, {}, {"base_weight": 1.0}),
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


def test_two_rounds_of_treeflash_draft_what_torch_scores_draft_by_draft(target):
    """Each draft by the one before it, after a prefill and after a commit."""
    path, model = target
    config = TreeFlashConfig.of_target(model.config, **SHAPE, windows=(3, None))
    theirs, head = oracle.Target(path, torch.float64), drawn(block_table(config))
    double = functools.partial(jax.tree.map, lambda x: torch.tensor(x, dtype=torch.float64))
    modules, K = double(modules_of(head)), config.max_draft
    tokens = batches()[0][0][:1]
    states = theirs(torch.tensor(tokens))[0]
    features = torch.cat([states[tap] for tap in config.taps], -1)
    drafter, params = block_drafter(config, model.model), {"head": head, "target": model.params}
    ours, text = jnp.asarray(features.detach().numpy(), jnp.float32), jnp.asarray(tokens, jnp.int32)
    sampler = make_sampler(SamplerConfig(), 1, model.config.vocab_size)

    @jax.jit
    def propose(state, length):
        reads = (False, False, True)
        context = Context(text, length, sampler, jnp.zeros(1, jnp.uint32), *reads)
        return drafter.propose(params, state, context, K)[0]

    state, n = drafter.init(params, 1, 20), 5
    state = drafter.prefill(params, state, text[:, :n], jnp.asarray([n]), None, ours[:, :n])
    for more in (3, 0):
        found = propose(state, jnp.asarray([n]))
        row = torch.tensor(tokens[0])
        x = oracle.block_states(modules, features[0], row, [n], config, theirs.embed)[0, -K:]
        before = row[n]
        for k in range(K):
            base, logits, _ = oracle.scores(modules, x[k], before, config, theirs, "treeflash")
            np.testing.assert_allclose(found.logits[0, k], logits.detach(), atol=1e-4)
            assert (logits - base).abs().max() > 0.1  # the step matters
            before = logits.argmax()
            assert int(found.tokens[0, k]) == int(before)
        new = ours[:, n : n + 4]
        state = drafter.commit(params, state, None, jnp.asarray([more]), new, None)
        n += more


@pytest.mark.parametrize("name", RUNS)
def test_training_follows_torch(target, name):
    """Losses of every step to 1e-4, and the trained weights, under a dense mask."""
    path, model = target
    config_class, shape, options, theirs = RUNS[name]
    config = config_class.of_target(model.config, **SHAPE, **shape)
    head = drawn(block_table(config))
    places = []
    for _, mask in batches():  # every step has the same key here, and another mask
        at, is_kept = map(np.asarray, draw_anchors(jax.random.key(0), jnp.asarray(mask), A))
        places.append([row[kept].tolist() for row, kept in zip(at, is_kept)])
    assert len({str(row) for row in places}) > 15
    loss = functools.partial(
        OBJECTIVES[config.name].loss, config=config, model=model.model, num_anchors=A, **options
    )
    losses, modules = oracle.block_losses(
        path,
        modules_of(head),
        config,
        batches(),
        kind=config.name,
        anchors=places,
        lrs=RATES,
        **theirs,
    )
    check(ours(model, head, config, loss), (losses, head_of(modules)))
