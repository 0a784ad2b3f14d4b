"""Checksums of what a config names, by which several processes see that they read the same."""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

from spec_jax import zoo

_FIRST = 64 << 20  # bytes of a file that are read
_BY_THE_FIRST = ("config.data.text",)  # what process 0 alone reads


def of_config(values: Mapping[str, Any]) -> dict[str, list]:
    """Returns checksums of the files and directories that a config names.

    Of a model's directory they are of config.json, of the tokenizer, and of the names, shapes and
    places of the tensors, not of their values; of a file, its size and its first 64 MiB; of any
    other directory, the names and sizes of its files.

    Args:
      values: The config by full names; texts may name several paths, separated by commas.
    """
    found = {}
    for key, value in values.items():
        parts = value if isinstance(value, tuple | list) else [value]
        names = [n.strip() for x in parts if isinstance(x, str) for n in x.split(",")]
        sums = {name: _of_path(name) for name in names if name and key not in _BY_THE_FIRST}
        for name, known in sums.items():
            if known is not None:
                found[f"what is in {name} ({key})"] = known
    return found


def _of_path(name: str) -> list | None:
    path = zoo.path(name) or pathlib.Path(name)
    try:
        if path.is_file():
            return _of_file(path)
        if not path.is_dir():
            return None
        if not (path / "config.json").exists():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            named = [[str(file.relative_to(path)), file.stat().st_size] for file in files]
            return [len(files), zlib.crc32(json.dumps(named).encode())]
        sums = [_of_file(path / "config.json")]
        if (path / "tokenizer.json").exists():
            sums.append(_of_file(path / "tokenizer.json"))
        return sums + [_of_tensors(file) for file in sorted(path.glob("*.safetensors"))]
    except OSError:
        return None  # the reader of the file says why


def _of_file(path: pathlib.Path) -> list[int]:
    with open(path, "rb") as file:
        return [path.stat().st_size, zlib.crc32(file.read(_FIRST))]


def _of_tensors(path: pathlib.Path) -> list[int]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return [path.stat().st_size, zlib.crc32(file.read(min(length, _FIRST)))]
