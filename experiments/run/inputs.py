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
from spec_jax.config import METHODS
from spec_jax.data import sources
from spec_jax.data.first_words import ENGLISH
from spec_jax.errors import SpecJaxError
from spec_jax.models import gguf
from spec_jax.models.tensors import stored_files

_FIRST = 64 << 20  # bytes of the header of a safetensors file that are read
_BY_THE_FIRST = ("config.data.text",)  # what process 0 alone reads
_WEIGHTS = (".safetensors", ".bin", gguf.SUFFIX)
# Keys of configs, of any section, whose values name files, directories or hub ids; and modules.
PATHS = (
    *("target", "draft", "drafts", "head", "init_from", "teacher"),
    *("data", "text", "responses", "prompts", "first_words", "model_json"),
)
MODULES = ("rule", "drafter")
Sums = dict[str, dict[str, str | None]]  # by what a config names, and of that by file


def of_config(
    values: Mapping[str, Any], *, has_weights: bool = True, known: Mapping[str, Mapping] = {}
) -> Sums:
    """Returns checksums of the files, directories and modules that a config names.

    They are SHA-256 of all bytes, 0.8 s a GB on one core. Of a directory that holds a model or a
    head, cached by the hub or not, they are of the files that are loaded; of any other directory,
    of all files that are not hidden; of ``module:NAME``, of the file of the module, once it is
    imported. What is not there, such as a model that the hub's cache lacks, has none.

    Args:
      values: The config by full names; texts may name several paths, separated by commas.
      has_weights: False, where each of several processes reads its part of the weights: of these,
        the size, and the names, shapes and places of the tensors.
      known: What this function has returned before, whose files are not read again.
    """
    found = {}
    for key, value in values.items():
        parts = value if isinstance(value, tuple | list) else [value]
        names = [n.strip() for x in parts if isinstance(x, str) for n in x.split(",")]
        for name in (n for n in names if n and key not in _BY_THE_FIRST):
            what = f"what is in {name} ({key})"
            files = _files_of(name, key)
            if files is not None:
                found[what] = _sums(files, has_weights, known.get(what, {}))
    return found


def by_file(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Returns checksums by what each is of, in words."""
    return {
        f"{what}: {file}" if file else what: known
        for what, files in sums.items()
        for file, known in (files.items() if isinstance(files, Mapping) else [("", files)])
    }


def of_path(name: str) -> str | None:
    """Returns the checksum of all that a path or hub id stands for; None: of nothing."""
    files = _files(name)
    if files is None:
        return None
    known = json.dumps(_sums(files, True, {}), sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _sums(files: Mapping[str, pathlib.Path], has_weights: bool, known: Mapping[str, Any]) -> dict:
    new = [name for name in files if name not in known]
    with ThreadPoolExecutor() as pool:
        of_file = functools.partial(_of_file, has_weights=has_weights)
        sums = {**known, **dict(zip(new, pool.map(of_file, map(files.get, new))))}
    return {name: sums[name] for name in files}


def _files_of(name: str, key: str) -> dict[str, pathlib.Path] | None:
    """The files behind a name that is a value of a key, as the key's reader takes it."""
    last = key.rpartition(".")[2]
    if last in MODULES and ":" in name:
        file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        return {"": pathlib.Path(file)} if file else None
    is_word = {
        "draft": METHODS.get(name, False),
        "drafts": METHODS.get(name, False),
        "data": sources.is_name(name) or name in ("pieces", "functions"),
        "text": name == "stdlib",
        "first_words": name == ENGLISH,
    }
    return _files(name) if last in PATHS and not is_word.get(last) else None


def _files(name: str) -> dict[str, pathlib.Path] | None:
    """The files behind a path or hub id, by their names in a directory."""
    try:
        path = zoo.path(name) or pathlib.Path(name)
        if path.is_file():
            return {"": path}
        is_local = path.is_dir()
        path = path if is_local else hub.cached_directory(name)
        if path is None:
            return None
        path = gguf.within(path)
        if path.is_file():
            return {"": path}
        files = stored_files(path)
        is_whole = files and all(file.exists() for file in (path / "config.json", *files))
        if not is_local and not is_whole:
            return None  # a download that was cut off
        if files:
            files += [file for pattern in hub.BESIDE_WEIGHTS for file in path.glob(pattern)]
        else:
            files = [file for file in path.rglob("*") if not _is_hidden(file.relative_to(path))]
        return {str(file.relative_to(path)): file for file in files if file.is_file()}
    except (OSError, SpecJaxError):
        return None  # the reader of the file says why


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
            elif path.suffix == gguf.SUFFIX:
                header = file.read(_FIRST)
            return f"{path.stat().st_size} {hashlib.sha256(header).hexdigest()}"
    except OSError:
        return None  # as above
