"""MTP modules as other projects publish them: what is read, what is left open, what is refused.

The names of their tensors are those of transformers in ``tests/parity/test_mtp_generate.py``.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.any_head import any_head
from support.block_drafts import TARGET as MODEL
from support.tiny_models import DEEPSEEK, LLAMA, QWEN2, QWEN3_NEXT, random_tensor

from spec_jax import load_mtp
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, WeightsError

V, D, L = LLAMA.vocab_size, LLAMA.hidden_size, LLAMA.num_hidden_layers
LAYERS = {"DeepSeek": DEEPSEEK, "Qwen3-Next": QWEN3_NEXT, "MiMo": QWEN2}
PREFIX = {"DeepSeek": f"model.layers.{L}.", "Qwen3-Next": "mtp.layers.0."}
PREFIX["MiMo"] = "model.mtp_layers.0."
OPTIONS = {"Qwen3-Next": dict(has_zero_centred_norms=True), "MiMo": dict(order="hidden-first")}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(directory, format="DeepSeek", tensors=None, num_modules=1, **hf):
    """Writes modules as published, beside ends of a target, with other tensors (None: without) and
    other keys of config.json; returns them and all tensors.
    """
    protocol = "recycled" if num_modules == 1 else "sequential"
    options = dict(num_modules=num_modules, protocol=protocol, **OPTIONS.get(format, {}))
    layer = dataclasses.replace(LAYERS[format], num_hidden_layers=1)
    head = any_head(MtpConfig.of_target(LLAMA, layer=layer, **options))
    head.save(directory, MODEL, format=format)
    stored = load_file(directory / "model.safetensors")
    stored |= {name: random_tensor(name, (V, D), 0) for name in (EMBED, HEAD)} | (tensors or {})
    stored = {name: x for name, x in stored.items() if x is not None}
    save_file(stored, directory / "model.safetensors")
    stated = json.loads((directory / "config.json").read_text())
    stated.pop("mtp_config", None)  # our own key
    (directory / "config.json").write_text(json.dumps(stated | hf))
    return head, stored


def test_modules_of_mimo_go_by_their_names_and_what_is_left_open_is_noted(tmp_path):
    head, stored = write(tmp_path, "MiMo")
    names = dict(embed_norm="token_layernorm", hidden_norm="hidden_layernorm", fc="input_proj")
    names |= dict(norm="final_layernorm", o="self_attn.o_proj", v="self_attn.v_proj")
    for ours, theirs in (names | dict(mlp_norm="post_attention_layernorm")).items():
        tensor = stored[f"{PREFIX['MiMo']}{theirs}.weight"]
        np.testing.assert_array_equal(head.params["0"][ours], tensor.T)
    read = load_mtp(tmp_path, MODEL)
    assert (read.format, read.config) == ("MiMo", head.config)
    jax.tree.map(np.testing.assert_array_equal, read.params, head.params)
    for field in ("order", "taps", "recycles_normed", "has_zero_centred_norms"):
        assert f"{field} = " in " ".join(read.notes)


def test_several_modules_draft_one_after_the_other_unless_fewer_are_asked_for(tmp_path):
    head, _ = write(tmp_path, num_modules=2)
    read = load_mtp(tmp_path, MODEL)
    assert (read.config.protocol, read.config.num_modules) == ("sequential", 2)
    jax.tree.map(np.testing.assert_array_equal, read.params, head.params)
    read = load_mtp(tmp_path, MODEL, num_modules=1)
    assert (read.config.protocol, list(read.params)) == ("recycled", ["0"])
    with pytest.raises(WeightsError, match=rf"model\.layers\.{L + 2}\..* is missing"):
        load_mtp(tmp_path, MODEL, num_modules=3)


def test_what_a_checkpoint_leaves_open_can_be_overridden(tmp_path):
    write(tmp_path, "MiMo")
    changes = dict(order="embedding-first", taps=(L,), protocol="sequential")
    changes |= dict(recycles_normed=False, has_zero_centred_norms=True)
    read = load_mtp(tmp_path, MODEL, **changes)
    assert {name: getattr(read.config, name) for name in changes} == changes
    assert "order = 'embedding-first': the caller says so." in read.notes


ENDS = {
    "embed": (f"{PREFIX['DeepSeek']}embed_tokens.weight", EMBED),
    "head": (f"{PREFIX['DeepSeek']}shared_head.head.weight", HEAD),
}


@pytest.mark.parametrize("end", ENDS)
def test_copies_of_the_targets_ends_are_dropped_and_others_are_kept(tmp_path, end):
    own, theirs = ENDS[end]
    field, tensor = f"has_own_{end}", random_tensor(theirs, (V, D), 0)

    def read(tensors, **overrides):
        write(tmp_path, tensors=tensors)
        return load_mtp(tmp_path, MODEL, **overrides)

    copy = read({own: tensor})
    assert not getattr(copy.config, field) and end not in copy.params["0"]
    assert f"{own} is left out: it is a copy of {theirs}." in copy.notes
    other = read({own: 2 * tensor})
    assert getattr(other.config, field)
    assert other.params["0"][end].shape == ((V, D) if end == "embed" else (D, V))
    assert getattr(read({own: tensor, EMBED: None, HEAD: None}).config, field)
    told = read({own: 2 * tensor}, **{field: False})
    assert end not in told.params["0"]
    with pytest.raises(WeightsError, match=f"{own} is missing"):
        read({}, **{field: True})


@pytest.mark.parametrize("format", LAYERS)
def test_a_tensor_that_is_wrong_is_named(tmp_path, format):
    name = f"{PREFIX[format]}self_attn.o_proj.weight"
    nan = np.full_like(write(tmp_path, format)[1][name], np.nan)
    for tensors, message in (
        ({name: None}, f"{name} is missing"),
        ({f"{PREFIX[format]}extra.weight": np.zeros(2)}, f"unexpected .*{PREFIX[format]}extra"),
        ({name: nan[:3]}, rf"{name} has shape \[3, {nan.shape[1]}\]"),
        ({name: nan}, f"{name} holds NaN"),
    ):
        write(tmp_path, format, tensors)
        with pytest.raises(WeightsError, match=message):
            load_mtp(tmp_path, MODEL)


REFUSED = [  # the file, what the caller says
    (dict(model_type="glm5_next"), {}, "'glm5_next' are not supported; known: deepseek_v3"),
    (dict(model_type=["a"]), {}, r"model_type \"\['a'\]\" are not supported"),
    (dict(num_hidden_layers=None), {}, "num_hidden_layers is None"),
    (dict(quantization_config={"weight_block_size": 3}), {}, "weight_block_size is 3"),
    (dict(sliding_window=8), {}, "sliding_window is 8, which is not supported"),
    ({}, {"taps": [3]}, r"taps are \[3\]; expected a tuple"),
    ({}, {"num_modules": True}, "is True"),
    ({}, {"recycles_normed": "no"}, "recycles_normed is 'no'; expected True or False"),
    ({}, {"norms": 1, "order_": 2}, "unknown head option 'norms'; options: taps, num_modules"),
]


@pytest.mark.parametrize(("hf", "said", "words"), REFUSED, ids=[x[-1] for x in REFUSED])
def test_a_config_that_does_not_fit_is_refused(tmp_path, hf, said, words):
    write(tmp_path, num_modules=2, **hf)
    with pytest.raises(ConfigError, match=words):
        load_mtp(tmp_path, MODEL, **said)


ALL = dict(layer_types=["full_attention"] * L, sliding_window=8)  # the types decide
SEES_ALL = [("DeepSeek", dict(sliding_window=8, use_sliding_window=False)), ("Qwen3-Next", ALL)]


@pytest.mark.parametrize(("format", "stated"), [("DeepSeek", dict(sliding_window=None)), *SEES_ALL])
def test_a_module_that_sees_all_may_state_a_window(tmp_path, format, stated):
    write(tmp_path, format, **stated)
    assert load_mtp(tmp_path, MODEL).config.num_modules == 1
