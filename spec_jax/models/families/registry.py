"""The registry of model families.

A family is one record, ``Family``. Weights, forward pass, caches, checkpoints and MTP modules find
it by the class of a config, or by the ``model_type`` of a config.json.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from spec_jax.errors import ConfigError
from spec_jax.models.caches.groups import GroupedCache
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.checks import naming, require, shown, stop_tokens
from spec_jax.models.config import AnyConfig, text_part
from spec_jax.models.files import check_not_quantised, exists, read_json
from spec_jax.models.float8 import has_blocks
from spec_jax.models.specs import ParamSpec


class LayerKind(NamedTuple):
    """What a layer of one kind computes, and what it keeps of the tokens that were fed.

    Attributes:
      layer: ``(weights, x dtype[B,T,D], cache, index, window, config) -> (dtype[B,T,D], cache)``,
        one layer with its residuals. ``window`` is a ``layers.Window``; ``cache`` is that of the
        layers which share ``init_cache``, and None if the tokens are whole sequences; ``index`` is
        the layer's place among them, traced in a loop over layers that repeat.
      init_cache: ``(config, batch, slots, dtype, num_layers) -> Cache`` of so many layers. Layers
        with the same function are one group of the model's cache, see ``models/caches/groups.py``.
    """

    layer: Callable[..., Any]
    init_cache: Callable[..., Any] = KVCache.create


class Family(NamedTuple):
    """A model family: how its config is read, what its weights are, what its layers compute.

    Attributes:
      config: the class of its configs, see ``AnyConfig``.
      model_types: values of ``model_type`` in a config.json that the class reads.
      layer_tables: ``(config) -> [{name: ParamSpec}]``, the declared weights of each layer.
      outer_table: ``(config) -> {name: ParamSpec}``, those of embedding, final norm and head. None
        if only the layers are supported, in MTP modules.
      layer: of the only kind of layers, see ``LayerKind``.
      init_cache: of the only kind of layers, see ``LayerKind``.
      kinds: in place of both, where layers differ: ``(config) -> [LayerKind]``, one a layer.
      can_scan: layers that repeat may be stacked and scanned, see ``models/runs.py``: the config
        has a field ``scan_layers``, and layers and their caches take a traced ``index``.
      has_panels: every matrix but ``embed`` is applied by ``layers.linear``, so a CPU may store
        them in panels, see ``models/cpu_layout.py``.
      prefixes: from how names of tensors begin in files to how they begin in the tables; None
        leaves the tensors out, as those of images.
      module_layer: ``(config) -> config`` of the one layer that an MTP module of such a model has;
        None if it is any layer of the model.
      recycles_normed: the next step of such a module, or the next module, reads the state after the
        module's output norm, not the one before it. Families with ``mtp_formats`` must state it.
      mtp_formats: names of the formats (see ``drafters/mtp/formats.py``) that can hold MTP modules
        with such a layer. Empty if modules are not supported.
        The names of a layer's weights must differ from those of a module (``fc``, ``norm``,
        ``embed``, ``head``, ``embed_norm``, ``hidden_norm``).
    """

    config: type
    model_types: tuple[str, ...]
    layer_tables: Callable[[Any], list[dict[str, ParamSpec]]]
    outer_table: Callable[[Any], dict[str, ParamSpec]] | None = None
    layer: Callable[..., Any] | None = None
    init_cache: Callable[..., Any] = KVCache.create
    kinds: Callable[[Any], Sequence[LayerKind]] | None = None
    can_scan: bool = False
    has_panels: bool = False
    prefixes: Mapping[str, str | None] = types.MappingProxyType({})
    module_layer: Callable[[Any], Any] | None = None
    recycles_normed: bool | None = None
    mtp_formats: tuple[str, ...] = ()


_FAMILIES: dict[type, Family] = {}


def register(family: Family) -> None:
    """Registers a family, so its models are loaded, decoded, trained and exported as any other.

    Registering the same config class again replaces its family.

    Args:
      family: its record.

    Raises:
      ConfigError: another family reads one of its model types, or it has MTP modules and does not
        state which state they recycle.
    """
    name = family.config.__name__
    is_stated = isinstance(family.recycles_normed, bool) or not family.mtp_formats
    why = "has mtp_formats, so its recycles_normed must be True or False"
    require(is_stated, f"the family of {name} {why}")
    for other in _FAMILIES.values():
        shared = sorted(set(family.model_types) & set(other.model_types))
        is_free = not shared or other.config is family.config
        reader = other.config.__name__
        message = f"model_type {', '.join(shared)} is read by {reader}; {name} needs another"
        require(is_free, message)
    _FAMILIES[family.config] = family


def family_of(config: AnyConfig) -> Family:
    """Returns the family of a config.

    Raises:
      ConfigError: no family has configs of its class, or of a class that it inherits from.
    """
    for kind in type(config).__mro__:
        if kind in _FAMILIES:
            return _FAMILIES[kind]
    known = ", ".join(kind.__name__ for kind in _FAMILIES)
    raise ConfigError(
        f"{type(config).__name__} is the config of no registered family; known: {known}"
    )


def layer_kinds(config: AnyConfig) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer of a model."""
    family = family_of(config)
    if family.kinds is not None:
        return tuple(family.kinds(config))
    return (LayerKind(family.layer, family.init_cache),) * config.num_hidden_layers


