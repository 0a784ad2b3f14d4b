"""SHA-256 of every file that checkpoints are written to: models, heads and modules."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import pathlib
import tempfile
from collections.abc import Callable

import jax
from goldens import common, tiny
from goldens.find import find

FORMATS = {"EAGLE-1": "eagle1", "EAGLE-3": "eagle3", "SpecForge": "eagle3", "speculators": "eagle3"}
DTYPES = ("float32", "bfloat16")


def _hashes(write: Callable[[pathlib.Path], None]) -> dict[str, str]:
    """The hash of each file; of JSON, of its values, since their order says nothing."""
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder) / "out"
        write(directory)
        found = {}
        for file in sorted(directory.rglob("*")):
            data = file.read_bytes()
            found[file.name] = hashlib.sha256(data).hexdigest()
            if file.suffix == ".json":
                found[f"{file.name}, values"] = json.dumps(json.loads(data), sort_keys=True)
        return found


def _format(write, name):
    """The keyword of a format, which earlier trees call a layout."""
    return {"format" if "format" in inspect.signature(write).parameters else "layout": name}


def _model(dtype):
    target, save = tiny.llama(), find("save_pretrained")
    return _hashes(lambda to: save(to, target.params, target.config, dtype=dtype))


def _head(format, dtype):
    head, target = tiny.head(FORMATS[format]), tiny.llama()
    write = find("write_head")
    options = _format(write, format) | {"target_config": target.config, "dtype": dtype}
    if format == "speculators":
        options |= {"verifier": "some/target", "target_embed": target.params["embed"]}
    return _hashes(lambda to: write(to, head.config, head.params, **options))


def _modules(format, dtype):
    target = tiny.llama().config
    layer, changes = {
        "MiMo": lambda: (dataclasses.replace(target, model_type="qwen2"),
                         {"order": "hidden-first"}),
        "DeepSeek": lambda: (find("DeepseekConfig")(
            vocab_size=31, hidden_size=16, num_attention_heads=2, q_lora_rank=8, kv_lora_rank=6,
            qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5, n_routed_experts=6,
            moe_intermediate_size=6, num_experts_per_tok=2, n_shared_experts=1, n_group=3,
            topk_group=2,
        ), {"protocol": "sequential", "num_modules": 2, "has_own_embed": True}),
        "Qwen3-Next": lambda: (find("Qwen3NextConfig")(
            vocab_size=31, hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
            shared_expert_intermediate_size=10, partial_rotary_factor=0.5,
        ), {"has_zero_centred_norms": True}),
    }[format]()  # fmt: skip
    layer = dataclasses.replace(layer, num_hidden_layers=1)
    config = find("MtpConfig").of_target(target, layer=layer, **changes)
    params = common.values(find("random_head")(config, jax.random.key(0)).params)
    write = find("write_mtp")
    options = _format(write, format) | {"target_config": target, "dtype": dtype}
    return _hashes(lambda to: write(to, config, params, **options))


def cells() -> dict[str, Callable[[], dict[str, str]]]:
    """Every format and dtype by name, as a function that writes it."""
    found = {}
    for dtype in DTYPES:
        found[f"model/{dtype}"] = functools.partial(_model, dtype)
        for format in FORMATS:
            found[f"head/{format}/{dtype}"] = functools.partial(_head, format, dtype)
        for format in ("MiMo", "DeepSeek", "Qwen3-Next"):
            found[f"modules/{format}/{dtype}"] = functools.partial(_modules, format, dtype)
    return found
