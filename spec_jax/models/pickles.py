"""Reads the tensors of files that torch wrote, where torch is installed."""

from __future__ import annotations

import pathlib
import zipfile
from typing import Any

import numpy as np

from spec_jax.errors import WeightsError
from spec_jax.models.parts import Part, Tensor
from spec_jax.models.shards import SINGLE, weight_files

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
# Clones: tensors that share memory are refused.
_CONVERT = (
    "safetensors.torch.save_file({name: tensor.clone() for name, tensor in "
    f"torch.load('{PICKLE}', weights_only=True).items()}}, '{SINGLE}')"
)


def open_pickles(directory: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors of ``pytorch_model.bin``, or of several such files and their index.

    The files are mapped into memory, and each part is read when it is asked for. Files of torch
    before 1.6 are read whole.

    Args:
      directory: holds the files.

    Raises:
      WeightsError: torch is not installed, a file cannot be read, or a dtype is not known.
    """
    files = weight_files(directory, PICKLE, PICKLE_INDEX)
    return {name: _tensor(name, x) for file in files for name, x in _load(file).items()}


def _tensor(name: str, tensor: Any) -> Tensor:
    """A tensor of torch as ours."""
    kind = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = np.dtype(kind)
    except TypeError as error:
        raise WeightsError(f"tensor {name} has dtype {kind}: {error}") from error
    if dtype.isbuiltin == 2:  # one of ml_dtypes, which torch's ``numpy`` does not know
        import torch

        tensor = tensor.view(getattr(torch, f"int{8 * dtype.itemsize}"))

    def read(part: Part) -> np.ndarray:
        return tensor[tuple(slice(r.start, r.stop) for r in part)].numpy().view(dtype)

    return Tensor(tuple(tensor.shape), dtype, read)


def _load(file: pathlib.Path) -> dict[str, Any]:
    """Returns the tensors by name; nothing else is unpickled."""
    if file.exists() and not file.is_file():
        raise WeightsError(f"{file} is not a regular file")
    try:
        import torch
    except ImportError as error:
        raise WeightsError(
            f"{file} needs torch to be read: install it (pip install torch), or convert the file "
            f"where torch is: {_CONVERT}"
        ) from error
    try:
        is_mapped = zipfile.is_zipfile(file)
        tensors = torch.load(str(file), map_location="cpu", weights_only=True, mmap=is_mapped)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle fails in any way
        cause = f"{type(error).__name__}: {error}"
        raise WeightsError(f"{file} cannot be read by torch: {cause:.500}") from error
    is_sound = isinstance(tensors, dict) and all(
        isinstance(x, torch.Tensor) for x in tensors.values()
    )
    if not is_sound:
        raise WeightsError(f"{file} holds something else than tensors by name")
    for name, tensor in tensors.items():
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # the same bytes many times over
            raise WeightsError(
                f"{file}: tensor {name} has shape {list(tensor.shape)}, but the file holds "
                f"{tensor.untyped_storage().nbytes()} bytes of it; expected tensors that are "
                "stored in full"
            )
    return tensors
