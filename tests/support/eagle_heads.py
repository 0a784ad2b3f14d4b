"""EAGLE heads of random weights, their drafting in NumPy, and rounds of them that are jitted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from support.decoders import HOT, features_of, prefill, propose, rule, run  # noqa: F401
from support.numpy_layers import np_mlp, np_norm, np_rope
from support.tiny_models import LLAMA, random_tensor, random_weights

from spec_jax import decoding
from spec_jax.drafters.eagle.model import EagleConfig, eagle, head_table
from spec_jax.models import transformer

V, U, D, SLOTS = 31, 20, 16, 64
TARGET = dataclasses.replace(LLAMA, max_position_embeddings=256)
LAYER = dataclasses.replace(TARGET, num_hidden_layers=1)
SMALL = dataclasses.replace(LAYER, vocab_size=U)
NARROW = dataclasses.replace(SMALL, hidden_size=12)
TAPS = (0, 1, 2)
CONFIGS = {
    "eagle-1": EagleConfig(1, LAYER, D, V, (3,), fc_bias=True),
    "eagle-3": EagleConfig(3, SMALL, D, V, TAPS),
    "eagle-3 whole vocabulary": EagleConfig(3, LAYER, D, V, TAPS),
    "fc_norm": EagleConfig(3, SMALL, D, V, TAPS, fc_norm=True),
    "norm_before_fc": EagleConfig(3, SMALL, D, V, TAPS, norm_before_fc=True),
    "norm_before_residual": EagleConfig(3, SMALL, D, V, TAPS, norm_before_residual=True),
    "norm_output": EagleConfig(3, SMALL, D, V, TAPS, norm_output=True),
    "own_embed": EagleConfig(3, SMALL, D, V, TAPS, own_embed=True),
    "narrow": EagleConfig(3, NARROW, D, V, TAPS, own_embed=True),
}
D2T = np.sort(np.random.RandomState(0).permutation(V)[:U]) - np.arange(U)  # offsets


def head_of(config):
    head = {
        name: jnp.asarray(random_tensor(f"{name} norm" if "norm" in name else name, spec.shape, 0))
        for name, spec in head_table(config).items()
    }
    if config.layer.vocab_size < config.target_vocab_size:
        head["d2t"] = jnp.asarray(D2T, jnp.int32)
    return head


def system_of(config, strategy="greedy", num_draft=3):
    target = transformer.model(TARGET, config.taps)
    params = {"target": random_weights(TARGET)}
    params["draft"] = {"head": head_of(config), "target": params["target"]}
    return decoding.System(target, eagle(config, target), rule(strategy), num_draft), params


# ------------------------------------------------------------------------ NumPy reference


class NumpyHead:
    """A head fed one pair at a time; keys and values in a list."""

    def __init__(self, config, head, embed):
        self.c, self.w = config, {k: np.asarray(v, np.float64) for k, v in head.items()}
        self.embed, self.keys, self.values = np.asarray(embed, np.float64), [], []
        if config.own_embed:
            self.embed = self.w["embed"]

    def join(self, feature):
        if self.c.version == 1:
            return feature
        if self.c.fc_norm:
            parts = feature.reshape(len(self.c.taps), -1)
            parts = [np_norm(x, self.w[f"fc_norm_{i}"]) for i, x in enumerate(parts)]
            feature = np.concatenate(parts)
        if self.c.norm_before_fc:
            feature = np_norm(feature, self.w["input_norm"])
        return feature @ self.w["fc"]

    def feed(self, state, token):
        w, e, position = self.w, self.embed[token], len(self.keys)
        if self.c.version == 1:
            x = start = np.concatenate([e, state]) @ w["fc"] + w["fc_bias"]
        else:
            normed = np_norm(state, w["hidden_norm"])
            x = np.concatenate([np_norm(e, w["embed_norm"]), normed])
            start = normed if self.c.norm_before_residual else state
        layer = self.c.layer
        N, G, H = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
        q = np_rope((x @ w["q"]).reshape(N, H), position)
        self.keys.append(np_rope((x @ w["k"]).reshape(G, H), position))
        self.values.append((x @ w["v"]).reshape(G, H))
        out = []
        for n in range(N):
            g = n // (N // G)
            scores = np.array([k[g] @ q[n] for k in self.keys]) / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            out.append(sum(p * v[g] for p, v in zip(weights / weights.sum(), self.values)))
        x = start + np.concatenate(out) @ w["o"]
        return np_mlp(x, w)

    def logits(self, x, target_head):
        if self.c.version == 1:
            return x @ target_head
        own = np_norm(x, self.w["norm"]) @ self.w["head"]
        full = np.full(self.c.target_vocab_size, -np.inf)
        ids = np.arange(len(own)) + self.w.get("d2t", np.zeros(len(own)))
        full[ids.astype(int)] = own
        return full

    def recycle(self, x):
        return np_norm(x, self.w["norm"]) if self.c.norm_output else x


def np_draft(config, params, prompt, pending, num_draft):
    """Greedy drafts and their logits after a prompt, every pair fed afresh."""
    target = transformer.model(TARGET, config.taps)
    padded = jnp.asarray([[*prompt, *[0] * (SLOTS - len(prompt))]])  # one compiled shape
    features = features_of(target, params, padded)[0]
    head = NumpyHead(config, params["draft"]["head"], params["target"]["embed"])
    target_head = np.asarray(params["target"]["head"], np.float64)
    for feature, token in zip(np.asarray(features, np.float64), [*prompt[1:], pending]):
        x = head.feed(head.join(feature), token)
    drafts, rows = [], []
    for i in range(num_draft):
        rows.append(head.logits(x, target_head))
        drafts.append(int(rows[-1].argmax()))
        if i + 1 < num_draft:
            x = head.feed(head.recycle(x), drafts[-1])
    return drafts, np.stack(rows)


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7]]
