"""Reads EAGLE heads as EAGLE, SpecForge and vllm-project/speculators publish them.

Reading is strict: a missing, unexpected or misshapen tensor is an error that names it. What a file
leaves open is decided here, and each decision is reported in a note.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from spec_jax.drafters.common.vocabulary import check_offsets
from spec_jax.drafters.eagle.model import EagleConfig, head_table
from spec_jax.drafters.eagle.read_config import check_overrides, find_layout, head_config
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.errors import WeightsError
from spec_jax.models.checks import integers_of
from spec_jax.models.config import ModelConfig
from spec_jax.models.files import check_not_quantised, naming, read_json
from spec_jax.models.params import table_placement
from spec_jax.models.parts import Tensor, holds_for_parts, part_at, read_onto, read_parts
from spec_jax.models.specs import ParamSpec
from spec_jax.models.tensors import StrictReader, open_tensors
from spec_jax.sharding import SHARDED, Rules, named

EMBED = "embed_tokens.weight"
_NORMS = {
    "embed_norm": "{layer}input_layernorm.weight",
    "hidden_norm": "{layer}hidden_norm.weight",
    "input_norm": "input_norm.weight",
    "norm": "norm.weight",
}
# Two copies of one embedding may differ by their rounding to bfloat16 or float16.
_RTOL, _ATOL = 2.0**-8, 2.0**-24


def read_head(
    directory: str | pathlib.Path,
    target_config: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    *,
    target_embed: jax.Array | None = None,
    mesh: Mesh | None = None,
    rules: Rules = SHARDED,
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
      rules: which dimensions are split over the mesh.
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
    directory = pathlib.Path(directory)
    check_overrides(overrides)
    hf = read_json(directory / "config.json")
    check_not_quantised(directory / "config.json", hf)
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(directory, stack)
        with naming(directory / "config.json"):
            layout = find_layout(hf, tensors.left)
        fc_in = _num_inputs(directory, tensors)
        with naming(directory / "config.json"):
            config = head_config(hf, layout, tensors.left, fc_in, target_config, overrides, notes)
        tensors.sizes = integers_of(config.layer)
        if EMBED in tensors.left and not config.own_embed:
            is_told = "own_embed" in overrides
            config = _share_embed(
                tensors, config, None if is_told else target_embed, notes, mesh, rules
            )
        is_midlayer = any(name.startswith("midlayer.") for name in tensors.left)
        layer = "midlayer." if is_midlayer else "layers.0."
        table = head_table(config)
        where = {}
        if mesh is not None:
            where = table_placement(str(directory), config.layer, table, mesh, rules)
            where["d2t"] = NamedSharding(mesh, PartitionSpec())
        weights = {
            name: tensors.weight(file_name(name, spec, layer), spec, dtype)
            for name, spec in table.items()
        }
        if config.version == 3:
            weights |= _draft_vocabulary(directory, tensors, config)
        tensors.finish()
        params = {name: read_onto(tensor, where.get(name)) for name, tensor in weights.items()}
    return LoadedHead(str(directory), config, params, tuple(notes), layout)


def file_name(name: str, spec: ParamSpec, layer: str) -> str:
    """Returns the name of a weight of ``head_table`` in a checkpoint.

    Args:
      name: our name.
      spec: its declaration.
      layer: the prefix of the one layer's names, "midlayer." or "layers.0.".
    """
    if name.startswith("fc_norm_"):
        return f"fc_norm.{name.removeprefix('fc_norm_')}.weight"
    if name in _NORMS:
        return _NORMS[name].format(layer=layer)
    return spec.hf_name.replace("model.layers.{i}.", layer)


def _num_inputs(directory, tensors: StrictReader) -> int:
    if "fc.weight" not in tensors.left:
        is_model = "model.embed_tokens.weight" in tensors.left
        raise WeightsError(
            f"{directory}: tensor fc.weight is missing, without which this is no EAGLE head: "
            f"{'it holds a whole model, which load_model reads; ' if is_model else ''}"
            "load_draft finds out what drafts are there"
        )
    shape = tensors.tensor("fc.weight").shape
    if len(shape) != 2:
        raise WeightsError(
            f"{directory}: tensor fc.weight has shape {list(shape)}; expected a matrix"
        )
    return shape[1]


def _share_embed(
    tensors, config: EagleConfig, target_embed, notes, mesh: Mesh | None, rules: Rules
) -> EagleConfig:
    """Drops the head's embedding if it is the target's; otherwise sets ``own_embed``."""
    shape = (config.target_vocab_size, config.layer.hidden_size)
    if target_embed is None:
        where = None if mesh is None else named(("vocab", "embed"), shape, mesh, rules)
        read_parts(tensors.take(EMBED, shape), where)  # damaged files are refused all the same
        notes.append(f"{EMBED} is left out, uncompared: the head shares the target's embedding.")
        return config
    if _is_close(tensors.tensor(EMBED), jnp.asarray(target_embed)):
        tensors.take(EMBED, shape)
        notes.append(f"{EMBED} is left out: it is a copy of the target's embedding.")
        return config
    notes.append(f"{EMBED} differs from the target's embedding; the head keeps its own.")
    return dataclasses.replace(config, own_embed=True)


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
    U, V = config.layer.vocab_size, config.target_vocab_size
    t2d = tensors.take("t2d", (V,)).read_whole() if "t2d" in tensors.left else None
    if U == V and "d2t" not in tensors.left:
        d2t = np.zeros(U, np.int32)
    else:
        d2t = tensors.take("d2t", (U,)).read_whole()
    try:
        offsets = check_offsets(d2t, t2d, V)
    except WeightsError as error:
        raise WeightsError(f"{directory}: {error}") from error
    return {"d2t": Tensor.of(np.asarray(offsets))} if U < V else {}
