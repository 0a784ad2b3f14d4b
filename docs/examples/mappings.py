"""Weights of other libraries for ``LoadedModel.from_params``: by our names, theirs and a transform.

Of our linear maps the first axis is the input, all heads stand side by side, and the rotary
dimensions of a head come in halves, as in transformers.
"""

import math


def leaf_of(weights, names, axis=None):
    """Returns the ``leaf`` that ``from_params`` asks for each weight.

    Args:
      weights: their arrays by name.
      names: by our name theirs, in which ``{i}`` is the number of the layer, and a transform.
      axis: along which the layers are stacked; None: they are apart.
    """

    def leaf(name, layer):
        theirs, transform = names[name]
        array = weights[theirs.replace("{i}", str(layer))]
        return transform(array if axis is None or layer is None else array.take(layer, axis))

    return leaf


def same(w):
    return w


def to_heads(w):  # [D,N,H] to [D,N*H]
    return w.reshape(w.shape[0], -1)


def from_heads(w):  # [N,H,D] to [N*H,D]
    return w.reshape(-1, w.shape[-1])


def halves(w):
    """Rotary dimensions in pairs, [...,H], as two halves."""
    return w.reshape(*w.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(w.shape)


# tunix, its state's names joined with dots. Qwen 2 has the biases, Qwen 3 the norms of q and k.
TUNIX = {
    "embed": ("embedder.input_embedding", same),
    "attention_norm": ("layers.{i}.input_layernorm.w", same),
    "q": ("layers.{i}.attn.q_proj.w", to_heads),
    "k": ("layers.{i}.attn.k_proj.w", to_heads),
    "v": ("layers.{i}.attn.v_proj.w", to_heads),
    "q_bias": ("layers.{i}.attn.q_bias", same),
    "k_bias": ("layers.{i}.attn.k_bias", same),
    "v_bias": ("layers.{i}.attn.v_bias", same),
    "q_norm": ("layers.{i}.attn.q_norm.w", same),
    "k_norm": ("layers.{i}.attn.k_norm.w", same),
    "o": ("layers.{i}.attn.o_proj.w", from_heads),
    "mlp_norm": ("layers.{i}.post_attention_layernorm.w", same),
    "gate": ("layers.{i}.mlp.gate_proj.kernel", same),
    "up": ("layers.{i}.mlp.up_proj.kernel", same),
    "down": ("layers.{i}.mlp.down_proj.kernel", same),
    "final_norm": ("final_norm.w", same),
    "head": ("lm_head.w", same),
}

# keras-hub's Llama, {w.path: w for w in backbone.weights}; its epsilon is 1e-6.
KERAS_HUB = {
    "embed": ("token_embedding/embeddings", same),
    "attention_norm": ("transformer_layer_{i}/self_attention_layernorm/scale", same),
    "q": ("transformer_layer_{i}/self_attention/query/kernel", to_heads),
    "k": ("transformer_layer_{i}/self_attention/key/kernel", to_heads),
    "v": ("transformer_layer_{i}/self_attention/value/kernel", to_heads),
    "o": ("transformer_layer_{i}/self_attention/attention_output/kernel", from_heads),
    "mlp_norm": ("transformer_layer_{i}/feedforward_layernorm/scale", same),
    "gate": ("transformer_layer_{i}/feedforward_gate_dense/kernel", same),
    "up": ("transformer_layer_{i}/feedforward_intermediate_dense/kernel", same),
    "down": ("transformer_layer_{i}/feedforward_output_dense/kernel", same),
    "final_norm": ("sequence_output_layernorm/scale", same),
    "head": ("token_embedding/reverse_embeddings", same),
}


def maxtext(head_dim, *, has_pairs):
    """MaxText's scanned layers, ``params/decoder/...``, which are stacked along axis 1.

    Args:
      head_dim: H; the query's map is divided by its root there.
      has_pairs: rotary dimensions come in pairs, as with its ``rope_type: llama3.1``.
    """
    rotary = halves if has_pairs else same
    at = "decoder/layers/"
    return {
        "embed": ("token_embedder/embedding", same),
        "attention_norm": (at + "pre_self_attention_layer_norm/scale", same),
        "q": (
            at + "self_attention/query/kernel",
            lambda w: to_heads(rotary(w) * math.sqrt(head_dim)),
        ),
        "k": (at + "self_attention/key/kernel", lambda w: to_heads(rotary(w))),
        "v": (at + "self_attention/value/kernel", to_heads),
        "o": (at + "self_attention/out/kernel", from_heads),
        "mlp_norm": (at + "post_self_attention_layer_norm/scale", same),
        "gate": (at + "mlp/wi_0/kernel", same),
        "up": (at + "mlp/wi_1/kernel", same),
        "down": (at + "mlp/wo/kernel", same),
        "final_norm": ("decoder/decoder_norm/scale", same),
        "head": ("decoder/logits_dense/kernel", same),
    }
