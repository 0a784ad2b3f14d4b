"""MTP modules of other projects: each format written by hand and read back, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.tiny_models import LLAMA, random_tensor, random_weights

from spec_jax import load_mtp
from spec_jax.drafters.mtp.model import mtp_table
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.loading import LoadedModel
from spec_jax.models import transformer
from spec_jax.models.families.deepseek import DeepseekConfig

V, D, L, X = 31, 16, 2, 4
TARGET = dataclasses.replace(LLAMA, max_position_embeddings=64)
MODEL = LoadedModel("tiny", transformer.model(TARGET), random_weights(TARGET), config=TARGET)
COMMON = dict(
    vocab_size=V, hidden_size=D, num_hidden_layers=L, max_position_embeddings=64, rms_norm_eps=1e-6
)
NORMS = {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
INSIDE = lambda prefix, **shapes: {f"{prefix}.{name}": shape for name, shape in shapes.items()}
GATED = lambda prefix, F: INSIDE(prefix, gate_proj=(F, D), up_proj=(F, D), down_proj=(D, F))
ROUTED = {k: v for e in range(X) for k, v in GATED(f"mlp.experts.{e}", 6).items()}
ROUTED |= {"mlp.gate": (X, D)}
LAYERS = {  # shapes [out, in]
    "deepseek_v3": NORMS
    | ROUTED
    | GATED("mlp.shared_experts", 6)
    | INSIDE("self_attn", q_a_proj=(8, D), q_a_layernorm=(8,), q_b_proj=(12, 8), o_proj=(D, 10))
    | INSIDE("self_attn", kv_a_proj_with_mqa=(8, D), kv_a_layernorm=(6,), kv_b_proj=(18, 6)),
    "qwen3_next": NORMS
    | ROUTED
    | GATED("mlp.shared_expert", 10)
    | INSIDE("self_attn", q_proj=(64, D), k_proj=(16, D), v_proj=(16, D), o_proj=(D, 32))
    | INSIDE("self_attn", q_norm=(8,), k_norm=(8,))
    | INSIDE("mlp", shared_expert_gate=(1, D)),
    "mimo": NORMS
    | GATED("mlp", 24)
    | INSIDE("self_attn", q_proj=(16, D), k_proj=(8, D), v_proj=(8, D), o_proj=(D, 16)),
}
SHARED = dict(num_experts_per_tok=2, moe_intermediate_size=6)
CONFIGS = {
    "deepseek_v3": SHARED
    | dict(num_attention_heads=2, q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=4)
    | dict(qk_rope_head_dim=2, v_head_dim=5, n_routed_experts=X, n_shared_experts=1)
    | dict(n_group=2, topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc")
    | dict(first_k_dense_replace=0)
    | dict(routed_scaling_factor=2.5),
    "qwen3_next": SHARED
    | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=X)
    | dict(partial_rotary_factor=0.5, rope_theta=10000.0, rope_scaling=None)
    | dict(shared_expert_intermediate_size=10),
    "mimo": dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=24),
}
PREFIX = {"deepseek_v3": "model.layers.{i}.", "qwen3_next": "mtp.layers.{i}."}
PREFIX["mimo"] = "model.mtp_layers.{i}."
THEIRS = {
    "deepseek_v3": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen3_next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}
OUTER = {  # our names -> theirs
    kind: {
        ours: ("mtp." if kind == "qwen3_next" else PREFIX[kind]) + name
        for ours, name in zip(("embed_norm", "hidden_norm", "fc", "norm"), names)
    }
    for kind, names in THEIRS.items()
}


def tensors_of(kind, ids):
    """Random tensors of the modules of these ids, and two of the target's."""
    shapes = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    shapes["model.layers.0.mlp.some.weight"] = (3,)
    for i in ids:
        outer = {ours: name.format(i=i) for ours, name in OUTER[kind].items()}
        shapes |= {f"{outer[n]}.weight": (D,) for n in ("embed_norm", "hidden_norm", "norm")}
        shapes[f"{outer['fc']}.weight"] = (D, 2 * D)
        prefix = PREFIX[kind].format(i=i)
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in LAYERS[kind].items()}
        if kind == "deepseek_v3":
            shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (X,)
        if kind == "mimo":
            shapes |= {f"{prefix}self_attn.{n}_proj.bias": (w,) for n, w in zip("qkv", (16, 8, 8))}
    return {name: random_tensor(name, shape, 0) for name, shape in shapes.items()}


