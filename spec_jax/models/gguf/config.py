"""The config.json and generation_config.json that the fields of a GGUF file stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.config.checks import check
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checks import is_integer, require, shown
from spec_jax.models.config import RopeConfig
from spec_jax.models.gguf.header import Header
from spec_jax.models.gguf.tensors import ROPE_FACTORS, read_part
from spec_jax.models.rope import rope_frequencies

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_KEYS = {  # after the architecture, and the key of config.json; the first six must be there
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_CHECKED = (  # below
    *("attention.value_length", "rope.dimension_count", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scale_linear"),
)
_UNUSED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")  # the embedding has a size
_MAX_VALUES = 4096  # of a list
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
    supported = ", ".join(_MODEL_TYPES)
    is_known = isinstance(architecture, str) and architecture in _MODEL_TYPES
    message = f"general.architecture is {shown(architecture)}; supported: {supported}"
    require(is_known, message)
    said = {
        key.removeprefix(f"{architecture}."): _plain(key, value)
        for key, value in fields.items()
        if key.startswith(f"{architecture}.")
    }
    _check_read(architecture, said)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{header.path}: tensor token_embd.weight is missing")
    for key in list(_KEYS)[:6]:
        require(key in said, f"{architecture}.{key} is missing")
    hf = {ours: said[key] for key, ours in _KEYS.items() if key in said}
    hf.setdefault("num_key_value_heads", hf["num_attention_heads"])
    head_dim = hf.get("head_dim", said.get("rope.dimension_count"))
    sizes = (hf["hidden_size"], hf["num_attention_heads"])
    if head_dim is None and all(is_integer(size, 1) for size in sizes):
        head_dim = sizes[0] // sizes[1]
    for key in ("rope.dimension_count", "attention.value_length"):
        value = said.get(key, head_dim)
        expected = f"that of a whole head, {shown(head_dim)}"
        check(value == head_dim, f"{architecture}.{key}", value, expected)
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
    """Returns ``bos_token_id`` and ``eos_token_id`` as config.json states them.

    Raises:
      ConfigError: one of them is no integer.
    """
    stated = {n: header.fields.get(f"tokenizer.ggml.{n}_token_id") for n in ("bos", *STOPS)}
    for name, value in stated.items():
        check(value is None or is_integer(value), f"{name}_token_id", value, "an id")
    stops = dict.fromkeys(stated[name] for name in STOPS if stated[name] is not None)
    return {"bos_token_id": stated["bos"], "eos_token_id": list(stops) or None}


def source_text(header: Header) -> str:
    """Returns who made the model and under which licence, as the file says, in one short line."""
    keys = ("name", "organization", "license", "source.url", "repo_url")
    stated = [header.fields.get(f"general.{key}") for key in keys]
    texts = [filter(str.isprintable, text[:80]) for text in stated if isinstance(text, str)]
    return ", ".join(map("".join, texts)) or "not stated"


def head_counts(hf: Mapping[str, Any]) -> dict[str, int]:
    """Returns the heads of the tensors whose rows the file holds in pairs, see ``tensors_of``.

    Args:
      hf: the file's config.json.

    Raises:
      ConfigError: the file does not say how many heads there are.
    """
    if hf["model_type"] != "llama":
        return {}
    queries = hf.get("num_attention_heads")
    keys = hf.get("num_key_value_heads", queries)
    for count in (queries, keys):
        require(is_integer(count, 1), f"the number of heads is {shown(count)}")
    return {"attn_q": queries, "attn_k": keys}


def _plain(key: str, value: Any) -> Any:
    """A value as JSON has it; a float32 as the shortest decimal that rounds to it."""
    size = len(value) if isinstance(value, (np.ndarray, list)) else 0
    require(size <= _MAX_VALUES, f"{key} is a list of {size} values, which is not read")
    if isinstance(value, np.ndarray):
        return value.tolist()
    with np.errstate(over="ignore"):
        return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_read(architecture: str, said: Mapping[str, Any]) -> None:
    """Refuses fields that may change what the model computes and are not read."""
    longest = said.get("context_length")
    for key, value in said.items():
        known = key in (*_KEYS, *_CHECKED, *_UNUSED) or (key in _IDLE and value == _IDLE[key])
        if architecture != "qwen3moe" and key.startswith("expert_"):
            known = value == 0
        if key == "attention.sliding_window":
            known = value == 0 or (is_integer(value) and is_integer(longest) and value >= longest)
        expected = f"; expected {_IDLE[key]!r}" if key in _IDLE else ""
        if key == "attention.sliding_window" and is_integer(value, 1):
            change = f"gguf-set-metadata FILE {architecture}.context_length {shown(value)}"
            expected = f"; without longer texts, `{change}` of PyPI's gguf lets the file be read"
        require(known, f"{architecture}.{key} is {shown(value)}, which is not read{expected}")


def _rope_scaling(header: Header, said: Mapping[str, Any], head_dim: Any) -> dict[str, Any] | None:
    """What config.json calls ``rope_scaling``."""
    kind = said.get("rope.scaling.type", "linear")
    factor = said.get("rope.scaling.factor", said.get("rope.scale_linear"))
    if kind == "linear" and factor in (None, 0, 1):
        kind = "none"
    if ROPE_FACTORS in header.tensors:
        require(kind == "none", f"both {ROPE_FACTORS} and {kind} rotary scaling")
        return _llama3(header, said, head_dim)
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": factor}
    original = said.get("rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3(header: Header, said: Mapping[str, Any], head_dim: Any) -> dict[str, Any]:
    """The scaling of Llama 3.1 and 3.2."""
    if is_integer(head_dim, 2) and header.tensors[ROPE_FACTORS].shape == (head_dim // 2,):
        stored = read_part(header, header.tensors[ROPE_FACTORS], (range(head_dim // 2),))
        theta = said.get("rope.freq_base", 10000.0)
        if np.isfinite(stored).all() and 1 <= stored.max() <= 1e6:
            scaling = {**_LLAMA3, "factor": round(float(stored.max()), 3)}
            rope = RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": scaling})
            plain, _ = rope_frequencies(dataclasses.replace(rope, rope_type="default"), head_dim)
            scaled, _ = rope_frequencies(rope, head_dim)
            if np.allclose(plain / scaled, stored, rtol=1e-3):
                return rope.spellings()["rope_scaling"]
    raise ConfigError(
        f"{ROPE_FACTORS} is not that of Llama 3's rotary scaling, {_LLAMA3}, and no "
        "other one is read"
    )
