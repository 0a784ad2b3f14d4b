"""Reads safetensors files, the tensors whole or in parts."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from spec_jax.errors import WeightsError
from spec_jax.models.checks import shown
from spec_jax.models.files import parse_json, read_text
from spec_jax.models.parts import Part, Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": jnp.bfloat16,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "BOOL": np.bool_,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
    }.items()
}


def weight_files(directory: pathlib.Path, single: str, index: str) -> list[pathlib.Path]:
    """Returns the files of a directory's tensors: a single one, or those that an index names.

    Where there are both, the single one is read, as in transformers; unless the index names it
    too. ``tensors.unread_index`` says so.

    Args:
      directory: holds them.
      single: the name of the single file.
      index: the name of the index.

    Raises:
      WeightsError: the index cannot be read, or names a file outside of the directory.
    """
    if not (directory / index).exists():
        return [directory / single]
    names = indexed_files(directory, index)
    is_alone = (directory / single).exists() and single not in names
    return [directory / name for name in ([single] if is_alone else names)]


def indexed_files(directory: pathlib.Path, index: str) -> list[str]:
    """Returns the names of the files that a directory's index names, in order.

    Raises:
      WeightsError: see ``weight_files``.
    """
    try:
        stated = parse_json(read_text(directory / index))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{directory / index} is no shard index: {error}") from error
    files = stated.get("weight_map") if isinstance(stated, dict) else None
    if not isinstance(files, dict) or not files:
        raise WeightsError(
            f"{directory / index} is no shard index: weight_map is {shown(files)}; expected an "
            "object with the file of each tensor"
        )
    for name in files.values():
        if not isinstance(name, str) or not _is_inside(name):
            raise WeightsError(
                f"{directory / index}: weight_map names the file {shown(name)}; expected the name "
                "of a file in the same directory"
            )
    return sorted(set(files.values()))


def _is_inside(name: str) -> bool:
    """Whether a name stays in its directory on every system; what lies there may be a link.

    The cache of the Hugging Face hub holds links to files elsewhere.
    """
    paths = pathlib.PurePosixPath(name), pathlib.PureWindowsPath(name)
    is_plain = all(not path.anchor and path.parts and ".." not in path.parts for path in paths)
    return is_plain and "\0" not in name


def open_shards(directory: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    """Returns the tensors of a directory's safetensors files, by name, see ``open_shard``."""
    files = weight_files(directory, SINGLE, INDEX)
    return {name: x for path in files for name, x in open_shard(path, stack).items()}


def open_shard(path: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, by name; each part is read when it is asked for.

    Args:
      path: of the file.
      stack: closes it.

    Raises:
      WeightsError: it cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        with safe_open(path, framework="numpy") as file:  # checks the whole header
            names = file.keys()
        file = stack.enter_context(open(path, "rb", buffering=0))
        begin = 8 + int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(begin - 8).decode())
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read as safetensors: {error}") from error
    return {name: _tensor(file, begin, name, header[name]) for name in names}


def _tensor(file: BinaryIO, begin: int, name: str, entry: Mapping[str, Any]) -> Tensor:
    """The tensor that an entry of a header describes."""
    shape = tuple(entry["shape"])
    stated = entry["dtype"]
    dtype = _DTYPES.get(stated, np.dtype("V", metadata={"stated": stated}))  # is not read
    begin += entry["data_offsets"][0]

    def read(part: Part) -> np.ndarray:
        array = np.empty([len(r) for r in part], dtype)
        content = memoryview(array.reshape(-1).view(np.uint8))
        for offset, size in _runs(part, shape, dtype.itemsize):
            _fill(file, begin + offset, content[:size], name)
            content = content[size:]
        return array

    return Tensor(shape, dtype, read)


def _fill(file: BinaryIO, offset: int, content: memoryview, name: str) -> None:
    file.seek(offset)
    while content:
        count = file.readinto(content)
        if not count:
            raise WeightsError(f"{file.name} ends within tensor {name}")
        content = content[count:]


def _runs(part: Part, shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yields where the bytes of a part are, as offsets and sizes of what lies together."""
    strides = itemsize * np.cumprod([1, *shape[:0:-1]], dtype=np.int64)[::-1]
    is_split = [len(r) < size for r, size in zip(part, shape)]
    inner = max(np.flatnonzero(is_split), default=0)  # dimensions after it are whole
    size = itemsize * math.prod(len(r) for r in part[inner:])
    offsets = np.int64(sum(r.start * int(stride) for r, stride in zip(part, strides)))
    for r, stride in zip(part[:inner], strides):
        offsets = np.add.outer(offsets, np.arange(len(r)) * stride)
    yield from ((offset, size) for offset in offsets.ravel().tolist())
