"""Heads in the formats of their projects: config.json, tensors, and what they should be read as."""

import dataclasses
import json

import numpy as np
from safetensors.numpy import save_file
from support.tiny_models import LLAMA, loaded, random_tensor

from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.models.config import ModelConfig, RopeConfig

V, U, D, F, L, TAPS = 31, 20, 16, 24, 8, (2, 4, 5)
TARGET = dataclasses.replace(LLAMA, num_hidden_layers=L, rope=RopeConfig(rope_theta=5e5))
MODEL = loaded(TARGET)
IDS = np.sort(np.random.RandomState(0).permutation(V)[:U])  # of the target, that it drafts
MASK = np.isin(np.arange(V), IDS)
SIZES = dict(hidden_size=D, intermediate_size=F, num_hidden_layers=1, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=1, head_dim=6, rms_norm_eps=1e-5, max_position_embeddings=64)
LAYER = ModelConfig(vocab_size=V, **SIZES)  # with head counts, eps and a rotary base of its own
SMALL = dataclasses.replace(LAYER, vocab_size=U)
CONFIG = {"model_type": "llama", "vocab_size": V, **SIZES}
CONFIG |= {"hidden_act": "silu", "rope_theta": 10000.0}
EAGLE_3 = {**CONFIG, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": U}
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
SPECFORGE = {**EAGLE_3, "architectures": ["LlamaForCausalLMEagle3"]}
SPECFORGE["eagle_config"] = {IDS_KEY: [1, 3, 4]}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": U,
    "target_hidden_size": None,
    "norm_before_residual": True,
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), False),
    IDS_KEY: [2, 4, 5],
    "transformer_layer_config": CONFIG,
}


def attention_and_mlp(layer, width_in, width=D):
    """Names in the file, ours, and shapes ``[out, in]``."""
    return {
        f"{layer}self_attn.q_proj.weight": ("q", (12, width_in)),
        f"{layer}self_attn.k_proj.weight": ("k", (6, width_in)),
        f"{layer}self_attn.v_proj.weight": ("v", (6, width_in)),
        f"{layer}self_attn.o_proj.weight": ("o", (width, 12)),
        f"{layer}post_attention_layernorm.weight": ("mlp_norm", (width,)),
        f"{layer}mlp.gate_proj.weight": ("gate", (F, width)),
        f"{layer}mlp.up_proj.weight": ("up", (F, width)),
        f"{layer}mlp.down_proj.weight": ("down", (width, F)),
    }


EAGLE_1_NAMES = {
    "fc.weight": ("fc", (D, 2 * D)),
    "fc.bias": ("fc_bias", (D,)),
    **attention_and_mlp("layers.0.", D),
}


def eagle_3_names(layer, width=D, vocab=U, num_states=3):
    return {
        "fc.weight": ("fc", (width, num_states * D)),
        f"{layer}input_layernorm.weight": ("embed_norm", (width,)),
        f"{layer}hidden_norm.weight": ("hidden_norm", (width,)),
        **attention_and_mlp(layer, 2 * width, width),
        "norm.weight": ("norm", (width,)),
        "lm_head.weight": ("head", (vocab, width)),
    }


FC_NORMS = {f"fc_norm.{i}.weight": (f"fc_norm_{i}", (D,)) for i in range(3)}
INPUT_NORM = {"input_norm.weight": ("input_norm", (3 * D,))}
BIASES = {"q": 12, "k": 6, "v": 6}
QKV_BIASES = {
    f"layers.0.self_attn.{n}_proj.bias": (f"{n}_bias", (size,)) for n, size in BIASES.items()
}
QK_NORMS = {f"layers.0.self_attn.{n}.weight": (n, (6,)) for n in ("q_norm", "k_norm")}
MIDLAYER, LAYERS = eagle_3_names("midlayer."), eagle_3_names("layers.0.")
NARROW = {**eagle_3_names("midlayer.", width=10), "embed_tokens.weight": ("embed", (V, 10))}
NO_BIAS = {name: x for name, x in EAGLE_1_NAMES.items() if name != "fc.bias"}
VERSION_1 = EagleConfig(1, LAYER, D, V, (L + 1,))
VERSION_3 = EagleConfig(3, SMALL, D, V, TAPS)