def places_of(kinds: Sequence[LayerKind]) -> list[tuple[int, int]]:
    """Returns the group of the cache that each layer belongs to, and its place in the group."""
    makers = [kind.init_cache for kind in kinds]
    groups = [*dict.fromkeys(makers)]
    return [(groups.index(maker), makers[:i].count(maker)) for i, maker in enumerate(makers)]


def init_cache(
    config: AnyConfig,
    batch: int,
    slots: int,
    dtype: DTypeLike = jnp.float32,
    num_layers: int | None = None,
) -> Any:
    """Returns an empty cache, of the kind that the layers take, for ``batch`` rows of ``slots``.

    Args:
      config: of the model.
      batch: B.
      slots: S.
      dtype: of keys and values.
      num_layers: of how many of the layers; None: of all.
    """
    counts = collections.Counter(kind.init_cache for kind in layer_kinds(config)[:num_layers])
    caches = [init(config, batch, slots, dtype, count) for init, count in counts.items()]
    return caches[0] if len(caches) == 1 else GroupedCache(tuple(caches))


def module_layer(config: AnyConfig) -> Any:
    """Returns the config of the one layer of an MTP module for such a model."""
    of_family = family_of(config).module_layer
    config = dataclasses.replace(config, scan_layers=False) if config.scan_layers else config
    return of_family(config) if of_family else dataclasses.replace(config, num_hidden_layers=1)


def family_of_type(model_type: Any, *, for_modules: bool = False) -> Family:
    """Returns the family that reads a ``model_type``.

    Args:
      model_type: as config.json has it.
      for_modules: MTP modules are to be read, not a whole model.

    Raises:
      ConfigError: there is none.
    """

    def is_suitable(family):
        return family.mtp_formats if for_modules else family.outer_table

    families = [family for family in _FAMILIES.values() if is_suitable(family)]
    for family in families:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in families for name in family.model_types))
    what = "MTP modules with layers of model_type" if for_modules else "model_type"
    verb = "are" if for_modules else "is"
    raise ConfigError(
        f"{what} {shown(model_type)} {verb} not supported; known: {known}; "
        "docs/write_a_family.md says how to add one"
    )


def read_config(directory: str | pathlib.Path) -> AnyConfig:
    """Reads the config of a Hugging Face directory.

    Stop tokens of generation_config.json take precedence over those of config.json, as they do
    when transformers generates.

    Raises:
      WeightsError: there is no config.json, or a file cannot be read.
      ConfigError: the family is not supported, the weights are quantised in a way that is not read,
        or a value has a wrong type or means nothing; the message names the file, the key and the
        value.
    """
    directory = pathlib.Path(directory)
    file = directory / "config.json"
    generation = directory / "generation_config.json"
    hf = read_json(file)
    check_not_quantised(file, {**hf, "quantization_config": None} if has_blocks(hf) else hf)
    generated = read_json(generation).get("eos_token_id") if exists(generation) else None
    with naming(file):
        family = family_of_type(hf.get("model_type"))
        text = text_part(hf)
        stop_tokens(text.get("eos_token_id"), text.get("vocab_size"))
    with naming(generation):
        stop_tokens(generated, text.get("vocab_size"))
    with naming(file):
        if generated is not None:
            hf["eos_token_id"] = generated
        return family.config.from_hf(hf)
