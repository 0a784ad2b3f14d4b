"""Snapshots of caches: what they hold, how they are saved, and whether they fit a cache."""

from __future__ import annotations

import pathlib
import typing
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_jax.errors import SnapshotError


def _save(self, path: str | pathlib.Path) -> None:
    """Writes the snapshot to one safetensors file."""
    name = lambda keys: ".".join(str(getattr(k, "name", getattr(k, "idx", k))) for k in keys)
    leaves = jax.tree_util.tree_flatten_with_path(self)[0]
    arrays = {name(keys): np.asarray(leaf) for keys, leaf in leaves}
    save_file(arrays, path, metadata={"format": f"spec_jax.{type(self).__name__}"})


def _load(cls, path: str | pathlib.Path):
    """Reads a snapshot that ``save`` wrote.

    Raises:
      SnapshotError: the file is missing or truncated, or holds no snapshot of this kind.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            form = (file.metadata() or {}).get("format")
            if form != f"spec_jax.{cls.__name__}":
                raise SnapshotError(f"{path} is no {cls.__name__}: its format is {form!r}")
            return _build(cls, {name: file.get_tensor(name) for name in file.keys()})
    except (OSError, KeyError, SafetensorError) as error:
        raise SnapshotError(f"{path} is no {cls.__name__}: {error!r}") from error


def _build(kind, arrays: dict[str, np.ndarray]):
    """Builds a snapshot from arrays by name, such as ``seq_len`` or ``attention.keys.0``."""

    def field(name: str, hint):
        inner = {n[len(name) + 1 :]: x for n, x in arrays.items() if n.startswith(f"{name}.")}
        if hasattr(hint, "_fields"):
            return _build(hint, inner)
        if typing.get_origin(hint) is tuple:
            return tuple(jnp.asarray(inner[str(i)]) for i in range(len(inner)))
        return jnp.asarray(arrays[name])

    return kind(**{name: field(name, hint) for name, hint in typing.get_type_hints(kind).items()})


class KVCacheSnapshot(NamedTuple):
    """A copy of an attention cache. It stays valid when the cache itself is donated.

    Attributes:
      keys: one ``dtype[B,G,S,H]`` a layer.
      values: one ``dtype[B,G,S,H]`` a layer.
      seq_len: i32[B], tokens fed.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    seq_len: jax.Array

    save = _save
    load = classmethod(_load)


class StateSnapshot(NamedTuple):
    """A copy of the cache of state-space layers.

    Attributes:
      ssm: one ``f32[B,N,H,Z]`` a layer.
      conv: one ``dtype[B,R-1,C]`` a layer, the latest inputs of the convolution.
      seq_len: i32[B], tokens fed.
    """

    ssm: tuple[jax.Array, ...]
    conv: tuple[jax.Array, ...]
    seq_len: jax.Array

    save = _save
    load = classmethod(_load)


class HybridSnapshot(NamedTuple):
    """A copy of a cache of attention and state-space layers."""

    attention: KVCacheSnapshot
    state: StateSnapshot

    save = _save
    load = classmethod(_load)


def check_fits(snapshot: Any, ours: Any) -> None:
    """Checks that a snapshot has the kind, shapes and dtypes of a cache.

    Args:
      snapshot: the one to restore.
      ours: a snapshot of the cache, or its shapes.

    Raises:
      SnapshotError: they differ; the message describes both.
    """

    def describe(tree):
        kinds = Counter(f"{x.dtype.name}{list(x.shape)}" for x in jax.tree.leaves(tree))
        return ", ".join(f"{n} x {kind}" for kind, n in kinds.items())

    if type(snapshot) is not type(ours):
        raise SnapshotError(
            f"the snapshot is {type(snapshot).__name__}; this cache takes a {type(ours).__name__}"
        )
    if describe(ours) != describe(snapshot):
        raise SnapshotError(
            f"the snapshot holds {describe(snapshot)}; this cache has {describe(ours)}"
        )
