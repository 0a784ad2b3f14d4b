"""Reads and writes Hugging Face model directories: config, weights and tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from spec_jax.errors import ConfigError, WeightsError
from spec_jax.meshes import platform_of
from spec_jax.models import orbax_files
from spec_jax.models.checks import integers_of, is_integer
from spec_jax.models.config import with_attention
from spec_jax.models.families import AnyConfig, family_of, read_config
from spec_jax.models.files import read_json, write_json, write_once
from spec_jax.models.float8 import METHOD, SCALE, block_of, dequantised, has_blocks
from spec_jax.models.params import (
    Params,
    assemble,
    assemble_named,
    declared,
    outer_table,
    placement,
    walk,
)
from spec_jax.models.parts import Part, Tensor, read_onto, stack
from spec_jax.models.runs import laid_out
from spec_jax.models.specs import ParamSpec, tensor_names
from spec_jax.models.tensors import (
    StrictReader,
    check_layers,
    on_host,
    open_tensors,
    renamed,
    save_tensors,
    unfused,
)
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.sharding import SHARDED, AxisRules, place

_HEAD = "lm_head.weight"
_MODULES = ("mtp.", "model.mtp_layers.")  # what ``load_mtp`` reads from the same directory


def load_pretrained(
    directory: str | pathlib.Path,
    dtype: DTypeLike = jnp.float32,
    *,
    scan_layers: bool | None = None,
    attention: str | None = None,
    mesh: Mesh | None = None,
    axis_rules: AxisRules = SHARDED,
) -> tuple[Params, AnyConfig]:
    """Loads a model directory of a registered family, from safetensors or the files of torch.

    MTP modules in the directory are not read. 8-bit floats in blocks are multiplied by their scales
    (see ``float8``). A directory with config.json and an orbax checkpoint holds the weights by our
    names, see ``orbax_files``. On a mesh, each process reads what its own devices
    hold, part by part, and never has a whole tensor that is split.

    Args:
      directory: holds config.json and the weights.
      dtype: of the returned parameters.
      scan_layers: stack the layers, see ``ModelConfig``; None: see ``runs.laid_out``.
      attention: how a cache is attended over, see ``config.ATTENTIONS``; None: as the family does.
      mesh: the devices to place the parameters on; None: jax's default device.
      axis_rules: which dimensions are split over the mesh.

    Returns:
      The parameters and their config.

    Raises:
      WeightsError: a file cannot be read or is truncated; or a tensor is missing, unexpected, not
        finite, or of another shape than config.json asks for. The message names the tensor.
      ConfigError: the family is not supported, its layers cannot be stacked, it lacks this
        attention, or the mesh does not divide its heads.
    """
    directory = pathlib.Path(directory)
    config = read_config(directory)
    hf = read_json(directory / "config.json")
    if scan_layers is None:
        config = laid_out(config, platform_of(mesh))
    elif family_of(config).can_scan:
        config = dataclasses.replace(config, scan_layers=scan_layers)
    elif scan_layers:
        raise ConfigError(f"scan_layers: the layers of {directory} are never stacked")
    config = with_attention(config, attention)
    if (folder := orbax_files.find(directory)) is not None:
        params = assemble_named(config, orbax_files.leaves(folder, config), dtype, str(folder))
        if mesh is not None:
            params = place(params, placement(str(directory), config, mesh, axis_rules))
        return params, config
    with contextlib.ExitStack() as files:
        stored = open_tensors(directory, files)
        check_layers(directory, config.num_hidden_layers, len(stored))
        where = None if mesh is None else placement(str(directory), config, mesh, axis_rules)
        stored = renamed(unfused(stored), family_of(config).prefixes)
        own = {name: x for name, x in stored.items() if not _is_of_module(name, hf, config)}
        if has_blocks(hf):
            if not any(name.endswith(SCALE) for name in stored):
                raise ConfigError(
                    f"{directory / 'config.json'} has a quantization_config: blocks of {METHOD}, "
                    "yet no tensor has scales; if the weights are plain, remove "
                    "quantization_config from the file"
                )
            own = dequantised(directory, own, block_of(hf))
        tensors = StrictReader(directory, own)
        tensors.sizes = integers_of(config)
        is_twice = config.tie_word_embeddings and _HEAD in tensors.left
        ends = _equal_ends(directory, tensors, config).astype(dtype) if is_twice else None

        def weight(spec: ParamSpec, layer: int | None) -> Tensor:
            return tensors.weight(spec.hf_name.replace("{i}", str(layer)), spec, dtype)

        weights = assemble(config, weight, stack)
        if ends is not None:
            weights["embed"] = ends
        tensors.finish()
        params = jax.tree.map(read_onto, weights, *([] if where is None else [where]))
    return params, config


def _is_of_module(name: str, hf: Mapping[str, Any], config: AnyConfig) -> bool:
    """Whether a tensor is of an MTP module, under a prefix or as layers after the last one."""
    count = hf.get("num_nextn_predict_layers")
    place = re.match(r"model\.layers\.(\d{1,9})\.", name)
    if place is None or not is_integer(count):
        return name.startswith(_MODULES)
    return 0 <= int(place[1]) - config.num_hidden_layers < count


def _equal_ends(directory: pathlib.Path, tensors: StrictReader, config: AnyConfig) -> Tensor:
    """A tied embedding that is stored again as the head, which must then be equal."""
    spec = outer_table(config)["embed"]
    embed = tensors.tensor(spec.hf_name)
    head = tensors.take(_HEAD, spec.shape)

    def read(part: Part) -> np.ndarray:
        array = embed.read(part)
        if not np.array_equal(array, head.read(part)):
            raise WeightsError(
                f"{directory}: config.json says tie_word_embeddings, yet {_HEAD} differs from "
                f"{spec.hf_name}"
            )
        return array

    return dataclasses.replace(embed, read=read)


def save_pretrained(
    directory: str | pathlib.Path,
    params: Params,
    config: AnyConfig,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = "float32",
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes a directory that transformers and ``load_pretrained`` load as the same model.

    Files appear under their final names only when they are complete. Parameters on a mesh are
    gathered file by file. In several processes all call this, and process 0 writes.

    Example:
      ```python
      import tempfile

      import spec_jax
      from spec_jax.models.checkpoint import save_pretrained

      target = spec_jax.load_model("zoo/target")
      with tempfile.TemporaryDirectory() as directory:
          save_pretrained(directory, target.params, target.config, target.tokenizer, "bfloat16")
          print(spec_jax.load_model(directory))
      ```

    Args:
      directory: created if it does not exist.
      params: the weights.
      config: their config.
      tokenizer: is saved beside them; None for no tokenizer.
      dtype: of the stored weights, "float32" or "bfloat16".
      max_shard_bytes: larger models are split into shards with an index. So much of the model
        is on the host at once.
    """
    directory = pathlib.Path(directory)
    dtype = jnp.dtype(dtype)
    hf = {**config.to_hf(), "dtype": dtype.name}  # refused before anything is written
    # tensors of each file, and bytes of the last one
    counts = [0]
    size = 0
    for _, spec, layer in declared(config):
        nbytes = dtype.itemsize * math.prod(spec.shape)
        if counts[-1] and size + nbytes > max_shard_bytes:
            counts.append(0)
            size = 0
        counts[-1] += len(tensor_names(spec, layer))
        size += nbytes
    tensors = (
        (name, as_stored(part, spec, dtype))
        for spec, layer, array in walk(config, params)
        for name, part in zip(
            tensor_names(spec, layer), array if "{e}" in spec.hf_name else [array]
        )
    )
    save_tensors(directory, [itertools.islice(tensors, count) for count in counts])

    def write_others():
        write_json(directory / "config.json", hf)
        generation = {n: hf[n] for n in ("bos_token_id", "eos_token_id") if hf[n] is not None}
        write_json(directory / "generation_config.json", generation)
        if tokenizer is not None:
            tokenizer.save(directory)

    write_once(write_others)


def as_stored(array: ArrayLike, spec: ParamSpec, dtype: DTypeLike) -> np.ndarray:
    """Returns a weight as files hold it, with linear maps as ``[out, in]``.

    Args:
      array: the weight as it is declared, or the part of one expert.
      spec: its declaration.
      dtype: of the result, unless the declaration states another.
    """
    array = on_host(array).astype(jnp.dtype(spec.dtype or dtype))
    # safetensors writes memory as it lies.
    return np.ascontiguousarray(array.T if spec.is_linear else array)
