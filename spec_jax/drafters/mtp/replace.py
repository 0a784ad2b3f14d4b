"""Writes a model's directory again with other MTP modules in it, for whoever serves both."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from spec_jax.drafters.formats import End, Reading, differences
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.drafters.mtp.formats import MTP_FORMATS, targets_end
from spec_jax.models.checks import require
from spec_jax.models.families import AnyConfig
from spec_jax.models.files import write_once
from spec_jax.models.parts import Tensor
from spec_jax.models.shards import INDEX, SINGLE, open_shard, weight_files
from spec_jax.models.tensors import expert_places


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
        files = {path: open_shard(path, stack) for path in weight_files(source, SINGLE, INDEX)}
        stored = {name: x for tensors in files.values() for name, x in tensors.items()}
        modules = _open(source, head, target, stack)
        new = dict(
            MTP_FORMATS.stored(
                head.config, head.params, modules.format, modules.num_layers, jnp.float32
            )
        )
        for end, names in _shared_ends(modules, head).items():
            original = stored[targets_end(end, stored.keys())].read_whole()
            new |= dict.fromkeys(names, original)
        changed = _changed(stored, new)
        write_once(lambda: _write(directory, source, files, changed))


def _open(
    source: pathlib.Path, head: LoadedHead, target: AnyConfig, stack: contextlib.ExitStack
) -> Reading:
    """The modules of a directory, if these can take their place."""
    require(
        any((source / name).exists() for name in (SINGLE, INDEX)),
        f"{source} has no safetensors, in which modules could be replaced",
    )
    modules = MTP_FORMATS.open(source, target, stack, {})
    ends = {end.field: _may_own(modules, end) for end in _ends(modules)}
    differing = {name for name, *_ in differences(head.config, modules.config)} - ends.keys()
    differing |= {name for name, may in ends.items() if getattr(head.config, name) not in may}
    message = (
        f"{source} holds MTP modules with another {', '.join(sorted(differing))}; save these alone"
    )
    require(not differing, message)
    for name in modules.tensors.left:
        dtype = modules.files[name].dtype
        message = f"{source}: {name} is stored as {dtype.name}; save the modules alone"
        require(dtype.itemsize > 1, message)
    for names in _shared_ends(modules, head).values():
        for name in names:
            modules.tensors.left.pop(name, None)
    MTP_FORMATS.weights(modules, head.config, jnp.float32)
    return modules


def _ends(modules: Reading) -> list[End]:
    """The modules' embeddings and output heads that the files have."""
    ends = MTP_FORMATS.ends(modules.config, modules.format, modules.num_layers)
    names = modules.names
    return [end._replace(stored=tuple(n for n in end.stored if n in names)) for end in ends]


def _may_own(modules: Reading, end: End) -> tuple[bool, ...]:
    """Whether modules in these files may have an end of their own, and whether they may not."""
    files = modules.files
    original = targets_end(end.weight, files.keys())
    if not end.stored:
        return (False,)

    def holds(name):  # also the target's own array, without loss
        copy = files[name]
        whole = files[original]
        is_wider = copy.dtype.itemsize > whole.dtype.itemsize
        return copy.shape == whole.shape and (is_wider or copy.dtype == whole.dtype)

    is_copy = original in files and all(map(holds, end.stored))
    return (True, False) if is_copy else (True,)


def _shared_ends(modules: Reading, head: LoadedHead) -> dict[str, tuple[str, ...]]:
    """Returns the tensors that files hold of the ends shared with the target, by weight."""
    return {
        end.weight: end.stored
        for end in _ends(modules)
        if end.stored and not getattr(head.config, end.field)
    }


def _changed(stored: Mapping[str, Tensor], new: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors that change, as they are stored: experts in one where they are."""
    inside = expert_places({name: x.shape for name, x in stored.items()})
    changed: dict[str, np.ndarray] = {}
    for name, array in new.items():
        whole, expert, rows = inside.get(name, (name, None, None))
        tensor = stored[whole]
        if whole not in changed:
            changed[whole] = np.empty(tensor.shape, tensor.dtype)
        place = ... if expert is None else (expert, slice(rows.start, rows.stop))
        changed[whole][place] = array.astype(tensor.dtype)
    return changed


def _write(
    directory: pathlib.Path,
    source: pathlib.Path,
    files: Mapping[pathlib.Path, Mapping[str, Tensor]],
    changed: Mapping[str, np.ndarray],
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(filter(pathlib.Path.is_file, source.iterdir())):
        stored = files.get(path, {})
        part = directory / f"{path.name}.partial"
        part.unlink(missing_ok=True)
        if stored.keys() & changed.keys():
            tensors = {
                name: changed[name] if name in changed else stored[name].read_whole()
                for name in sorted(stored)
            }
            save_file(tensors, part, metadata={"format": "pt"})
        elif path in files:
            try:
                os.link(path.resolve(), part)
            except OSError:
                shutil.copyfile(path, part)
        else:
            shutil.copyfile(path, part)
        os.replace(part, directory / path.name)
        part.unlink(missing_ok=True)  # where both were links to one file, which rename leaves