def write(directory, kind, tensors, **config):
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / "model.safetensors"
    )
    hf = {"model_type": kind, **COMMON, **CONFIGS[kind], **config}
    (directory / "config.json").write_text(json.dumps(hf))


FIRST = {"deepseek_v3": L, "qwen3_next": 0, "mimo": 0}
EXPECTED = {
    "deepseek_v3": ("DeepSeek", "embedding-first", False),
    "qwen3_next": ("Qwen3-Next", "embedding-first", True),
    "mimo": ("MiMo", "hidden-first", False),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_each_format_is_read_as_its_own_tensors(tmp_path, kind):
    i = FIRST[kind]
    tensors = tensors_of(kind, [i])
    write(tmp_path, kind, tensors)
    read = load_mtp(tmp_path, MODEL)
    name, order, is_zero_centred = EXPECTED[kind]
    config, module = read.config, read.params["0"]
    assert (read.format, config.order) == (name, order)
    assert config.has_zero_centred_norms is is_zero_centred
    assert (config.taps, config.protocol, config.num_modules) == ((L + 1,), "recycled", 1)
    assert config.recycles_normed and not config.has_own_embed and not config.has_own_head
    shapes = {k: w.shape for k, w in module.items()}
    assert shapes == {k: s.shape for k, s in mtp_table(config).items()}
    for ours, theirs in OUTER[kind].items():
        theirs = tensors[f"{theirs.format(i=i)}.weight"]
        np.testing.assert_array_equal(module[ours], theirs.T)
    prefix = PREFIX[kind].format(i=i)
    np.testing.assert_array_equal(module["o"], tensors[f"{prefix}self_attn.o_proj.weight"].T)
    np.testing.assert_array_equal(
        module["mlp_norm"], tensors[f"{prefix}post_attention_layernorm.weight"]
    )
    if "experts_up" in module:
        for e in range(X):
            expected = tensors[f"{prefix}mlp.experts.{e}.up_proj.weight"].T
            np.testing.assert_array_equal(module["experts_up"][e], expected)
    else:
        np.testing.assert_array_equal(module["v_bias"], tensors[f"{prefix}self_attn.v_proj.bias"])
    said = " ".join(read.notes)
    for field in ("order", "taps", "recycles_normed", "has_zero_centred_norms"):
        assert f"{field} = " in said


def test_several_modules_draft_one_after_the_other_unless_fewer_are_asked_for(tmp_path):
    tensors = tensors_of("deepseek_v3", [L, L + 1])
    write(tmp_path, "deepseek_v3", tensors, num_nextn_predict_layers=2)
    read = load_mtp(tmp_path, MODEL)
    assert (read.config.protocol, read.config.num_modules) == ("sequential", 2)
    for i in range(2):
        expected = tensors[f"model.layers.{L + i}.eh_proj.weight"].T
        np.testing.assert_array_equal(read.params[str(i)]["fc"], expected)
    read = load_mtp(tmp_path, MODEL, num_modules=1)
    assert (read.config.protocol, list(read.params)) == ("recycled", ["0"])
    with pytest.raises(WeightsError, match=rf"model\.layers\.{L + 2}\..* is missing"):
        load_mtp(tmp_path, MODEL, num_modules=3)


def test_what_a_checkpoint_leaves_open_can_be_overridden(tmp_path):
    write(tmp_path, "mimo", tensors_of("mimo", [0]))
    changes = dict(order="embedding-first", taps=(L,), protocol="sequential")
    changes |= dict(recycles_normed=False, has_zero_centred_norms=True)
    read = load_mtp(tmp_path, MODEL, **changes)
    assert {name: getattr(read.config, name) for name in changes} == changes
    assert "order = 'embedding-first': the caller says so." in read.notes


ENDS = {
    "embed": (f"model.layers.{L}.embed_tokens.weight", "model.embed_tokens.weight"),
    "head": (f"model.layers.{L}.shared_head.head.weight", "lm_head.weight"),
}


@pytest.mark.parametrize("end", ENDS)
def test_copies_of_the_targets_ends_are_dropped_and_others_are_kept(tmp_path, end):
    own, theirs = ENDS[end]
    field, base = f"has_own_{end}", tensors_of("deepseek_v3", [L])

    def read(tensors, **overrides):
        write(tmp_path, "deepseek_v3", tensors)
        return load_mtp(tmp_path, MODEL, **overrides)

    copy = read({**base, own: base[theirs]})
    assert not getattr(copy.config, field) and end not in copy.params["0"]
    assert f"{own} is left out: it is a copy of {theirs}." in copy.notes
    other = read({**base, own: 2 * base[theirs]})
    assert getattr(other.config, field)
    assert other.params["0"][end].shape == ((V, D) if end == "embed" else (D, V))
    alone = {k: v for k, v in base.items() if k not in ("lm_head.weight", theirs)}
    alone = {k: v for k, v in alone.items() if k != "model.embed_tokens.weight"}
    assert getattr(read({**alone, own: base[theirs]}).config, field)
    told = read({**base, own: 2 * base[theirs]}, **{field: False})
    assert end not in told.params["0"]
    with pytest.raises(WeightsError, match=f"{own} is missing"):
        read(base, **{field: True})


@pytest.mark.parametrize("kind", LAYERS)
def test_a_tensor_that_is_wrong_is_named(tmp_path, kind):
    tensors = tensors_of(kind, [FIRST[kind]])
    prefix = PREFIX[kind].format(i=FIRST[kind])
    name = f"{prefix}self_attn.o_proj.weight"

    def refused(changed, message):
        write(tmp_path, kind, changed)
        with pytest.raises(WeightsError, match=message):
            load_mtp(tmp_path, MODEL)

    refused({k: v for k, v in tensors.items() if k != name}, f"{name} is missing")
    refused({**tensors, f"{prefix}extra.weight": np.zeros(2)}, f"unexpected .*{prefix}extra")
    refused({**tensors, name: np.zeros((3, D), np.float32)}, rf"{name} has shape \[3, 16\]")
    refused({**tensors, name: np.full_like(tensors[name], np.nan)}, f"{name} holds NaN")
    target = {k: v for k, v in tensors.items() if not k.startswith(("mtp.", "model.mtp_", prefix))}
    refused(target, "has no MTP module: no tensor begins with mtp")


REFUSED = [  # the file, what the caller says
    (dict(model_type="glm5_next"), {}, "'glm5_next' are not supported; known: deepseek_v3"),
    (dict(model_type=["a"]), {}, r"model_type \"\['a'\]\" are not supported"),
    (dict(scoring_func="softmax"), {}, "scoring_func 'softmax' is not supported"),
    (dict(topk_method="greedy"), {}, "topk_method 'greedy' is not supported"),
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
    write(tmp_path, "deepseek_v3", tensors_of("deepseek_v3", [L, L + 1]), **hf)
    with pytest.raises(ConfigError, match=words):
        load_mtp(tmp_path, MODEL, **said)


def test_a_module_that_sees_all_may_state_a_window(tmp_path):
    for stated in (dict(sliding_window=None), dict(sliding_window=8, use_sliding_window=False)):
        write(tmp_path, "deepseek_v3", tensors_of("deepseek_v3", [L]), **stated)
        assert load_mtp(tmp_path, MODEL).config.num_modules == 1
    kinds = ["full_attention"] * L  # which decide where they are stated
    modules = tensors_of("qwen3_next", [0])
    write(tmp_path, "qwen3_next", modules, layer_types=kinds, sliding_window=8)
    assert load_mtp(tmp_path, MODEL).config.num_modules == 1


def test_the_target_may_be_of_the_modules_own_family(tmp_path):
    write(tmp_path, "deepseek_v3", tensors_of("deepseek_v3", [L]))
    target = DeepseekConfig.from_hf({**COMMON, **CONFIGS["deepseek_v3"]})
    own = dataclasses.replace(MODEL, config=target)
    assert load_mtp(tmp_path, own).config == load_mtp(tmp_path, MODEL).config
