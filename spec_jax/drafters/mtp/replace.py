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
from spec_jax.drafters.mtp.checkpoint import OpenModules, open_modules, stored_tensors, targets_end
from spec_jax.models.checks import require
from spec_jax.models.config import with_attention
from spec_jax.models.families import AnyConfig
from spec_jax.models.files import write_once
from spec_jax.models.shards import INDEX, SINGLE, Shards, weight_files
from spec_jax.models.tensors import unfused


def check_replaces(source: str | pathlib.Path, head: LoadedHead, target: AnyConfig) -> None:
    """Raises an error if ``replace_modules`` could not put the modules into a directory.

    It reads config.json and the headers of the weights alone.

    Args:
      source: the model's directory.
      head: the modules.
      target: the model's config.

    Raises:
      ConfigError: the directory's modules have another config; the fields are named. Or they are
        stored as 8-bit numbers, or in files of torch.
      WeightsError: it has none, or their headers are not those of the config.
    """
    with contextlib.ExitStack() as stack:
        _open(pathlib.Path(source), head, target, stack)


def replace_modules(
    directory: str | pathlib.Path, head: LoadedHead, source: str | pathlib.Path, target: AnyConfig
) -> None:
    """Writes a copy of a model's directory in which the MTP modules are these.

    config.json, the index and the names, shapes and dtypes of all tensors stay as they are, so
    whatever loads the model and its modules loads the copy. Where the modules share the model's
    embedding or output head and the directory has one of the modules', that becomes a copy of the
    model's. Files of weights without a tensor of the modules are hard links where the file system
    allows.

    Args:
      directory: created if absent; its files are overwritten.
      head: the modules, of the config that the stored ones have.
      source: the model's directory, with modules.
      target: the model's config.

    Raises:
      ConfigError: see ``check_replaces``; or the directories are one.
      WeightsError: files cannot be read, or hold no modules.
    """
    directory, source = pathlib.Path(directory), pathlib.Path(source)
    is_same = directory.resolve() == source.resolve()
    require(not is_same, f"{directory} is the model's directory; expected another to write to")
    with contextlib.ExitStack() as stack:
        shards = Shards(source, stack)
        modules = _open(source, head, target, stack)
        new = dict(stored_tensors(head.config, head.params, modules.format, jnp.float32))
        for end in _shared_ends(modules, head):
            original = shards.tensor(targets_end(end, shards.names())).read_whole()
            new |= dict.fromkeys(modules.ends[end], original)
        changed = _changed(shards, new)
        write_once(lambda: _write(directory, source, shards, changed))


def _open(
    source: pathlib.Path, head: LoadedHead, target: AnyConfig, stack: contextlib.ExitStack
) -> OpenModules:
    """The modules of a directory, if these can take their place."""
    require(
        any((source / name).exists() for name in (SINGLE, INDEX)),
        f"{source} has no safetensors, in which modules could be replaced",
    )
    modules = open_modules(source, target, stack)

    def plain(config):
        return dataclasses.replace(config, layer=with_attention(config.layer, "auto"))

    ends = {f"has_own_{end}": _may_own(modules, end) for end in modules.ends}
    stored = plain(modules.config)
    custom = plain(head.config)
    names = [field.name for field in dataclasses.fields(stored)]
    others = [
        name
        for name in names
        if getattr(custom, name) not in ends.get(name, (getattr(stored, name),))
    ]
    message = f"{source} holds MTP modules with another {', '.join(others)}; save these alone"
    require(not others, message)
    for name in modules.tensors.left:
        dtype = modules.shards.tensor(name).dtype
        message = f"{source}: {name} is stored as {dtype.name}; save the modules alone"
        require(dtype.itemsize > 1, message)
    for end in _shared_ends(modules, head):
        modules.tensors.left.difference_update(modules.ends[end])
    modules.weights(head.config, jnp.float32)
    return modules


def _may_own(modules: OpenModules, end: str) -> tuple[bool, ...]:
    """Whether modules in these files may have an end of their own, and whether they may not."""
    names = modules.shards.names()
    stored = modules.ends[end]
    original = targets_end(end, names)
    if not stored:
        return (False,)

    def holds(name):  # also the target's own array, without loss
        copy = modules.shards.tensor(name)
        whole = modules.shards.tensor(original)
        is_wider = copy.dtype.itemsize > whole.dtype.itemsize
        return copy.shape == whole.shape and (is_wider or copy.dtype == whole.dtype)

    is_copy = original in names and all(map(holds, stored))
    return (True, False) if is_copy else (True,)


def _shared_ends(modules: OpenModules, head: LoadedHead) -> list[str]:
    """The ends that these modules share with the target, and that the files have nevertheless."""
    return [
        end
        for end, stored in modules.ends.items()
        if stored and not getattr(head.config, f"has_own_{end}")
    ]


def _changed(shards: Shards, new: dict) -> dict[str, np.ndarray]:
    """The tensors that change, as they are stored: experts in one where they are."""
    inside = unfused({name: shards.tensor(name).shape for name in shards.names()})
    changed: dict[str, np.ndarray] = {}
    for name, array in new.items():
        stored, expert, rows = inside.get(name, (name, None, None))
        tensor = shards.tensor(stored)
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
        copy = directory / path.name
        names = shards.names_in(path) if path in weights else set()
        part = directory / f"{path.name}.partial"
        part.unlink(missing_ok=True)
        if not path.is_file():
            continue
        if names & changed.keys():

            def read(name):
                return shards.tensor(name).read_whole()

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
