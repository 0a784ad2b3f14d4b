"""Reads and writes block drafters in the formats of their projects, see ``formats``.

Reading is strict: a missing, unexpected or misshapen tensor is an error that names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spec_jax.drafters.block import formats
from spec_jax.drafters.block.config import BlockConfig, DFlashConfig, DSparkConfig, TreeFlashConfig
from spec_jax.drafters.block.formats import FORMATS, SPECULATORS
from spec_jax.drafters.block.model import block_table
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.errors import WeightsError
from spec_jax.models.checkpoint import as_stored
from spec_jax.models.checks import integers_of, require
from spec_jax.models.files import check_not_quantised, naming, read_json, write_json, write_once
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.params import check_weights, flat_table, shapes_of
from spec_jax.models.parts import read_onto
from spec_jax.models.specs import ParamSpec
from spec_jax.models.tensors import StrictReader, on_host, open_tensors, save_tensors

_KEYS = {  # of config.json, that state the sizes of dimensions which no layer of a model has
    "rank": ("markov_rank", "selector_rank"),
    "reach": ("conv_kernel_size",),
    "taps": (),
}
_COPIES = ("embed_tokens.weight", "lm_head.weight")
# Two copies of one embedding may differ by their rounding to bfloat16 or float16.
_RTOL = 2.0**-8
_ATOL = 2.0**-24


def file_names(config: BlockConfig, prefix: str = "") -> dict[str, tuple[str, ParamSpec]]:
    """Returns the name of each weight in a file, and its declaration, by our dotted name.

    Args:
      config: the head's.
      prefix: of the backbone's tensors.
    """
    named = {}
    for name, spec in flat_table(block_table(config)).items():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        file_name = spec.hf_name.replace("model.layers.{i}.", f"layers.{layer}.")
        is_backbone = not name.startswith(("step.", "confidence"))
        named[name] = (f"{prefix if is_backbone else ''}{file_name}", spec)
    return named


def without_step(head: LoadedHead) -> LoadedHead:
    """Returns a head's block alone, as DFlash: drafts that do not know each other.

    Beside the head it shows what the step contributes. ``save`` writes it as any other.

    Args:
      head: a DSpark or TreeFlash head.

    Raises:
      ConfigError: it is another kind of head.
    """
    require(
        isinstance(head.config, (DSparkConfig, TreeFlashConfig)),
        f"{head.name} has no step of DSpark or TreeFlash that could be left out",
    )
    own = {field.name for field in dataclasses.fields(DFlashConfig)}
    kept = {name: value for name, value in vars(head.config).items() if name in own}

    def is_block(name):
        return name != "step" and not name.startswith("confidence")

    params = {name: w for name, w in head.params.items() if is_block(name)}
    name = f"{head.name} without its step"
    return LoadedHead(name, DFlashConfig(**kept), params, stated_length=head.stated_length)


def read_head(
    directory: str | pathlib.Path,
    target: LoadedModel,
    dtype: DTypeLike = jnp.float32,
    **overrides: Any,
) -> LoadedHead:
    """Reads a head's config.json and weights.

    Args:
      directory: the head's directory.
      target: the model that it drafts for, whose embedding and output head it shares; copies of
        these are compared with them.
      dtype: the dtype of the parameters.
      **overrides: see ``formats.OVERRIDES``.

    Returns:
      The head, and a note for everything that the checkpoint leaves open and how it was read.

    Raises:
      WeightsError: an unreadable file; a tensor that is missing, unexpected, of another shape
        than config.json says, or not finite; its own embedding or output head.
      ConfigError: the head is for another target, or of an architecture that is not supported.
    """
    directory, notes = pathlib.Path(directory), []
    file = directory / "config.json"
    hf = read_json(file)
    check_not_quantised(file, hf)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(directory, stack)
        with naming(file):
            format, config = formats.head_config(hf, tensors.left, target.config, overrides, notes)
        of_layer = integers_of(config.layer)
        is_prefixed = "model.fc.weight" in tensors.left
        params: dict[str, Any] = {}
        for name, (stored, spec) in file_names(config, "model." if is_prefixed else "").items():
            *outer, last = name.split(".")
            place = params
            for key in outer:
                place = place.setdefault(key, {})
            own = [key for axis in spec.axes for key in _KEYS.get(axis, ())]
            is_own = any(axis in _KEYS for axis in spec.axes)
            own = {key: getattr(config, key) for key in own if hasattr(config, key)}
            tensors.sizes = own if is_own else of_layer
            place[last] = read_onto(tensors.weight(_stored_name(stored, tensors), spec, dtype))
        _drop_copies(directory, tensors, target, notes)
        tensors.finish()
    return LoadedHead(str(directory), config, params, tuple(notes), format)


def _stored_name(name: str, tensors: StrictReader) -> str:
    """The name that a tensor has in this file, which may be an older one, or a module's."""
    others = (f"{formats.OLDER}{name}", f"{name}.weight")
    found = [other for other in others if other in tensors.left]
    return found[0] if found and name not in tensors.left else name


