"""Writes a model's directory again with other MTP modules in it, for whoever serves both."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from spec_jax.drafters.loaded import LoadedHead
from spec_jax.drafters.mtp.checkpoint import read_mtp, stored_tensors
from spec_jax.drafters.mtp.formats import find_format
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checks import require
from spec_jax.models.config import with_attention
from spec_jax.models.families import AnyConfig
from spec_jax.models.files import read_json, write_once
from spec_jax.models.shards import INDEX, SINGLE, Shards, weight_files
from spec_jax.models.tensors import unfused


def check_replaces(source: str | pathlib.Path, head: LoadedHead, target: AnyConfig) -> None:
    """Raises an error if ``replace_modules`` could not put the modules into a directory.

    Args:
      source: the model's directory.
      head: the modules.
      target: the model's config.

    Raises:
      ConfigError: the directory's modules have another config; the fields are named. Or its
        weights are files of torch.
      WeightsError: it has none, or they cannot be read.
    """
    require(
        any((pathlib.Path(source) / name).exists() for name in (SINGLE, INDEX)),
        f"{source} has no safetensors, in which modules could be replaced",
    )
    stored = read_mtp(source, target).config
    plain = lambda config: dataclasses.replace(config, layer=with_attention(config.layer, "auto"))
    stored, own = plain(stored), plain(head.config)
    names = [field.name for field in dataclasses.fields(stored)]
    others = [name for name in names if getattr(stored, name) != getattr(own, name)]
    message = f"{source} holds MTP modules with another {', '.join(others)}; save these alone"
    require(not others, message)


def replace_modules(
    directory: str | pathlib.Path, head: LoadedHead, source: str | pathlib.Path, target: AnyConfig
) -> None:
    """Writes a copy of a model's directory in which the MTP modules are these.

    config.json, the index and the names, shapes and dtypes of all tensors stay as they are, so
    whatever loads the model and its modules loads the copy. Files of weights without a tensor of
    the modules are hard links where the file system allows.

    Args:
      directory: created if absent; its files are overwritten.
      head: the modules, of the config that the stored ones have.
      source: the model's directory, with modules.
      target: the model's config.

    Raises:
      ConfigError: the modules in the directory have another config, or are stored as 8-bit numbers
        or in files of torch; or the directories are one.
      WeightsError: files cannot be read, or hold no modules.
    """
    directory, source = pathlib.Path(directory), pathlib.Path(source)
    is_same = directory.resolve() == source.resolve()
    require(not is_same, f"{directory} is the model's directory; expected another to write to")
    check_replaces(source, head, target)
    with contextlib.ExitStack() as stack:
        shards = Shards(source, stack)
        fmt = find_format(source, read_json(source / "config.json"), shards.names())
        new = dict(stored_tensors(head.config, head.params, fmt, jnp.float32))
        changed = _changed(source, shards, new)
        write_once(lambda: _write(directory, source, shards, changed))


def _changed(source: pathlib.Path, shards: Shards, new: dict) -> dict[str, np.ndarray]:
    """The tensors that change, as they are stored: experts in one where they are."""
    inside = unfused({name: shards.tensor(name).shape for name in shards.names()})
    changed: dict[str, np.ndarray] = {}
    for name, array in new.items():
        stored, expert, rows = inside.get(name, (name, None, None))
        if stored not in shards.names():
            raise WeightsError(f"{source}: tensor {name} is missing")
        tensor = shards.tensor(stored)
        if tensor.dtype.itemsize == 1:
            raise ConfigError(
                f"{source}: {stored} is stored as {tensor.dtype.name}; save the modules alone"
            )
        if stored not in changed:
            changed[stored] = np.empty(tensor.shape, tensor.dtype)
        place = ... if expert is None else (expert, slice(rows.start, rows.stop))
        changed[stored][place] = array.astype(tensor.dtype)
    return changed


def _write(
    directory: pathlib.Path, source: pathlib.Path, shards: Shards, changed: dict[str, np.ndarray]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    weights = set(weight_files(source, SINGLE, INDEX))
    for path in sorted(source.iterdir()):
        copy, names = directory / path.name, shards.names_in(path) if path in weights else set()
        part = directory / f"{path.name}.partial"
        part.unlink(missing_ok=True)
        if not path.is_file():
            continue
        if names & changed.keys():
            read = lambda name: shards.tensor(name).read_whole()
            tensors = {n: changed[n] if n in changed else read(n) for n in sorted(names)}
            save_file(tensors, part, metadata={"format": "pt"})
        elif path in weights:
            try:
                os.link(path.resolve(), part)
            except OSError:
                shutil.copyfile(path, part)
        else:
            shutil.copyfile(path, part)
        os.replace(part, copy)
        part.unlink(missing_ok=True)  # where both were links to one file, which rename leaves
