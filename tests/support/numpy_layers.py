"""Parts of a Llama layer in NumPy, with the norm's epsilon and the angles of ``LLAMA``."""

from __future__ import annotations

import numpy as np
from support.tiny_models import LLAMA


def np_norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + LLAMA.rms_norm_eps) * w


def np_rope(x, position):
    """Of [...,N,H]; ``position`` is one of all heads, or one for each of [T,N,H]."""
    half = x.shape[-1] // 2
    speed = LLAMA.rope.rope_theta ** (-np.arange(half) / half)
    angle = np.asarray(position)[..., None, None] * speed
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )


def np_mlp(x, w):
    """The residual stream after the mlp of weights ``w``."""
    h = np_norm(x, w["mlp_norm"])
    gate = h @ w["gate"]
    return x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
