"""Reads MTP modules as DeepSeek-V3, Qwen3-Next and MiMo publish them.

Reading is strict: a missing, unexpected or misshapen tensor of the modules is an error that names
it. What a checkpoint leaves open is decided here, and each decision is reported in a note. The
target's tensors in the same directory are only read to compare a module's embedding and head with
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from spec_jax.drafters.loaded import LoadedHead
from spec_jax.drafters.mtp.layout import Layout, find_layout, modules_config
from spec_jax.drafters.mtp.model import MtpConfig, mtp_table
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checks import integers_of, shown, stated_object
from spec_jax.models.families import AnyConfig
from spec_jax.models.files import naming, read_json
from spec_jax.models.params import table_placement
from spec_jax.models.parts import Part, Tensor, holds_for_parts, read_onto, read_parts, stack
from spec_jax.models.pickles import Pickles
from spec_jax.models.shards import Shards
from spec_jax.models.tensors import StrictReader, open_files
from spec_jax.sharding import SHARDED, Rules, named

_SCALE = "_scale_inv"
_BLOCK = (128, 128)
_TARGET_EMBED, _TARGET_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_mtp(
    directory: str | pathlib.Path,
    target_config: AnyConfig,
    dtype: DTypeLike = jnp.float32,
    *,
    mesh: Mesh | None = None,
    rules: Rules = SHARDED,
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
      rules: which dimensions are split over the mesh.
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
    directory, notes = pathlib.Path(directory), []
    hf = read_json(directory / "config.json")
    with contextlib.ExitStack() as stack:
        shards = open_files(directory, stack)
        with naming(directory / "config.json"):
            layout = find_layout(directory, hf, shards.names())
            numbers = {layout.number(name) for name in shards.names()} - {None}
            config = modules_config(hf, layout, len(numbers), target_config, overrides, notes)
            block = _block_of(hf)
        if config.num_modules > len(shards.names()):  # before a list of their names is made
            raise WeightsError(
                f"{directory}: num_modules is {config.num_modules}, but the weights hold "
                f"{len(shards.names())} tensors, and a module has at least one; expected at most "
                f"the {len(numbers)} modules that are stored"
            )
        source = _Modules(directory, shards, layout, config.num_modules, block)
        tensors = StrictReader(directory, source)
        tensors.sizes = integers_of(config.layer)
        for end in ("embed", "head"):
            config = _resolve_end(
                end, config, layout, tensors, shards, overrides, notes, mesh, rules
            )
        weights = {
            str(i): _module(tensors, layout, config, i, dtype) for i in range(config.num_modules)
        }
        tensors.finish()
        where = []
        if mesh is not None:
            table = dict.fromkeys(weights, mtp_table(config))
            where = [table_placement(str(directory), config.layer, table, mesh, rules)]
        params = jax.tree.map(read_onto, weights, *where)
    return LoadedHead(str(directory), config, params, tuple(notes), layout.name)


def _module(
    tensors: StrictReader, layout: Layout, config: MtpConfig, index: int, dtype: DTypeLike
) -> dict[str, Tensor]:
    """The weights of one module, of which nothing is read yet."""

    def leaf(name, spec):
        # Biases that move a choice differ by less than a short float resolves.
        own_dtype = jnp.float32 if name == "router_bias" else dtype
        take = lambda spec, e=0: tensors.weight(
            layout.tensor(name, spec, index, e), spec, own_dtype
        )
        if "{e}" not in spec.hf_name:
            return take(spec)
        count, *shape = spec.shape
        one = spec._replace(shape=tuple(shape), axes=spec.axes[1:])
        return stack([take(one, e) for e in range(count)])

    return {name: leaf(name, spec) for name, spec in mtp_table(config).items()}


def _resolve_end(
    end: str, config: MtpConfig, layout: Layout, tensors: StrictReader, shards: Shards | Pickles,
    overrides: Mapping[str, Any], notes: list[str], mesh: Mesh | None, rules: Rules,
) -> MtpConfig:
    """Drops copies of the target's embedding ("embed") or head; keeps those that differ."""
    field = f"has_own_{end}"
    with_end = dataclasses.replace(config, **{field: True})
    spec = mtp_table(with_end)[end]
    stored, axes = (x[::-1] if spec.is_linear else x for x in (spec.shape, spec.axes))
    where = None if mesh is None else named(axes, stored, mesh, rules)
    names = [layout.tensor(end, spec, i) for i in range(config.num_modules)]
    copies = [name for name in names if name in tensors.left]
    theirs = _TARGET_EMBED if end == "embed" or _TARGET_HEAD not in shards.names() else _TARGET_HEAD
    if field in overrides:
        is_own, why = overrides[field], "as the caller says"
    elif not copies:
        is_own, why = False, "the modules have none and share the target's"
    elif theirs not in shards.names():
        is_own, why = True, f"{theirs} is not here to be compared with {copies[0]}"
    else:
        whole = shards.tensor(theirs)
        is_own = any(not _is_equal(tensors.tensor(name), whole, where) for name in copies)
        why = f"{copies[0]} {'differs from' if is_own else 'is a copy of'} {theirs}"
    notes.append(f"{field} = {is_own!r}: {why}.")
    if is_own:
        return with_end
    for name in copies:
        copy = tensors.take(name, stored)
        if field in overrides:
            read_parts(copy, where)  # damaged files are refused all the same
    return dataclasses.replace(config, **{field: False})


