"""Checksums of what a config names, by which runs and processes see that they read the same."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spec_jax import hub, zoo

_FIRST = 64 << 20  # bytes of the header of a safetensors file that are read
_BY_THE_FIRST = ("config.data.text",)  # what process 0 alone reads
_WEIGHTS = (".safetensors", ".bin")
# What is read of a directory that holds a model or a head, beside its weights.
_OF_A_MODEL = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")


def of_config(values: Mapping[str, Any], *, has_weights: bool = True) -> dict[str, str]:
    """Returns checksums of the files, directories and modules that a config names.

    They are SHA-256 of all bytes, 0.8 s a GB on one core. Of a model's directory, cached by the
    hub or not, they are of its weights, its tokenizer and its JSON files; of any other directory,
    of all files that are not hidden; of ``module:NAME``, of the file of the module, once it is
    imported.

    Args:
      values: The config by full names; texts may name several paths, separated by commas.
      has_weights: False, where each of several processes reads its part of the weights: of these,
        the size, and the names, shapes and places of the tensors.
    """
    found = {}
    for key, value in values.items():
        parts = value if isinstance(value, tuple | list) else [value]
        names = [n.strip() for x in parts if isinstance(x, str) for n in x.split(",")]
        for name in (n for n in names if n and key not in _BY_THE_FIRST):
            known = of_path(name, has_weights=has_weights)
            if known is not None:
                found[f"what is in {name} ({key})"] = known
    return found


def of_path(name: str, *, has_weights: bool = True) -> str | None:
    """Returns the checksum of what a name stands for, see ``of_config``; None: of nothing."""
    try:
        files = _files(name)
    except OSError:
        return None  # the reader of the file says why
    if files is None:
        return None
    with ThreadPoolExecutor() as pool:
        sums = pool.map(functools.partial(_of_file, has_weights=has_weights), files.values())
        known = dict(zip(files, sums))
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def _files(name: str) -> dict[str, pathlib.Path] | None:
    """The files behind a name, by their names in a directory."""
    path = zoo.path(name) or pathlib.Path(name)
    if path.is_file():
        return {"": path}
    module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
    if getattr(module, "__file__", None):
        return {"": pathlib.Path(module.__file__)}
    if not path.is_dir():
        path = hub.cached_directory(name)
        if path is None:
            return None
    files = [file for ending in _WEIGHTS for file in path.glob(f"*{ending}")]
    if files:
        files += [file for pattern in _OF_A_MODEL for file in path.glob(pattern)]
    else:
        files = [file for file in path.rglob("*") if not _is_hidden(file.relative_to(path))]
    return {str(file.relative_to(path)): file for file in files if file.is_file()}


def _is_hidden(path: pathlib.Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _of_file(path: pathlib.Path, has_weights: bool) -> str | None:
    try:
        with open(path, "rb") as file:
            if has_weights or path.suffix not in _WEIGHTS:
                return hashlib.file_digest(file, "sha256").hexdigest()
            header = b""
            if path.suffix == ".safetensors":
                header = file.read(min(int.from_bytes(file.read(8), "little"), _FIRST))
            return f"{path.stat().st_size} {hashlib.sha256(header).hexdigest()}"
    except OSError:
        return None  # as above
