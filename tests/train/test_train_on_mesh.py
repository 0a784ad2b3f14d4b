"""Training on a mesh: the same losses, parameters split and gathered, checkpoints that move."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.mesh_training import HEADS, MESHES, MODEL, OBJECTIVES, STEPS, Run, adamw, losses

from spec_jax.errors import TrainingError
from spec_jax.models import checkpoint, transformer
from spec_jax.models.params import param_shardings
from spec_jax.planning import hlo
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.placement import Placement, device_bytes
from spec_jax.train.step import TrainState

# Every objective, mesh and optimizer once; the product is measured by hand.
COVER = [
    ("lm", "full and tensor", {}),
    ("scanned", "tensor", {}),  # each key-value head lies on two devices
    ("distill", "data", {}),
    ("eagle3", "full and tensor", {}),
    ("eagle1", "both", {"accumulate": 2}),
    ("mtp", "full", {"name": "muon"}),
    ("sequential", "full and tensor:2", {}),
    ("dspark", "full and tensor", {}),
]


def check_losses(name, mesh, optimizer):
    expected = losses(name, **optimizer)
    assert expected[0] != expected[-1]
    run = Run(name, *MESHES[mesh], **optimizer)
    difference = np.abs(run.train() - expected).max()
    print(f"{name} on {mesh}: {difference:.1e}")
    assert difference < 1e-5
    found = jax.tree.map(lambda x: x.sharding, run.state)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, found, run.where))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mesh", "optimizer"), COVER, ids=lambda x: str(x))
def test_twenty_losses_are_those_of_one_device(name, mesh, optimizer):
    check_losses(name, mesh, optimizer)


@pytest.mark.measure
@pytest.mark.parametrize(("name", "mesh"), list(itertools.product(OBJECTIVES, MESHES)))
def test_losses_of_every_objective_on_every_mesh(name, mesh):
    check_losses(name, mesh, {})


def bytes_of(placement, where, changes):
    """Bytes a device of the state before the first step, without the optimizer's own numbers."""
    make = lambda: TrainState.create(
        transformer.init_params(MODEL, jax.random.key(0)), adamw(**changes)
    )
    shapes, state = jax.eval_shape(make), placement.state_shardings(where, make)
    numbers = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes) if x.size < 8)
    return device_bytes(shapes, state) - numbers


@pytest.mark.parametrize("changes", [{}, {"name": "muon"}], ids=str)
def test_fully_sharded_states_take_an_eighth_of_the_memory(changes):
    placement = Placement.of("data:8", is_fully_sharded=True)
    where = param_shardings(MODEL, placement.mesh, placement.axis_rules)
    whole = jax.tree.map(lambda x: placement.replicated, where)
    assert bytes_of(placement, whole, changes) == 8 * bytes_of(placement, where, changes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, mesh", [("lm", "full and tensor"), ("eagle3", "full")])
def test_weights_are_gathered_and_activations_stay_where_their_rows_are(name, mesh):
    run = Run(name, *MESHES[mesh])
    text = run.step.lower(run.state, run.batch(0), run.frozen).compile().as_text()
    program = hlo.read(text)
    found = hlo.traffic(program, program.call())  # what a step moves between devices
    assert {c.kind for c in found.collectives} == {"all-gather", "all-reduce"}
    weights = [x.size * x.dtype.itemsize for x in jax.tree.leaves(run.state.params)]
    of_all_rows = run.batch(0).tokens.size if name in HEADS else run.batch(0).size
    assert found.largest_gather <= max(weights) < 4 * of_all_rows * MODEL.hidden_size
    tensor = run.placement.mesh.shape["tensor"]
    assert found.by_kind["all-gather"][1] >= sum(weights) / tensor


def same(a, b):
    a, b = jax.device_get((a, b))
    return jax.tree.all(jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b))


@pytest.mark.exhaustive
def test_a_checkpoint_is_restored_onto_other_meshes_and_back(tmp_path):
    expected = losses("lm")
    on = [(None, False), MESHES["full and tensor"], MESHES["tensor"], (None, False)]
    with Checkpoints(tmp_path, keep=8) as checkpoints:
        saved = None
        for begin, (mesh, is_fully_sharded) in zip(range(0, STEPS, 5), on):
            run = Run("lm", mesh, is_fully_sharded)
            if saved is not None:
                for restore in (checkpoints.restore, checkpoints.restore_best):
                    state = restore(run.state)
                    assert same(state, saved)
                    if mesh:
                        where = jax.tree.map(lambda x: x.sharding, state)
                        assert jax.tree.all(jax.tree.map(lambda a, b: a == b, where, run.where))
                run.state = state
            found = run.train(begin, begin + 5)
            np.testing.assert_allclose(found, expected[begin : begin + 5], rtol=0, atol=1e-5)
            saved = jax.device_get(run.state)
            checkpoints.save(begin + 5, run.state)
            checkpoints.save_best(begin + 5, run.state, figure=begin)
            checkpoints.wait()


def test_a_number_that_is_not_finite_is_found_on_a_mesh(tmp_path):
    mesh = Placement.of("data:8").mesh
    where = NamedSharding(mesh, PartitionSpec("data"))
    good = {"good": jax.device_put(jnp.ones(8), where), "bad": jnp.ones(8)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, good | {"bad": jax.device_put(jnp.ones(8).at[6].set(jnp.nan), where)})
        checkpoints.wait()
        with pytest.raises(TrainingError, match="'bad'.* is not finite"):
            checkpoints.restore(good, say=lambda line: None)


def test_an_export_has_the_same_bytes(tmp_path):
    placement = Placement.of("data:1,tensor:8", is_fully_sharded=True)
    params = transformer.init_params(MODEL, jax.random.key(0))
    split = jax.device_put(params, param_shardings(MODEL, placement.mesh, placement.axis_rules))
    assert len(split["embed"].addressable_shards[0].data) == MODEL.vocab_size // 8
    for shard in split["layers"]["0"]["k"].addressable_shards:  # of four heads on eight devices
        assert shard.data.shape[1] == MODEL.head_dim
    for name, weights in (("whole", params), ("split", split)):
        checkpoint.save_pretrained(tmp_path / name, weights, MODEL, dtype="bfloat16")
    files = [p.name for p in (tmp_path / "whole").iterdir()]
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "split" / name).read_bytes()
    assert any(name.endswith(".safetensors") for name in files)
