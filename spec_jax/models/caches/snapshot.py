"""Snapshots of caches: what they hold, how they are saved, and whether they fit a cache."""

from __future__ import annotations

import functools
import pathlib
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_jax.errors import SnapshotError


def _save(self, path: str | pathlib.Path) -> None:
    """Writes the snapshot to one safetensors file."""
    leaves = jax.tree_util.tree_flatten_with_path(self)[0]
    name_of = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    arrays = {name_of(keys): np.asarray(leaf) for keys, leaf in leaves}
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
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        return cls(**_as_tuples(traverse_util.unflatten_dict(arrays, sep=".")))
    except (OSError, TypeError, IndexError, SafetensorError) as error:
        raise SnapshotError(f"{path} is no {cls.__name__}: {error!r}") from error


def _as_tuples(node: Any) -> Any:
    """Nested dicts of arrays, in which those with the keys "0", "1" and so on become tuples."""
    if not isinstance(node, dict):
        return jnp.asarray(node)
    inner = {name: _as_tuples(x) for name, x in node.items()}
    is_numbered = set(inner) == set(map(str, range(len(inner))))
    return tuple(inner[str(i)] for i in range(len(inner))) if is_numbered else inner


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


class CacheSnapshot(NamedTuple):
    """A copy of a cache whose layers are not all attention, or are of several groups.

    Attributes:
      groups: the arrays of each group of layers by name, one a layer: "keys" and "values" as in
        ``KVCacheSnapshot``, or of latent attention "keys" alone, dtype[B,1,S,C]; "ssm",
        f32[B,N,H,Z], and "conv", dtype[B,R-1,C], the latest inputs of the convolution.
      seq_len: i32[B], tokens fed.
    """

    groups: tuple[dict[str, tuple[jax.Array, ...]], ...]
    seq_len: jax.Array

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
    is_alike = jax.tree.structure(ours) == jax.tree.structure(snapshot)
    if not is_alike or describe(ours) != describe(snapshot):
        raise SnapshotError(
            f"the snapshot holds {describe(snapshot)}; this cache has {describe(ours)}"
        )


class Snapshotted:
    """Mixin of caches of one kind of layers: these have ``parts``, ``with_parts``, ``length``."""

    def snapshot(self) -> KVCacheSnapshot | CacheSnapshot:
        """Returns a copy that outlives the cache; ``restore_from_snapshot`` is the inverse."""
        parts = self.parts()
        length = jnp.copy(self.length)
        if set(parts) == {"keys", "values"}:
            return KVCacheSnapshot(**parts, seq_len=length)
        return CacheSnapshot((parts,), length)

    def restore_from_snapshot(self, snapshot: KVCacheSnapshot | CacheSnapshot) -> Any:
        """Returns the cache as it was when the snapshot was taken, without a window.

        A snapshot that lies on other devices goes through ``jax.device_get`` first.

        Raises:
          SnapshotError: the snapshot is of another kind of cache, or of another shape or dtype.
        """
        check_fits(snapshot, jax.eval_shape(self.snapshot))
        if isinstance(snapshot, CacheSnapshot):
            return self.with_parts(snapshot.groups[0], snapshot.seq_len)
        parts = {"keys": snapshot.keys, "values": snapshot.values}
        return self.with_parts(parts, snapshot.seq_len)
