"""Reads and writes the tensors of a checkpoint directory, safetensors or a file of torch.

Reading is strict: a tensor that is missing, unexpected or of the wrong shape is an error that
names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_jax.errors import WeightsError
from spec_jax.models.files import write_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
_DERIVED = ".rotary_emb.inv_freq"  # a buffer that old Llama checkpoints carry along
_FLOAT8 = {
    "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": jnp.dtype(jnp.float8_e5m2),
}


class Shards:
    """The tensors of a directory's safetensors files, each read when it is asked for.

    Args:
      directory: holds one file, or shards and their index.
      stack: closes the files.

    Raises:
      WeightsError: there is no such file, or one cannot be read.
    """

    def __init__(self, directory: pathlib.Path, stack: contextlib.ExitStack):
        self._where: dict[str, pathlib.Path] = {}
        self._files = {}
        for file in self._list(directory):
            try:
                self._files[file] = stack.enter_context(safe_open(file, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{file} cannot be read as safetensors: {error}") from error
            self._where.update(dict.fromkeys(self._files[file].keys(), file))

    @staticmethod
    def _list(directory: pathlib.Path) -> list[pathlib.Path]:
        if (directory / INDEX).exists():
            try:
                index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
                names = sorted(set(index["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise WeightsError(f"{directory / INDEX} is no shard index: {error!r}") from error
            return [directory / name for name in names]
        if (directory / SINGLE).exists():
            return [directory / SINGLE]
        raise WeightsError(f"{directory} has neither {SINGLE} nor {INDEX}")

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._where)

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as it is stored."""
        file = self._where[name]
        if self._files[file].get_slice(name).get_dtype() in _FLOAT8:
            return _read_float8(file, name)
        return self._files[file].get_tensor(name)


def _read_float8(file: pathlib.Path, name: str) -> np.ndarray:
    """Reads a tensor of 8-bit floats, which safetensors can write from NumPy but not read to it."""
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        entry = json.loads(stream.read(size))[name]
        begin, end = entry["data_offsets"]
        stream.seek(8 + size + begin)
        content = stream.read(end - begin)
    return np.frombuffer(content, _FLOAT8[entry["dtype"]]).reshape(entry["shape"])


class StrictReader:
    """Takes the tensors of a checkpoint one by one and keeps track of those that are left.

    Args:
      directory: for messages.
      source: ``Shards``, or another object with ``names() -> set[str]`` and
        ``read(name) -> np.ndarray``.

    Attributes:
      left: names of the tensors that nobody has taken yet.
    """

    def __init__(self, directory: pathlib.Path, source: Any):
        self._directory, self._source = directory, source
        self.left = {name for name in source.names() if not name.endswith(_DERIVED)}

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as it is stored, and leaves it.

        Raises:
          WeightsError: it is missing.
        """
        if name not in self.left:
            raise WeightsError(f"{self._directory}: tensor {name} is missing")
        return self._source.read(name)

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a tensor as it is stored, and removes it from those left.

        Args:
          name: of the tensor.
          shape: the shape that it must have.

        Raises:
          WeightsError: it is missing, has another shape, or holds values that are not finite.
        """
        array = self.read(name)
        if array.shape != shape:
            raise WeightsError(
                f"{self._directory}: tensor {name} has shape {list(array.shape)}; "
                f"config.json asks for {list(shape)}"
            )
        if not np.isfinite(array).all():
            raise WeightsError(f"{self._directory}: tensor {name} holds NaN or infinite values")
        self.left.discard(name)
        return array

    def finish(self) -> None:
        """Checks that no tensor is left.

        Raises:
          WeightsError: some are left; the message names them.
        """
        if self.left:
            names = ", ".join(sorted(self.left)[:8])
            raise WeightsError(f"{self._directory}: unexpected tensors {names}")


def open_tensors(directory: pathlib.Path, stack: contextlib.ExitStack) -> StrictReader:
    """Opens a directory's safetensors, or its ``pytorch_model.bin`` if it has none.

    Args:
      directory: of the checkpoint.
      stack: closes the files.

    Raises:
      WeightsError: it has neither, or they cannot be read.
    """
    has_safetensors = (directory / SINGLE).exists() or (directory / INDEX).exists()
    if has_safetensors:
        return StrictReader(directory, Shards(directory, stack))
    if not (directory / PICKLE).exists():
        raise WeightsError(f"{directory} has neither {SINGLE}, {INDEX} nor {PICKLE}")
    return StrictReader(directory, _Pickle(directory / PICKLE))


class _Pickle:
    """The tensors of one file that torch wrote."""

    def __init__(self, file: pathlib.Path):
        self._tensors = _load(file)

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        # NumPy has no bfloat16 of its own.
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _load(file: pathlib.Path) -> dict:
    """Returns the tensors by name; nothing else is unpickled."""
    try:
        import torch
    except ImportError as error:
        raise WeightsError(
            f"{file} needs torch to be read: install it (pip install torch), or convert the file "
            f"where torch is: safetensors.torch.save_file(torch.load('{PICKLE}', "
            f"weights_only=True), '{SINGLE}')"
        ) from error
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise WeightsError(f"{file} cannot be read by torch: {error}") from error
    is_sound = isinstance(tensors, dict) and all(
        isinstance(x, torch.Tensor) for x in tensors.values()
    )
    if not is_sound:
        raise WeightsError(f"{file} holds something else than tensors by name")
    return tensors


def save_tensors(directory: pathlib.Path, shards: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Writes one file of tensors, or several and their index. Each is written completely or not.

    Args:
      directory: created if it does not exist.
      shards: the tensors of each file, by name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards):
        save_file(dict(shard), directory / f"{name}.partial", metadata={"format": "pt"})
        os.replace(directory / f"{name}.partial", directory / name)
    # A directory that is overwritten must not keep the entry point of the other layout.
    (directory / (INDEX if len(shards) == 1 else SINGLE)).unlink(missing_ok=True)
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        size = sum(array.nbytes for shard in shards for array in shard.values())
        write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
