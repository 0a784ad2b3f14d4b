"""What a config.json leaves out, or states as null, against transformers' configuration classes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from needs import transformers

from spec_jax.errors import ConfigError
from spec_jax.models.families import family_of_type
from spec_jax.models.rope import rope_frequencies

_ALL = "vocab_size hidden_size num_hidden_layers num_attention_heads num_experts_per_tok"
_ALL += " moe_intermediate_size"
_LATENT = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size"
_LATENT += " n_routed_experts"
_HEADS = "num_key_value_heads head_dim num_experts"
_DELTA = "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"
_DELTA += f" {_HEADS} shared_expert_intermediate_size"
OF_MODEL_CONFIG = {  # models of ``ModelConfig``, and their class
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "mimo": "Qwen2Config",  # which its own class inherits from
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
}
KINDS = {  # their class, and the keys that have no default here
    "llama": ("LlamaConfig", "intermediate_size"),
    "qwen2": ("Qwen2Config", "intermediate_size"),
    "qwen3": ("Qwen3Config", "intermediate_size"),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "kimi_k2": ("DeepseekV3Config", _LATENT),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _LATENT),
    "glm4_moe": ("Glm4MoeConfig", "intermediate_size num_key_value_heads n_routed_experts"),
    "qwen3_moe": ("Qwen3MoeConfig", "intermediate_size num_experts"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", _DELTA),
    "qwen3_next": ("Qwen3NextConfig", _DELTA),
}
# Absent from theirs, spelled otherwise there, or of no consequence for what is computed.
_OTHER = {"rope", "scan_layers", "attention", "eos_token_id", "bos_token_id", "head_dim"}
_OTHER |= {"first_k_dense_replace"} | {"partial_rotary_factor", "mlp_bias", "intermediate_size"}
_OTHER |= {"max_pass", "sliding_window"}


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
    names -= {"kimi_k2": {"model_type"}, "qwen2": {"attention_bias"}}.get(kind, set())
    if hasattr(ours, "windows"):
        names -= {"layer_types"}
        kinds = getattr(theirs, "layer_types", None) or [None] * theirs.num_hidden_layers
        assert [size is not None for size in ours.windows] == [
            k == "sliding_attention" for k in kinds
        ]
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


@pytest.mark.parametrize("kind", OF_MODEL_CONFIG)
@pytest.mark.parametrize("is_null", [False, True], ids=["left out", "null"])
@pytest.mark.parametrize("name", ["head_dim", "num_key_value_heads", "max_position_embeddings"])
def test_a_size_that_is_left_out_or_null_is_read_as_transformers_does(kind, is_null, name):
    """In models with other heads than those of their class's defaults."""
    hf = dict(vocab_size=31, hidden_size=1024, intermediate_size=24, num_hidden_layers=2)
    hf |= dict(num_attention_heads=64, sliding_window=None, **({name: None} if is_null else {}))
    if kind == "qwen3_moe":
        hf |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    from_hf = family_of_type(kind).config.from_hf
    try:
        theirs = getattr(transformers, OF_MODEL_CONFIG[kind])(**hf)
    except Exception:  # of the library that checks their types
        with pytest.raises(ConfigError, match=f"{name} is null; expected"):
            from_hf(hf | {"model_type": kind})
    else:
        expected = getattr(theirs, name, None)
        if expected is None and name == "head_dim":  # their configs keep null here
            expected = theirs.hidden_size // theirs.num_attention_heads
        assert getattr(from_hf(hf | {"model_type": kind}), name) == expected


NORMED = ("deepseek", "kimi", "glm4", "qwen3_next")
FLAGS = [(kind, "rope_interleave") for kind in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")]
FLAGS += [(kind, "norm_topk_prob") for kind in KINDS if kind.startswith(NORMED)]


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


SIZES = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4)
LLAMA_3 = dict(rope_type="llama3", rope_theta=1e4, factor=2.0, low_freq_factor=1.0)
LLAMA_3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=64)
DEFAULT = dict(rope_type="default", rope_theta=1e4)
BASES = {  # what config.json says of the base, and in its parameters
    "no base": {},
    "no base, nor parameters": dict(rope_parameters=None),
    "no base, older spelling": dict(rope_scaling=dict(rope_type="linear", factor=2.0)),
    "a base among the parameters alone": dict(rope_parameters=DEFAULT | dict(rope_theta=7.0)),
}
PARAMETERS = {
    "no type": dict(rope_type=None, rope_theta=1e4),
    "no factor": dict(rope_type="linear", rope_theta=1e4, factor=None),
    "no factor, none needed": DEFAULT | dict(factor=None),
    **{f"llama3, no {name}": LLAMA_3 | {name: None} for name in [*LLAMA_3][2:]},
}
for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
    PARAMETERS[f"yarn, no {name}"] = YARN | {name: None}
ROPES = {name: dict(rope_theta=None) | stated for name, stated in BASES.items()}
ROPES |= {name: dict(rope_parameters=stated) for name, stated in PARAMETERS.items()}
ROPES["no base among the parameters"] = dict(
    rope_theta=5e5, rope_parameters=DEFAULT | dict(rope_theta=None)
)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("stated", ROPES.values(), ids=ROPES)
def test_null_of_the_rotary_embedding_is_read_or_refused_as_transformers_does(kind, stated):
    copied = {n: dict(x) if isinstance(x, dict) else x for n, x in stated.items()}  # they write
    from_hf = family_of_type(kind.lower()).config.from_hf
    hf = SIZES | stated | {"model_type": kind.lower()}
    try:
        config = getattr(transformers, f"{kind}Config")(**SIZES, **copied)
        theirs = getattr(transformers, f"{kind}Model")(config).rotary_emb
    except Exception:  # of their checks, or of their arithmetic
        with pytest.raises(ConfigError, match="rope_theta|rope_type|factor|original_max"):
            from_hf(hf)
    else:
        frequencies, scale = rope_frequencies(from_hf(hf).rope, SIZES["head_dim"])
        np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=1e-5)
        assert scale == pytest.approx(theirs.attention_scaling)
