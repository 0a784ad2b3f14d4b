"""Directories that are read straight onto a mesh: what they hold, what is read, what is refused."""

import contextlib
import dataclasses
import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import gate_kind
from support.meshes import mesh
from support.tiny_models import (
    BAMBA,
    DEEPSEEK,
    LLAMA,
    MAMBA2,
    QWEN2,
    QWEN3,
    QWEN3_NEXT,
    random_weights,
)

import spec_jax
from spec_jax.drafters import register, registry
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.loading import random_head
from spec_jax.models import checkpoint
from spec_jax.models import shards as shards_module
from spec_jax.models import tensors as tensors_module
from spec_jax.models.checkpoint import load_pretrained, save_pretrained
from spec_jax.models.params import param_shardings
from spec_jax.models.parts import part_at, parts_here
from spec_jax.sharding import FULLY_SHARDED, REPLICATED, SHARDED

SINGLE = "model.safetensors"
WIDE = dict(num_attention_heads=8, num_key_value_heads=4)
MODELS = {
    "llama": dataclasses.replace(LLAMA, **WIDE),
    "qwen2 tied": dataclasses.replace(QWEN2, num_attention_heads=8, num_key_value_heads=8),
    "qwen3": dataclasses.replace(QWEN3, **WIDE),
    "mamba2": dataclasses.replace(MAMBA2, num_heads=8, head_dim=4),
    "bamba": dataclasses.replace(BAMBA, **WIDE, hidden_size=32, mamba_n_heads=8),
}


@pytest.fixture
def bytes_read(monkeypatch):
    """Of tensors in files, one number a read."""
    counts = []

    class Counted(io.FileIO):
        def readinto(self, buffer):
            counts.append(super().readinto(buffer))
            return counts[-1]

    counted = lambda path, mode, buffering: Counted(path, mode)
    monkeypatch.setattr(shards_module, "open", counted, raising=False)
    return counts


@pytest.fixture
def llama(tmp_path):
    save_pretrained(tmp_path, random_weights(MODELS["llama"]), MODELS["llama"])
    return tmp_path


def assert_same(placed, expected):
    assert jax.tree.structure(placed) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_lies(params, shardings):
    is_there = lambda x, where: x.sharding.is_equivalent_to(where, x.ndim)
    assert jax.tree.all(jax.tree.map(is_there, params, shardings))


def buffers(params):
    shards = (s for x in jax.tree.leaves(params) for s in x.addressable_shards)
    return [s.data.unsafe_buffer_pointer() for s in shards]


def edit(directory, change):
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


@pytest.mark.representatives("scanned-qwen2 tied-data:2,tensor:4", "unrolled-bamba-data:1,tensor:8")
@pytest.mark.parametrize("sizes", ["data:2,tensor:4", "data:1,tensor:8"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_a_model_on_a_mesh_is_the_model_read_whole(tmp_path, name, sizes, scan_layers):
    config = MODELS[name]
    save_pretrained(tmp_path, random_weights(config), config, max_shard_bytes=9000)
    if config.tie_word_embeddings:  # and the head is stored again
        (file,) = [
            f for f in tmp_path.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(f)
        ]
        tensors = load_file(file)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, file)
    options = dict(scan_layers=scan_layers)
    for rules in (SHARDED, FULLY_SHARDED):
        params, read = load_pretrained(
            tmp_path, jnp.bfloat16, **options, mesh=mesh(sizes), axis_rules=rules
        )
        whole, expected = load_pretrained(tmp_path, jnp.bfloat16, **options)
        assert read == expected
        assert_same(params, whole)
        assert_lies(params, param_shardings(read, mesh(sizes), rules))


@pytest.mark.parametrize("name", ["zoo/target", "zoo/draft"])
def test_a_model_that_is_read_onto_a_mesh_stays_where_it_is(name):
    where = mesh("data:2,tensor:4")
    model = spec_jax.load_model(name, mesh=where)
    assert_same(model.params, spec_jax.load_model(name).params)
    assert buffers(model.on_mesh(where).params) == buffers(model.params)
    whole = spec_jax.load_draft("zoo/draft", model, mesh=where, axis_rules=REPLICATED)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(whole.params))


def modules(layer, **changes):
    layer = dataclasses.replace(layer, num_hidden_layers=1)
    options = {"num_modules": 2, "protocol": "sequential", **changes}
    return lambda target: MtpConfig.of_target(target, layer=layer, **options)


