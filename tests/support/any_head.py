"""A head of any config, with random weights."""

import jax.numpy as jnp
import numpy as np
from support.tiny_models import random_tensor

from spec_jax.drafters.registry import kind_of
from spec_jax.loading import LoadedHead
from spec_jax.models.params import flat_table, nest


def any_head(config, dtype="float32", seed=0):
    """Its reduced vocabulary, if any, holds ids of the target that are spread evenly."""
    table = flat_table(kind_of(config).head.table(config))
    params = nest(
        {
            name: jnp.asarray(random_tensor(name, spec.shape, seed), spec.dtype or dtype)
            for name, spec in table.items()
        }
    )
    U, V = config.layer.vocab_size, config.target_vocab_size
    if U < V:
        params["d2t"] = jnp.asarray(np.arange(U) * (V - 1) // (U - 1) - np.arange(U), jnp.int32)
    return LoadedHead("head", config, params)
