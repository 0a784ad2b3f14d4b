"""Fresh heads that begin with weights of the target."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.contracts import Model
from spec_jax.models.families import AnyConfig
from spec_jax.models.params import layer_weights


def from_target(
    head: dict, target: Any, config: AnyConfig | Model, ids: jax.Array | None = None
) -> dict:
    """Copies the target's last layer, embedding, final norm and output head into fresh weights.

    A weight is copied where name and shape agree. Of a map that takes embedding and state side
    by side (EAGLE-3's q, k, v), the state's half is copied. The rest stays as it is. Of a custom
    model only embedding and output head are known.

    Args:
      head: The fresh weights by name; those of several modules may be nested.
      target: The target's weights, its layers apart or stacked.
      config: The target's shape; of a custom model, its functions.
      ids: i32[U], the ids of a reduced vocabulary. None means the whole vocabulary.

    Returns:
      A dict of the same shapes.
    """
    if isinstance(config, Model):
        target = config.ends(target)
        known = {}
    else:
        last = layer_weights(config, target, config.num_hidden_layers - 1)
        known = {**last, "norm": target["final_norm"]}
    embed = target["embed"]
    D = embed.shape[1]
    output = target["head"] if "head" in target else embed.T
    known["embed"] = embed
    known["head"] = output if ids is None else output[:, ids]

    def leaf(name, w):
        if isinstance(w, dict):
            return {inner: leaf(inner, x) for inner, x in w.items()}
        w0 = known.get(name)
        if w0 is None:
            return w
        if w0.shape == w.shape:
            return jnp.array(w0, w.dtype)
        if w.ndim == 2 and w.shape == (2 * D, *w0.shape[1:]):
            return jnp.concatenate([w[:D], w0.astype(w.dtype)])
        return w

    return {name: leaf(name, w) for name, w in head.items()}
