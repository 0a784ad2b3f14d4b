"""Invalid meshes: each is refused where it enters, before anything is loaded or compiled."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from support.tiny_models import GLM4_MOE, LLAMA, random_weights

from configs import decode_default, evaluate_zoo, regenerate_zoo
from experiments.overlap import make_sides
from experiments.regenerate import load_decoder
from experiments.run import report
from spec_jax import SpeculativeConfig, SpeculativeDecoder, meshes, sharding
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.errors import ConfigError
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.loading import LoadedModel, random_head
from spec_jax.models import transformer
from spec_jax.models.params import placement
from spec_jax.models.specs import ParamSpec
from spec_jax.overlap import overlap
from spec_jax.overlap.overlap import mesh_of_side

TARGET = LoadedModel("tiny", transformer.model(LLAMA), random_weights(LLAMA), config=LLAMA)
TOO_MANY = f"data:{len(jax.devices()) + 1}"


def one_device(names=meshes.MESH_AXES, kind=AxisType.Auto):
    grid = np.asarray(jax.devices()[:1]).reshape((1,) * len(names))
    return Mesh(grid, names, axis_types=(kind,) * len(names))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("rows:2", r"mesh is 'rows:2'; expected positive sizes of data and tensor"),
        ("data:0", r"mesh is 'data:0'; expected positive sizes"),
        ("data:1,data:1", r"mesh is 'data:1,data:1'; expected"),
        ("data:two", r"mesh is 'data:two'; expected"),
        ("", r"mesh is ''; expected"),
        ((2, 4), r"mesh is \(2, 4\); expected a Mesh, which make_mesh makes, or text such as"),
        (TOO_MANY, r"needs \d+ devices; jax sees \d+ \(cpu\); .*device_count=\d+ before Python"),
        (one_device(("x", "tensor")), r"axes 'x', 'tensor'; expected data and tensor"),
        (one_device(kind=AxisType.Explicit), r"expected AxisType.Auto for each"),
    ],
    ids=["axis", "zero", "twice", "word", "empty", "tuple", "too many", "names", "explicit"],
)
def test_a_mesh_that_cannot_be_is_named(mesh, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(TARGET, mesh=mesh)


def test_sizes_by_name_are_checked_as_text_is():
    assert meshes.make_mesh({"tensor": 1}).shape == {"data": 1, "tensor": 1}
    with pytest.raises(ConfigError, match="mesh is 'rows:2'"):
        meshes.make_mesh({"rows": 2})


OPTIONS = [
    ({"is_draft_replicated": True}, "is_draft_replicated is set, and there is no mesh"),
    (
        {"is_draft_replicated": True, "mesh": one_device()},
        "is_draft_replicated is set, and there is no draft",
    ),
    (
        {"devices": overlap.Devices(*jax.devices()[:1] * 2), "mesh": one_device()},
        "devices and mesh are both given.*a mesh for each side",
    ),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=["no mesh", "no draft", "overlap"])
def test_options_that_need_others_are_refused(options, message):
    config = SpeculativeConfig("ngram", 2)
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(TARGET, None, config, **options)


def test_heads_that_the_mesh_does_not_divide_are_refused_with_a_size_that_does():
    counts = {"heads": 12, "kv_heads": 4}
    mesh = AbstractMesh((1, 8), meshes.MESH_AXES)
    message = "tiny has 12 heads, which the mesh axis tensor:8 does not divide; .* 3, 4, 6, 12"
    with pytest.raises(ConfigError, match=message):
        sharding.check_divides("tiny", counts, mesh, sharding.SHARDED)
    sharding.check_divides("tiny", counts, mesh, sharding.REPLICATED)
    config = dataclasses.replace(GLM4_MOE, num_attention_heads=8)
    message = "glm has 6 experts, which the mesh axis tensor:8 does not divide; .* 1, 2, 3, 6"
    with pytest.raises(ConfigError, match=message):
        placement("glm", config, mesh, sharding.SHARDED)
    sharding.check_divides("tiny", {"heads": 8, "kv_heads": 4}, mesh, sharding.SHARDED)


def test_what_a_mesh_does_not_divide_is_said():
    """4 heads, 2 key-value heads, 24 inner features, 31 ids; a reduced vocabulary of 10."""
    mesh = AbstractMesh((2, 4), meshes.MESH_AXES)
    whole = "is not divided by the mesh axis tensor:4, so every device along it holds all of it"
    assert TARGET.kept_whole(mesh) == [f"tiny: vocab of size 31 {whole}"]
    head = random_head(EagleConfig.of_target(LLAMA, 3, 10), jax.random.key(0))
    assert f"{head.name}: vocab of size 10 {whole}" in head.kept_whole(mesh)
    assert head.kept_whole(mesh, sharding.REPLICATED) == []
    # Experts that the mesh does not divide are split by their inner width.
    experts = ParamSpec((6, 8, 4), ("experts", None, "mlp"), "experts")
    table = {"router": ParamSpec((8, 6), ("embed", "experts"), "router"), "experts": experts}
    only = [f"moe: experts of size 6 {whole}"]
    assert sharding.kept_whole("moe", table, mesh, sharding.SHARDED, {}) == only
    del table["router"]
    assert sharding.kept_whole("moe", table, mesh, sharding.SHARDED, {}) == []
    assert sharding.whole_rows(4, mesh) == [] and len(sharding.whole_rows(3, mesh)) == 1


@pytest.mark.parametrize("experiment", [decode_default, evaluate_zoo, regenerate_zoo])
def test_experiments_refuse_before_they_load(experiment):
    config = experiment.get_config()
    assert MeshOptions.of(config) == (None, False)
    config.is_draft_replicated = True
    with pytest.raises(ConfigError, match="expected a mesh too"):
        MeshOptions.of(config)
    config.mesh = TOO_MANY
    with pytest.raises(ConfigError, match="jax sees"):
        MeshOptions.of(config)


def test_an_experiment_without_a_draft_has_none_to_replicate():
    config = regenerate_zoo.get_config()
    config.update({"mesh": "data:1", "is_draft_replicated": True})
    with pytest.raises(ConfigError, match="expected a draft model or a head too"):
        load_decoder(config, MeshOptions.of(config))


def test_a_report_says_the_mesh_and_what_lies_whole_on_it():
    mesh = AbstractMesh((2, 4), meshes.MESH_AXES)
    facts = TARGET.kept_whole(mesh)
    known = dict(
        axes={"data": 2, "tensor": 4}, devices=["d"] * 8, is_draft_replicated=True, kept_whole=facts
    )
    first, *rest = report.mesh_lines(known)
    assert first == "mesh data:2,tensor:4 of 8 devices, drafts replicated" and rest == facts
    assert report.mesh_lines(None) == []
    options = MeshOptions(one_device())
    assert options.facts(TARGET, batch=3)["kept_whole"] == []
    assert options.facts(TARGET)["axes"] == {"data": 1, "tensor": 1}


def test_the_overlap_experiment_gives_each_side_devices_of_its_own():
    assert not make_sides("", "").shared
    assert mesh_of_side(make_sides("", "data:1").target).shape == {"data": 1, "tensor": 1}
    with pytest.raises(ConfigError, match=r"have \d+ and 1 devices; jax sees"):
        make_sides("", TOO_MANY)
    with pytest.raises(ConfigError, match="mesh is 'rows:1'"):
        make_sides("rows:1", "")


def test_a_target_that_was_put_on_a_mesh_is_decoded_there():
    mesh = one_device()
    decoder = SpeculativeDecoder(TARGET.on_mesh(mesh), TARGET)
    assert decoder.mesh is mesh and decoder.draft.params["embed"].sharding.mesh is mesh
    assert SpeculativeDecoder(TARGET).mesh is None
