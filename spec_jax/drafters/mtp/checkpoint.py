"""Reads and writes MTP modules in the formats of DeepSeek-V3, Qwen3-Next and MiMo.

Reading is strict: a missing, unexpected or misshapen tensor of the modules is an error that names
it. What a checkpoint leaves open is decided here, and each decision is reported in a note. The
target's tensors in the same directory are only read to compare a module's embedding and head with
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from spec_jax.drafters.loaded import LoadedHead
from spec_jax.drafters.mtp.formats import (
    FORMATS,
    MtpFormat,
    find_format,
    format_of,
    modules_config,
    modules_json,
)
from spec_jax.drafters.mtp.model import MtpConfig, mtp_table, mtp_tables
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checkpoint import as_stored
from spec_jax.models.checks import integers_of, require
from spec_jax.models.config import with_attention
from spec_jax.models.families import AnyConfig, family_of
from spec_jax.models.files import naming, read_json, write_json, write_once
from spec_jax.models.float8 import Dequantised, block_of
from spec_jax.models.params import check_weights, shapes_of, table_placement
from spec_jax.models.parts import Tensor, holds_for_parts, read_onto, read_parts, stack
from spec_jax.models.shards import Shards
from spec_jax.models.tensors import StrictReader, Unfused, on_host, open_files, save_tensors
from spec_jax.sharding import SHARDED, AxisRules, named

_TARGET_EMBED = "model.embed_tokens.weight"
_TARGET_HEAD = "lm_head.weight"


def read_mtp(
    directory: str | pathlib.Path,
    target_config: AnyConfig,
    dtype: DTypeLike = jnp.float32,
    *,
    mesh: Mesh | None = None,
    axis_rules: AxisRules = SHARDED,
    **overrides: Any,
) -> LoadedHead:
    """Reads the MTP modules of a model's directory.

    Args:
      directory: holds config.json of the model and tensors, with or without the target's own.
      target_config: the config of the model that they draft for.
      dtype: the dtype of the parameters, except a router's bias, which stays float32. 8-bit tensors
        are multiplied by their scales first.
      mesh: the devices to place the parameters on, each process reading what its own devices hold;
        None: jax's default device.
      axis_rules: which dimensions are split over the mesh.
      **overrides: fields of ``MtpConfig`` instead of what is derived: ``num_modules`` (further
        modules are not read), ``protocol``, ``order``, ``taps``, ``recycles_normed``,
        ``has_zero_centred_norms``, ``has_own_embed``, ``has_own_head``.

    Returns:
      The modules, with parameters ``{"0": {...}, "1": {...}}`` and a note for everything that the
      checkpoint leaves open and how it was read.

    Raises:
      WeightsError: an unreadable file; a tensor of the modules that is missing, unexpected, of
        another shape than config.json says, or not finite.
      ConfigError: an override that does not exist; layers that are not supported; modules for
        another target; a mesh that does not divide their heads.
    """
    directory = pathlib.Path(directory)
    with contextlib.ExitStack() as stack:
        modules = open_modules(directory, target_config, stack, overrides)
        config = modules.config
        tensors = modules.tensors
        notes = modules.notes
        for end, stored in modules.ends.items():
            field = f"has_own_{end}"
            spec = mtp_table(dataclasses.replace(config, **{field: True}))[end]
            shape, axes = (x[::-1] if spec.is_linear else x for x in (spec.shape, spec.axes))
            sharding = None if mesh is None else named(axes, shape, mesh, axis_rules)
            is_own = overrides.get(field)
            why = "as the caller says"
            if is_own is None:
                is_own, why = _compare_end(end, stored, tensors, modules.shards, sharding)
            notes.append(f"{field} = {is_own!r}: {why}.")
            config = dataclasses.replace(config, **{field: is_own})
            for tensor in () if is_own else [tensors.take(name, shape) for name in stored]:
                if field in overrides:
                    read_parts(tensor, sharding)  # damaged files are refused all the same
        weights = modules.weights(config, dtype)
        shardings = []
        if mesh is not None:
            table = dict.fromkeys(weights, mtp_table(config))
            shardings = [table_placement(str(directory), config.layer, table, mesh, axis_rules)]
        params = jax.tree.map(read_onto, weights, *shardings)
    return LoadedHead(str(directory), config, params, tuple(notes), modules.format.name)


class OpenModules(NamedTuple):
    """The files of MTP modules, of which config.json and headers were read.

    Attributes:
      format: how the tensors are named.
      config: the modules'; its ``has_own_*`` are False unless overridden.
      ends: the names of the modules' embeddings and output heads that are stored, by "embed" and
        "head".
      shards: all tensors of the directory.
      tensors: those of the modules.
      notes: a sentence for each choice that the checkpoint leaves open.
    """

    format: MtpFormat
    config: MtpConfig
    ends: dict[str, list[str]]
    shards: Any
    tensors: StrictReader
    notes: list[str]

    def weights(self, config: MtpConfig, dtype: DTypeLike) -> dict[str, dict[str, Tensor]]:
        """Returns the weights of all modules, of which nothing is read yet.

        Args:
          config: the modules', with the ends that they are to have.
          dtype: of the weights whose declaration states no other.

        Raises:
          WeightsError: a tensor is missing, unexpected, quantised, or of another shape than
            config.json says.
        """

        def read(i):
            return _module(self.tensors, self.format, config, i, dtype)

        weights = {str(i): read(i) for i in range(config.num_modules)}
        self.tensors.finish()
        return weights


def open_modules(
    directory: pathlib.Path,
    target_config: AnyConfig,
    stack: contextlib.ExitStack,
    overrides: Mapping[str, Any] | None = None,
) -> OpenModules:
    """Opens the MTP modules of a model's directory; of the tensors only headers are read.

    Args:
      directory: see ``read_mtp``.
      target_config: the config of the model that they draft for.
      stack: closes the files.
      overrides: see ``read_mtp``.

    Raises:
      WeightsError: a file cannot be read, or there are no modules.
      ConfigError: see ``read_mtp``.
    """
    hf, notes, overrides = read_json(directory / "config.json"), [], overrides or {}
    shards = Unfused(open_files(directory, stack))
    names = shards.names()
    with naming(directory / "config.json"):
        fmt = find_format(directory, hf, names)
        numbers = {fmt.number(name) for name in names} - {None}
        config = modules_config(hf, fmt, len(numbers), target_config, overrides, notes)
        block = block_of(hf)
    if config.num_modules > len(names):  # before a list of their names is made
        message = f"num_modules is {config.num_modules}; {len(numbers)} modules are stored"
        raise WeightsError(f"{directory}: {message}, in {len(names)} tensors")
    source = Dequantised(directory, _Modules(shards, fmt, config.num_modules), block)
    tensors = StrictReader(directory, source)
    tensors.sizes = integers_of(config.layer)
    both = mtp_table(dataclasses.replace(config, has_own_embed=True, has_own_head=True))

    def names_of(end):
        return [fmt.tensor(end, both[end], i) for i in range(config.num_modules)]

    ends = {end: [n for n in names_of(end) if n in tensors.left] for end in ("embed", "head")}
    return OpenModules(fmt, config, ends, shards, tensors, notes)


def _module(
    tensors: StrictReader, fmt: MtpFormat, config: MtpConfig, index: int, dtype: DTypeLike
) -> dict[str, Tensor]:
    """The weights of one module, of which nothing is read yet."""

    def leaf(name, spec):
        def take(spec, e=0):
            return tensors.weight(fmt.tensor(name, spec, index, e), spec, dtype)

        if "{e}" not in spec.hf_name:
            return take(spec)
        count, *shape = spec.shape
        one = spec._replace(shape=tuple(shape), axes=spec.axes[1:])
        return stack([take(one, e) for e in range(count)])

    return {name: leaf(name, spec) for name, spec in mtp_table(config).items()}


def targets_end(end: str, names: AbstractSet[str]) -> str:
    """Returns the name of the target's tensor that an "embed" or "head" of modules may copy."""
    return _TARGET_HEAD if end == "head" and _TARGET_HEAD in names else _TARGET_EMBED


