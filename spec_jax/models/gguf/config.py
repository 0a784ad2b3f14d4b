"""The config.json and generation_config.json that the fields of a GGUF file stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checks import is_integer, shown
from spec_jax.models.config import RopeConfig
from spec_jax.models.gguf.header import Header
from spec_jax.models.gguf.tensors import ROPE_FACTORS, GgufTensors
from spec_jax.models.rope import rope_frequencies

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_KEYS = {  # after the architecture, and the key of config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Read below, or of no consequence here.
_OTHERS = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scale_linear",
    "tensor_data_layout",
}
_IDLE = {  # fields that change what a model computes, and the value with which they do not
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
    "attention.causal": True,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_weights_scale": 1,
    "expert_weights_norm": True,
    "expert_gating_func": 1,  # softmax
    "use_parallel_residual": False,
}
_LLAMA3 = {  # a file holds only what each frequency is divided by
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
STOPS = ("eos", "eot", "eom")  # of a sequence, a turn, a message


def config_json(header: Header) -> dict[str, Any]:
    """Returns the object of config.json.

    Args:
      header: of the file.

    Raises:
      ConfigError: the architecture is not supported, or a field says what is not read.
      WeightsError: there is no embedding.
    """
    fields = header.fields
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _MODEL_TYPES:
        raise ConfigError(
            f"{header.path}: general.architecture is {shown(architecture)}; supported: "
            f"{', '.join(_MODEL_TYPES)}"
        )
    said = {
        key.removeprefix(f"{architecture}."): _plain(value)
        for key, value in fields.items()
        if key.startswith(f"{architecture}.")
    }
    _check_read(header, architecture, said)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{header.path}: tensor token_embd.weight is missing")
    hf = {ours: said[key] for key, ours in _KEYS.items() if key in said}
    head_dim = hf.get("head_dim", said.get("rope.dimension_count"))
    for key in ("rope.dimension_count", "attention.value_length"):
        if said.get(key, head_dim) != head_dim:
            raise ConfigError(
                f"{header.path}: {architecture}.{key} is {shown(said[key])}; expected that of a "
                f"whole head, {shown(head_dim)}"
            )
    return {
        **hf,
        **({} if head_dim is None else {"head_dim": head_dim}),
        "rope_theta": hf.get("rope_theta", 10000.0),
        "rope_scaling": _rope_scaling(header, said, head_dim),
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "norm_topk_prob": True,  # of qwen3moe, whose weights are always normalised
        "sliding_window": None,
        **token_ids(header),
    }


def token_ids(header: Header) -> dict[str, Any]:
    """Returns ``bos_token_id`` and ``eos_token_id`` as config.json states them."""
    stated = {n: header.fields.get(f"tokenizer.ggml.{n}_token_id") for n in ("bos", *STOPS)}
    stops = dict.fromkeys(stated[name] for name in STOPS if stated[name] is not None)
    return {"bos_token_id": stated["bos"], "eos_token_id": list(stops) or None}


def source_text(header: Header) -> str:
    """Returns who made the model and under which licence, as the file says."""
    keys = ("name", "organization", "license", "source.url", "repo_url")
    stated = [header.fields.get(f"general.{key}") for key in keys]
    return ", ".join(value for value in stated if isinstance(value, str)) or "not stated"


def head_counts(header: Header, hf: Mapping[str, Any]) -> dict[str, int]:
    """Returns the heads of the tensors whose rows the file holds in pairs, see ``GgufTensors``.

    Args:
      header: of the file.
      hf: its config.json.

    Raises:
      ConfigError: the file does not say how many heads there are.
    """
    if hf["model_type"] != "llama":
        return {}
    queries = hf.get("num_attention_heads")
    keys = hf.get("num_key_value_heads", queries)
    for count in (queries, keys):
        if not is_integer(count, 1):
            raise ConfigError(f"{header.path}: the number of heads is {shown(count)}")
    return {"attn_q": queries, "attn_k": keys}


def _plain(value: Any) -> Any:
    """A value as JSON has it; a float32 as the shortest decimal that rounds to it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_read(header: Header, architecture: str, said: Mapping[str, Any]) -> None:
    """Refuses fields that may change what the model computes and are not read."""
    for key, value in said.items():
        known = key in _KEYS or key in _OTHERS or (key in _IDLE and value == _IDLE[key])
        if architecture != "qwen3moe" and key.startswith("expert_"):
            known = value == 0
        if known or (key == "attention.sliding_window" and _sees_all(value, said)):
            continue
        expected = f"; expected {_IDLE[key]!r}" if key in _IDLE else ""
        raise ConfigError(
            f"{header.path}: {architecture}.{key} is {shown(value)}, which is not read{expected}"
        )


def _sees_all(window: Any, said: Mapping[str, Any]) -> bool:
    longest = said.get("context_length")
    return window == 0 or (is_integer(window) and is_integer(longest) and window >= longest)


def _rope_scaling(header: Header, said: Mapping[str, Any], head_dim: Any) -> dict[str, Any] | None:
    """What config.json calls ``rope_scaling``."""
    kind = said.get("rope.scaling.type", "linear" if "rope.scale_linear" in said else "none")
    factor = said.get("rope.scaling.factor", said.get("rope.scale_linear"))
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise ConfigError(f"{header.path}: both {ROPE_FACTORS} and {kind} rotary scaling")
        return _llama3(header, said, head_dim)
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    original = said.get("rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3(header: Header, said: Mapping[str, Any], head_dim: Any) -> dict[str, Any]:
    """The scaling of Llama 3.1 and 3.2."""
    entry = header.tensors[ROPE_FACTORS]
    stored = GgufTensors(header, {}).values(ROPE_FACTORS)
    rope = RopeConfig.from_hf(
        {
            "rope_theta": said.get("rope.freq_base", 10000.0),
            "rope_scaling": {**_LLAMA3, "factor": round(float(stored.max()), 3)},
        }
    )
    if is_integer(head_dim, 2) and entry.shape == (head_dim // 2,):
        plain, _ = rope_frequencies(dataclasses.replace(rope, rope_type="default"), head_dim)
        scaled, _ = rope_frequencies(rope, head_dim)
        if np.allclose(plain / scaled, stored, rtol=1e-3):
            return rope.spellings()["rope_scaling"]
    raise ConfigError(
        f"{header.path}: {ROPE_FACTORS} is not that of Llama 3's rotary scaling, {_LLAMA3}, and no "
        "other one is read"
    )
