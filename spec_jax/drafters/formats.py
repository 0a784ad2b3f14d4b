"""The files of heads: one reader, one writer and one picker for the formats of all projects.

A project's convention is a ``Format``: how it names tensors. A config's field is a ``Field``: the
key of config.json that states it, where each format puts the key, and what holds where a file
leaves it out. A kind of heads brings both tables in a subclass of ``HeadFormats``, with what no
table says; see ``eagle.formats``, ``mtp.formats`` and ``block.formats``.

Reading is strict: a missing, unexpected or misshapen tensor is an error that names it. What a file
leaves open is decided, and each decision is reported in a note. Writing leaves nothing open, and
refuses a config that would be read as another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from spec_jax.drafters import registry
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checkpoint import as_stored
from spec_jax.models.checks import (
    check,
    integers_of,
    is_integer,
    naming,
    require,
    shown,
    stated_flag,
    stated_object,
)
from spec_jax.models.config import SLIDING
from spec_jax.models.files import check_not_quantised, read_json, write_json, write_once
from spec_jax.models.loaded import LoadedModel, family_name
from spec_jax.models.params import Params, flat_table, nest, table_placement
from spec_jax.models.parts import Tensor, holds_for_parts, part_at, read_onto, read_parts, stack
from spec_jax.models.specs import ParamSpec
from spec_jax.models.tensors import StrictReader, on_host, open_tensors, save_tensors, unfused
from spec_jax.sharding import SHARDED, AxisRules, named

SPECULATORS = "speculators"
LAYER = "transformer_layer_config"  # the object of its files that describes a head's layers
REQUIRED = ...
# Two copies of one embedding may differ by their rounding to bfloat16 or float16.
_RTOL = 2.0**-8
_ATOL = 2.0**-24
_NOT_STATED = ("layer", "attention", "tie_word_embeddings")  # a head's layers tie nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A project's convention for the heads of a kind; subclasses add what else differs.

    Attributes:
      architecture: in config.json; None: that of the family of the head's layers.
      layer: how the names of a layer's tensors begin, in place of "model.layers.{i}.".
      names: whole names of tensors that the table of the kind names otherwise, by our names
        without numbers.
      is_after: modules are numbered on from the target's layers.
    """

    architecture: str | None = None
    layer: str = "layers.{i}."
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_after: bool = False

    def tensor_name(self, name: str, spec: ParamSpec, num_layers: int) -> str:
        """Returns the name of a tensor in files, of experts with ``{e}`` in it.

        Args:
          name: ours, with dots between the keys of nested parameters.
          spec: its declaration.
          num_layers: of the target.
        """
        keys = name.split(".")
        number = next((int(key) for key in keys if key.isdigit()), 0)
        number += num_layers if self.is_after else 0
        plain = ".".join(key for key in keys if not key.isdigit())
        usual = spec.hf_name.replace("model.layers.{i}.", self.layer)
        return self.names.get(plain, usual).replace("{i}", str(number))


class Field(NamedTuple):
    """A field of a head's config, and the key of config.json that states it.

    Attributes:
      name: of the field.
      key: its key; "" if no key states it.
      kind: bool, int, str or tuple; the config checks the last two.
      default: the value where the key is absent, or ``(reading) -> (value, why)`` with the reason
        for a note, "" for none; ``REQUIRED``: there is none.
      read: ``(reading) -> value``, for what takes more than a look at the key.
      places: by format the objects that the key is written in, "" being the top; by default the
        top. None: the format does not know the field.
    """

    name: str
    key: str = ""
    kind: type = bool
    default: Any = False
    read: Callable[[Reading], Any] | None = None
    places: Mapping[str, tuple[str, ...] | None] = {}


class End(NamedTuple):
    """An embedding or output head of the target, of which a head's files may hold copies.

    Attributes:
      stored: the names of the copies.
      weight: its name among the target's parameters, "embed" or "head".
      field: of the config, true if the head has one of its own; "": it cannot.
      is_copied: files are written with copies.
    """

    stored: tuple[str, ...]
    weight: str
    field: str = ""
    is_copied: bool = False


