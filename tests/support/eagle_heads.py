"""EAGLE heads of random weights, their drafting in NumPy, and rounds of them that are jitted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from support.decoders import HOT, features_of, prefill, propose, rule, run  # noqa: F401
from support.numpy_layers import np_layer, np_norm, np_recycled_drafts
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
    """A head over whole sequences, without a cache."""

    def __init__(self, config, params):
        as64 = lambda x: np.asarray(x, np.float64)
        self.c, self.w = config, {name: as64(x) for name, x in params["head"].items()}
        self.embed = self.w["embed"] if config.own_embed else as64(params["target"]["embed"])
        self.target_head = as64(params["target"]["head"])

    def join(self, features):
        if self.c.version == 1:
            return features
        if self.c.fc_norm:
            parts = np.split(features, len(self.c.taps), axis=1)
            parts = [np_norm(x, self.w[f"fc_norm_{i}"]) for i, x in enumerate(parts)]
            features = np.concatenate(parts, axis=1)
        if self.c.norm_before_fc:
            features = np_norm(features, self.w["input_norm"])
        return features @ self.w["fc"]

    def rows(self, states, tokens):
        w, e = self.w, self.embed[tokens]
        if self.c.version == 1:
            x = a = np.concatenate([e, states], axis=1) @ w["fc"] + w["fc_bias"]
        else:
            normed = np_norm(states, w["hidden_norm"])
            a = np.concatenate([np_norm(e, w["embed_norm"]), normed], axis=1)
            x = normed if self.c.norm_before_residual else states
        return np_layer(x, a, w, self.c.layer.head_dim)

    def logits(self, x):
        if self.c.version == 1:
            return x @ self.target_head
        own = np_norm(x, self.w["norm"]) @ self.w["head"]
        full = np.full(self.c.target_vocab_size, -np.inf)
        ids = np.arange(len(own)) + self.w.get("d2t", np.zeros(len(own)))
        full[ids.astype(int)] = own
        return full

    def recycle(self, x):
        return np_norm(x, self.w["norm"]) if self.c.norm_output else x


def np_draft(config, params, prompt, pending, num_draft):
    """Greedy drafts and their logits after a prompt."""
    target = transformer.model(TARGET, config.taps)
    padded = jnp.asarray([[*prompt, *[0] * (SLOTS - len(prompt))]])  # one compiled shape
    features = features_of(target, params, padded)[0, : len(prompt)]
    head = NumpyHead(config, params["draft"])
    states = head.join(np.asarray(features, np.float64))
    return np_recycled_drafts(head, states, [*prompt, pending], num_draft)


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7]]
