"""Reads the tensors of a checkpoint directory, from safetensors or from a file of torch."""

from __future__ import annotations

import contextlib
import pathlib
import pickle

import numpy as np

from spec_jax.errors import WeightsError
from spec_jax.models.checkpoint import INDEX, SINGLE, Shards, StrictReader

PICKLE = "pytorch_model.bin"


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
        self._file = file

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