def _compare_end(
    end: str, stored: list[str], tensors: StrictReader, shards: Shards, sharding: Sharding | None
) -> tuple[bool, str]:
    """Whether modules have an embedding or output head of their own, and why."""
    original = targets_end(end, shards.names())
    if not stored:
        return False, "the modules have none and share the target's"
    if original not in shards.names():
        return True, f"{original} is not here to be compared with {stored[0]}"
    whole = shards.tensor(original)
    for tensor in map(tensors.tensor, stored):

        def is_equal(part):
            return np.array_equal(tensor.read(part), whole.read(part))

        if tensor.shape != whole.shape or not holds_for_parts(is_equal, whole.shape, sharding):
            return True, f"{stored[0]} differs from {original}"
    return False, f"{stored[0]} is a copy of {original}"


class _Modules:
    """The modules' tensors alone."""

    def __init__(self, shards: Any, fmt: MtpFormat, count: int):
        numbers = {name: fmt.number(name) for name in shards.names()}
        self._names = {name for name, i in numbers.items() if i is not None and i < count}
        self.tensor = shards.tensor

    def names(self) -> set[str]:
        return self._names


# -------------------------------------------------------------------------------- writing


def write_mtp(
    directory: str | pathlib.Path,
    config: MtpConfig,
    params: dict[str, dict[str, jax.Array]],
    *,
    target_config: AnyConfig,
    format: str | None = None,
    dtype: DTypeLike | None = None,
) -> None:
    """Writes a directory that ``read_mtp`` reads as the same modules.

    Layers of DeepSeek-V3 and Qwen3-Next are written under their families' names. Layers of
    Llama, Qwen2 and Qwen3 get MiMo's names where the hidden state is joined first and
    DeepSeek's where the embedding is, since that order goes with the names. Servers know MiMo's
    names with a Qwen2 layer alone: pass ``format="MiMo"`` for them.

    Where an explicit format has the other order, the halves of the joining map change places:
    what is read back computes the same, and its ``order`` is the format's. ``taps``,
    ``protocol`` and ``recycles_normed`` are stated under a key that servers do not read.
    Files get their final names when they are complete.

    Args:
      directory: a directory for the modules alone, created if absent; its files are overwritten.
      config: the modules'.
      params: their weights.
      target_config: the config of the model that they draft for.
      format: "DeepSeek", "Qwen3-Next" or "MiMo"; by default what the layer and order imply.
      dtype: the dtype to store; by default the weights' own. A router's bias stays float32.

    Raises:
      ConfigError: the format cannot express the modules' config.
      WeightsError: a weight is missing or misshapen.
    """
    directory, L = pathlib.Path(directory), target_config.num_hidden_layers
    fmt = format_of(format or _default_format(config), L)
    _check_format(config, fmt, target_config)
    check_weights(params, shapes_of(mtp_tables(config)), "")
    dtype = jnp.dtype(params["0"]["fc"].dtype if dtype is None else dtype)
    tensors = dict(stored_tensors(config, params, fmt, dtype))
    hf = modules_json(config, fmt, L)
    read = modules_config(hf, fmt, config.num_modules, target_config, {}, [])
    ends = {name: getattr(config, name) for name in ("has_own_embed", "has_own_head")}

    def plain(layer):
        return with_attention(layer, "auto")  # no file states it

    read = dataclasses.replace(read, **ends, layer=plain(read.layer))
    expected = dataclasses.replace(config, order=fmt.order, layer=plain(config.layer))
    if read != expected:
        raise ConfigError(f"the layer {expected.layer} would be read as {read.layer}")
    save_tensors(directory, [tensors.items()])
    hf |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    write_once(lambda: write_json(directory / "config.json", hf))


