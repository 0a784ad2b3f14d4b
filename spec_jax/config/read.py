"""Configs from plain values: flat names, nested mappings, one section of a file."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import pathlib
import tomllib
import typing
from collections.abc import Mapping
from typing import Any

import yaml

from spec_jax.config.checks import check, is_list
from spec_jax.errors import ConfigError, did_you_mean

_ALIASES = {"is_adaptive": "adaptive"}
DEFAULT_SECTION = "speculative"


_A_DRAFT = (
    " (a draft is loaded and given to the decoder: SpeculativeDecoder(target, "
    "load_draft(NAME, target), config))"
)


def _hint(key: str, known: list[str]) -> str:
    """What to write in place of an unknown key, if that can be guessed."""
    if "speculative_method" in known and key in ("model", "draft", "draft_model", "head"):
        return _A_DRAFT
    return did_you_mean(key, known)


class ConfigRecord:
    """A part of a config that may be given as a mapping of its fields."""

    @classmethod
    def of(cls, value: Any, name: str) -> Any:
        """Returns the record that the value spells.

        Args:
          value: a record or a mapping.
          name: what an error calls it.

        Raises:
          ConfigError: the value is neither, or one of its fields is wrong.
        """
        if isinstance(value, Mapping):
            return build(cls, value)
        names = ", ".join(field.name for field in dataclasses.fields(cls))
        expected = f"a {cls.__name__} or a mapping of {names}"
        check(isinstance(value, cls), name, value, expected)
        return value


@functools.cache
def _records(cls) -> dict[str, type[ConfigRecord]]:
    """The fields of a config that are records, by name."""
    return {
        name: kind
        for name, hint in typing.get_type_hints(cls).items()
        for kind in (hint, *typing.get_args(hint))
        if isinstance(kind, type) and issubclass(kind, ConfigRecord)
    }


def _is_optional(cls, name: str) -> bool:
    return cls.__dataclass_fields__[name].default is None


@functools.cache
def _flat_names(cls) -> dict[str, tuple[str, dataclasses.Field]]:
    """Where flat names belong: ``ngram_max`` is the field ``max`` of the record ``ngram``."""
    return {
        f"{name}_{field.name}": (name, field)
        for name, record in _records(cls).items()
        for field in dataclasses.fields(record)
    }


def _nest(cls, values: Mapping[str, Any], below: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Moves flat names into mappings under the names of their records.

    Args:
      cls: the config's class.
      values: by flat or nested name.
      below: nested values that these take precedence over: a file's.

    Raises:
      ConfigError: an unknown key, with the known ones listed.
    """
    records, below = _records(cls), below or {}
    values = _without_aliases(values, below) if records else dict(values)
    names = [field.name for field in dataclasses.fields(cls)]
    _check_keys(cls, values, names)
    nested = {key: value for key, value in values.items() if key in names}
    for key, value in values.items():
        if key in names:
            continue
        name, field = _flat_names(cls)[key]
        # None changes a field that is set, and makes no record of its own.
        record = nested.get(name, below.get(name) if value is None else None)
        if value is None and field.default is None and record in (None, False):
            continue
        if record is False:
            raise ConfigError(f"{key} is {value!r}; expected None where {name} is False")
        record = None if record is True else record
        nested[name] = {**_parts(records[name], record, name), field.name: value}
    return nested


