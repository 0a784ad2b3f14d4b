"""The target's states kept on disk, for sweeps that train several heads on the same batches."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from spec_jax.errors import ConfigError
from spec_jax.models.config import ModelConfig
from spec_jax.train.objective import View


class ViewCache:
    """Stores views in a folder of a limited size, under names made of what they depend on.

    A full cache keeps its oldest views, because the next run of a sweep begins with the batches
    of the first. A view is read back bit-equal. A file that cannot be read is computed again.

    Args:
      folder: The folder; it is created if it does not exist. Several runs may share it, one
        after the other.
      max_bytes: The largest size of all files together.
      target: The target's weights; they, ``config`` and ``taps`` are part of a view's name.
      config: The target's shape.
      taps: The states that are kept.

    Raises:
      ConfigError: The size is negative.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        max_bytes: int,
        target: dict,
        config: ModelConfig,
        taps: tuple[int, ...],
    ):
        if max_bytes < 0:
            raise ConfigError(f"max_bytes is {max_bytes}; expected 0 or more")
        self.folder, self._max_bytes = pathlib.Path(folder), max_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._bytes = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        self._identity = _fingerprint(target, config, taps)

    def view(self, tokens: np.ndarray, compute: Callable[[np.ndarray], View]) -> View:
        """Returns a view that was stored, or computes it and stores it if there is room.

        Args:
          tokens: i32[B,W], the windows.
          compute: Computes the view of the windows.
        """
        tokens = np.asarray(tokens, np.int32)
        name = hashlib.sha256(self._identity + repr(tokens.shape).encode() + tokens.tobytes())
        path = self.folder / f"{name.hexdigest()}.safetensors"
        try:
            return View(**load_file(path))
        except (OSError, SafetensorError, TypeError):
            pass
        view = compute(tokens)
        arrays = jax.device_get({"features": view.features, "hidden": view.hidden})
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        size = sum(x.nbytes for x in arrays.values()) + 512  # and the header
        if self._bytes + size <= self._max_bytes:
            partial = path.with_suffix(".partial")
            try:
                save_file(arrays, partial)
                os.replace(partial, path)
                self._bytes += path.stat().st_size
            except (OSError, SafetensorError):  # a full disk is a full cache
                self._max_bytes = 0
                partial.unlink(missing_ok=True)
        return view


def _fingerprint(target: dict, config: ModelConfig, taps: tuple[int, ...]) -> bytes:
    """Hashes config, taps, and the type, the shape and a few values of every weight."""
    about = (type(config).__name__, dataclasses.asdict(config), taps)
    digest = hashlib.sha256(repr(about).encode())
    for path, w in jax.tree_util.tree_leaves_with_path(target):
        some = np.asarray(w[tuple(0 for _ in w.shape[:-1])])
        digest.update(f"{jax.tree_util.keystr(path)} {w.dtype} {w.shape}".encode())
        digest.update(some.tobytes())
    return digest.digest()
