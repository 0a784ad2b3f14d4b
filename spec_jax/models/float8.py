"""Matrices of 8-bit floats in blocks, multiplied by their scales as they are read.

Beside a matrix ``NAME`` stands ``NAME_scale_inv``, a factor for each block of rows and columns; the
last block of either may be partial.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.errors import WeightsError
from spec_jax.models.checks import require, shown, stated_object
from spec_jax.models.parts import Part, Tensor

SCALE = "_scale_inv"
METHOD = "fp8"
_KEY = "quantization_config"
_BLOCK = (128, 128)


def block_of(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Returns rows and columns of a block, as a parsed config.json states them.

    Raises:
      ConfigError: they are stated wrongly.
    """
    block = stated_object(hf, _KEY).get("weight_block_size") or _BLOCK
    is_pair = isinstance(block, (list, tuple)) and len(block) == 2
    is_block = is_pair and all(type(size) is int and size > 0 for size in block)
    require(is_block, f"weight_block_size is {shown(block)}; expected rows and columns")
    return tuple(block)


def has_blocks(hf: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json says that weights are 8-bit floats in blocks."""
    said = hf.get(_KEY)
    is_stated = isinstance(said, Mapping) and said.get("weight_block_size") is not None
    return is_stated and said.get("quant_method") == METHOD


def dequantised(
    directory: pathlib.Path, tensors: Mapping[str, Tensor], block: tuple[int, int]
) -> dict[str, Tensor]:
    """Returns tensors in float32 where they are stored as 8-bit floats, and without the scales.

    Args:
      directory: for messages.
      tensors: by name.
      block: rows and columns that share a scale.

    Raises:
      WeightsError: one has 8 bits and no scales, scales of another shape, or scales and more bits.
    """

    def plain(name: str, stored: Tensor) -> Tensor:
        if f"{name}{SCALE}" in tensors:
            return _scaled(directory, name, stored, tensors[f"{name}{SCALE}"], block)
        if stored.dtype.itemsize == 1:
            message = f"tensor {name}{SCALE} is missing, of {stored.dtype.name} {name}"
            raise WeightsError(f"{directory}: {message}")
        return stored

    scales = {f"{name}{SCALE}" for name in tensors}
    return {name: plain(name, x) for name, x in tensors.items() if name not in scales}


def _scaled(
    directory: pathlib.Path, name: str, stored: Tensor, factors: Tensor, block: tuple[int, int]
) -> Tensor:
    """A tensor times its factors."""
    if stored.dtype.itemsize != 1:
        raise WeightsError(
            f"{directory}: there is a tensor {name}{SCALE}, but {name} is stored as "
            f"{stored.dtype.name}; only 8-bit floats have scales"
        )
    expected = tuple(-(-n // b) for n, b in zip(stored.shape, block))
    if len(stored.shape) != 2 or factors.shape != expected:
        raise WeightsError(
            f"{directory}: tensor {name}{SCALE} has shape {list(factors.shape)}; {name} of "
            f"shape {list(stored.shape)} has {list(expected)} blocks of {list(block)}"
        )

    def read(part: Part) -> np.ndarray:
        within = list(zip(part, block))
        blocks = tuple(range(r.start // b, -(-r.stop // b)) for r, b in within)
        scales = factors.read(blocks).astype(np.float32)
        for axis, (r, b) in enumerate(within):
            scales = scales.take(np.asarray(r) // b - r.start // b, axis=axis)
        return stored.read(part).astype(np.float32) * scales

    return Tensor(stored.shape, np.dtype(np.float32), read)
