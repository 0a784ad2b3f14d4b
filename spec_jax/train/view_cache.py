"""The target's states kept on disk, for several epochs and for sweeps that train several heads."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from spec_jax import processes
from spec_jax.config.checks import check
from spec_jax.models.config import ModelConfig
from spec_jax.models.tensors import on_host
from spec_jax.train.objective import View
from spec_jax.train.placement import Placement
from spec_jax.version import __version__

_PART_BYTES = 1 << 28  # of a weight that are gathered at once


class ViewCache:
    """Stores views in a folder of a limited size, under names made of what they depend on.

    A full cache keeps its oldest views, because the next run of a sweep begins with the batches
    of the first. A view is read back bit-equal. A file that cannot be read is computed again.

    Each row is a file, named by its tokens and found whatever rows stand beside it: in the next
    epoch batches are others. Of several processes, each writes and reads the rows of its own
    devices, so any number of processes can read what any other has written, from a folder that
    they share.

    Args:
      folder: The folder; it is created if it does not exist. Several runs may share it, one
        after the other.
      max_bytes: The largest size of all files together.
      target: The target's weights; all of them, ``config``, ``taps`` and the version of spec_jax
        are part of a view's name.
      config: The target's shape.
      taps: The states that are kept.
      placement: Where the rows of a view lie.

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
        placement: Placement = Placement(),
    ):
        check(max_bytes >= 0, "max_bytes", max_bytes, "0 or more")
        self.folder = pathlib.Path(folder)
        self._placement = placement
        self.folder.mkdir(parents=True, exist_ok=True)
        used = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        self._left = (max_bytes - used) // processes.count()  # a share for each process
        self._identity = _fingerprint(target, config, taps)

    def view(
        self,
        compute: Callable[[np.ndarray, np.ndarray | None], View],
        tokens: np.ndarray,
        begins: np.ndarray | None = None,
    ) -> View:
        """Returns a view that was stored, or computes it and stores it if there is room.

        All processes call it with the same arguments and in the same order.

        Args:
          compute: ``(tokens, begins) -> View``.
          tokens: i32[B,W], the windows.
          begins: i32[B,W], see ``Batch``.
        """
        tokens = np.asarray(tokens, np.int32)
        size = repr(tokens.shape).encode()  # rounding depends on it

        def file(row):
            name = hashlib.sha256(self._identity + size + tokens[row].tobytes())
            if begins is not None:
                name.update(np.asarray(begins[row], np.int32).tobytes())
            return self.folder / f"{name.hexdigest()}.safetensors"

        files = [file(row) for row in range(len(tokens))]
        found = {row: _read(files[row]) for row in self._rows(len(tokens))}
        if not processes.any_process(None in found.values()):
            return self._joined(found, len(tokens))
        view = self._placement.place(compute(tokens, begins))
        self._write(files, {files[row] for row, known in found.items() if known}, view)
        return view

    def _rows(self, batch: int) -> set[int]:
        """The rows of this process."""
        where = self._placement.rows((batch,))
        mine = [slice(None)]
        if where is not None:
            mine = [index[0] for index in where.addressable_devices_indices_map((batch,)).values()]
        return {row for part in mine for row in range(batch)[part]}

    def _joined(self, found: dict[int, dict[str, np.ndarray]], batch: int) -> View:
        def join(name):
            def rows(index):
                return np.stack([found[row][name] for row in range(batch)[index[0]]])

            shape = batch, *next(iter(found.values()))[name].shape
            where = self._placement.rows(shape)
            if where is None:
                return rows((slice(None),))
            return jax.make_array_from_callback(shape, where, rows)

        return View(join("features"), join("hidden"))

    def _write(self, files: list[pathlib.Path], known: set[pathlib.Path], view: View) -> None:
        """Writes rows that are not known and whose first copy this process has, all or none.

        Equal windows are one file.
        """
        rows: dict[pathlib.Path, dict[str, np.ndarray]] = {}
        for name in ("features", "hidden"):
            for shard in getattr(view, name).addressable_shards:
                if shard.replica_id == 0:
                    data = np.asarray(shard.data)
                    for row, x in enumerate(data, shard.index[0].start or 0):
                        if files[row] not in known:
                            rows.setdefault(files[row], {})[name] = np.ascontiguousarray(x)
        size = sum(x.nbytes for row in rows.values() for x in row.values()) + 512 * len(rows)
        if size > self._left:
            return
        for file, arrays in rows.items():
            partial = file.with_suffix(f".partial{processes.index()}")
            try:
                save_file(arrays, partial)
                os.replace(partial, file)
                self._left -= file.stat().st_size
            except (OSError, SafetensorError):  # a full disk is a full cache
                self._left = 0
                partial.unlink(missing_ok=True)
                return


def _read(file: pathlib.Path) -> dict[str, np.ndarray] | None:
    """The states of a window; None if they are not there, or damaged."""
    try:
        found = load_file(file)
    except (OSError, SafetensorError):
        return None
    return found if found.keys() == {"features", "hidden"} else None


def _fingerprint(target: dict, config: ModelConfig, taps: tuple[int, ...]) -> bytes:
    """Hashes version, config, taps and every weight; about a second for each GB of weights."""
    about = (__version__, type(config).__name__, dataclasses.asdict(config), taps)
    digest = hashlib.sha256(repr(about).encode())
    for path, w in jax.tree_util.tree_leaves_with_path(target):
        digest.update(f"{jax.tree_util.keystr(path)} {w.dtype} {w.shape}".encode())
        for part in _parts(w):
            digest.update(on_host(part).reshape(-1).view(np.uint8))
    return digest.digest()


def _parts(w: jax.Array) -> Iterator[jax.Array]:
    """Yields a weight in parts of its first dimension, none of which overfills a device."""
    if w.nbytes <= _PART_BYTES:
        yield w
        return
    rows = max(1, _PART_BYTES * len(w) // w.nbytes)
    for begin in range(0, len(w), rows):
        yield jax.lax.dynamic_slice_in_dim(w, begin, min(rows, len(w) - begin))