def _without_aliases(values: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Names a record in place of its switch; True keeps a record that is there."""
    values = dict(values)
    for alias in values.keys() & _ALIASES.keys():
        switch = values.pop(alias)
        name = _ALIASES[alias]
        records = (values.get(name), below.get(name)) if switch is True else ()
        values[name] = next((x for x in records if x not in (None, True, False)), switch)
    return values


def _check_keys(cls, values: Mapping[str, Any], names: list[str]) -> None:
    """Raises ConfigError if a key is neither a field nor a flat name."""
    records = _records(cls)
    flat = _flat_names(cls)
    unknown = sorted(map(str, values.keys() - {*names, *flat}))
    if not unknown:
        return
    guesses = [*names, *flat, *(_ALIASES if records else ())]
    hinted = [f"{key!r}{_hint(key, guesses)}" for key in unknown]

    def fields(name):
        return ", ".join(f.name for f in dataclasses.fields(records[name]))

    known = [f"{name} ({fields(name)})" if name in records else name for name in names]
    raise ConfigError(
        f"unknown key {', '.join(hinted)} in {cls.__name__}; known keys: {', '.join(known)}"
    )


def _parts(record: type[ConfigRecord], value: Any, name: str) -> dict[str, Any]:
    """The fields that a value of a record names; all of them, unless it is a mapping."""
    if value is None or isinstance(value, Mapping):
        return dict(value or {})
    return dict(vars(record.of(value, name)))


def _over(cls, file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Nested values of a file under those of the call.

    A record that may be None is replaced as a whole, the others field by field.
    """
    merged = {**file, **given}
    for name, record in _records(cls).items():
        if name in file and name in given and not _is_optional(cls, name):
            parts = (_parts(record, values[name], name) for values in (file, given))
            merged[name] = {k: v for part in parts for k, v in part.items()}
    return merged


def reads_flat_names(cls):
    """Class decorator of a config of records: its arguments may be flat names and mappings.

    ``C(ngram_max=4)``, ``C(ngram={"max": 4})`` and ``C(ngram=NgramConfig(max=4))`` are equal. A
    flat name beside its record changes that field; it is an attribute too. Where the argument
    ``config_file`` is given, what the call does not name is read from the file's section.
    """
    plain_init = cls.__init__
    signature = inspect.signature(plain_init)
    names = [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(plain_init)
    def __init__(self, *args, **kwargs):
        positional = signature.bind_partial(self, *args).arguments
        del positional["self"]
        for name in positional.keys() & kwargs:
            raise TypeError(f"{cls.__name__}() got multiple values for argument {name!r}")
        given = {**positional, **kwargs}
        values = None
        file = given.get("config_file")
        # ``dataclasses.replace`` names every field: nothing is left to read.
        if file is not None and not set(names) <= set(given):
            section = given["section_name"] = given.get("section_name") or DEFAULT_SECTION
            given["config_file"] = str(file)
            below = _coerce(cls, _nest(cls, read_section(file, section)))
            values = _over(cls, below, _nest(cls, given, below))
        values = _nest(cls, given) if values is None else values
        for name, record in _records(cls).items():
            if name in values and not (values[name] is None and _is_optional(cls, name)):
                values[name] = record.of(values[name], name)
        plain_init(self, **values)

    def __getattr__(self, name):
        record, field = _flat_names(cls).get(name, (None, None))
        if field is None:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
        return getattr(getattr(self, record), field.name, None)

    cls.__init__ = __init__
    cls.__getattr__ = __getattr__
    return cls


def read_section(config_file: str | pathlib.Path, section_name: str) -> Mapping[str, Any]:
    """Reads one section of a .yaml, .toml or .json file.

    Raises:
      ConfigError: the file cannot be read or has no such section.
    """
    path = pathlib.Path(config_file)
    parsers = {
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
        ".toml": tomllib.loads,
        ".json": json.loads,
    }
    if path.suffix not in parsers:
        raise ConfigError(f"config_file {path} has no known suffix: {', '.join(parsers)}")
    try:
        sections = parsers[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"config_file {path} cannot be read: {error}") from error
    section = sections.get(section_name) if isinstance(sections, Mapping) else None
    if not isinstance(section, Mapping):
        have = ", ".join(map(str, sections)) if isinstance(sections, Mapping) else "none"
        raise ConfigError(f"{path} has no section {section_name!r}; its sections: {have}")
    return section


def build(cls, values: Mapping[str, Any]):
    """Builds a frozen config from plain values, coercing where it is harmless.

    A number spelled as a string, a whole float for an int and a list for a tuple are
    taken; anything else is left to the class's own checks.

    Raises:
      ConfigError: an unknown key, with the known ones listed, or a wrong value.
    """
    return cls(**_coerce(cls, _nest(cls, values)))


def _coerce(cls, values: Mapping[str, Any]) -> dict[str, Any]:
    def coerce(kind: str, value: Any) -> Any:
        if isinstance(value, str) and ("int" in kind or "float" in kind):
            try:
                value = float(value)
            except ValueError:
                return value
        if isinstance(value, float) and kind.startswith("int") and value.is_integer():
            return int(value)
        if isinstance(value, int) and kind.startswith("float") and not isinstance(value, bool):
            return float(value)
        return tuple(value) if is_list(value) and "tuple" in kind else value

    kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    return {name: coerce(kinds[name], value) for name, value in values.items()}
