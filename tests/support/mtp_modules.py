"""MTP modules of random weights, their drafting in NumPy, and rounds of them that are jitted."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from support import decoders
from support.decoders import HOT, features_of, propose, rule, run  # noqa: F401
from support.numpy_layers import np_layer, np_norm, np_recycled_drafts
from support.tiny_models import DEEPSEEK, LLAMA, QWEN3, QWEN3_NEXT, random_tensor, random_weights

from spec_jax import decoding
from spec_jax.drafters.mtp.model import MtpConfig, mtp, mtp_table
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.models import transformer
from spec_jax.models.checkpoint import save_pretrained

V, D, SLOTS, K = 31, 16, 64, 3
TARGET = dataclasses.replace(LLAMA, max_position_embeddings=256)
of_target = lambda **changes: MtpConfig.of_target(TARGET, **changes)
CONFIGS = {
    "recycled": of_target(),
    "hidden-first": of_target(order="hidden-first"),
    "recycled before the norm": of_target(recycles_normed=False),
    "zero-centred, own ends": of_target(
        has_zero_centred_norms=True, has_own_embed=True, has_own_head=True
    ),
    "sequential": of_target(protocol="sequential", num_modules=K),
    "sequential before the norm": of_target(
        protocol="sequential",
        num_modules=K,
        recycles_normed=False,
        order="hidden-first",
        taps=(TARGET.num_hidden_layers,),
    ),
}
KINDS = {"qwen3": QWEN3, "deepseek": DEEPSEEK, "qwen3-next": QWEN3_NEXT}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [2]]


def modules_of(config):
    def tensor(name, spec, seed):
        value = random_tensor(name, spec.shape, seed)
        return jnp.asarray(value - 1 if "norm" in name and config.has_zero_centred_norms else value)

    table = mtp_table(config)
    return {
        str(i): {name: tensor(name, spec, i) for name, spec in table.items()}
        for i in range(config.num_modules)
    }


def fused(tensors):
    """The tensors with the experts of a layer in one, gates above the other halves."""
    found = {name: x for name, x in tensors.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        part = lambda e, kind: tensors[f"{prefix}.experts.{e}.{kind}_proj.weight"]
        count = sum(name.startswith(f"{prefix}.experts.") for name in tensors) // 3
        both = [np.concatenate([part(e, "gate"), part(e, "up")]) for e in range(count)]
        found[f"{prefix}.experts.gate_up_proj"] = np.stack(both)
        found[f"{prefix}.experts.down_proj"] = np.stack([part(e, "down") for e in range(count)])
    return found


def write_with_modules(directory, target, tokenizer=None, **changes):
    """Writes a model and its modules as published, in one directory; returns the modules."""
    config = MtpConfig.of_target(target, **changes)
    weights, file = modules_of(config), directory / "model.safetensors"
    model = LoadedModel("target", transformer.model(target), {}, config=target)
    LoadedHead("modules", config, weights).save(directory, model)
    tensors = load_file(file)
    save_pretrained(directory, random_weights(target), target, tokenizer)
    save_file(tensors | load_file(file), file)
    hf = json.loads((directory / "config.json").read_text())
    hf |= {"num_nextn_predict_layers": config.num_modules}
    (directory / "config.json").write_text(json.dumps(hf))
    return config, weights


def system_of(config, strategy="greedy", num_draft=K):
    target = transformer.model(TARGET, config.taps)
    params = {"target": random_weights(TARGET)}
    params["draft"] = {"head": modules_of(config), "target": params["target"]}
    return decoding.System(target, mtp(config, target), rule(strategy), num_draft), params


# ------------------------------------------------------------------------ NumPy reference


class NumpyModule:
    """A module over whole sequences, without a cache."""

    def __init__(self, config, module, target):
        as64 = lambda tree: {k: np.asarray(v, np.float64) for k, v in tree.items()}
        self.c, self.w = config, as64(module)
        if config.has_zero_centred_norms:
            self.w = {k: 1 + w if "norm" in k else w for k, w in self.w.items()}
        self.w.setdefault("embed", np.asarray(target["embed"], np.float64))
        self.w.setdefault("head", np.asarray(target["head"], np.float64))

    def rows(self, states, tokens):
        w = self.w
        e, h = np_norm(w["embed"][tokens], w["embed_norm"]), np_norm(states, w["hidden_norm"])
        x = np.concatenate([e, h] if self.c.order == "embedding-first" else [h, e], -1) @ w["fc"]
        return np_layer(x, np_norm(x, w["attention_norm"]), w, TARGET.head_dim)

    def logits(self, x):
        return np_norm(x, self.w["norm"]) @ self.w["head"]

    def recycle(self, x):
        return np_norm(x, self.w["norm"]) if self.c.recycles_normed else x


def np_draft(config, params, tokens, num_draft=K):
    """Greedy drafts and their logits after tokens of which the last is pending."""
    fed = jnp.asarray([[*tokens[:-1], *[0] * (SLOTS - len(tokens) + 1)]])
    features = features_of(transformer.model(TARGET, config.taps), params, fed)
    features = np.asarray(features[0, : len(tokens) - 1], np.float64)
    modules = [
        NumpyModule(config, module, params["target"]) for module in params["draft"]["head"].values()
    ]
    if config.protocol == "recycled":
        return np_recycled_drafts(modules[0], features, tokens, num_draft)
    tokens, n, logits = list(tokens), len(features), []
    for step in range(1, num_draft + 1):
        states = features  # row t of module m joins row t of the one before with token t + m
        for m in range(1, step + 1):
            x = modules[m - 1].rows(states, tokens[m : m + n])
            states = modules[m - 1].recycle(x)
        logits.append(modules[step - 1].logits(x[-1]))
        tokens.append(int(logits[-1].argmax()))
    return tokens[-num_draft:], np.stack(logits)


# ------------------------------------------------------------------------------- the loop


def prefill(system, params, new, sampler=None, prompts=PROMPTS):
    return decoders.prefill(system, params, prompts, new, sampler)


def rows_of(state):
    return [t[: n + 1].tolist() for t, n in zip(np.asarray(state.tokens), np.asarray(state.length))]
