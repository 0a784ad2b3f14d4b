"""A batch in parts: the update and the figures are those of the batch, whatever each part holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import gate_kind, gate_loss
from support.mesh_training import HEADS, MODEL, Run, windows

from spec_jax.drafters import registry
from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.train.chunks import chain_loss
from spec_jax.train.means import Mean, merge, report
from spec_jax.train.objective import Batch, row_keys, with_view
from spec_jax.train.step import TrainState, train_step

ROWS, PARTS, LENGTH = 6, 3, 19
GATED = gate_loss.GATE, gate_kind.new(MODEL), {}
CASES = HEADS | {
    "gate": GATED,
    "eagle1, noise": (*HEADS["eagle1"][:2], {"noise": 0.2}),
    "dpace": (*HEADS["dflash"][:2], {"num_anchors": 4, "slot_weights": "dpace"}),
    "lm": None,
    "distill": None,
}


def batch_of_parts():
    """Rows of 0 to 15 tokens to predict; the last of three parts, rows 2 and 5, has none."""
    counts = np.asarray([15, 1, 0, 4, 2, 0])
    mask = np.arange(LENGTH) >= LENGTH - counts[:, None]
    return Batch(windows(0, ROWS, LENGTH), mask, np.zeros(ROWS))


def setting(name):
    """The loss, what makes its parameters and the target's, and a batch."""
    target = functools.partial(transformer.init_params, MODEL, jax.random.key(1))
    if CASES[name] is None:
        run = Run(name)
        return run.loss, lambda: (run.init(), target()), windows(0, ROWS)
    objective, config, options = CASES[name]
    spec = gate_kind.KIND.head if name == "gate" else registry.kind_of(config).head
    fresh = lambda: spec.init_params(config, jax.random.key(2), "float32")
    constants = {"d2t": jnp.arange(64, dtype=jnp.int32) // 4} if name == "eagle3" else {}
    loss = objective.bind(config, transformer.model(MODEL), options, constants)
    init = lambda: (objective.split(fresh())[0], target())
    return with_view(loss, transformer.model(MODEL), config.taps), init, batch_of_parts()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_update_of_parts_is_that_of_the_batch(name):
    """With its figures, though parts have other numbers of tokens, and one has none."""
    loss, init, batch = setting(name)
    optimizer = optax.sgd(1.0)

    @jax.jit
    def updates(batch):
        params, frozen = init()
        if isinstance(batch, Batch):
            batch = batch.replace(key=row_keys(jax.random.key(3), ROWS))

        def update(parts):
            state, options = TrainState.create(params, optimizer), dict(accumulate=parts)
            state, figures = train_step(
                state, batch, frozen, objective=loss, optimizer=optimizer, **options
            )
            return jax.tree.map(jnp.subtract, params, state.params), figures

        return update(1), update(PARTS)

    (expected, known), (found, figures) = jax.device_get(updates(batch))
    size, gap = (
        np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in jax.tree.leaves(tree)))
        for tree in (expected, jax.tree.map(np.subtract, expected, found))
    )
    print(f"{name}: {gap / size:.1e}")
    assert gap < 1e-6 * size and size > 0
    known, figures = report(known), report(figures)
    assert known.keys() == figures.keys()
    for figure in known:
        np.testing.assert_allclose(figures[figure], known[figure], rtol=1e-5, atol=1e-6)


def linear_loss(params, batch, frozen, counts=None):
    """Two steps of a linear head, whose means have other counts each."""
    states = jax.nn.one_hot(batch.tokens[:, : LENGTH - 2], 96) @ params["in"]  # [K,B,T,D]

    def measure(out, states, true):
        drafts = jnp.zeros(states.shape[:3], jnp.int32)
        return jnp.square(states @ out - true[:, None]), drafts

    over, shares = counts and counts["tokens"], jnp.asarray([0.5, 2.0])
    true = batch.tokens[:, 2:].astype(jnp.float32)
    return chain_loss(measure, params["out"], states, batch, true, shares, over)


def test_parts_are_weighed_by_their_tokens_and_a_batch_without_any_changes_nothing():
    draw = np.random.default_rng(0)
    shapes = {"in": (2, 1, 96, 4), "out": (4,)}
    params = {name: draw.normal(size=x).astype(np.float32) for name, x in shapes.items()}
    batch, optimizer = batch_of_parts(), optax.sgd(0.1, momentum=0.9)
    step = functools.partial(train_step, objective=linear_loss, optimizer=optimizer)
    at_once, by_parts = jax.jit(step), jax.jit(functools.partial(step, accumulate=PARTS))
    state = TrainState.create(params, optimizer)
    whole, known = jax.device_get(at_once(state, batch))
    in_parts, found = jax.device_get(by_parts(state, batch))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, in_parts, whole)
    jax.tree.map(close, report(found), report(known))
    empty = batch.replace(mask=np.zeros_like(batch.mask))
    after, nothing = jax.device_get(at_once(whole, empty))
    jax.tree.map(np.testing.assert_array_equal, after, whole.replace(step=2))
    assert nothing["loss"] == 0 and np.isnan(report(nothing)["loss_by_step"]).all()


def test_figures_of_several_steps_are_weighed_by_what_counts():
    few = {"terms": {"tokens": Mean(np.float32(8), np.float32(4))}, "loss": 2.0, "grad_norm": 1.0}
    many = {"terms": {"tokens": Mean(np.float32(64), np.float32(64))}, "loss": 1.0}
    found = report(merge(few, many | {"grad_norm": 3.0}))
    assert found == {"loss": pytest.approx(72 / 68), "grad_norm": 2.0}
    with pytest.raises(ConfigError, match="no figures to merge; expected those of one batch"):
        merge()


def test_what_cannot_be_computed_in_parts_is_refused():
    state, optimizer = TrainState.create({"w": jnp.ones(())}, optax.sgd(1.0)), optax.sgd(1.0)
    loss = lambda params, batch, frozen, counts=None: (params["w"] * batch.sum(), {})
    step = functools.partial(train_step, objective=loss, optimizer=optimizer)
    for batch, accumulate, message in (
        (jnp.ones((4, 2)), 2, "figures have no terms"),
        (jnp.ones((4, 2)), 3, r"accumulate is 3; .* \[4\]: expected a multiple of 3"),
        ((jnp.ones((4, 2)), jnp.ones(())), 2, r"a batch with keys of its rows, see row_keys"),
    ):
        with pytest.raises(ConfigError, match=message):
            jax.eval_shape(functools.partial(step, accumulate=accumulate), state, batch)


def test_every_objective_of_the_package_is_computed_in_parts():
    ways = {name: way.objective() for name, (_, way) in registry.objectives().items()}
    inner = lambda loss: getattr(loss, "func", loss).__module__
    own = {name for name, way in ways.items() if inner(way.loss).startswith("spec_jax.")}
    assert own <= {case[0].name for case in CASES.values() if case}