@dataclasses.dataclass
class Reading:
    """A head's directory while it is read: first what its config.json means, then its tensors.

    Attributes:
      hf: the parsed config.json.
      names: of the tensors.
      target: the config of the model that the head drafts for.
      overrides: what the caller says in place of the file.
      directory: for messages.
      inner: the objects of config.json in which keys may stand instead of at the top.
      format: the name of the format, once it is known.
      cls: the class of the head's config, likewise.
      values: the fields that have been read.
      notes: a sentence for every choice that the file leaves open.
      config: the head's, once it is known.
      files: all tensors of the directory.
      tensors: those of the head, which are taken one by one.
    """

    hf: Mapping[str, Any]
    names: AbstractSet[str]
    target: Any
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    directory: pathlib.Path = pathlib.Path()
    inner: tuple[str, ...] = ()
    format: str = ""
    cls: type = object
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    config: Any = None
    files: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    tensors: StrictReader | None = None

    @property
    def num_layers(self) -> Any:
        """What the file says of the number of its model's layers."""
        return self.hf.get("num_hidden_layers")

    def stated(self, *keys: str, inner: tuple[str, ...] | None = None) -> Any:
        """The value of the first of these keys that is stated; None if none is.

        Args:
          *keys: of config.json.
          inner: the objects in which they may stand too, if not all of ``inner``.
        """
        names = self.inner if inner is None else inner
        places = (self.hf, *(stated_object(self.hf, name) for name in names))
        found = (place[key] for key in keys for place in places if place.get(key) is not None)
        return next(found, None)

    def flag(self, key: str, default: bool = False) -> bool:
        """The value of a key that is true or false."""
        return stated_flag({key: self.stated(key)}, key, default)

    def decide(self, name: str, value: Any, why: str) -> Any:
        """Notes how a field that the file leaves open is read; returns the value."""
        self.notes.append(f"{name} = {value!r}: {why}.")
        return value

    def check_target(self, what: str, key: str, value: Any, expected: int) -> None:
        """Checks a size of the target that config.json states.

        Args:
          what: of the target, in words.
          key: of config.json.
          value: that is stated; None: it is not.
          expected: the target's own.

        Raises:
          ConfigError: the head is for another target, or does not say for which.
        """
        message = f"{key} is missing, so the head's target is not known; expected the {what} of"
        require(value is not None, f"{message} this one, {expected}")
        message = f"the head is for a target of {what} {shown(value)}; this one has {expected}"
        require(value == expected, f"{message} (by the key {key})")

    def check_taps(self, taps: Sequence[Any], last: int) -> tuple[int, ...]:
        """Returns taps of the target; raises a ConfigError if one is not of 0 to ``last``."""
        L = self.target.num_hidden_layers
        are_taps = all(is_integer(tap) and 0 <= tap <= last for tap in taps)
        known = f"a target of {L} layers has 0 to {L}, and {L + 1} after its final norm"
        require(are_taps, f"taps {shown(tuple(taps))} do not exist: {known}")
        return tuple(taps)


