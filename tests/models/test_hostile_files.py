"""Model directories of strangers: what they state is refused where it is read, and named."""

import json
import math
import os
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.block_drafts import TARGET
from support.published_heads import MODEL, write_head
from support.tiny_models import BAMBA, DEEPSEEK, LLAMA, MAMBA2, QWEN2, QWEN3_NEXT, random_weights
from support.tiny_tokenizers import letters

from spec_jax import load_head, load_mtp
from spec_jax.data.records import read_records
from spec_jax.errors import ConfigError, SpecJaxError, WeightsError
from spec_jax.inspection import inspect
from spec_jax.models.checkpoint import load_pretrained, save_pretrained
from spec_jax.models.families import family_of_type, read_config
from spec_jax.models.shards import INDEX, SINGLE
from spec_jax.models.tokenizer import Tokenizer

BASES = {"llama": LLAMA, "qwen2": QWEN2, "mamba2": MAMBA2, "bamba": BAMBA}
MODULES = {"deepseek_v3": DEEPSEEK, "qwen3_next": QWEN3_NEXT}
NO_LENGTHS = (-1, 0, True, 2.5, "2", [1])
NO_SIZES = (10**12, 10**400, *NO_LENGTHS)
NO_FLAGS = ("no", "false", 2, 1.0, [True])
NO_NUMBERS = (math.nan, math.inf, -1, True, "1e-5", 10**400, [1])
DEEP = "[" * 100_000 + "]" * 100_000
LLAMA_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size")
LLAMA_SIZES += ("head_dim", "num_attention_heads", "num_key_value_heads")
SIZES = {
    "mamba2": ("num_hidden_layers", "num_heads", "state_size", "n_groups", "conv_kernel"),
    "bamba": ("num_hidden_layers", "mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    "deepseek_v3": ("n_routed_experts", "num_experts_per_tok", "n_group", "kv_lora_rank"),
    "qwen3_next": ("num_experts", "moe_intermediate_size", "num_attention_heads"),
}
# By family: values by key; a key of the rotary embedding stands in its object.
WRONG = {kind: dict.fromkeys(keys, NO_SIZES) for kind, keys in SIZES.items()}
WRONG["qwen2"] = dict.fromkeys(("tie_word_embeddings", "use_sliding_window"), NO_FLAGS)
WRONG["llama"] = dict.fromkeys(LLAMA_SIZES, NO_SIZES) | {
    "max_position_embeddings": NO_LENGTHS,
    "rms_norm_eps": NO_NUMBERS,
    "tie_word_embeddings": NO_FLAGS,
    "attention_bias": NO_FLAGS,
    "rope_theta": (*NO_NUMBERS, 0),
    "rope_parameters": ("linear", [1]),
    "layer_types": (3,),
    "eos_token_id": (31, -2, True, 2.0, "2", [2, "3"], [1.5], [31], {"a": 1}),
    "rope_parameters.factor": NO_NUMBERS,
    "rope_parameters.high_freq_factor": (*NO_NUMBERS, 1.0),
    "rope_parameters.original_max_position_embeddings": NO_SIZES,
}
WRONG["mamba2"] |= {"layer_norm_epsilon": NO_NUMBERS, "use_conv_bias": NO_FLAGS}
WRONG["bamba"]["rope_parameters.partial_rotary_factor"] = NO_NUMBERS
WRONG["bamba"]["attn_layer_indices"] = (3, [True], ["a"])
WRONG["deepseek_v3"] |= {"routed_scaling_factor": NO_NUMBERS[:2], "norm_topk_prob": NO_FLAGS}
WRONG["deepseek_v3"]["first_k_dense_replace"] = [x for x in NO_SIZES if x != 0]
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64}


def write_config(directory, kind, key, value):
    """A config.json of a family with one other value."""
    hf = {**BASES, **MODULES}[kind].to_hf()
    group, _, name = key.rpartition(".")
    if key == "rope_theta":
        del hf["rope_parameters"]  # the older spelling
    elif group and kind == "llama":
        hf[group] = dict(LLAMA3)
    (hf[group] if group else hf)[name] = value
    (directory / "config.json").write_text(json.dumps(hf))


@pytest.mark.parametrize("kind", WRONG)
def test_a_value_that_means_nothing_is_refused_with_its_file_key_and_value(tmp_path, kind):
    for key, values in WRONG[kind].items():
        for value in values:
            write_config(tmp_path, kind, key, value)
            hf = json.loads((tmp_path / "config.json").read_text()) if value != 10**400 else None
            with pytest.raises(SpecJaxError) as caught:
                if kind in BASES or hf is None:
                    read_config(tmp_path)
                else:  # read for MTP modules alone
                    family_of_type(kind, for_modules=True).config.from_hf(hf)
            message = str(caught.value)
            assert len(message) < 500
            if hf is not None:
                assert "expected" in message and key.rpartition(".")[2] in message
                assert repr(value)[:70] in message or "10000" in message
            assert kind in MODULES or "config.json" in message


