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
from typing import Any, Self

import yaml

from spec_jax.config.checks import check, check_options, is_list
from spec_jax.errors import ConfigError, did_you_mean

DEFAULT_SECTION = "speculative"
_SWITCH, _SWITCHED = "is_adaptive", "adaptive"  # True and False also stand for a record
_A_DRAFT = (
    " (a draft is loaded and given to the decoder: SpeculativeDecoder(target, "
    "load_draft(NAME, target), config))"
)


class ConfigRecord:
    """A part of a config that may be given as a mapping of its fields."""

    _prefix = ""  # of the names of fields in errors

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.metadata:
                object.__setattr__(self, field.name, _frozen(getattr(self, field.name)))
        check_options(self, self._prefix)

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

    def _one_given(self, *names: str) -> str:
        """Returns the full name of the one of these fields that is not None.

        Raises:
          ConfigError: several are given, or none.
        """
        *others, last = [f"{self._prefix}{name}" for name in names]
        given = [f"{self._prefix}{name}" for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"of {', '.join(others)} and {last}, {' and '.join(given) or 'none of them'} are "
                "given; name one of them"
            )
        return given[0]


def _frozen(value: Any) -> Any:
    """Returns lists, also nested ones, as tuples; anything else as it is."""
    return tuple(map(_frozen, value)) if is_list(value) else value


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


def _nested(cls, values: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Moves flat names into mappings under the names of their records.

    Args:
      cls: the config's class.
      values: by flat or nested name.
      below: nested values that these take precedence over, a file's. A record that may be None is
        replaced as a whole, the others field by field.

    Raises:
      ConfigError: an unknown key, with the known ones listed.
    """
    values = dict(values)
    if _SWITCH in values and _SWITCHED in _records(cls):  # True keeps a record that is there
        switch = values.pop(_SWITCH)
        known = (values.get(_SWITCHED), below.get(_SWITCHED)) if switch is True else ()
        values[_SWITCHED] = next((x for x in known if x not in (None, True, False)), switch)
    _check_keys(cls, values)
    flat = _flat_names(cls)
    nested = {key: value for key, value in values.items() if key not in flat}
    for key in values.keys() & flat.keys():
        value = values[key]
        name, field = flat[key]
        # None changes a field that is set, and makes no record of its own.
        record = nested.get(name, below.get(name) if value is None else None)
        if value is None and field.default is None and record in (None, False):
            continue
        if record is False:
            raise ConfigError(f"{key} is {value!r}; expected None where {name} is False")
        nested[name] = {**_parts(cls, name, record), field.name: value}
    for name in _records(cls).keys() & nested.keys() & below.keys():
        if not _is_optional(cls, name):
            nested[name] = {**_parts(cls, name, below[name]), **_parts(cls, name, nested[name])}
    return {**below, **nested}


def _check_keys(cls, values: Mapping[str, Any]) -> None:
    """Raises ConfigError if a key is neither a field nor a flat name."""
    records = _records(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    known = [*names, *_flat_names(cls), *([_SWITCH] if _SWITCHED in names else [])]
    unknown = sorted(map(str, values.keys() - {*known}))
    if not unknown:
        return

    def hint(key):
        is_draft = key in ("model", "draft", "draft_model", "head")
        has_method = "speculative_method" in names
        return _A_DRAFT if is_draft and has_method else did_you_mean(key, known)

    def listed(name):
        fields = dataclasses.fields(records[name]) if name in records else ()
        return f"{name} ({', '.join(x.name for x in fields)})" if fields else name

    raise ConfigError(
        f"unknown key {', '.join(f'{key!r}{hint(key)}' for key in unknown)} in {cls.__name__}; "
        f"known keys: {', '.join(map(listed, names))}"
    )


def _parts(cls, name: str, value: Any) -> dict[str, Any]:
    """The fields that a value of a record names; all of them, unless it is a mapping."""
    if value is None or value is True:
        return {}
    is_mapping = isinstance(value, Mapping)
    return dict(value if is_mapping else vars(_records(cls)[name].of(value, name)))


class ConfigOfRecords:
    """A config whose fields may be records, see ``reads_flat_names``; flat names are attributes."""

    def __getattr__(self, name: str) -> Any:
        record, field = _flat_names(type(self)).get(name, (None, None))
        if field is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(getattr(self, record), field.name, None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds a config from plain values, see ``build``; a record may be a mapping too.

        Raises:
          ConfigError: an unknown key (the known ones are listed) or a wrong value.
        """
        return build(cls, values)


def reads_flat_names(cls):
    """Class decorator of a config of records: its arguments may be flat names and mappings.

    ``C(ngram_max=4)``, ``C(ngram={"max": 4})`` and ``C(ngram=NgramConfig(max=4))`` are equal. A
    flat name beside its record changes that field. Where the argument
    ``config_file`` is given, what the call does not name is read from the file's section.
    """
    plain_init = cls.__init__
    signature = inspect.signature(plain_init)
    names = {field.name for field in dataclasses.fields(cls)}

    @functools.wraps(plain_init)
    def __init__(self, *args, **kwargs):
        fields = {name: value for name, value in kwargs.items() if name in names}
        given = {**kwargs, **signature.bind_partial(self, *args, **fields).arguments}
        del given["self"]
        below = {}
        # ``dataclasses.replace`` names every field: nothing is left to read.
        if given.get("config_file") is not None and not names <= given.keys():
            given["config_file"] = str(given["config_file"])
            given["section_name"] = given.get("section_name") or DEFAULT_SECTION
            section = read_section(given["config_file"], given["section_name"])
            below = _nested(cls, _coerced(cls, section), {})
        values = _nested(cls, given, below)
        for name, record in _records(cls).items():
            if name in values and not (values[name] is None and _is_optional(cls, name)):
                values[name] = record.of(values[name], name)
        plain_init(self, **values)

    cls.__init__ = __init__
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
    _check_keys(cls, values)
    return cls(**_coerced(cls, values))


def _coerced(cls, values: Mapping[str, Any]) -> dict[str, Any]:
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
    return {name: coerce(kinds.get(name, ""), value) for name, value in values.items()}