def _drop_copies(directory, tensors: StrictReader, target: LoadedModel, notes) -> None:
    for name in _COPIES:
        if name not in tensors.left:
            continue
        stored = tensors.tensor(name)
        ours = _end(target, name)
        whole = np.asarray(stored.read_whole(), np.float32)
        is_copy = whole.shape == ours.shape and np.allclose(whole, ours, rtol=_RTOL, atol=_ATOL)
        if not is_copy:
            raise WeightsError(
                f"{directory}: tensor {name} differs from the target's, and a block drafter with "
                "its own embedding or output head is not supported"
            )
        tensors.take(name, stored.shape)
        notes.append(f"{name} is left out: it is a copy of the target's.")


def _end(target: LoadedModel, name: str) -> np.ndarray:
    """The target's embedding or output head f32[V,D], by its name in a file."""
    head = target.params.get("head")
    is_head = name == "lm_head.weight" and head is not None
    end = on_host(head).T if is_head else on_host(target.params["embed"])
    return np.ascontiguousarray(end, np.float32)  # safetensors writes memory as it is


def write_head(
    head: LoadedHead,
    directory: pathlib.Path,
    target: LoadedModel,
    *,
    format: str | None,
    dtype: DTypeLike | None,
    num_speculative_tokens: int,
) -> None:
    """Writes a directory that the format's loaders and ``read_head`` read as the same head.

    Args:
      head: the head.
      directory: a directory for the head alone, created if absent; its files are overwritten.
      target: the model that it drafts for.
      format: a name in ``FORMATS``; None: the first that can express the config.
      dtype: the dtype to store; by default the weights' own.
      num_speculative_tokens: tokens drafted a round, for the format "speculators".

    Raises:
      ConfigError: the format cannot express the head's config.
      WeightsError: a weight is missing or has another shape.
    """
    config = head.config
    params = head.params
    format = formats.pick_format(config, target, format, num_speculative_tokens)
    hf = formats.head_json(config, format, target.config, num_speculative_tokens, target.name)
    check_weights(params, shapes_of(block_table(config)), "")
    dtype = jnp.dtype(params["norm"].dtype if dtype is None else dtype)
    stored = {}
    names = file_names(config, FORMATS[format].prefix)
    for name, (file_name, spec) in names.items():
        place = params
        for key in name.split("."):
            place = place[key]
        stored[file_name] = as_stored(place, spec, dtype)
    if FORMATS[format].has_copies:
        stored |= {name: _end(target, name).astype(dtype) for name in _COPIES}
    save_tensors(directory, [stored.items()])
    hf["dtype"] = dtype.name
    if format != SPECULATORS:
        hf["torch_dtype"] = dtype.name
    write_once(lambda: write_json(directory / "config.json", hf))