LENGTH, ABSENT = "original_max_position_embeddings", ...
YARN = {"rope_type": "yarn", "factor": 2.0, "truncate": False}
NO_ROPE = {"rope_scaling": None}
HEADS = dict(num_key_value_heads=8, num_attention_heads=8, head_dim=4)
MISTRAL = HEADS | dict(model_type="mistral")
SCALING = LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
NEWER = dict(rope_parameters=SCALING | {"rope_theta": 5e5}, rope_scaling=ABSENT, rope_theta=ABSENT)


def of_length(n):
    return NO_ROPE | dict(max_position_embeddings=n)


def of_yarn(n, **more):
    return {"rope_scaling": YARN | {LENGTH: n} | more}


def older(key):
    return dict(rope_scaling=SCALING | {"rope_type": ABSENT, key: "llama3"}, rope_theta=5e5)


# Other spellings, and what is left out, and what each of them means; tests/parity/test_configs.py
# compares more of them with transformers.
SAME = {
    "flags": (dict(tie_word_embeddings=1, attention_bias=0), dict(tie_word_embeddings=True)),
    "no window": (dict(use_sliding_window=0), {}),
    "a size": (dict(hidden_size=float(LLAMA.hidden_size)), {}),
    "a length": (of_length(4096.0), of_length(4096)),
    "a long one": (of_length(10**30), of_length(2**31 - 1)),
    "of yarn": (of_yarn(4096.0, truncate=0), of_yarn(4096)),
    "no length of yarn": ({}, of_yarn(LLAMA.max_position_embeddings)),
    "a null length": (of_yarn(33) | {LENGTH: None}, of_yarn(33)),
    "one at the top": (of_yarn(33) | {LENGTH: 77}, of_yarn(77)),
    "no scaling": (dict(rope_scaling=False, hidden_act=""), NO_ROPE),
    "an older spelling": (older("rope_type"), NEWER),
    "the oldest spelling": (older("type"), NEWER),
    "a mistral": (MISTRAL | dict(sliding_window=None), HEADS),
    "a window of all": (MISTRAL | dict(sliding_window=LLAMA.max_position_embeddings), HEADS),
    "a late one": (dict(use_sliding_window=True, sliding_window=8, max_window_layers=2), {}),
    "no stop token": (dict(eos_token_id=-1), dict(eos_token_id=None)),
    "one of two": (dict(eos_token_id=[2, -1]), dict(eos_token_id=2)),
}


def present(stated):
    """An object without what is absent."""
    stated = {n: present(x) if isinstance(x, dict) else x for n, x in stated.items()}
    return {n: x for n, x in stated.items() if x is not ABSENT}


@pytest.mark.parametrize("name", SAME)
def test_values_that_mean_what_was_expected_are_read_as_it(tmp_path, name):
    hf = LLAMA.to_hf() | {"rope_theta": 1e4, "rope_scaling": YARN}
    del hf["rope_parameters"]
    read = []
    for stated in SAME[name]:
        (tmp_path / "config.json").write_text(json.dumps(present(hf | stated)))
        read.append(read_config(tmp_path))
    assert read[0] == read[1]
    assert type(read[0].hidden_size) is type(read[0].max_position_embeddings) is int
    assert type(read[0].attention_bias) is type(read[0].rope.truncate) is bool


LONG = "x" * 10**6
HOSTILE = {  # of a model that is saved: what its config states, and what is said of it
    "a long name": (dict(quantization_config={"quant_method": LONG}), r"by .*xxx\.\.\. are not"),
    "a long list": (dict(quantization_config={"quant_method": [LONG]}), r"xxx\.\.\. are not"),
    "layers": (dict(num_hidden_layers=10**9), r"config\.json: num_hidden_layers is 1000000000"),
    "more layers": (dict(num_hidden_layers=9999), r"is 9999, but the weights hold \d+ tensors"),
    "ids": (dict(vocab_size=10**9), r"asks for \[1000000000, 16\] \(vocab_size is 1000000000\)"),
    "heads": (dict(num_attention_heads=10**9), "heads is 1000000000, times head_dim 4"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_model_that_is_not_there_is_refused_before_any_is_declared(tmp_path, name):
    changes, words = HOSTILE[name]
    for config in (LLAMA, BAMBA) if "layers" in name else (LLAMA,):
        save_pretrained(tmp_path, random_weights(config), config)
        (tmp_path / "config.json").write_text(json.dumps(config.to_hf() | changes))
        with pytest.raises(SpecJaxError, match=words) as caught:
            load_pretrained(tmp_path)
        assert len(str(caught.value)) < 600
        assert "layers" not in name or re.search(words, inspect(tmp_path).refused)


def test_an_absent_key_is_named_after_its_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"/config\.json: hidden_size, .*vocab_size are missing$"):
        read_config(tmp_path)


HEAD_VALUES = {"num_hidden_layers": 10**9, "num_attention_heads": 0, "rms_norm_eps": math.nan}
HEAD_VALUES |= {"rope_theta": -1.0, "attention_bias": "no", "intermediate_size": 2.5}
HEAD_VALUES |= {"eos_token_id": [2, "3"], "max_position_embeddings": -1}


@pytest.mark.parametrize("name", ["eagle-1", "eagle-3", "specforge", "speculators"])
def test_a_head_of_impossible_sizes_is_refused(tmp_path, name):
    for key, value in HEAD_VALUES.items():
        write_head(tmp_path, name)
        hf = json.loads((tmp_path / "config.json").read_text())
        (hf["transformer_layer_config"] if name == "speculators" else hf)[key] = value
        hf.pop("rope_parameters", None)
        (tmp_path / "config.json").write_text(json.dumps(hf))
        with pytest.raises(ConfigError, match=rf"config\.json: .*{key}.* {re.escape(repr(value))}"):
            load_head(tmp_path, MODEL)


@pytest.mark.parametrize("count", [10**9, -1, True, 1.0, "1"])
def test_modules_that_are_not_there_are_refused(tmp_path, count):
    hf = {**LLAMA.to_hf(), "model_type": "mimo", "num_nextn_predict_layers": count}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tensors = {"model.mtp_layers.0.x": np.zeros(1), f"model.layers.{'9' * 5000}.x": np.zeros(1)}
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(SpecJaxError, match=f"(num_nextn_predict_layers|num_modules) is {count!r}"):
        load_mtp(tmp_path, TARGET)


FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX]


