"""A layer in NumPy with the norms and angles of ``LLAMA``, and greedy drafting of heads."""

import numpy as np
from oracles.layers import attend, mlp, rms, turn
from support.tiny_models import LLAMA


def np_norm(x, w):
    return rms(x, w, LLAMA.rms_norm_eps)


def np_layer(x, a, w, head_dim):
    """The residual stream f64[T,D] after attention, which reads ``a``, and the mlp."""
    q, k, v = (np.reshape(a @ w[n], (len(a), -1, head_dim)) for n in "qkv")
    q, k = (turn(y, range(len(a)), LLAMA.rope.rope_theta) for y in (q, k))
    x = x + attend(q, k, v, np.tri(len(a), dtype=bool)) @ w["o"]
    return x + mlp(np_norm(x, w["mlp_norm"]), w["gate"].T, w["up"].T, w["down"].T)


def np_recycled_drafts(head, states, tokens, num_draft):
    """Greedy drafts and their logits after tokens of which the last is pending.

    Args:
      head: whose ``rows(states, tokens)`` join each state with the token after it.
      states: f64[T,D], of the tokens before the pending one.
      tokens: T + 1 ids.
      num_draft: K.
    """
    tokens, logits = list(tokens), []
    for _ in range(num_draft):
        x = head.rows(states, tokens[1:])
        logits.append(head.logits(x[-1]))
        tokens.append(int(logits[-1].argmax()))
        states = np.concatenate([states, head.recycle(x[-1:])])
    return tokens[-num_draft:], np.stack(logits)
