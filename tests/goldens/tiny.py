"""A tiny Llama on disk, as any project would write it, and heads for it."""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile
import zlib

import jax
import numpy as np
from goldens import common
from goldens.find import find
from safetensors.numpy import save_file

import spec_jax

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 31,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "eos_token_id": 0, "hidden_act": "silu",
}  # fmt: skip


def _tensors(layers: int) -> dict[str, tuple[int, ...]]:
    V, D, F = (CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size"))
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,),
              "lm_head.weight": (V, D)}  # fmt: skip
    for i in range(layers):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (D,), "post_attention_layernorm": (D,),
                "self_attn.q_proj": (D, D), "self_attn.k_proj": (D // 2, D),
                "self_attn.v_proj": (D // 2, D), "self_attn.o_proj": (D, D),
                "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
            }.items()
        }  # fmt: skip
    return shapes


@functools.cache
def llama(layers: int = 2) -> spec_jax.LoadedModel:
    """The model with values that NumPy draws by the name of each tensor."""

    def tensor(name, shape):
        draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        return (1 + 0.1 * draw if "norm" in name else 0.2 * draw).astype(np.float32)

    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        tensors = {name: tensor(name, shape) for name, shape in _tensors(layers).items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        hf = json.dumps(CONFIG | {"num_hidden_layers": layers})
        (directory / "config.json").write_text(hf)
        return spec_jax.load_model(directory)


@functools.cache
def head(kind: str, **changes) -> spec_jax.LoadedHead:
    """A head for ``llama()``: "eagle1", "eagle3" of a reduced vocabulary, or "mtp"."""
    target = llama().config
    config = {
        "eagle1": lambda: find("EagleConfig").of_target(target, 1, **changes),
        "eagle3": lambda: find("EagleConfig").of_target(target, 3, 20, **changes),
        "mtp": lambda: find("MtpConfig").of_target(target, **changes),
    }[kind]()
    loaded = find("random_head")(config, jax.random.key(0))
    return common.with_params(loaded, kind, common.values(loaded.params))