def _is_equal(a: Tensor, b: Tensor, where: Sharding | None) -> bool:
    check = lambda part: np.array_equal(a.read(part), b.read(part))
    return a.shape == b.shape and holds_for_parts(check, a.shape, where)


def _block_of(hf: Mapping[str, Any]) -> tuple[int, int]:
    """The block of an 8-bit matrix that shares one scale."""
    block = stated_object(hf, "quantization_config").get("weight_block_size") or _BLOCK
    is_pair = isinstance(block, (list, tuple)) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise ConfigError(f"weight_block_size is {shown(block)}; expected rows and columns")
    return tuple(block)


class _Modules:
    """The modules' tensors alone, whole numbers times scales where they are stored so."""

    def __init__(self, directory, shards: Shards | Pickles, layout: Layout, count: int, block):
        self._directory, self._shards, self._block = directory, shards, block
        number = layout.number
        own = {name for name in shards.names() if number(name) is not None}
        self._own = {name for name in own if number(name) < count}

    def names(self) -> set[str]:
        """All but the scales of tensors that are there."""
        scales = {f"{name}{_SCALE}" for name in self._own}
        return self._own - scales

    def tensor(self, name: str) -> Tensor:
        stored, scale = self._shards.tensor(name), f"{name}{_SCALE}"
        if scale not in self._own:
            if stored.dtype.itemsize == 1:
                raise WeightsError(
                    f"{self._directory}: tensor {scale} is missing, of {stored.dtype.name} {name}"
                )
            return stored
        factors = self._shards.tensor(scale)
        expected = tuple(-(-n // b) for n, b in zip(stored.shape, self._block))
        if len(stored.shape) != 2 or factors.shape != expected:
            raise WeightsError(
                f"{self._directory}: tensor {scale} has shape {list(factors.shape)}; {name} of "
                f"shape {list(stored.shape)} has {list(expected)} blocks of {list(self._block)}"
            )

        def read(part: Part) -> np.ndarray:
            within = list(zip(part, self._block))
            blocks = tuple(range(r.start // b, -(-r.stop // b)) for r, b in within)
            scales = factors.read(blocks).astype(np.float32)
            for axis, (r, b) in enumerate(within):
                scales = scales.take(np.asarray(r) // b - r.start // b, axis=axis)
            return stored.read(part).astype(np.float32) * scales

        return Tensor(stored.shape, np.dtype(np.float32), read)
