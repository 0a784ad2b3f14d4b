"""The header of a GGUF file: its fields, and where its tensors are."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import types
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from spec_jax.config.checks import check
from spec_jax.errors import WeightsError
from spec_jax.models.checks import require, shown

SUFFIX = ".gguf"
MAX_BYTES = 1 << 26  # of the fields and the list of tensors
MAX_TEXTS = 1 << 20  # in all lists: the largest vocabularies have .8 million with their merges
MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 4
_TYPES = "<u1 <i1 <u2 <i2 <u4 <i4 <f4 ? text list <u8 <i8 <f8".split()  # of values, by number


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor is in a file.

    Attributes:
      shape: of its values, as NumPy has it; the file states it in the other order.
      type: the ``gguf.GGMLQuantizationType`` of its values.
      row_bytes: of the values along its last dimension.
      begin: of its first byte in the file.
    """

    shape: tuple[int, ...]
    type: Any
    row_bytes: int
    begin: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What a GGUF file says before its weights.

    Attributes:
      path: of the file.
      fields: by key; lists of numbers are arrays.
      tensors: by name.
    """

    path: pathlib.Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Entry]


def library(path: pathlib.Path) -> types.ModuleType:
    """Returns the ``gguf`` package, which is imported when it is first needed.

    Args:
      path: of the file that needs it.

    Raises:
      WeightsError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise WeightsError(
            f"{path} is a GGUF file, which needs the package gguf: pip install 'spec_jax[gguf]'"
        ) from error
    return gguf


def read_header(path: pathlib.Path) -> Header:
    """Reads the header of a GGUF file; that of a file that has not changed is remembered.

    Time and memory are bounded whatever the file says.

    Raises:
      WeightsError: the file is damaged, of another version, split over several files, or needs a
        package that is not installed.
    """
    try:
        state = path.stat()
        return _read(path, state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as GGUF: {error}") from error


@functools.lru_cache(maxsize=2)
def _read(path: pathlib.Path, size: int, *_changed: int) -> Header:
    gguf = library(path)
    if not path.is_file():
        raise OSError("it is not a regular file")
    with open(path, "rb") as file:
        cursor = _Cursor(file, size)
        require(cursor.take(4) == b"GGUF", "it does not begin with GGUF")
        version = cursor.number("<u4")
        is_known = version in (2, 3)
        require(is_known, f"version {version}; expected 2 or 3, with its lowest byte first")
        num_tensors = cursor.count("tensors", MAX_TENSORS)
        num_fields = cursor.count("fields", MAX_FIELDS)
        fields = {}
        for _ in range(num_fields):
            key = cursor.text()
            require(key not in fields, f"the field {shown(key)} is there twice")
            fields[key] = cursor.value(cursor.number("<u4"))
        stated = [_stated_tensor(cursor) for _ in range(num_tensors)]
    remedy = "merge them: llama-gguf-split --merge FIRST.gguf OUT.gguf"
    is_alone = _integer(fields, "split.count", 1) <= 1
    require(is_alone, f"it is one of several files; {remedy}")
    alignment = _integer(fields, "general.alignment", 32)
    is_power = alignment >= 1 and not alignment & (alignment - 1)
    check(is_power, "general.alignment", alignment, "a power of two")
    begin = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in stated:
        require(name not in tensors, f"the tensor {shown(name)} is there twice")
        tensors[name] = _entry(gguf, name, shape, kind, begin + offset)
    _check_places(tensors, size)
    return Header(path, types.MappingProxyType(fields), types.MappingProxyType(tensors))


def _integer(fields: Mapping[str, Any], key: str, default: int) -> int:
    value = fields.get(key, default)
    check(isinstance(value, int), key, value, "an integer")
    return value


class _Cursor:
    """Reads one value after the other, and refuses what would go on for too long."""

    def __init__(self, file: BinaryIO, size: int):
        self._file = file
        self._size = size
        self._texts_left = MAX_TEXTS
        self.position = 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        end = self.position + count
        if end > min(self._size, MAX_BYTES):
            what = "the file ends" if end > self._size else f"its header exceeds {MAX_BYTES} bytes"
            raise ValueError(f"{what}: a value of {count} bytes at byte {self.position}")
        self.position = end
        return self._file.read(count)

    def number(self, dtype: str) -> Any:
        """The next number."""
        return np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0].item()

    def count(self, what: str, limit: int) -> int:
        """The next number, of things of which there are at most so many."""
        count = self.number("<u8")
        require(count <= limit, f"it says that it has {count} {what}; expected at most {limit}")
        return count

    def text(self) -> str:
        """The next text, after its length."""
        return self.take(self.number("<u8")).decode()

    def value(self, kind: int) -> Any:
        """The next value of a kind; a list has numbers or texts."""
        name = _TYPES[kind] if kind < len(_TYPES) else None
        if name == "text":
            return self.text()
        if name != "list":
            return self.number(self._number(kind))
        inner = self.number("<u4")
        if inner < len(_TYPES) and _TYPES[inner] == "text":
            length = self.count("texts in lists", self._texts_left)
            self._texts_left -= length
            return [self.text() for _ in range(length)]
        dtype = np.dtype(self._number(inner))
        length = self.count("numbers in a list", MAX_BYTES)
        return np.frombuffer(self.take(length * dtype.itemsize), dtype)

    def _number(self, kind: int) -> str:
        name = _TYPES[kind] if kind < len(_TYPES) else None
        if name in (None, "text", "list"):
            raise ValueError(f"a value of type {kind} at byte {self.position} is not read")
        return name


def _stated_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of the next tensor in the list."""
    name = cursor.text()
    rank = cursor.number("<u4")
    is_fit = 1 <= rank <= MAX_DIMENSIONS
    require(is_fit, f"tensor {shown(name)} has {rank} dimensions; expected 1 to 4")
    shape = tuple(cursor.number("<u8") for _ in range(rank))[::-1]
    message = f"tensor {shown(name)} has the shape {shape}; expected positive numbers"
    require(min(shape) >= 1, message)
    return name, shape, cursor.number("<u4"), cursor.number("<u8")


@functools.cache
def _is_read(gguf: Any, kind: int) -> bool:
    """Whether the package makes values of this type plain."""
    try:
        kind = gguf.GGMLQuantizationType(kind)
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True


def _entry(gguf: Any, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Entry:
    if not _is_read(gguf, kind):
        said = {int(x): x.name for x in gguf.GGMLQuantizationType}.get(kind, kind)
        raise ValueError(f"tensor {shown(name)} is stored as {said}, which is not read")
    kind = gguf.GGMLQuantizationType(kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    message = f"tensor {shown(name)} has rows of {shape[-1]}, not in blocks of {kind.name}, {block}"
    require(shape[-1] % block == 0, message)
    return Entry(shape, kind, shape[-1] // block * block_bytes, begin)


def _check_places(tensors: Mapping[str, Entry], size: int) -> None:
    """Refuses tensors beyond the end of the file, and bytes that belong to two of them."""
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].begin):
        require(entry.begin >= end, f"tensor {shown(name)} lies over another one")
        end = entry.begin + math.prod(entry.shape[:-1]) * entry.row_bytes
        require(end <= size, f"the file ends within tensor {shown(name)}")
