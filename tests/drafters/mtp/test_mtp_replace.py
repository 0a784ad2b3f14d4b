"""MTP modules put back into their model's directory: every other byte stays."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.mtp_modules import fused, write_with_modules
from support.tiny_models import DEEPSEEK_TARGET, GLM4_MOE, QWEN3_NEXT_TARGET, QWEN35, QWEN35_MOE

import spec_jax
from spec_jax.drafters.mtp.replace import check_replaces, replace_modules
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models import shards

TARGETS = {
    "qwen3.5": QWEN35,
    "qwen3.5, experts in one": QWEN35_MOE,
    "qwen3-next": QWEN3_NEXT_TARGET,
    "glm-4.5": GLM4_MOE,
    "deepseek": DEEPSEEK_TARGET,
}


def write(directory, name):
    """A model and its module in bfloat16 and in two files, of which one has the module."""
    write_with_modules(directory, TARGETS[name])
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if "in one" in name:
        tensors = fused(tensors)
    is_module = lambda name: (
        name.startswith(("mtp.", "model.layers.2.")) or name == "lm_head.weight"
    )
    files = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for tensor, x in tensors.items():
        x = x if "e_score" in tensor else x.astype(jnp.bfloat16)
        files[f"model-{1 + is_module(tensor)}.safetensors"][tensor] = np.ascontiguousarray(x)
    for file, content in files.items():
        save_file(content, directory / file)
    where = {tensor: file for file, content in files.items() for tensor in content}
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "chat_template.jinja").write_text("any")
    return files


def stored(directory):
    return {p.name: load_file(p) for p in sorted(directory.glob("*.safetensors"))}


@pytest.mark.representatives("qwen3.5, experts in one", "glm-4.5")
@pytest.mark.parametrize("name", TARGETS)
def test_a_module_is_put_back_under_its_names_and_nothing_else_changes(tmp_path, name):
    """Untrained it leaves all tensors as they are, bit for bit; changed, it is read back."""
    source = tmp_path / "source"
    source.mkdir()
    files = write(source, name)
    target = spec_jax.load_model(source)
    module = spec_jax.load_draft(source, target, "float32")
    replace_modules(tmp_path / "same", module, source, target.config)
    for file, content in stored(tmp_path / "same").items():
        assert {n: x.dtype for n, x in content.items()} == {
            n: x.dtype for n, x in files[file].items()
        }
        jax.tree.map(np.testing.assert_array_equal, content, files[file])
    replace_modules(tmp_path / "same", module, source, target.config)  # again, over links
    assert {p.name for p in (tmp_path / "same").iterdir()} == {p.name for p in source.iterdir()}
    for file in ("config.json", "model.safetensors.index.json", "chat_template.jinja"):
        assert (tmp_path / "same" / file).read_bytes() == (source / file).read_bytes()

    double = jax.tree.map(lambda w: 2 * w, module.params)  # exact in bfloat16
    changed = dataclasses.replace(module, params=double)
    replace_modules(tmp_path / "new", changed, source, target.config)
    read = spec_jax.load_draft(tmp_path / "new", spec_jax.load_model(tmp_path / "new"), "float32")
    assert read.config == module.config
    jax.tree.map(np.testing.assert_array_equal, read.params, double)
    new = stored(tmp_path / "new")
    jax.tree.map(
        np.testing.assert_array_equal, new["model-1.safetensors"], files["model-1.safetensors"]
    )
    np.testing.assert_array_equal(
        new["model-2.safetensors"]["lm_head.weight"], files["model-2.safetensors"]["lm_head.weight"]
    )
    jax.tree.map(np.testing.assert_array_equal, stored(source), files)  # links are not written to


def test_what_cannot_be_put_back_is_refused_before_a_file_is_written(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write(source, "glm-4.5")
    target = spec_jax.load_model(source)
    module = spec_jax.load_draft(source, target, "float32")

    def refused(message, head=module, directory=tmp_path / "new"):
        with pytest.raises(ConfigError, match=message):
            replace_modules(directory, head, source, target.config)
        assert not (tmp_path / "new").exists()

    refused("is the model's directory", directory=source)
    config = dataclasses.replace(module.config, recycles_normed=False, has_own_embed=True)
    other = dataclasses.replace(module, config=config)
    refused("with another has_own_embed, recycles_normed; save these alone", other)
    tensors = load_file(source / "model-2.safetensors")
    name = "model.layers.2.eh_proj.weight"
    scale = {f"{name}_scale_inv": np.ones((1, 1), np.float32)}
    save_file(
        tensors | scale | {name: tensors[name].astype(jnp.float8_e4m3fn)},
        source / "model-2.safetensors",
    )
    refused(f"{name} is stored as float8_e4m3fn")


def test_the_check_reads_headers_alone_and_refuses_what_they_show(tmp_path, monkeypatch):
    """So that modules which could not be put back are refused before they are trained."""
    write(tmp_path, "glm-4.5")
    target = spec_jax.load_model(tmp_path)
    module = spec_jax.load_draft(tmp_path, target, "float32")
    monkeypatch.setattr(shards, "_fill", lambda *args: pytest.fail("it read a tensor"))
    check = lambda: check_replaces(tmp_path, dataclasses.replace(module, params={}), target.config)
    check()
    file, name = tmp_path / "model-2.safetensors", "model.layers.2.mlp.experts.1.up_proj.weight"
    tensors = load_file(file)
    eight = {name: np.ones(tensors[name].shape, np.int8)}
    for changed, error, message in (
        (eight, WeightsError, f"{name}_scale_inv is missing, of int8 {name}"),
        ({name: tensors[name][:1]}, WeightsError, rf"{name} has shape \[1, 16\]"),
        ({"model.layers.2.more.weight": tensors[name]}, WeightsError, "unexpected .*2.more.weight"),
    ):
        save_file(tensors | changed, file)
        with pytest.raises(error, match=message):
            check()


def test_ends_that_the_modules_share_become_copies_of_the_models(tmp_path):
    """Without comparing them: those in the files differ, and would be read as the modules' own."""
    source = tmp_path / "source"
    source.mkdir()
    own = dict(has_own_embed=True, has_own_head=True)
    write_with_modules(source, GLM4_MOE, **own)
    target = spec_jax.load_model(source)
    module = spec_jax.load_draft(source, target, "float32")
    assert module.config.has_own_embed and module.config.has_own_head
    config = dataclasses.replace(module.config, has_own_embed=False, has_own_head=False)
    weights = {name: w for name, w in module.params["0"].items() if name not in ("embed", "head")}
    shared = dataclasses.replace(module, config=config, params={"0": weights})
    replace_modules(tmp_path / "new", shared, source, target.config)
    read = spec_jax.load_mtp(tmp_path / "new", target, "float32")
    assert read.config == config
    jax.tree.map(np.testing.assert_array_equal, read.params, shared.params)
    stored = load_file(tmp_path / "new" / "model.safetensors")
    assert stored.keys() == load_file(source / "model.safetensors").keys()
