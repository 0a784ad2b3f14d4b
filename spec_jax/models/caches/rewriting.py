"""Caches that jax cannot write in place.

A decode loop writes a few slots a pass. On a CPU, jax before 0.11.2 computes the update of a
bfloat16 array in float32, so that every write converts the whole array there and back. The remedy
is another dtype or a newer jax; docs/decisions.md says why caches are not stored in another type.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from spec_jax.models.caches.kv import KVCache

_IN_PLACE_SINCE = (0, 11, 2)


def is_rewritten(
    dtype: DTypeLike, platform: str, version: Sequence[int] = jax.__version_info__
) -> bool:
    """Returns whether writing one slot of a cache rewrites the whole array.

    Args:
      dtype: of keys and values.
      platform: where they lie, such as "cpu".
      version: of jax.
    """
    return platform == "cpu" and dtype == jnp.bfloat16 and tuple(version) < _IN_PLACE_SINCE


def warn_if_rewritten(
    states: Mapping[str, tuple[Callable[..., Any], Any]], stacklevel: int = 2
) -> None:
    """Warns once if passes would rewrite the key-value caches of any of these states.

    Args:
      states: what makes each, ``(params, batch, slots) -> state`` and the weights on their devices,
        by the name of what it belongs to, such as "target".
      stacklevel: of the warning.
    """
    names = [name for name, (init, params) in states.items() if _has_rewritten(init, params)]
    if names:
        models = " and ".join(names)
        needed = ".".join(map(str, _IN_PLACE_SINCE))
        warnings.warn(
            f"on a CPU jax {jax.__version__} rewrites a whole bfloat16 cache, here of {models}, "
            "whenever it writes a token, and decoding slows down as slots are added; load "
            f"{models} in float32, or install jax {needed} or newer (Python 3.12 or newer)",
            stacklevel=stacklevel,
        )


def _has_rewritten(init: Callable[..., Any], params: Any) -> bool:
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    devices = set().union(*(x.devices() for x in arrays))
    if not any(is_rewritten(jnp.bfloat16, device.platform) for device in devices):
        return False
    state = jax.eval_shape(lambda params: init(params, 1, 8), params)

    def is_cache(node):
        return isinstance(node, KVCache)

    caches = filter(is_cache, jax.tree.leaves(state, is_leaf=is_cache))
    return any(x.dtype == jnp.bfloat16 for cache in caches for x in jax.tree.leaves(cache))
