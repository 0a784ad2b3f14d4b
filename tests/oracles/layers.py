"""Parts of transformer layers in NumPy, in float64, over whole sequences without a cache."""

import numpy as np


def rms(x, weight, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def turn(x, positions, theta):
    """Rotary embedding of x[T,N,H], one pair of dimensions at a time."""
    out, H = np.empty_like(x), x.shape[-1]
    for j in range(H // 2):
        angle = np.asarray(positions)[:, None] * theta ** (-2 * j / H)
        a, b = x[..., j], x[..., j + H // 2]
        out[..., j] = a * np.cos(angle) - b * np.sin(angle)
        out[..., j + H // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attend(q, k, v, sees):
    """Attention f64[T,N*H] of q[T,N,H] over k and v[S,G,H], where ``sees`` bool[T,S] allows it."""
    T, N, H = q.shape
    k, v = (x.repeat(N // x.shape[1], axis=1) for x in (k, v))
    out = np.zeros_like(q)
    for t in range(T):
        for head in range(N):
            scores = k[sees[t], head] @ q[t, head] / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ v[sees[t], head]
    return out.reshape(T, -1)


def mlp(h, gate, up, down):
    """The gated feed-forward part; matrices are stored ``[out, in]``."""
    gated = h @ gate.T
    return (gated * sigmoid(gated) * (h @ up.T)) @ down.T