class HeadFormats:
    """How the heads of some kinds lie in files; a subclass for each family of kinds.

    Attributes:
      known: by the name of a kind the formats that can hold its heads, the preferred one first.
      fields: of the configs, in the order in which they are read.
      inner: the objects of config.json in which keys may stand instead of at the top.
      doubts: notes on what loaders of a format disagree about, by format, field and the stated
        value; None means an absent key.
      older: names under which a tensor may be stored too, ``{}`` being the usual one.
      tolerance: relative and absolute, within which a tensor is a copy of an end of the target.
    """

    known: Mapping[str, Mapping[str, Format]]
    fields: tuple[Field, ...]
    inner: tuple[str, ...] = ()
    doubts: Mapping[tuple[str, str, Any], str] = {}
    older: tuple[str, ...] = ()
    tolerance: tuple[float, float] = (_RTOL, _ATOL)

    # ------------------------------------------------------------------ what a kind brings

    def formats(self, config: Any) -> Mapping[str, Format]:
        """Returns the formats that can hold a head, the preferred one first."""
        return self.known[config.name]

    def column(self, config: Any, format: str) -> Format:
        """Returns the format of a name; one that cannot hold the head is read by usual names."""
        return self.formats(config).get(format, Format())

    def find(self, reading: Reading) -> tuple[str, type]:
        """Returns the name of the format of a directory, and the class of its config.

        Raises:
          ConfigError: it holds no such head.
          WeightsError: the same, according to the tensors.
        """
        raise NotImplementedError

    def settled(self, reading: Reading) -> dict[str, Any]:
        """Returns the ``layer`` of the config, and other fields that no caller may change."""
        raise NotImplementedError

    def to_json(
        self, config: Any, format: str, target: LoadedModel, num_draft: int, hf: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the whole config.json.

        Args:
          config: the head's.
          format: the name of the format.
          target: the model that it drafts for.
          num_draft: K, for formats that state it.
          hf: the fields that have keys, already at their places.
        """
        raise NotImplementedError

    def check(self, config: Any, format: str, target: Any) -> None:
        """Raises a ConfigError if other loaders of a format misread a config that is read here.

        Args:
          config: the head's.
          format: the name of the format.
          target: the config of the model that it drafts for.
        """

    def as_format(self, config: Any, format: str) -> Any:
        """Returns the config with what the format alone decides."""
        return config

    def transformed(self, name: str, array: np.ndarray, config: Any, written: Any) -> np.ndarray:
        """Returns a weight as a file of a format holds it, before linear maps are turned.

        Args:
          name: ours, with dots between the keys of nested parameters.
          array: the weight.
          config: the head's.
          written: the same as the format has it, see ``as_format``.
        """
        return array

    def source(self, reading: Reading) -> Mapping[str, Tensor]:
        """Returns the tensors of the head among those of the directory, which are ``files``."""
        check_not_quantised(reading.directory / "config.json", reading.hf)
        return reading.files

    def ends(self, config: Any, format: str, num_layers: int) -> tuple[End, ...]:
        """Returns the ends of the target of which files may hold copies.

        Args:
          config: the head's.
          format: the name of the format.
          num_layers: of the target.
        """
        return ()

    def original(
        self, end: End, reading: Reading, target: LoadedModel, mesh: Mesh | None, rules: AxisRules
    ) -> tuple[str, Tensor, Sharding | None, bool] | None:
        """Returns what copies of an end are compared with.

        Args:
          end: of the target.
          reading: the open head.
          target: the model that it drafts for.
          mesh: the devices that the head is read onto, or None.
          rules: which dimensions are split over the mesh.

        Returns:
          Its owner's name, its values, where they lie, and whether files hold it transposed; None
          if there is nothing to compare with.
        """
        weight, is_linear = _end(target, end.weight)
        parts = {part_at(s.index, weight.shape): s.data for s in weight.addressable_shards}
        whole = Tensor(weight.shape, weight.dtype, parts.__getitem__)
        return "the target's", whole, weight.sharding, is_linear

    def sizes(self, config: Any, spec: ParamSpec) -> dict[str, int]:
        """Returns the integers of config.json that sizes of a weight may come from, by key."""
        return integers_of(config.layer)

    def extra_params(self, reading: Reading) -> dict[str, Tensor]:
        """Returns parameters that are in no table."""
        return {}

    def extra_tensors(self, config: Any, format: str, params: Params) -> dict[str, np.ndarray]:
        """Returns tensors that are written beside those of the table and copies of ends.

        Args:
          config: the head's.
          format: the name of the format.
          params: its weights.
        """
        return {}

    # ------------------------------------------------------------------------------ reading

    def config_of(self, reading: Reading) -> Any:
        """Returns the config of a head, and completes the notes.

        Raises:
          ConfigError: the head is for another target, or is not supported.
          WeightsError: there is no such head.
        """
        reading.inner = self.inner
        reading.format, reading.cls = self.find(reading)
        fields = self._fields(reading.cls, reading.format)
        known = [field.name for field in fields]
        for name in reading.overrides:
            require(name in known, f"unknown head option {name!r}; options: {', '.join(known)}")
        reading.values |= self.settled(reading)
        for field in fields:
            reading.values[field.name] = self._value(field, reading)
        sizes = (reading.target.hidden_size, reading.target.vocab_size)
        names = ("target_hidden_size", "target_vocab_size")
        config = reading.cls(**dict(zip(names, sizes)), **reading.values)
        # A caller may name our last tap, the state after the final norm; most files cannot.
        reading.check_taps(config.taps, reading.target.num_hidden_layers + 1)
        return config

    def _fields(self, cls: type, format: str) -> list[Field]:
        """The fields that configs of a class have and a format knows."""
        names = {field.name for field in dataclasses.fields(cls)}
        return [x for x in self.fields if x.name in names and x.places.get(format, ()) is not None]

    def _value(self, field: Field, reading: Reading) -> Any:
        name, key, kind, default, *_ = field
        if name in reading.overrides:
            return reading.decide(name, reading.overrides[name], "the caller says so")
        if field.read is not None:
            return field.read(reading)
        stated = reading.stated(key) if key else None
        if kind is int and (stated is not None or default is REQUIRED):
            check(is_integer(stated), key, stated, "an integer")
        if kind is bool:
            stated = stated_flag({key: stated}, key, None)
            reading.notes += filter(None, [self.doubts.get((reading.format, name, stated))])
        if stated is not None:
            return tuple(stated) if kind is tuple and isinstance(stated, list) else stated
        value, why = default(reading) if callable(default) else (default, "")
        return reading.decide(name, value, why) if why else value

    def open(
        self,
        directory: pathlib.Path,
        target: Any,
        stack: contextlib.ExitStack,
        overrides: Mapping[str, Any],
    ) -> Reading:
        """Opens a head's directory; of the tensors only headers are read.

        Args:
          directory: with safetensors, or files of torch if torch is installed.
          target: the config of the model that it drafts for.
          stack: closes the files.
          overrides: see ``read``.

        Raises:
          ConfigError: see ``read``.
          WeightsError: see ``read``.
        """
        file = directory / "config.json"
        hf = read_json(file)
        files = unfused(open_tensors(directory, stack))
        reading = Reading(hf, files.keys(), target, overrides, directory, files=files)
        with naming(file):
            reading.config = self.config_of(reading)
        reading.tensors = StrictReader(directory, self.source(reading))
        return reading

    def weights(self, reading: Reading, config: Any, dtype: DTypeLike) -> dict[str, Tensor]:
        """Returns the weights of an open head by dotted name; nothing of them is read yet.

        Args:
          reading: the open head.
          config: the head's, with the ends that it is to have.
          dtype: of the weights whose declaration states no other.

        Raises:
          WeightsError: a tensor is missing, unexpected, quantised, or of another shape than
            config.json says.
        """
        tensors = reading.tensors
        weights = {}
        num_layers = reading.num_layers
        usual = self.names(config, reading.format, num_layers)
        others = [self.names(config, format, num_layers) for format in self.formats(config)]
        for name, (stored, spec) in usual.items():
            tensors.sizes = self.sizes(config, spec)
            also = [names[name][0] for names in others] + [x.format(stored) for x in self.older]
            stored = next((x for x in (stored, *also) if x in tensors.left), stored)
            row = spec._replace(shape=spec.shape[1:])
            is_there = spec.shape[0] == 1 and stored in tensors.left
            if is_there and len(tensors.tensor(stored).shape) == len(row.shape):
                weights[name] = stack([tensors.weight(stored, row, dtype)])
            else:
                weights[name] = tensors.weight(stored, spec, dtype)
        weights |= self.extra_params(reading)
        tensors.finish()
        return weights

    def read(
        self,
        directory: str | pathlib.Path,
        target: LoadedModel,
        dtype: DTypeLike = jnp.float32,
        *,
        mesh: Mesh | None = None,
        axis_rules: AxisRules = SHARDED,
        **overrides: Any,
    ) -> LoadedHead:
        """Reads a head's config.json and weights.

        Args:
          directory: the head's directory, with safetensors, or files of torch if torch is
            installed.
          target: the model that it drafts for; copies of its ends are compared with them.
          dtype: the dtype of the parameters, except of those whose declaration states another.
          mesh: the devices to place the parameters on, each process reading what its own devices
            hold; None: jax's default device.
          axis_rules: which dimensions are split over the mesh.
          **overrides: fields of the config instead of what config.json says.

        Returns:
          The head, and a note for everything that the checkpoint leaves open and how it was read.

        Raises:
          WeightsError: an unreadable file; a tensor that is missing, unexpected, of another shape
            than config.json says, or not finite.
          ConfigError: an unknown override; the head is for another target, or of an architecture
            that is not supported; or the mesh does not divide its heads.
        """
        directory = pathlib.Path(directory)
        with contextlib.ExitStack() as files:
            reading = self.open(directory, target.config, files, overrides)
            config = self._shared(reading, target, mesh, axis_rules)
            where = {}
            if mesh is not None:  # refuses a mesh before a weight is read
                table = flat_table(registry.kind_of(config).head.table(config))
                where = table_placement(str(directory), config.layer, table, mesh, axis_rules)
            whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
            weights = self.weights(reading, config, dtype)
            params = {n: read_onto(tensor, where.get(n, whole)) for n, tensor in weights.items()}
        notes = tuple(reading.notes)
        return LoadedHead(str(directory), config, nest(params), notes, reading.format)

    def _shared(
        self, reading: Reading, target: LoadedModel, mesh: Mesh | None, rules: AxisRules
    ) -> Any:
        """Drops copies of the target's ends; returns the config, which says which ends are left."""
        config = reading.config
        tensors = reading.tensors
        shape = (config.target_vocab_size, config.layer.hidden_size)
        for end in self.ends(config, reading.format, reading.num_layers):
            stored = [name for name in end.stored if name in tensors.left]
            if not stored or getattr(config, end.field, False):
                continue
            if end.field in reading.overrides:
                why = "uncompared: the head shares the target's"
                where = None if mesh is None else named(("vocab", "embed"), shape, mesh, rules)
                for name in stored:  # damaged files are refused all the same
                    read_parts(tensors.tensor(name), where)
            else:
                original = self.original(end, reading, target, mesh, rules)
                differing = self._differing(tensors, stored, original)
                if differing and not end.field:
                    raise WeightsError(
                        f"{reading.directory}: tensor {differing}, and a head of this kind with "
                        "its own embedding or output head is not supported"
                    )
                if differing:
                    reading.decide(end.field, True, f"{differing}; the head keeps its own")
                    config = dataclasses.replace(config, **{end.field: True})
                    continue
                why = f"it is a copy of {original[0]}"
            reading.notes.append(f"{stored[0]} is left out: {why}.")
            for name in stored:
                tensors.take(name, shape)
        return config

    def _differing(self, tensors: StrictReader, stored: Sequence[str], original: Any) -> str:
        """Returns which tensor differs from an end of the target, in words; "" if none does."""
        if original is None:
            return f"{stored[0]} is here without the target's"
        owner, whole, where, is_turned = original
        for name in stored:
            copy = tensors.tensor(name).T if is_turned else tensors.tensor(name)

            def is_close(part):
                a, b = (jnp.asarray(x.read(part)).astype(jnp.float32) for x in (copy, whole))
                return bool(jnp.allclose(a, b, *self.tolerance))

            if copy.shape != whole.shape or not holds_for_parts(is_close, whole.shape, where):
                return f"{name} differs from {owner}"
        return ""

    def names(self, config: Any, format: str, num_layers: int) -> dict[str, tuple[str, ParamSpec]]:
        """Returns the name of each weight in files of a format, and its declaration, by our name.

        Args:
          config: the head's.
          format: the name of the format.
          num_layers: of the target, from which some formats count on.
        """
        table = flat_table(registry.kind_of(config).head.table(config))
        stored = self.column(config, format).tensor_name
        return {name: (stored(name, spec, num_layers), spec) for name, spec in table.items()}

    # ------------------------------------------------------------------------------ writing

    def pick(
        self, config: Any, target: LoadedModel, format: str | None, num_speculative_tokens: int
    ) -> str:
        """Returns the format to write a head in: the given one, or the first that can express it.

        Args:
          config: the head's.
          target: the model that it drafts for.
          format: the name of a format, or None.
          num_speculative_tokens: tokens drafted a round, for formats that state it.

        Raises:
          ConfigError: no format can express this config.
        """
        refusals = {}
        for name in (format,) if format else self.formats(config):
            try:
                self.json(config, name, target, num_speculative_tokens)
                return name
            except ConfigError as error:
                refusals[name] = str(error)
        if len(set(refusals.values())) == 1:
            raise ConfigError(refusals[name])
        listed = "; ".join(f"{name}: {message}" for name, message in refusals.items())
        raise ConfigError(f"no format can express this config: {listed or 'none is known'}")

    def json(self, config: Any, format: str, target: LoadedModel, num_draft: int) -> dict[str, Any]:
        """Returns the config.json of a head, the inverse of ``config_of``.

        Args:
          config: the head's.
          format: the name of a format.
          target: the model that it drafts for.
          num_draft: K, for formats that state it.

        Raises:
          ConfigError: the format cannot express the head's config, or its loaders would read it as
            something else.
        """
        known = ", ".join(self.formats(config))
        of = f"{config.name} with a layer of {family_name(config.layer)}"
        require(format in self.formats(config), f"format is {format!r}; known for {of}: {known}")
        self.check(config, format, target.config)
        hf: dict[str, Any] = {}
        for field in self._fields(type(config), format):
            for place in field.places.get(format, ("",)) if field.key else ():
                value = getattr(config, field.name)
                value = list(value) if isinstance(value, tuple) else value
                (hf.setdefault(place, {}) if place else hf)[field.key] = value
        hf = self.to_json(config, format, target, num_draft, hf)
        num_layers = target.config.num_hidden_layers
        stored = self.names(config, format, num_layers).values()
        names = {name.replace("{e}", "0") for name, _ in stored}
        fields = [end.field for end in self.ends(config, format, num_layers) if end.field]
        ends = {field: getattr(config, field) for field in fields}  # decided by the tensors
        read = self.config_of(Reading(hf, names, target.config, ends))
        for name, value, other in differences(self.as_format(config, format), read):
            raise ConfigError(
                f"{name} is {value!r}; in the format {format} it would be read as {other!r}; known "
                f"formats: {known}"
            )
        return hf

    def stored(
        self, config: Any, params: Params, format: str, num_layers: int, dtype: DTypeLike
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the tensors of a head as a format has them, by name.

        Args:
          config: the head's.
          params: its weights.
          format: the name of the format.
          num_layers: of the target, see ``names``.
          dtype: of the tensors, except of those whose declaration states another.
        """
        written = self.as_format(config, format)
        for name, (stored, spec) in self.names(config, format, num_layers).items():
            array = self.transformed(name, on_host(_weight(params, name)), config, written)
            for e, part in enumerate(array) if "{e}" in stored else [(0, array)]:
                yield stored.replace("{e}", str(e)), as_stored(part, spec, dtype)

    def write(
        self,
        head: LoadedHead,
        directory: pathlib.Path,
        target: LoadedModel,
        *,
        format: str | None,
        dtype: DTypeLike | None,
        num_speculative_tokens: int,
    ) -> None:
        """Writes a directory that the format's loaders and ``read`` read as the same head.

        Files get their final names when they are complete.

        Args:
          head: the head.
          directory: a directory for the head alone, created if absent; its files are overwritten.
          target: the model that it drafts for.
          format: the name of a format; None: the first that can express the config.
          dtype: the dtype to store; by default the weights' own.
          num_speculative_tokens: tokens drafted a round, for formats that state it.

        Raises:
          ConfigError: the format cannot express the head's config, or its loaders would read it as
            something else.
          WeightsError: a weight is missing or misshapen.
        """
        config, params = head.config, head.params
        format = self.pick(config, target, format, num_speculative_tokens)
        hf = self.json(config, format, target, num_speculative_tokens)
        registry.kind_of(config).head.check_params(config, params, "")
        num_layers = target.config.num_hidden_layers
        first = next(iter(self.names(config, format, num_layers)))
        dtype = jnp.dtype(_weight(params, first).dtype if dtype is None else dtype)
        tensors = dict(self.stored(config, params, format, num_layers, dtype))
        tensors |= self.extra_tensors(config, format, params)
        for end in self.ends(config, format, num_layers):
            if end.is_copied and not getattr(config, end.field, False):
                weight, is_linear = _end(target, end.weight)
                spec = ParamSpec(weight.shape, (), "", is_linear)
                tensors |= {name: as_stored(weight, spec, dtype) for name in end.stored}
        save_tensors(directory, [tensors.items()])
        hf["dtype"] = dtype.name
        if format != SPECULATORS:
            hf["torch_dtype"] = dtype.name
        write_once(lambda: write_json(directory / "config.json", hf))

    def draft_format(self, detect: Callable[..., bool]) -> registry.DraftFormat:
        """Returns the record of a kind of these heads.

        Args:
          detect: see ``DraftFormat``.
        """
        return registry.DraftFormat(
            detect=detect, read=self.read, reads_sharded=True, write=self.write, pick=self.pick
        )


def differences(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the fields in which configs of heads differ, those of their layers first.

    What no file states of a layer is left out.

    Args:
      a: the config of a head.
      b: another.

    Yields:
      The name of a field, and its two values.
    """
    for prefix, one, two in (("layer.", a.layer, b.layer), ("", a, b)):
        for name in (field.name for field in dataclasses.fields(one)):
            value, other = getattr(one, name), getattr(two, name, None)
            if name not in _NOT_STATED and value != other:
                yield f"{prefix}{name}", value, other


def _weight(params: Params, name: str) -> Any:
    return functools.reduce(operator.getitem, name.split("."), params)


def _end(target: LoadedModel, weight: str) -> tuple[jax.Array, bool]:
    """The target's embedding or output head, and whether files hold it transposed."""
    is_linear = weight == "head" and "head" in target.params
    return jnp.asarray(target.params[weight if is_linear else "embed"]), is_linear


def layer_json(layer: Any) -> dict[str, Any]:
    """Returns what config.json says of a head's layers, with both spellings of the rotary ones."""
    size = getattr(layer, "sliding_window", None)
    if size is not None:  # of Llama's layers, too, which ``to_hf`` would save as Mistral's
        layer = dataclasses.replace(layer, sliding_window=None)
    hf = layer.to_hf() | layer.rope.spellings()
    del hf["architectures"]
    if size is not None:
        kinds = [SLIDING] * layer.num_hidden_layers
        hf |= {"use_sliding_window": True, "sliding_window": size, "layer_types": kinds}
    return hf | {"tie_word_embeddings": False}


def speculators_json(
    algorithm: str, config: Any, layer: Mapping[str, Any], target: LoadedModel, num_draft: int
) -> dict[str, Any]:
    """Returns what a config.json of the format "speculators" says of every head.

    Args:
      algorithm: its name there.
      config: the head's.
      layer: the object of its layers.
      target: the model that it drafts for.
      num_draft: K.
    """
    check(is_integer(num_draft, 1), "num_speculative_tokens", num_draft, "1 or more")
    check(isinstance(target.name, str), "the target's name", target.name, "its name or path")
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_draft}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    architectures = [target.config.architectures[target.config.model_type]]
    verifier = {"name_or_path": target.name, "architectures": architectures}
    methods = {"default_proposal_method": "greedy", "proposal_methods": [proposal]}
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.layer.vocab_size,
        LAYER: layer,
        "speculators_config": {"algorithm": algorithm, **methods, "verifier": verifier},
    }
