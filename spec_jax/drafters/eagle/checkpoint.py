"""Reads and writes EAGLE heads in the formats of EAGLE, SpecForge and vllm-project/speculators.

Reading is strict: a missing, unexpected or misshapen tensor is an error that names it. What a file
leaves open is decided here, and each decision is reported in a note.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from spec_jax.drafters.common.vocabulary import check_offsets
from spec_jax.drafters.eagle import formats
from spec_jax.drafters.eagle.formats import SPECFORGE, SPECULATORS, file_names
from spec_jax.drafters.eagle.model import EagleConfig, check_head, head_table
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checkpoint import as_stored
from spec_jax.models.checks import integers_of
from spec_jax.models.config import ModelConfig
from spec_jax.models.files import check_not_quantised, naming, read_json, write_json, write_once
from spec_jax.models.params import check_weights, flat_table, nest, table_placement
from spec_jax.models.parts import Tensor, holds_for_parts, part_at, read_onto, read_parts, stack
from spec_jax.models.specs import ParamSpec
from spec_jax.models.tensors import StrictReader, on_host, open_tensors, save_tensors
from spec_jax.sharding import SHARDED, AxisRules, named

_EMBED = "embed_tokens.weight"
# Two copies of one embedding may differ by their rounding to bfloat16 or float16.
_RTOL = 2.0**-8
_ATOL = 2.0**-24


def read_head(
    directory: str | pathlib.Path,
    target_config: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    *,
    target_embed: jax.Array | None = None,
    mesh: Mesh | None = None,
    axis_rules: AxisRules = SHARDED,
    **overrides: Any,
) -> LoadedHead:
    """Reads a head's config.json and weights.

    Args:
      directory: the head's directory, with safetensors, or pytorch_model.bin if torch is installed.
      target_config: the config of the model that it drafts for.
      dtype: the dtype of the parameters.
      target_embed: dtype[V,D], the target's embedding, which a copy in the head is compared with.
        Without it, a copy of the same width is assumed to be the target's.
      mesh: the devices to place the parameters on, each process reading what its own devices hold;
        None: jax's default device.
      axis_rules: which dimensions are split over the mesh.
      **overrides: ``taps`` or an option of ``EagleConfig``, instead of what config.json says.

    Returns:
      The head, with ``d2t`` among its parameters where the draft vocabulary is smaller, and a note
      for everything that the checkpoint leaves open and how it was read.

    Raises:
      WeightsError: an unreadable file; a tensor that is missing, unexpected, of another shape
        than config.json says, or not finite; a ``d2t`` that is no table of offsets.
      ConfigError: the head is for another target, or of an architecture that is not supported; or
        the mesh does not divide its heads.
    """
    directory, notes = pathlib.Path(directory), []
    file = directory / "config.json"
    hf = read_json(file)
    check_not_quantised(file, hf)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(directory, stack)
        formats.check_overrides(overrides, formats.has_masks(tensors.left))
        with naming(file):
            format = formats.find_format(hf, tensors.left)
        fc_in = _num_inputs(directory, tensors)
        with naming(file):
            config = formats.head_config(hf, tensors.left, fc_in, target_config, overrides, notes)
        tensors.sizes = integers_of(config.layer)
        if _EMBED in tensors.left and not config.own_embed:
            compared = None if "own_embed" in overrides else target_embed
            config = _share_embed(tensors, config, compared, notes, mesh, axis_rules)
        is_midlayer = any(name.startswith("midlayer.") for name in tensors.left)
        prefix = "midlayer." if is_midlayer else "layers.0."
        table = flat_table(head_table(config))
        shardings = {}
        if mesh is not None:  # refuses a mesh before a weight is read
            shardings = table_placement(str(directory), config.layer, table, mesh, axis_rules)
            shardings["d2t"] = NamedSharding(mesh, PartitionSpec())
        names = file_names(config, prefix)
        weights = {name: _weight(tensors, *names[name], dtype) for name in table}
        if config.version == 3:
            weights |= _draft_vocabulary(directory, tensors, config)
        tensors.finish()
        params = {name: read_onto(tensor, shardings.get(name)) for name, tensor in weights.items()}
    return LoadedHead(str(directory), config, nest(params), tuple(notes), format)


def write_head(
    directory: str | pathlib.Path,
    config: EagleConfig,
    params: dict[str, jax.Array],
    *,
    format: str,
    target_config: ModelConfig,
    target_embed: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    num_speculative_tokens: int = 3,
    verifier: str | None = None,
) -> None:
    """Writes a directory that the format's loaders and ``read_head`` read as the same head.

    config.json leaves nothing open: it has every norm, the tapped states in the numbering of the
    format, and both spellings of the rotary embedding. EAGLE's own loader knows none of the norms
    that are optional in ``EagleConfig``, no bias, and no states other than the usual three; the
    format "EAGLE-3" writes them for other loaders. Files get their final names when they are
    complete.

    Args:
      directory: a directory for the head alone, created if absent; its files are overwritten.
      config: the head's.
      params: its weights.
      format: "EAGLE-1", "EAGLE-3", "SpecForge" (which SGLang loads too) or "speculators".
      target_config: the config of the model it drafts for.
      target_embed: dtype[V,D], written as the embedding of a head that shares the target's. The
        format "speculators" needs it; "SpecForge" leaves it out but of P-EAGLE, as its loaders
        always share.
      dtype: the dtype to store, "float32", "bfloat16" or "float16"; by default the weights' own.
      num_speculative_tokens: tokens drafted a round, for the format "speculators".
      verifier: the target's name or path for the format "speculators", which needs it, as its
        package and vLLM load the target.

    Raises:
      ConfigError: the format cannot express the head's config, or its loaders would read it as
        something else.
      WeightsError: a weight is missing or misshapen, or ``d2t`` is no table of offsets.
    """
    directory = pathlib.Path(directory)
    hf = formats.head_json(config, format, target_config, num_speculative_tokens, verifier)
    if format == SPECULATORS and not config.own_embed and target_embed is None:
        # Its package may keep unset memory where a file has no embedding.
        raise ConfigError("target_embed is None; speculators takes the embedding from the file")
    check_head(config, params)
    dtype = jnp.dtype(params["fc"].dtype if dtype is None else dtype)
    U = config.layer.vocab_size
    V = config.target_vocab_size
    tensors = {}
    for name, (stored, spec) in file_names(config, formats.prefix_of(config, format)).items():
        weight = functools.reduce(operator.getitem, name.split("."), params)
        tensors[stored] = as_stored(weight, spec, dtype)
    # SpecForge's own converter asks for the tables of ids where the vocabularies are equal, too.
    if config.version == 3 and (U < V or format == SPECFORGE):
        d2t = on_host(params.get("d2t", np.zeros(U, np.int32)))  # offsets from draft ids
        t2d = np.isin(np.arange(V), np.arange(U) + d2t)  # which ids can be drafted
        tensors |= {"d2t": check_offsets(d2t, t2d, V).astype(np.int64), "t2d": t2d}
    has_copy = config.is_parallel or format != SPECFORGE
    if target_embed is not None and not config.own_embed and has_copy:
        shape = (V, config.layer.hidden_size)
        check_weights({"target_embed": target_embed}, {"target_embed": shape}, "")
        tensors[_EMBED] = as_stored(target_embed, ParamSpec(shape, (), _EMBED), dtype)
    save_tensors(directory, [tensors.items()])
    hf["dtype"] = dtype.name
    if format != SPECULATORS:
        hf["torch_dtype"] = dtype.name
    write_once(lambda: write_json(directory / "config.json", hf))


def _num_inputs(directory, tensors: StrictReader) -> int:
    if "fc.weight" not in tensors.left:
        is_model = "model.embed_tokens.weight" in tensors.left
        advice = "load_model reads a model" if is_model else "load_draft detects the kind"
        message = f"tensor fc.weight is missing, which every EAGLE head has; {advice}"
        raise WeightsError(f"{directory}: {message}")
    shape = tensors.tensor("fc.weight").shape
    if len(shape) != 2:
        raise WeightsError(f"{directory}: tensor fc.weight has shape {[*shape]}; expected a matrix")
    return shape[1]


def _weight(tensors: StrictReader, name: str, spec: ParamSpec, dtype: DTypeLike) -> Tensor:
    """A weight; the state of masked pairs may be stored without its first dimension, as by NeMo."""
    if name == "mask_hidden" and name in tensors.left and len(tensors.tensor(name).shape) == 2:
        return stack([tensors.weight(name, spec._replace(shape=spec.shape[1:]), dtype)])
    return tensors.weight(name, spec, dtype)


def _share_embed(
    tensors, config: EagleConfig, target_embed, notes, mesh: Mesh | None, axis_rules: AxisRules
) -> EagleConfig:
    """Drops the head's embedding if it is the target's; otherwise sets ``own_embed``."""
    shape = (config.target_vocab_size, config.layer.hidden_size)
    if target_embed is None:
        sharding = None if mesh is None else named(("vocab", "embed"), shape, mesh, axis_rules)
        read_parts(tensors.take(_EMBED, shape), sharding)  # damaged files are refused all the same
        notes.append(f"{_EMBED} is left out, uncompared: the head shares the target's embedding.")
    elif _is_close(tensors.tensor(_EMBED), jnp.asarray(target_embed)):
        tensors.take(_EMBED, shape)
        notes.append(f"{_EMBED} is left out: it is a copy of the target's embedding.")
    else:
        notes.append(f"{_EMBED} differs from the target's embedding; the head keeps its own.")
        return dataclasses.replace(config, own_embed=True)
    return config


def _is_close(stored: Tensor, target_embed: jax.Array) -> bool:
    if stored.shape != target_embed.shape:
        return False  # and, as the head's own, it is refused by its shape
    ours = {part_at(s.index, stored.shape): s.data for s in target_embed.addressable_shards}

    def check(part):
        a, b = (jnp.asarray(x).astype(jnp.float32) for x in (stored.read(part), ours[part]))
        return bool(jnp.allclose(a, b, rtol=_RTOL, atol=_ATOL))

    return holds_for_parts(check, stored.shape, target_embed.sharding)


def _draft_vocabulary(directory, tensors, config: EagleConfig) -> dict[str, Tensor]:
    """``{"d2t": i32[U]}``, or nothing where the vocabularies are equal."""
    U = config.layer.vocab_size
    V = config.target_vocab_size
    t2d = tensors.take("t2d", (V,)).read_whole() if "t2d" in tensors.left else None
    is_whole = U == V and "d2t" not in tensors.left
    d2t = np.zeros(U, np.int32) if is_whole else tensors.take("d2t", (U,)).read_whole()
    try:
        offsets = check_offsets(d2t, t2d, V)
    except WeightsError as error:
        raise WeightsError(f"{directory}: {error}") from error
    return {"d2t": Tensor.of(np.asarray(offsets))} if U < V else {}
