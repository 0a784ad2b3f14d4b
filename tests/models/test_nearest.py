"""An unsupported family is refused with the nearest one, what is missing, and a guide."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file, save_file
from support.pairs import tiny_pair

from spec_jax.errors import ConfigError
from spec_jax.loading import load_model
from spec_jax.models.families import read_config

GUIDE = r"\. docs/write_a_family.md says how"
ROWS = {"num_attention_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5}


GEMMA = dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, head_dim=256)
GEMMA |= dict(ROWS, model_type="gemma2", attn_logit_softcapping=50.0)
SOFT_CAPS = "soft caps on logits; the activation 'gelu_pytorch_tanh'; norms that multiply"
GPT2 = dict(model_type="gpt2", n_positions=1024, layer_norm_epsilon=1e-5)
TEXT = dict(ROWS, model_type="mistral", sliding_window=8)
MISTRAL = dict(model_type="mistral3", vision_config={"depth": 2}, text_config=TEXT)
GRANITE = dict(ROWS, model_type="granite", logits_scaling=1.0)
CONFIGS = [
    (dict(ROWS, model_type="phimoe", num_local_experts=16), "llama", "a mixture of experts"),
    (dict(ROWS, model_type="mixtral", num_local_experts=8), "mistral", "a mixture of"),
    (GEMMA, "llama", SOFT_CAPS),
    (dict(ROWS, model_type="falcon_h1", mamba_n_heads=8), "bamba", None),
    (dict(model_type="mamba", state_size=16), "mamba2", None),
    (GPT2, "llama", "positions that are not rotary; LayerNorm in place of RMSNorm"),
    (MISTRAL, "mistral", "images or sound beside the text; sliding-window attention"),
    (dict(GRANITE, logits_scaling=8.0, residual_multiplier=1.0), "llama", "multipliers of"),
    (GRANITE, "llama", None),
]


@pytest.mark.parametrize(
    "config, nearest, missing",
    CONFIGS,
    ids=lambda x: x["model_type"] if isinstance(x, dict) else None,
)
def test_the_keys_of_a_config_say_what_is_missing(tmp_path, config, nearest, missing):
    (tmp_path / "config.json").write_text(json.dumps(config))
    needs = "its files show no difference" if missing is None else f"what .* needs.*: {missing}"
    message = rf"'{config['model_type']}' is not supported; .*family is {nearest}; {needs}"
    with pytest.raises(ConfigError, match=f"{message}.*{GUIDE}"):
        read_config(tmp_path)


def test_the_names_of_the_tensors_say_which_family_is_nearest_and_what_is_missing(tmp_path):
    target = tiny_pair(tmp_path) / "target"
    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    for i in range(2):
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors.pop(f"model.layers.{i}.self_attn.{name}.weight")
        tensors[f"model.layers.{i}.self_attn.qkv_proj.weight"] = tensors["model.norm.weight"]
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({**config, "model_type": "mine"}))
    others = r"tensors that llama does not have \(self_attn.qkv_proj.weight\); layers without "
    with pytest.raises(ConfigError, match=others + "self_attn.k_proj.weight, self_attn.q_proj"):
        load_model(target)
