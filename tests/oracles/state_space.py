"""Mamba-2 and gated delta nets as they are defined: token after token, in float64 NumPy."""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def run_mixer(layer, h, config):
    """What a mixer makes of inputs f64[T,D], and its state and last inputs behind them.

    Args:
      layer: its weights, float64.
      h: the inputs.
      config: a ``MixerConfig``.
    """
    N, H, G, Z = config.num_heads, config.head_dim, config.n_groups, config.state_size
    width, C = N * H, config.conv_dim
    state, last = np.zeros((N, H, Z)), np.zeros((config.conv_kernel, C))
    out = np.zeros_like(h)
    for t, x_t in enumerate(h):
        mixed = x_t @ layer["in"] + layer.get("in_bias", 0)
        gate, raw, dt = mixed[:width], mixed[width : width + C], mixed[width + C :]
        last = np.concatenate([last[1:], raw[None]])
        conv = silu((last.T * layer["conv"][:, 0]).sum(axis=1) + layer.get("conv_bias", 0))
        x = conv[:width].reshape(N, H)
        b, c = conv[width:].reshape(2, G, Z)
        dt = np.clip(np.log1p(np.exp(dt + layer["time_bias"])), *config.time_step_limit)
        y = np.zeros((N, H))
        for n in range(N):
            g = n // (N // G)
            keep = np.exp(-dt[n] * np.exp(layer["decay"][n]))
            state[n] = keep * state[n] + dt[n] * np.outer(x[n], b[g])
            y[n] = state[n] @ c[g] + layer["skip"][n] * x[n]
        y = (y.reshape(-1) * silu(gate)).reshape(G, -1)
        y = rms_norm(y, layer["gate_norm"].reshape(G, -1), config.norm_eps).reshape(-1)
        out[t] = y @ layer["out"] + layer.get("out_bias", 0)
    return out, state, last[1:]


def run_delta_net(layer, h, config):
    """What a gated delta net makes of inputs f64[T,D], and its state and last inputs behind them.

    Args:
      layer: its weights, float64.
      h: the inputs.
      config: a ``MixerConfig``.
    """
    N, H, G, Z = config.num_heads, config.head_dim, config.n_groups, config.state_size
    state, last = np.zeros((N, H, Z)), np.zeros((config.conv_kernel, config.conv_dim))
    unit = lambda x: x / np.sqrt((x * x).sum() + 1e-6)
    out = np.zeros_like(h)
    for t, x_t in enumerate(h):
        last = np.concatenate([last[1:], (x_t @ layer["qkv"])[None]])
        conv = silu((last.T * layer["conv"][:, 0]).sum(axis=1))
        q, k, v = np.split(conv, [G * Z, 2 * G * Z])
        rate = 1 / (1 + np.exp(-(x_t @ layer["rate"])))
        step = np.log1p(np.exp(x_t @ layer["step"] + layer["time_bias"]))
        y = np.zeros((N, H))
        for n in range(N):
            g = n // (N // G)
            key, query = unit(k.reshape(G, Z)[g]), unit(q.reshape(G, Z)[g]) / np.sqrt(Z)
            state[n] *= np.exp(-np.exp(layer["decay"][n]) * step[n])
            error = v.reshape(N, H)[n] - state[n] @ key
            state[n] += rate[n] * np.outer(error, key)
            y[n] = state[n] @ query
        y = rms_norm(y, layer["gate_scale"], config.norm_eps).reshape(-1)
        out[t] = (y * silu(x_t @ layer["z"])) @ layer["out"]
    return out, state, last[1:]


def run_mamba2(params, tokens, config):
    """Logits f64[T,V] of one sequence, and each layer's state and last inputs behind it."""
    as_64 = lambda tree: {k: np.asarray(v, np.float64) for k, v in tree.items() if k != "layers"}
    outer, ends = as_64(params), []
    x = outer["embed"][list(tokens)]
    for i in range(config.num_hidden_layers):
        layer = as_64(params["layers"][str(i)])
        h = rms_norm(x, layer["mixer_norm"], config.layer_norm_epsilon)
        h, *end = run_mixer(layer, h, config.mixer)
        x = x + h
        ends.append(end)
    x = rms_norm(x, outer["final_norm"], config.layer_norm_epsilon)
    return x @ outer.get("head", outer["embed"].T), ends
