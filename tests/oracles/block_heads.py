"""Block drafters in NumPy, in float64, one row and one layer at a time, from published tensors.

Tensors go by their published names and are stored ``[out, in]``. Written from the papers'
definitions: DFlash (arXiv 2602.06036), DSpark (2607.05147), TreeFlash (2606.03819); DFlash 2.
"""

from __future__ import annotations

import numpy as np


def rms(x, weight, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def turn(x, positions, theta):
    """Rotary embedding of x[T,N,H], one pair of dimensions at a time."""
    out, H = np.empty_like(x), x.shape[-1]
    for j in range(H // 2):
        angle = positions[:, None] * theta ** (-2 * j / H)
        a, b = x[..., j], x[..., j + H // 2]
        out[..., j] = a * np.cos(angle) - b * np.sin(angle)
        out[..., j + H // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def block_states(tensors, config, features, ids, embed, shift=0):
    """States f64[S,D] before the final norm of the block ``ids``, after features f64[n,E].

    Args:
      tensors: of the head.
      config: a ``BlockConfig``.
      features: the target's tapped states of the tokens before the block.
      ids: i64[S], [pending | masks].
      embed: f64[V,D], the target's.
      shift: of the block's positions, to show that they matter.
    """
    layer, n, S = config.layer, len(features), len(ids)
    H, theta, eps = layer.head_dim, layer.rope.rope_theta, layer.rms_norm_eps
    context = rms(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    x, before, inside = embed[ids], np.arange(n), n + shift + np.arange(S)
    groups = layer.num_attention_heads // layer.num_key_value_heads
    for i in range(layer.num_hidden_layers):
        w = lambda name: tensors[f"layers.{i}.{name}.weight"]
        heads = lambda x, name: (x @ w(f"self_attn.{name}_proj").T).reshape(len(x), -1, H)
        key = lambda x, at: turn(rms(heads(x, "k"), w("self_attn.k_norm"), eps), at, theta)
        y = rms(x, w("input_layernorm"), eps)
        a = convolved(tensors, f"layers.{i}.attention_conv", y, y, 0)
        k = np.concatenate([key(context, before), key(a, inside)]).repeat(groups, axis=1)
        v = np.concatenate([heads(context, "v"), heads(a, "v")]).repeat(groups, axis=1)
        q = turn(rms(heads(a, "q"), w("self_attn.q_norm"), eps), inside, theta)
        out = np.zeros((S, layer.num_attention_heads, H))
        for t in range(S):
            place = np.concatenate([before, inside])
            sees = np.ones(n + S, bool)
            if config.is_causal[i]:
                sees &= place <= inside[t]
            if config.windows[i] is not None:
                sees &= np.abs(place - inside[t]) < config.windows[i]
            for head in range(layer.num_attention_heads):
                scores = k[sees, head] @ q[t, head] / np.sqrt(H)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights / weights.sum() @ v[sees, head]
        out = out.reshape(S, -1) @ w("self_attn.o_proj").T
        x = x + convolved(tensors, f"layers.{i}.attention_conv", y, out, 1)
        y = rms(x, w("post_attention_layernorm"), eps)
        h = convolved(tensors, f"layers.{i}.mlp_conv", y, y, 0)
        gate = h @ w("mlp.gate_proj").T
        out = (gate * sigmoid(gate) * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
        x = x + convolved(tensors, f"layers.{i}.mlp_conv", y, out, 1)
    return x


def convolved(tensors, name, y, z, side):
    """DFlash 2: z f64[S,D] beside the rows before it in the block, by taps that y adds to.

    Without such a convolution z itself.
    """
    if f"{name}.base_kernel" not in tensors:
        return z
    base = tensors[f"{name}.base_kernel"][side]
    taps, D = base.shape
    added = (y @ tensors[f"{name}.kernel_projection.weight"].T).reshape(len(y), 2, taps, -1)
    group, out = D // added.shape[-1], np.zeros_like(z)
    for i in range(len(z)):
        for tap in range(min(taps, i + 1)):
            for d in range(D):
                out[i, d] += (base[tap, d] + added[i, side, tap, d // group]) * z[i - tap, d]
    return out


def step(tensors, config, x, token, embed, unembed):
    """Logits f64[V] of one position and the confidence in its draft, from the token before it."""
    h = rms(x, tensors["norm.weight"], config.layer.rms_norm_eps)
    if config.name == "treeflash":
        e = rms(embed[token], tensors["ar_approximation.norm.weight"])
        both = np.concatenate([e, h]) @ tensors["ar_approximation.ug.weight"].T
        u, g = np.split(both + tensors["ar_approximation.ug.bias"], 2)
        x = x + (g * sigmoid(g) * u) @ tensors["ar_approximation.d.weight"].T
        h = rms(x, tensors["norm.weight"], config.layer.rms_norm_eps)
    logits, confidence = h @ unembed, None
    if config.name == "dflash2":
        of = lambda which: tensors[f"candidate_selector.{which}"]
        read = of("predecessor_codebook")[token] * (of("hidden_projection.weight") @ h)
        paired = logits - 1e4
        for t in np.argsort(logits)[-config.selector_top_k :]:
            paired[t] = logits[t] + read @ of("successor_codebook")[t]
        logits = paired
    if config.name == "dspark":
        e = bias = tensors["markov_head.markov_w1.weight"][token]
        if config.markov_head_type == "gated":
            gate = tensors["markov_head.gate_proj.weight"] @ np.concatenate([h, e])
            bias = e * sigmoid(gate + tensors["markov_head.gate_proj.bias"])
        logits = logits + tensors["markov_head.markov_w2.weight"] @ bias
        if config.has_confidence:
            read = np.concatenate([h, e]) if config.confidence_with_markov else h
            logit = tensors["confidence_head.proj.weight"] @ read
            confidence = sigmoid(logit + tensors["confidence_head.proj.bias"])[0]
    return logits, confidence


def chain(tensors, config, features, pending, embed, unembed, num_draft):
    """The greedy chain: tokens, logits f64[K,V] and confidences, each after the draft before."""
    ids = np.full(config.block_size, config.mask_token_id)
    ids[0] = pending
    x = block_states(tensors, config, features, ids, embed)
    x = x if config.is_anchor_first else x[1:]
    token, drafts, logits, confidences = pending, [], [], []
    for k in range(num_draft):
        scores, confidence = step(tensors, config, x[k], token, embed, unembed)
        token = int(scores.argmax())
        drafts.append(token)
        logits.append(scores)
        confidences.append(confidence)
    return drafts, np.array(logits), confidences
