"""Block drafters in NumPy, in float64, one row and one layer at a time, from published tensors.

Tensors go by their published names and are stored ``[out, in]``. Written from the papers'
definitions: DFlash (arXiv 2602.06036), DSpark (2607.05147), TreeFlash (2606.03819); DFlash 2.
"""

import numpy as np
from oracles.layers import attend, mlp, rms, sigmoid, turn


def block_states(tensors, config, features, ids, embed):
    """States f64[S,D] before the final norm of the block ``ids``, after features f64[n,E].

    Args:
      tensors: of the head.
      config: a ``BlockConfig``.
      features: the target's tapped states of the tokens before the block.
      ids: i64[S], [pending | masks].
      embed: f64[V,D], the target's.
    """
    layer, n, S = config.layer, len(features), len(ids)
    H, theta, eps = layer.head_dim, layer.rope.rope_theta, layer.rms_norm_eps
    context = rms(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    x, before, inside = embed[ids], np.arange(n), n + np.arange(S)
    place = np.concatenate([before, inside])
    for i in range(layer.num_hidden_layers):
        w = lambda name: tensors[f"layers.{i}.{name}.weight"]
        heads = lambda x, name: (x @ w(f"self_attn.{name}_proj").T).reshape(len(x), -1, H)
        key = lambda x, at: turn(rms(heads(x, "k"), w("self_attn.k_norm"), eps), at, theta)
        y = rms(x, w("input_layernorm"), eps)
        a = convolved(tensors, f"layers.{i}.attention_conv", y, y, 0)
        k = np.concatenate([key(context, before), key(a, inside)])
        v = np.concatenate([heads(context, "v"), heads(a, "v")])
        q = turn(rms(heads(a, "q"), w("self_attn.q_norm"), eps), inside, theta)
        distance = place - inside[:, None]
        sees = np.ones((S, n + S), bool)
        if config.is_causal[i]:
            sees &= distance <= 0
        if config.windows[i] is not None:
            sees &= np.abs(distance) < config.windows[i]
        out = attend(q, k, v, sees) @ w("self_attn.o_proj").T
        x = x + convolved(tensors, f"layers.{i}.attention_conv", y, out, 1)
        y = rms(x, w("post_attention_layernorm"), eps)
        h = convolved(tensors, f"layers.{i}.mlp_conv", y, y, 0)
        out = mlp(h, *(w(f"mlp.{name}_proj") for name in ("gate", "up", "down")))
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
