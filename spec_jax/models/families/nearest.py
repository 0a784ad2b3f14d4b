"""What to start from where a checkpoint's family is not supported.

Judged by config.json and the names of the tensors. A checkpoint may differ in what neither of
them shows, so this names differences and never says that there are no others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from spec_jax.errors import SpecJaxError

_GUIDE = "docs/write_a_family.md"
_SHOWN = 3  # tensors that are named

_BY_KEY = {  # what a key asks for, unless its value changes nothing; no family here has it
    (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
    ): "a mixture of experts in place of the MLP",
    ("kv_lora_rank",): "multi-head latent attention",
    ("index_topk",): "an indexer that chooses the tokens that are attended over",
    ("linear_num_key_heads", "linear_attn_config"): "layers of linear attention",
    ("attn_logit_softcapping", "final_logit_softcapping"): "soft caps on logits",
    ("query_pre_attn_scalar",): "an attention scale that is not 1 / sqrt(head_dim)",
    (
        "embedding_multiplier",
        "scale_emb",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "logit_scale",
        "scale_depth",
    ): "multipliers of embeddings, residuals, attention or logits",
    ("no_rope_layers", "no_rope_layer_interval"): "layers without rotary positions",
    ("rope_local_base_freq",): "two rotary bases",
    ("alibi", "n_positions"): "positions that are not rotary",
    ("parallel_attn", "use_parallel_residual"): "attention and MLP in parallel",
    ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"): "LayerNorm in place of RMSNorm",
    ("clip_qkv",): "clipped queries, keys and values",
    ("vision_config", "audio_config"): "images or sound beside the text",
    ("is_encoder_decoder",): "an encoder",
}
_BY_TYPE = {  # what neither keys nor tensors show, by the beginning of the model_type
    "gemma": "norms that multiply by 1 + weight, and embeddings times sqrt(hidden_size)",
    "cohere": "rotary positions of interleaved pairs",
    "glm": "rotary positions of interleaved pairs",
}
_EXPERTS = "a mixture of experts in place of the MLP"
_LATENT = "multi-head latent attention"
_DELTA = (
    "layers of linear attention",
    "layers of linear_attention",
    "images or sound beside the text",
)
_HELD = {  # what supported families have of these
    "deepseek_v3": (_EXPERTS, _LATENT),
    "kimi_k2": (_EXPERTS, _LATENT),
    "glm4_moe_lite": (_EXPERTS, _LATENT),
    "glm4_moe": (_EXPERTS,),
    "qwen3_moe": (_EXPERTS,),
    "qwen3_next": (_EXPERTS, *_DELTA[:2]),
    "qwen3_5": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe": (_EXPERTS, *_DELTA),
    "qwen3_5_moe_text": (_EXPERTS, *_DELTA),
}
_SMALL = {  # a model of any family, to see the names of its tensors
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 64,
    "attn_layer_indices": [1],
    "num_heads": 8,
    "state_size": 8,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "eos_token_id": 1,
    "sliding_window": None,
}


def explain(hf: Mapping[str, Any], names: Iterable[str], families: Iterable[Any]) -> str:
    """Returns sentences: the nearest supported family, what the checkpoint needs besides, a guide.

    Args:
      hf: the parsed config.json.
      names: of the checkpoint's tensors; empty if they are not known.
      families: the ``Family`` records of whole models.
    """
    text = hf.get("text_config")
    text = {**hf, **text} if isinstance(text, Mapping) else hf
    theirs = {_place(name) for name in names}
    known = {
        kind: _places(family, {**_SMALL, "model_type": kind, **_flags(text)})
        for family in families
        for kind in family.model_types
    }
    kind = _nearest(str(hf.get("model_type")), text, theirs, known)
    missing = [what for what in _features(text) if what not in _HELD.get(kind, ())]
    others, lacking = sorted(theirs - known[kind]), sorted(known[kind] - theirs)
    if theirs and known[kind]:
        if others:
            missing.append(f"tensors that {kind} does not have ({_some(others)})")
        if lacking:
            missing.append(f"layers without {_some(lacking)}")
    needs = "its files show no difference, and the code of the model may have one"
    if missing:
        listed = "; ".join(missing)
        needs = f"what this checkpoint needs besides, as far as its files show: {listed}"
    return f"The nearest supported family is {kind}; {needs}. {_GUIDE} says how to add a family"


def _features(hf: Mapping[str, Any]) -> list[str]:
    """What the keys ask for that no family has."""
    same: dict[str, Any] = {"query_pre_attn_scalar": hf.get("head_dim")}
    changes = lambda key: hf.get(key) not in (None, False, 0, 1, "", [], {}, same.get(key))
    found = [what for keys, what in _BY_KEY.items() if any(map(changes, keys))]
    if hf.get("rms_norm_eps") is not None:
        found = [what for what in found if not what.startswith("LayerNorm")]
    kinds = hf.get("layer_types")
    kinds = {str(kind) for kind in kinds} if isinstance(kinds, (list, tuple)) else set()
    if kinds - {"full_attention"}:
        found.append(f"layers of {', '.join(sorted(kinds - {'full_attention'})[:_SHOWN])}")
    elif hf.get("sliding_window") and hf.get("use_sliding_window", True):
        found.append("sliding-window attention")
    acts = [hf.get("hidden_activation"), hf.get("hidden_act"), hf.get("activation_function")]
    act = next((act for act in acts if act), "silu")
    if act not in ("silu", "swish"):
        found.append(f"the activation {str(act)[:40]!r}")
    kind = str(hf.get("model_type"))
    return found + [what for start, what in _BY_TYPE.items() if kind.startswith(start)]


def _nearest(
    model_type: str, hf: Mapping[str, Any], theirs: set[str], known: Mapping[str, set[str]]
) -> str:
    """The supported ``model_type`` whose tensors, or else whose name, are most alike."""
    has_state = any(key.startswith(("mamba_", "ssm_", "state_size")) for key in map(str, hf))
    usual = "llama" if not has_state else "bamba" if "num_attention_heads" in hf else "mamba2"

    is_linear = any(str(key).startswith("linear_num_") for key in hf)

    def likeness(kind: str) -> tuple[float, ...]:
        both, either = len(theirs & known[kind]), len(theirs | known[kind])
        by_name = difflib.SequenceMatcher(None, model_type, kind).ratio()
        has_name = not has_state and by_name > 0.7
        by_tensors = both / either if theirs else 0.0
        return (
            by_tensors,
            (_DELTA[0] in _HELD.get(kind, ())) == is_linear,
            has_name * by_name,
            kind == usual,
            by_name,
        )

    return max(known, key=likeness)


def _flags(hf: Mapping[str, Any]) -> dict[str, bool]:
    """Flags that say which tensors there are."""
    names = ("attention_bias", "mlp_bias", "tie_word_embeddings")
    return {name: hf[name] for name in names if isinstance(hf.get(name), bool)}


def _places(family: Any, hf: dict[str, Any]) -> set[str]:
    """The places of a small model's tensors; empty if the family needs other keys."""
    try:
        config = family.config.from_hf(hf)
        tables = [family.outer_table(config), *family.layer_tables(config)]
    except (SpecJaxError, AttributeError, KeyError, TypeError, ValueError):
        return set()
    return {_place(spec.hf_name.format(i=0, e=0)) for table in tables for spec in table.values()}


def _place(name: str) -> str:
    """A tensor's name without the number of its layer and what stands before."""
    name = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    index = name.find("layers.*.")
    return name[index:] if index >= 0 else ".".join(name.split(".")[-2:])


def _some(names: list[str]) -> str:
    short = [name.removeprefix("layers.*.") for name in names]
    return ", ".join(short[:_SHOWN]) + (f" and {len(short) - _SHOWN} more" * (len(short) > _SHOWN))