@pytest.mark.parametrize("file", FILES)
def test_json_of_any_depth_and_files_that_never_end_are_refused(tmp_path, file):
    save_pretrained(tmp_path, random_weights(LLAMA), LLAMA, letters(31))

    def load():
        load_pretrained(tmp_path)
        Tokenizer.from_directory(tmp_path)

    load()
    for text in (DEEP, '{"a":' * 5000 + "1" + "}" * 5000, '{"a": 1' + "0" * 5000 + "}"):
        (tmp_path / file).write_text(text)
        with pytest.raises(WeightsError, match=file):
            load()
    (tmp_path / file).unlink()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / file)
        with pytest.raises(WeightsError, match=f"{file}.*not a regular file"):
            load()


def test_a_prompt_of_any_depth_is_refused_by_its_line(tmp_path):
    for row in (DEEP, '{"messages": [{"role": "user", "content": ' + "[" * 200 + "]" * 200 + "}]}"):
        (tmp_path / "rows.jsonl").write_text(f'{{"text": "a"}}\n{row}\n')
        with pytest.raises(ConfigError, match=r"rows\.jsonl:2: not JSON \(.* nested over 100"):
            list(read_records(tmp_path / "rows.jsonl"))


def test_stop_tokens_out_of_range_name_the_file_that_states_them(tmp_path):
    write_config(tmp_path, "llama", "eos_token_id", 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 31]}')
    message = r"generation_config\.json: eos_token_id is \[2, 31\]; expected an id from 0 to 30"
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    for wrong in (10**6, "2"):  # though the other file decides
        write_config(tmp_path, "llama", "eos_token_id", wrong)
        with pytest.raises(ConfigError, match=rf"/config\.json: eos_token_id is {wrong!r}"):
            read_config(tmp_path)


@pytest.mark.parametrize("outside", ["../{}", "{}", "a/../../{}", "..\\{}", "C:\\{}", "", "."])
def test_an_index_names_files_of_its_own_directory(tmp_path, outside):
    directory, blobs = tmp_path / "model", tmp_path / "blobs"
    save_pretrained(directory, random_weights(LLAMA), LLAMA, max_shard_bytes=4000)
    blobs.mkdir()
    for file in directory.glob("*.safetensors"):  # as in the cache of the hub
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    load_pretrained(directory)
    other = tmp_path / "other.safetensors"
    save_file({"a": np.zeros(3, np.float32)}, other)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["a"] = outside.format(other if outside == "{}" else other.name)
    (directory / INDEX).write_text(json.dumps(index))
    message = rf"{INDEX}: weight_map names the file '.*expected the name of a file in the same"
    with pytest.raises(WeightsError, match=message):
        load_pretrained(directory)


def test_a_tokenizer_that_its_library_cannot_take_is_refused(tmp_path):
    letters(31).save(tmp_path)
    sound = json.loads((tmp_path / "tokenizer.json").read_text())
    panics = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    empty = {"type": "WordLevel", "vocab": {}, "unk_token": "a"}
    for change, message in (
        ({"normalizer": panics}, "cannot be read as a tokenizer"),
        ({"model": empty, "added_tokens": []}, "has an empty vocabulary"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(sound | change))
        with pytest.raises(WeightsError, match=message):
            Tokenizer.from_directory(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_in_place_of_a_pickle_is_not_waited_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_hf()))
    os.mkfifo(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is not a regular file"):
        load_pretrained(tmp_path)
