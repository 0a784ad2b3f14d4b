"""GGUF files of tiny models, written by ``gguf`` as llama.cpp's converter writes them."""

import pathlib

import gguf
import numpy as np

from spec_jax.models.checkpoint import as_stored
from spec_jax.models.params import walk

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}


def tensors_of(config, params) -> dict[str, np.ndarray]:
    """The tensors of a file by their names in it; those of experts as one stack."""
    architecture = ARCHITECTURES[config.model_type]
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = {}
    for spec, layer, array in walk(config, params):
        if "{e}" in spec.hf_name:
            one = spec._replace(shape=spec.shape[1:])
            value = np.stack([as_stored(part, one, "float32") for part in array])
        else:
            value = as_stored(array, spec, "float32")
        ours = spec.hf_name.format(i=layer, e="").replace("experts..", "experts.")
        stem, _, what = ours.rpartition(".")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        count = heads.get(stem.rpartition(".")[2])
        if count and architecture == "llama":
            halves = value.reshape(count, 2, value.shape[0] // count // 2, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        tensors[f"{names.get_name(stem)}.{what}"] = np.ascontiguousarray(value)
    return tensors


def write(
    path: pathlib.Path,
    config,
    params,
    kind: str = "F32",
    fields=None,
    extra=None,
    quantise=gguf.quants.quantize,
):
    """Writes a file.

    Args:
      path: of the file.
      config: of the model.
      params: its weights.
      kind: how matrices are quantised where their rows allow it, as ``gguf`` names it.
      fields: more fields, as ``{key: (method of GGUFWriter, value)}``; a None leaves one out.
      extra: more tensors in float32, by name.
      quantise: ``(array, kind) -> array``, what is stored of a tensor.
    """
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    stated = {
        f"{architecture}.block_count": ("uint32", config.num_hidden_layers),
        f"{architecture}.vocab_size": ("uint32", config.vocab_size),
        f"{architecture}.context_length": ("uint32", config.max_position_embeddings),
        f"{architecture}.embedding_length": ("uint32", config.hidden_size),
        f"{architecture}.feed_forward_length": ("uint32", config.intermediate_size),
        f"{architecture}.attention.head_count": ("uint32", config.num_attention_heads),
        f"{architecture}.attention.head_count_kv": ("uint32", config.num_key_value_heads),
        f"{architecture}.attention.key_length": ("uint32", config.head_dim),
        f"{architecture}.attention.value_length": ("uint32", config.head_dim),
        f"{architecture}.attention.layer_norm_rms_epsilon": ("float32", config.rms_norm_eps),
        f"{architecture}.rope.freq_base": ("float32", config.rope.rope_theta),
        f"{architecture}.rope.dimension_count": ("uint32", config.head_dim),
        "general.name": ("string", "Tiny"),
        "general.license": ("string", "mit"),
    }
    if architecture == "qwen3moe":
        stated |= {
            f"{architecture}.expert_count": ("uint32", config.num_experts),
            f"{architecture}.expert_used_count": ("uint32", config.num_experts_per_tok),
            f"{architecture}.expert_feed_forward_length": ("uint32", config.moe_intermediate_size),
        }
    for key, entry in (stated | (fields or {})).items():
        if entry is not None:
            getattr(writer, f"add_{entry[0]}")(key, entry[1])
    quantised = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[quantised]
    for name, array in (tensors_of(config, params) | (extra or {})).items():
        is_matrix = array.ndim > 1 and array.shape[-1] % block == 0
        chosen = quantised if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, quantise(array, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_fields(tokens, model="gpt2", types=None, **others):
    """The fields of a byte-level tokenizer; ``others`` by name are (method, value)."""
    fields = {
        "tokenizer.ggml.model": ("string", model),
        "tokenizer.ggml.pre": ("string", "gpt-2"),
        "tokenizer.ggml.merges": ("array", ["a b"]),
        "tokenizer.ggml.tokens": ("array", list(tokens)),
        "tokenizer.ggml.token_type": ("array", list(types or [1] * len(tokens))),
    }
    return fields | {f"tokenizer.ggml.{name}": entry for name, entry in others.items()}
