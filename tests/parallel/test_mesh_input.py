"""Invalid meshes: each is refused where it enters, before anything is loaded or compiled."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from support.tiny_models import LLAMA, loaded

from configs import decode_default, evaluate_zoo, regenerate_zoo
from experiments.overlap import make_sides
from experiments.regenerate import load_decoder
from spec_jax import SpeculativeConfig, SpeculativeDecoder, meshes, sharding
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.errors import ConfigError
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.loading import random_head
from spec_jax.models.specs import ParamSpec
from spec_jax.overlap import overlap
from spec_jax.overlap.overlap import mesh_of_side

TARGET = loaded(LLAMA)
TOO_MANY = f"data:{len(jax.devices()) + 1}"


def one_device(names=meshes.MESH_AXES, kind=AxisType.Auto):
    grid = np.asarray(jax.devices()[:1]).reshape((1,) * len(names))
    return Mesh(grid, names, axis_types=(kind,) * len(names))


def options_of(experiment, **values):
    config = experiment.get_config()
    config.update(values)
    return config, MeshOptions.of(config)


def decode(**options):
    return SpeculativeDecoder(TARGET, None, SpeculativeConfig("ngram", 2), **options)


TWICE = overlap.Devices(*jax.devices()[:1] * 2)
ALONE = {"is_draft_replicated": True}
REFUSED = {
    "axis": (lambda: decode(mesh="rows:2"), "'rows:2'; expected positive sizes of data and tensor"),
    "zero": (lambda: decode(mesh="data:0"), r"mesh is 'data:0'; expected positive sizes"),
    "twice": (lambda: decode(mesh="data:1,data:1"), r"mesh is 'data:1,data:1'; expected"),
    "word": (lambda: decode(mesh="data:two"), r"mesh is 'data:two'; expected"),
    "empty": (lambda: decode(mesh=""), r"mesh is ''; expected"),
    "tuple": (lambda: decode(mesh=(2, 4)), r"is \(2, 4\); expected a Mesh, which make_mesh makes"),
    "too many": (lambda: decode(mesh=TOO_MANY), r"jax sees \d+ \(cpu\); .*device_count=\d+ before"),
    "names": (lambda: decode(mesh=one_device(("x", "tensor"))), "'x', 'tensor'; expected data and"),
    "explicit": (lambda: decode(mesh=one_device(kind=AxisType.Explicit)), "AxisType.Auto for each"),
    "sizes": (lambda: meshes.make_mesh({"rows": 2}), "mesh is 'rows:2'"),
    "no mesh": (lambda: decode(**ALONE), "is_draft_replicated is set, and there is no mesh"),
    "no draft": (lambda: decode(**ALONE, mesh=one_device()), "is set, and there is no draft"),
    "both": (lambda: decode(devices=TWICE, mesh=one_device()), "devices and mesh are both given"),
    "of a side": (lambda: make_sides("rows:1", ""), "mesh is 'rows:1'"),
    "of both sides": (lambda: make_sides("", TOO_MANY), r"have \d+ and 1 devices; jax sees"),
    "experiment": (lambda: options_of(decode_default, **ALONE), "expected a mesh too"),
    "its size": (lambda: options_of(evaluate_zoo, **ALONE, mesh=TOO_MANY), "jax sees"),
    "its draft": (
        lambda: load_decoder(*options_of(regenerate_zoo, **ALONE, mesh="data:1")),
        "expected a draft model or a head too",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mesh_that_cannot_be_is_named(name):
    call, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        call()


def test_what_a_mesh_does_not_divide_is_said():
    """4 heads, 2 key-value heads, 24 inner features, 31 ids; a reduced vocabulary of 10."""
    mesh = AbstractMesh((2, 4), meshes.MESH_AXES)
    whole = "is not divided by the mesh axis tensor:4, so every device along it holds all of it"
    assert TARGET.unsplit_weights(mesh) == [f"tiny: vocab of size 31 {whole}"]
    head = random_head(EagleConfig.of_target(LLAMA, 3, 10), jax.random.key(0))
    assert f"{head.name}: vocab of size 10 {whole}" in head.unsplit_weights(mesh)
    assert head.unsplit_weights(mesh, sharding.REPLICATED) == []
    # Experts that the mesh does not divide are split by their inner width.
    experts = ParamSpec((6, 8, 4), ("experts", None, "mlp"), "experts")
    table = {"router": ParamSpec((8, 6), ("embed", "experts"), "router"), "experts": experts}
    only = [f"moe: experts of size 6 {whole}"]
    assert sharding.unsplit_weights("moe", table, mesh, sharding.SHARDED, {}) == only
    del table["router"]
    assert sharding.unsplit_weights("moe", table, mesh, sharding.SHARDED, {}) == []
    assert sharding.unsplit_batch(4, mesh) == [] and len(sharding.unsplit_batch(3, mesh)) == 1
    options = MeshOptions(one_device())
    assert options.facts(TARGET, batch=3)["kept_whole"] == []
    assert options.facts(TARGET)["axes"] == {"data": 1, "tensor": 1}


def test_a_mesh_may_be_left_out_or_given_by_sizes_or_by_sides():
    for experiment in (decode_default, evaluate_zoo, regenerate_zoo):
        assert options_of(experiment)[1] == (None, False)
    assert meshes.make_mesh({"tensor": 1}).shape == {"data": 1, "tensor": 1}
    assert not make_sides("", "").shared
    assert mesh_of_side(make_sides("", "data:1").target).shape == {"data": 1, "tensor": 1}


def test_a_target_that_was_put_on_a_mesh_is_decoded_there():
    mesh = one_device()
    decoder = SpeculativeDecoder(TARGET.on_mesh(mesh), TARGET)
    assert decoder.mesh is mesh and decoder.draft.params["embed"].sharding.mesh is mesh
    assert SpeculativeDecoder(TARGET).mesh is None
