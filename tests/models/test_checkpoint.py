"""Hugging Face directories: round trips, and every way in which one can be wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.block_drafts import TARGET
from support.tiny_models import FAMILIES, LLAMA, QWEN2, QWEN3, QWEN3_MOE, random_weights

from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.inspection import inspect
from spec_jax.loading import load_draft, load_head, load_model, load_mtp, random_head
from spec_jax.models.checkpoint import load_pretrained, save_pretrained
from spec_jax.models.families import read_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def llama(tmp_path):
    """A saved model that a test may damage."""
    save_pretrained(tmp_path, random_weights(LLAMA), LLAMA)
    return tmp_path


def edit_tensors(directory, edit, file=SINGLE):
    tensors = load_file(directory / file)
    edit(tensors)
    save_file(tensors, directory / file)


def edit_json(directory, edit, file="config.json"):
    value = json.loads((directory / file).read_text())
    edit(value)
    (directory / file).write_text(json.dumps(value))


def assert_same(params, expected):
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
@pytest.mark.parametrize("shard_bytes", [5 << 30, 2000], ids=["one file", "shards"])
def test_what_is_saved_loads_as_the_same_model(tmp_path, config, shard_bytes):
    config = dataclasses.replace(config, eos_token_id=(2, 5), bos_token_id=1, rms_norm_eps=1e-5)
    params = random_weights(config)
    save_pretrained(tmp_path, params, config, max_shard_bytes=shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 3) == (shard_bytes == 2000) == (tmp_path / INDEX).exists()
    assert not list(tmp_path.glob("*.partial"))
    loaded, again = load_pretrained(tmp_path)
    assert_same(loaded, params)
    assert again == config
    if shard_bytes == 2000:
        for tensors in map(load_file, files):
            assert sum(x.nbytes for x in tensors.values()) <= 2000 or len(tensors) == 1
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))


def test_bfloat16_is_stored_and_loaded_as_such(tmp_path):
    params = random_weights(QWEN3, dtype="bfloat16")
    save_pretrained(tmp_path, params, QWEN3, dtype="bfloat16")
    assert {x.dtype.name for x in load_file(tmp_path / SINGLE).values()} == {"bfloat16"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    half, _ = load_pretrained(tmp_path, jnp.bfloat16)
    assert_same(half, params)
    single, _ = load_pretrained(tmp_path)
    assert_same(single, jax.tree.map(lambda x: x.astype(jnp.float32), params))


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_file_where_a_directory_is_saved_is_named(tmp_path, inside):
    (tmp_path / "taken").write_text("")
    directory = tmp_path / "taken" / inside
    head = random_head(EagleConfig.of_target(LLAMA, 1), jax.random.key(0))
    modules = random_head(MtpConfig.of_target(LLAMA), jax.random.key(0))
    saves = [lambda: head.save(directory, TARGET), lambda: modules.save(directory, TARGET)]
    for save in (*saves, lambda: save_pretrained(directory, TARGET.params, LLAMA)):
        with pytest.raises(ConfigError, match="cannot be made a directory: a file of this name is"):
            save()


def test_layers_are_stacked_on_tpus_by_default(llama, monkeypatch):
    for platform in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)  # noqa: B023
        assert load_pretrained(llama)[1].scan_layers == (platform == "tpu")
    assert not load_pretrained(llama, scan_layers=False)[1].scan_layers


def test_weights_that_lie_transposed_in_memory_are_saved_as_they_read(tmp_path):
    params = jax.tree.map(lambda x: np.asfortranarray(x), random_weights(QWEN2))
    save_pretrained(tmp_path, params, QWEN2)
    assert_same(load_pretrained(tmp_path)[0], random_weights(QWEN2))


@pytest.mark.parametrize("first", [2000, 5 << 30], ids=["shards first", "one file first"])
def test_saving_over_another_layout_leaves_the_new_weights_in_force(tmp_path, first):
    for seed, shard_bytes in enumerate([first, 2000 + (5 << 30) - first]):
        params = random_weights(LLAMA, seed)
        save_pretrained(tmp_path, params, LLAMA, max_shard_bytes=shard_bytes)
    assert_same(load_pretrained(tmp_path)[0], params)


def test_a_tied_model_may_store_its_head_again(tmp_path):
    save_pretrained(tmp_path, random_weights(QWEN2), QWEN2)
    assert "lm_head.weight" not in load_file(tmp_path / SINGLE)
    copy = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()})
    edit_tensors(tmp_path, copy)
    assert_same(load_pretrained(tmp_path)[0], random_weights(QWEN2))
    edit_tensors(tmp_path, lambda t: t["lm_head.weight"].__setitem__((3, 2), 9.0))
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_pretrained(tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_ignored(llama):
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    add = lambda t: t.update({name.format(i): np.ones(2, np.float32) for i in range(2)})
    edit_tensors(llama, add)
    assert_same(load_pretrained(llama)[0], random_weights(LLAMA))


def test_stop_tokens_may_be_a_list_and_those_of_generation_take_precedence(llama):
    assert read_config(llama).eos_token_id == ()
    edit_json(llama, lambda c: c.update(eos_token_id=3))
    assert read_config(llama).eos_token_id == (3,)
    edit_json(llama, lambda c: c.update(eos_token_id=[4, 9]), "generation_config.json")
    assert read_config(llama).eos_token_id == (4, 9)
    (llama / "generation_config.json").unlink()
    assert read_config(llama).eos_token_id == (3,)


NAME = "model.layers.1.mlp.up_proj.weight"


def cast(dtype, **scales):
    def change(tensors):
        tensors[NAME] = tensors[NAME].astype(jnp.dtype(dtype))
        tensors |= {f"{NAME}_{name}": scale for name, scale in scales.items()}

    return change


def spoil(value):
    def change(tensors):
        tensors[NAME] = tensors[NAME].copy()
        tensors[NAME][0, 0] = value

    return change


def renamed(name_of):
    def change(tensors):
        whole = dict(tensors)
        tensors.clear()
        tensors.update({name_of(name): x for name, x in whole.items()})

    return change


MORE = {"model.layers.2.mlp.up_proj.weight": np.zeros(3), "a.bias": np.zeros(16)}
TENSORS = {
    "missing": (lambda t: t.pop(NAME), f"{NAME} is missing"),
    "the last norm": (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
    "unexpected": (lambda t: t.update(MORE), r"unexpected tensors a\.bias, model\.layers\.2\.mlp"),
    "shape": (
        lambda t: t.update({NAME: t[NAME][1:].copy()}),
        rf"{NAME} has .*\[23, 16\].*\[24, 16",
    ),
    "eight bits": (cast("float8_e4m3fn"), f"{NAME} has dtype float8_e4m3fn: quantised weights"),
    "scaled": (cast("int8", scale_inv=np.ones((1, 1))), f"{NAME} has dtype int8: quantised"),
    "nan": (spoil(np.nan), f"{NAME} holds NaN"),
    "infinite": (spoil(np.inf), f"{NAME} holds NaN"),
    "no prefix": (renamed(lambda name: name.removeprefix("model.")), "lack the prefix 'model"),
    "another prefix": (renamed(lambda name: f"module.{name}"), "without the prefix 'module"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_damaged_tensor_is_named(llama, name):
    change, words = TENSORS[name]
    edit_tensors(llama, change)
    with pytest.raises(WeightsError, match=words):
        load_model(llama)


def test_a_damaged_expert_is_named_alone(tmp_path):
    save_pretrained(tmp_path, random_weights(QWEN3_MOE), QWEN3_MOE)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    edit_tensors(tmp_path, lambda t: t.update({name: t[name][:2]}))
    with pytest.raises(WeightsError, match=rf"{name} has shape \[2, 16\].*asks for \[4, 16\]"):
        load_model(tmp_path)
    edit_tensors(tmp_path, lambda t: t.pop(name))
    with pytest.raises(WeightsError, match=f"{name} is missing"):
        load_model(tmp_path)
    assert any(f"missing, 1: {name}" in note for note in inspect(tmp_path).notes)


def cut(keep, file=SINGLE):
    return lambda at: (at / file).write_bytes((at / file).read_bytes()[:keep])


def write(file, content):
    return lambda at: (at / file).write_bytes(content)


def remove(file):
    return lambda at: (at / file).unlink()


FILES = {
    **{f"cut at {n}": (cut(n), rf"{SINGLE} cannot be read") for n in (0, 5, 300, -1)},
    **{
        f"index {text!r}": (write(INDEX, text), rf"{INDEX} is no shard index")
        for text in (b"{", b"[]", b'{"metadata": {}}', b'{"weight_map": ["a"]}', b"\xff")
    },
    **{
        f"{file} {text!r}": (write(file, text), file)
        for file in ("config.json", "generation_config.json")
        for text in (b"{", b"[]", b"\xff")
    },
    "no weights": (remove(SINGLE), rf"neither {SINGLE} nor {INDEX}"),
    "no config": (remove("config.json"), r"config\.json"),
    "nothing": (lambda at: at.rename(at.parent / "elsewhere"), "absent"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(tmp_path, name):
    change, words = FILES[name]
    save_pretrained(tmp_path / "absent", random_weights(LLAMA), LLAMA)
    change(tmp_path / "absent")
    with pytest.raises(WeightsError, match=words):
        load_pretrained(tmp_path / "absent")


def test_a_damaged_or_missing_shard_is_named(tmp_path):
    save_pretrained(tmp_path, random_weights(LLAMA), LLAMA, max_shard_bytes=6000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    for change in (cut(-10, shard), remove(shard)):
        change(tmp_path)
        with pytest.raises(WeightsError, match=rf"{shard.name} cannot be read"):
            load_pretrained(tmp_path)


def test_of_one_file_and_shards_all_read_the_one_file_and_say_so(tmp_path, caplog):
    """As transformers chooses; an index that names the file too is read, and all of its files."""
    edited = jax.tree.map(lambda x: x + 1, random_weights(LLAMA))
    save_pretrained(tmp_path, edited, LLAMA, max_shard_bytes=6000)
    index = (tmp_path / INDEX).read_bytes()
    save_pretrained(tmp_path, random_weights(LLAMA), LLAMA)
    (tmp_path / INDEX).write_bytes(index)
    target = load_model(tmp_path)
    assert_same(target.params, random_weights(LLAMA))
    (note,) = target.notes
    assert f"{SINGLE} and {INDEX}, which names other files; {SINGLE} alone is read" in note
    assert note in caplog.text and note in inspect(tmp_path).notes
    head = random_head(EagleConfig.of_target(target.config), jax.random.key(0))
    head.save(tmp_path / "head", target)
    assert note not in load_draft(tmp_path / "head", target).notes
    (tmp_path / "head" / INDEX).write_bytes(index)
    again = load_draft(tmp_path / "head", target)
    assert_same(again.params, head.params)
    assert note in again.notes
    names = dict.fromkeys(load_file(tmp_path / SINGLE), SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    assert load_model(tmp_path).notes == ()


LAYOUTS = {
    "tiny-Q4_K_M.gguf": "the GGUF file tiny-Q4_K_M.gguf: name the file|does not begin with GGUF",
    "adapter_model.safetensors": "LoRA adapter.*merge_and_unload",
    "consolidated.00.pth": "its publisher's own layout",
    "weights.bin": "weights.bin is not a name that is read; expected pytorch_model.bin",
}


@pytest.mark.parametrize("file", LAYOUTS)
def test_files_of_other_layouts_are_told_apart(llama, file):
    (llama / SINGLE).rename(llama / file)
    with pytest.raises(WeightsError, match=LAYOUTS[file]):
        load_model(llama)
    (llama / "config.json").unlink()
    with pytest.raises(WeightsError, match=LAYOUTS[file]):
        load_model(llama)


def test_a_file_in_place_of_a_directory_is_refused(llama):
    with pytest.raises(WeightsError, match="is a file; expected a GGUF file, or the directory of"):
        load_model(llama / SINGLE)


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_drafts_and_models_that_are_loaded_as_the_other_say_what_they_are(llama, tmp_path, kind):
    target, at = load_model(llama), tmp_path / "draft"
    config = {"eagle": EagleConfig, "mtp": MtpConfig}[kind].of_target(target.config)
    random_head(config, jax.random.key(0)).save(at, target)
    message = f"is a draft of the kind '{kind}', not a model.*load_draft\\('.*', target\\)"
    with pytest.raises(WeightsError, match=message):
        load_model(at)
    assert load_draft(at, target).method == kind
    if kind == "mtp":
        with pytest.raises(WeightsError, match="fc.weight is missing.*load_draft detects"):
            load_head(at, target)
        with pytest.raises(WeightsError, match="no MTP module.*Use load_model for a model, load_h"):
            load_mtp(llama, target)
    else:
        with pytest.raises(WeightsError, match="which every EAGLE head has; load_model reads"):
            load_head(llama, target)
