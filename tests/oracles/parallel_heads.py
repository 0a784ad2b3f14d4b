"""P-EAGLE in NumPy, in float64, one pass without a cache, from published tensors.

Tensors go by their published names and are stored ``[out, in]``. Written from the paper's
definitions: P-EAGLE (arXiv 2602.01469), whose first layer is EAGLE-3's (2503.01840).
"""

import numpy as np
from oracles.layers import attend, mlp, rms, turn


def scores(tensors, config, features, tokens, embed, num_draft):
    """Logits f64[K,U] of K drafts.

    Args:
      tensors: of the head.
      config: a ``PEagleConfig``.
      features: f64[n,E], the target's tapped states of the tokens before the pending one.
      tokens: i64[n], the token after each of them; the last is the pending one.
      embed: f64[V,D], the target's, for a head without one.
      num_draft: K.
    """
    layer, n = config.layer, len(features)
    H, theta, eps = layer.head_dim, layer.rope.rope_theta, layer.rms_norm_eps
    M = num_draft - 1
    features = np.concatenate([features, np.tile(tensors["mask_hidden"][0], (M, 1))])
    tokens = np.concatenate([tokens, np.full(M, config.mask_token_id)])
    at = np.arange(n + M)
    if config.norm_before_fc:
        features = rms(features, tensors["input_norm.weight"], eps)
    if config.fc_norm:
        parts = np.split(features, len(config.taps), axis=1)
        parts = [rms(x, tensors[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(parts)]
        features = np.concatenate(parts, axis=1)
    state = features @ tensors["fc.weight"].T
    e = tensors.get("embed_tokens.weight", embed)[tokens]
    for i in range(layer.num_hidden_layers):
        w = lambda name: tensors[f"layers.{i}.{name}.weight"]
        heads = lambda x, name: (x @ w(f"self_attn.{name}_proj").T).reshape(len(x), -1, H)
        if i == 0:
            normed = rms(state, w("hidden_norm"), eps)
            x = normed if config.norm_before_residual else state
            a = np.concatenate([rms(e, w("input_layernorm"), eps), normed], axis=1)
        else:
            a = rms(x, w("input_layernorm"), eps)
        q, k, v = (heads(a, name) for name in "qkv")
        if layer.has_qk_norm:
            q, k = (rms(y, w(f"self_attn.{name}_norm"), eps) for y, name in ((q, "q"), (k, "k")))
        q, k = turn(q, at, theta), turn(k, at, theta)
        sees = np.tri(n + M, dtype=bool)
        x = x + attend(q, k, v, sees) @ w("self_attn.o_proj").T
        h = rms(x, w("post_attention_layernorm"), eps)
        x = x + mlp(h, *(w(f"mlp.{name}_proj") for name in ("gate", "up", "down")))
    return rms(x[n - 1 :], tensors["norm.weight"], eps) @ tensors["lm_head.weight"].T