def stored_tensors(
    config: MtpConfig, params: dict[str, dict[str, jax.Array]], fmt: MtpFormat, dtype: DTypeLike
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of modules as a format has them, by name.

    Args:
      config: the modules'.
      params: their weights.
      fmt: the format.
      dtype: of the tensors, except of those whose declaration states another.
    """
    leaves = itertools.product(range(config.num_modules), mtp_table(config).items())
    for i, (name, spec) in leaves:
        array = on_host(params[str(i)][name])
        if name == "fc" and config.order != fmt.order:
            array = np.roll(array, config.layer.hidden_size, axis=0)
        for expert, part in enumerate(array) if "{e}" in spec.hf_name else [(0, array)]:
            yield fmt.tensor(name, spec, i, expert), as_stored(part, spec, dtype)


def _default_format(config: MtpConfig) -> str:
    """The format of the layer's family that joins in the modules' order, or else its first."""
    names = family_of(config.layer).mtp_formats
    if not names:
        raise ConfigError(f"no format is known for MTP modules of {type(config.layer).__name__}")
    return next((name for name in names if FORMATS[name].order == config.order), names[0])


def _check_format(config: MtpConfig, fmt: MtpFormat, target: AnyConfig) -> None:
    """Raises a ConfigError if a format cannot express a config, or its loaders misread it."""
    known = family_of(config.layer).mtp_formats
    kind = type(config.layer).__name__
    use = " or ".join(known)
    name = fmt.name
    require(name in known, f"the format {name} cannot hold a layer of {kind}; use {use}")
    for what, size, expected in (
        ("width", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.target_vocab_size, target.vocab_size),
    ):
        message = f"the modules are for a target of {what} {size}; this one has {expected}"
        require(size == expected, message)
    norms = config.has_zero_centred_norms
    count = config.num_modules
    message = f"has_zero_centred_norms is {norms}; loaders of {name} assume {fmt.is_zero_centred}"
    require(norms == fmt.is_zero_centred, message)
    is_held = count == 1 or not fmt.is_single
    require(is_held, f"num_modules is {count}; the format {name} holds one")
    has_ends = config.has_own_embed or config.has_own_head
    message = f"has_own_embed or has_own_head is True; modules in the format {name} share both"
    require(fmt.has_own_ends or not has_ends, message)