HEADS = {
    "eagle-1": lambda target: EagleConfig.of_target(target, version=1),
    "eagle-3": lambda target: EagleConfig.of_target(target, version=3),
    "mtp of llama": modules(MODELS["llama"]),
    "mtp of deepseek experts": modules(
        dataclasses.replace(DEEPSEEK, num_attention_heads=8, n_routed_experts=24)
    ),
    "mtp of qwen3-next experts": modules(
        dataclasses.replace(QWEN3_NEXT, num_attention_heads=8, num_experts=8),
        **dict(num_modules=1, protocol="recycled", has_zero_centred_norms=True),
    ),
}


@pytest.mark.representatives("eagle-3-data:2,tensor:4", "mtp of deepseek experts-data:1,tensor:8")
@pytest.mark.parametrize("sizes", ["data:2,tensor:4", "data:1,tensor:8"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_on_a_mesh_is_the_head_read_whole_and_written_so(llama, tmp_path, name, sizes):
    target = spec_jax.load_model(llama, mesh=mesh(sizes))
    config = HEADS[name](target.config)
    random_head(config, jax.random.key(0)).save(tmp_path / "head", target, dtype="bfloat16")
    head = spec_jax.load_draft(tmp_path / "head", target, mesh=mesh(sizes))
    whole = spec_jax.load_draft(tmp_path / "head", target)
    assert head.config == whole.config == config and head.notes == whole.notes
    assert_same(head.params, whole.params)
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(head.params))
    assert buffers(head.on_mesh(mesh(sizes)).params) == buffers(head.params)
    head.save(tmp_path / "again", target, dtype="bfloat16")
    expected, written = (load_file(tmp_path / at / SINGLE) for at in ("head", "again"))
    jax.tree.map(np.testing.assert_array_equal, written, expected)


@pytest.mark.parametrize("factor", [1, 2], ids=["copy", "own"])
def test_a_heads_copy_of_the_embedding_is_compared_part_by_part(llama, tmp_path, factor):
    where = mesh("data:1,tensor:8")
    target = spec_jax.load_model(llama, mesh=where, axis_rules=FULLY_SHARDED)
    head = random_head(EagleConfig.of_target(target.config, version=3), jax.random.key(0))
    head.save(tmp_path / "head", target)
    embed = factor * np.asarray(target.params["embed"])
    edit(tmp_path / "head", lambda t: t.update({"embed_tokens.weight": embed}))
    read = spec_jax.load_head(tmp_path / "head", target, mesh=where)
    assert read.config.own_embed is (factor == 2)
    assert ("embed" in read.params) is (factor == 2)


def test_a_kind_that_reads_whole_heads_is_placed_afterwards(llama, tmp_path):
    register(gate_kind.KIND)
    try:
        target = spec_jax.load_model(llama, mesh=mesh("data:2,tensor:4"))
        random_head(gate_kind.new(target.config), jax.random.key(1)).save(tmp_path / "head", target)
        head = spec_jax.load_draft(tmp_path / "head", target, mesh=mesh("data:2,tensor:4"))
        assert head.params["gate"].sharding.spec[0] == "tensor"
    finally:
        registry.unregister("gate")


# ------------------------------------------------------------------ what is read


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_every_byte_is_read_once_however_many_devices_share_it(llama, bytes_read, scan_layers):
    size = sum(x.nbytes for x in load_file(llama / SINGLE).values())
    for where in (None, mesh("data:8,tensor:1"), mesh("data:2,tensor:4"), mesh("data:1,tensor:8")):
        bytes_read.clear()
        load_pretrained(llama, scan_layers=scan_layers, mesh=where)
        assert sum(bytes_read) == size


def test_parts_are_those_of_the_whole_tensor(tmp_path, bytes_read):
    """Any part of any tensor, against the same tensor sliced by NumPy."""
    random = np.random.RandomState(0)
    shapes = [(), (7,), (5, 6), (4, 1, 3), (2, 3, 4, 5)]
    arrays = {
        f"{dtype.__name__}{list(shape)}": np.asarray(random.randint(0, 9, shape)).astype(dtype)
        for shape in shapes
        for dtype in (np.float64, np.float16, jnp.bfloat16.dtype.type, np.int16, np.bool_)
    }
    save_file(arrays, tmp_path / SINGLE)
    with contextlib.ExitStack() as stack:
        tensors = shards_module.open_shards(tmp_path, stack)
        for name, array in arrays.items():
            tensor = tensors[name]
            assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
            for _ in range(30):
                ends = [sorted(random.choice(n + 1, 2, replace=False)) for n in array.shape]
                index = tuple(slice(*map(int, pair)) for pair in ends)
                bytes_read.clear()
                np.testing.assert_array_equal(
                    tensor.read(part_at(index, array.shape)), array[index]
                )
                assert sum(bytes_read) == array[index].nbytes
                part = part_at(index[::-1], array.shape[::-1])
                np.testing.assert_array_equal(tensor.T.read(part), array.T[index[::-1]])


# ------------------------------------------------------------------ what is written


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_a_model_on_a_mesh_is_written_file_by_file(llama, tmp_path, monkeypatch, scan_layers):
    params, config = load_pretrained(
        llama, mesh=mesh("data:2,tensor:4"), axis_rules=FULLY_SHARDED, scan_layers=scan_layers
    )
    steps, write, as_stored = [], tensors_module.save_file, checkpoint.as_stored

    def gather(array, spec, dtype):
        steps.append(spec.hf_name)
        return as_stored(array, spec, dtype)

    def note(tensors, *args, **kwargs):
        steps.append(len(tensors))
        write(tensors, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "as_stored", gather)
    monkeypatch.setattr(tensors_module, "save_file", note)
    save_pretrained(tmp_path / "again", params, config, max_shard_bytes=4000)
    files = [i for i, step in enumerate(steps) if isinstance(step, int)]
    begins = [0, *(i + 1 for i in files)]
    assert len(files) > 3 and [steps[i] for i in files] == [b - a for a, b in zip(begins, files)]
    expected, written = load_file(llama / SINGLE), {}
    for file in (tmp_path / "again").glob("*.safetensors"):
        written |= load_file(file)
    jax.tree.map(np.testing.assert_array_equal, written, expected)


# ------------------------------------------------------------------ what is refused

NAME = "model.layers.1.mlp.up_proj.weight"  # [mlp, embed], split into rows


def spoil(at):
    def change(tensors):
        tensors[NAME] = tensors[NAME].copy()
        tensors[NAME][at] = np.nan

    return change


@pytest.mark.parametrize("at", [(0, 0), (-1, -1)], ids=["the first device's", "the last's"])
def test_a_value_that_only_one_device_reads_is_found(llama, at):
    edit(llama, spoil(at))
    where = mesh("data:1,tensor:8")
    parts = parts_here((16, 24), param_shardings(MODELS["llama"], where)["layers"]["1"]["up"])
    assert [len(devices) for devices in parts.values()] == [1] * 8
    with pytest.raises(WeightsError, match=rf"{NAME} holds NaN"):
        load_pretrained(llama, mesh=where)


def test_what_is_wrong_is_named_before_anything_is_read(llama, bytes_read):
    for change, words in (
        (lambda t: t.update({NAME: t[NAME].astype(np.complex64)}), f"{NAME} has dtype C64"),
        (lambda t: t.pop(NAME), f"{NAME} is missing"),
    ):
        edit(llama, change)
        with pytest.raises(WeightsError, match=words):
            load_pretrained(llama, mesh=mesh("data:2,tensor:4"))
        assert not bytes_read


def test_a_mesh_that_does_not_divide_the_heads_is_refused_before_anything_is_read(
    tmp_path, bytes_read
):
    save_pretrained(tmp_path, random_weights(LLAMA), LLAMA)
    target, over = spec_jax.load_model(tmp_path), mesh("data:1,tensor:8")
    random_head(EagleConfig.of_target(LLAMA), jax.random.key(0)).save(tmp_path / "head", target)
    bytes_read.clear()
    for load in (
        lambda: spec_jax.load_model(tmp_path, mesh=over),
        lambda: spec_jax.load_draft(tmp_path / "head", target, mesh=over),
    ):
        with pytest.raises(ConfigError, match="4 heads, which the mesh axis tensor:8 does not div"):
            load()
    assert not bytes_read  # headers at most


def test_without_torch_its_files_are_refused_with_a_way_out(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (llama / SINGLE).rename(llama / "pytorch_model.bin")
    remedy = r"pytorch_model\.bin needs torch.*pip install torch.*safetensors.torch.save_file"
    for over in (None, mesh("data:2,tensor:4")):
        with pytest.raises(WeightsError, match=remedy):
            spec_jax.load_model(llama, mesh=over)