def head(stated, names, config=VERSION_3, layer=None, **changes):
    """config.json, names in the file, and the config with these changes, of itself or its layer."""
    layer = dataclasses.replace(config.layer, **(layer or {}))
    return stated, names, dataclasses.replace(config, layer=layer, **changes)


NORMED = {"norm_before_fc": True, "norm_output": True}
QWEN3 = {**SPECULATORS, "transformer_layer_config": {**CONFIG, "model_type": "qwen3"}}
HEADS = {
    "eagle-1": head(CONFIG, EAGLE_1_NAMES, VERSION_1, fc_bias=True),
    "eagle-1 without a bias": head({**CONFIG, "bias": False}, NO_BIAS, VERSION_1),
    "eagle-1 of qwen2": head(
        {**CONFIG, "qkv_bias": True, "model_type": "qwen2"},
        {**EAGLE_1_NAMES, **QKV_BIASES},
        dataclasses.replace(VERSION_1, fc_bias=True),
        layer={"model_type": "qwen2"},
    ),
    "eagle-3": head(EAGLE_3, MIDLAYER),
    "eagle-3 whole vocabulary": head(
        {**EAGLE_3, "draft_vocab_size": V},
        eagle_3_names("midlayer.", vocab=V),
        layer={"vocab_size": V},
    ),
    "eagle-3 narrow": head(
        {**EAGLE_3, "hidden_size": 10, "target_hidden_size": D},
        NARROW,
        layer={"hidden_size": 10},
        own_embed=True,
    ),
    "specforge": head(SPECFORGE, MIDLAYER),
    "specforge fc_norm": head(
        {**SPECFORGE, "fc_norm": True, "norm_output": True},
        {**MIDLAYER, **FC_NORMS},
        fc_norm=True,
        norm_output=True,
    ),
    "speculators": head(SPECULATORS, LAYERS, norm_before_residual=True),
    "speculators norms": head(
        {**SPECULATORS, **NORMED, "norm_before_residual": False}, {**LAYERS, **INPUT_NORM}, **NORMED
    ),
    "speculators fc_norm": head(
        {**SPECULATORS, "fc_norm": True},
        {**LAYERS, **FC_NORMS},
        norm_before_residual=True,
        fc_norm=True,
    ),
    "speculators qwen3": head(
        QWEN3, {**LAYERS, **QK_NORMS}, layer={"model_type": "qwen3"}, norm_before_residual=True
    ),
}


def tensors_of(names):
    tensors = {name: random_tensor(name, shape, 0) for name, (_, shape) in names.items()}
    if tensors.get("lm_head.weight", np.zeros((0, 0))).shape[0] == U:
        tensors |= {"d2t": IDS - np.arange(U), "t2d": MASK}
    return tensors


def write(directory, config, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_head(directory, name="eagle-3", *, without=(), tensors=None, **config):
    """One of ``HEADS`` with other tensors and keys of config.json."""
    stated, names, _ = HEADS[name]
    merged = {**tensors_of(names), **(tensors or {})}
    for gone in without:
        del merged[gone]
    return write(directory, {**stated, **config}, merged)


def params_of(names, config):
    """The parameters that the file's tensors are, matrices transposed."""
    tensors = tensors_of(names)
    params = {}
    for name, (ours, _) in names.items():
        is_linear = tensors[name].ndim == 2 and ours != "embed"
        params[ours] = tensors[name].T if is_linear else tensors[name]
    if config.layer.vocab_size < V:
        params["d2t"] = (IDS - np.arange(U)).astype(np.int32)
    return params
