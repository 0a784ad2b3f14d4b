"""What a config.json leaves out, or states as null, against transformers' configuration classes."""

from __future__ import annotations

import dataclasses

import pytest

from spec_jax.errors import ConfigError
from spec_jax.models.families import family_of_type

transformers = pytest.importorskip(
    "transformers", reason="parity needs transformers (extra 'parity')"
)

_ALL = "vocab_size hidden_size num_hidden_layers num_attention_heads num_experts_per_tok"
_ALL += " moe_intermediate_size"
_LATENT = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size"
_LATENT += " n_routed_experts"
_HEADS = "num_key_value_heads head_dim num_experts"
_DELTA = "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"
_DELTA += f" {_HEADS} shared_expert_intermediate_size"
KINDS = {  # their class, and the keys that have no default here
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "kimi_k2": ("DeepseekV3Config", _LATENT),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _LATENT),
    "glm4_moe": ("Glm4MoeConfig", "intermediate_size num_key_value_heads n_routed_experts"),
    "qwen3_moe": ("Qwen3MoeConfig", f"intermediate_size {_HEADS}"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", _DELTA),
    "qwen3_next": ("Qwen3NextConfig", _DELTA),
}
# Absent from theirs, spelled otherwise there, or of no consequence for what is computed.
_OTHER = {"rope", "scan_layers", "attention", "eos_token_id", "bos_token_id", "head_dim"}
_OTHER |= {"first_k_dense_replace"} | {"partial_rotary_factor", "mlp_bias", "intermediate_size"}


def theirs_and_needed(kind):
    name, needed = KINDS[kind]
    theirs = getattr(transformers, name)()
    stated = {n: getattr(theirs, n, None) for n in f"{_ALL} {needed}".split()}
    head_dim = {"head_dim": 128} if stated.get("head_dim") is None else {}
    return theirs, {"model_type": kind} | stated | head_dim


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_left_out_are_read_as_transformers_assumes(kind):
    theirs, hf = theirs_and_needed(kind)
    ours = family_of_type(kind).config.from_hf(hf)
    names = {field.name for field in dataclasses.fields(ours)} - _OTHER
    names -= {"model_type"} if kind == "kimi_k2" else set()
    found = {name: getattr(ours, name) for name in names}
    if "layer_types" in found:
        found["layer_types"] = list(found["layer_types"])
    assert found == {name: getattr(theirs, name) for name in names}
    rope = theirs.rope_parameters
    assert (ours.rope.rope_type, ours.rope.rope_theta) == (rope["rope_type"], rope["rope_theta"])
    assert getattr(ours, "partial_rotary_factor", 1) == rope.get("partial_rotary_factor", 1)
    if hasattr(ours, "first_k_dense_replace"):
        sparse = getattr(theirs, "mlp_layer_types", None)
        dense = theirs.first_k_dense_replace if sparse is None else sparse.count("dense")
        assert ours.first_k_dense_replace == dense


FLAGS = [(kind, "rope_interleave") for kind in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")]
FLAGS += [(kind, "norm_topk_prob") for kind in KINDS if not kind.startswith(("qwen3_5", "qwen3_m"))]


@pytest.mark.parametrize("kind, name", FLAGS)
def test_null_for_a_flag_is_read_or_refused_as_transformers_does(kind, name):
    """Null is false where their class takes it, and an error where it is one there."""
    _, hf = theirs_and_needed(kind)
    make, family = getattr(transformers, KINDS[kind][0]), family_of_type(kind).config
    assert getattr(make(), name) is getattr(family.from_hf(hf), name) is True
    try:
        value = getattr(make(**{name: None}), name)
    except Exception:  # of the library that checks their types
        with pytest.raises(ConfigError, match=f"{name} is null; expected true or false"):
            family.from_hf(hf | {name: None})
    else:
        assert value is None and getattr(family.from_hf(hf | {name: None}), name) is False
