"""Checks of what a config.json states, before anything is built from it.

Files come from strangers, so every value is checked where it enters: its type, and the range in
which it means something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spec_jax.config.checks import MAX_INT, check, is_integer, is_number, shown
from spec_jax.errors import ConfigError

MAX_SIZE = MAX_INT
NO_TOKEN = -1  # where an id is expected: there is none
_MAX_SIZES = {"num_hidden_layers": 10_000}  # each layer is declared, so its number costs memory
_KINDS = {  # declared types, and how messages call them
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (is_integer, "a 32-bit integer"),
    "float": (is_number, "a finite number"),
    "str": (lambda value: isinstance(value, str), "a text"),
}


def require(is_met: bool, message: str) -> None:
    """Raises a ConfigError with this message unless a condition is met."""
    if not is_met:
        raise ConfigError(message)


@contextlib.contextmanager
def naming(file: pathlib.Path | str) -> Iterator[None]:
    """Puts the name of a file before the message of a ConfigError that is raised within."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _kind_of(field: dataclasses.Field) -> tuple[str, str]:
    """Returns the name of a field's declared type and, after the first bar, of the others."""
    names = field.type if isinstance(field.type, str) else field.type.__name__
    kind, _, others = names.partition(" | ")
    return kind, others


def as_declared(cls: type, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values of a config.json for a dataclass, in the types of its fields where they fit.

    Files hold 0 and 1 for booleans, 4096.0 for integers, and limits of positions that no 32-bit
    integer can hold. Other values stay as they are, for ``check_fields``.

    Args:
      cls: the dataclass.
      stated: values by the names of its fields.
    """
    kinds = {field.name: _kind_of(field)[0] for field in dataclasses.fields(cls)}
    values = dict(stated)
    for name, value in stated.items():
        if kinds[name] == "bool":
            values[name] = _as_flag(value)
        elif kinds[name] == "int" and isinstance(value, float) and value.is_integer():
            values[name] = value = int(value)
        if name == "max_position_embeddings" and type(value) is int:
            values[name] = min(value, MAX_SIZE)
    return values


def _as_flag(value: Any) -> Any:
    return bool(value) if type(value) is int and value in (0, 1) else value


def check_nulls(cls: type, stated: Mapping[str, Any]) -> None:
    """Raises a ConfigError if null is stated for a field that cannot be None and has a default.

    Where the default is false, zero or empty, null is read as it.

    Args:
      cls: the dataclass.
      stated: values by the names of its fields.
    """
    for field in dataclasses.fields(cls):
        kind, others = _kind_of(field)
        has_default = field.default is not dataclasses.MISSING and bool(field.default)
        if kind in _KINDS and not others and has_default and stated.get(field.name, 0) is None:
            raise ConfigError(f"{field.name} is null; expected {_KINDS[kind][1]}")


def check_fields(config: Any) -> None:
    """Checks that the fields of a dataclass have the types that are declared.

    Fields of other types than bool, int, float and str, or these and None, are left to the class.

    Raises:
      ConfigError: a field has another type, is not finite, or is an integer of over 32 bits.
    """
    for field in dataclasses.fields(config):
        kind, rest = _kind_of(field)
        value = getattr(config, field.name)
        if kind not in _KINDS or rest not in ("", "None") or (value is None and rest):
            continue
        is_kind, expected = _KINDS[kind]
        check(is_kind(value), field.name, value, expected)


def integers_of(config: Any) -> dict[str, int]:
    """Returns the fields of a dataclass that are integers, by name."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if is_integer(value)}


def check_sizes(config: Any, *names: str) -> None:
    """Raises a ConfigError if one of these fields is not a positive integer, or is too large."""
    for name in names:
        value = getattr(config, name)
        limit = _MAX_SIZES.get(name, MAX_SIZE)
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        check(is_size, name, value, "a positive integer")
        check(value <= limit, name, value, f"at most {limit}")


def check_ranges(config: Any, **ranges: tuple[float, float]) -> None:
    """Raises a ConfigError if a field is neither None nor a number from the first to the second."""
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        is_fit = value is None or is_number(value, low, high)
        check(is_fit, name, value, f"a number from {low:g} to {high:g}")


def check_known(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises a ConfigError that lists the known values if a value is none of them."""
    known = list(known)
    if value not in known:
        raise ConfigError(f"{name} {shown(value)} is not supported; known: {', '.join(known)}")


def check_supported(hf: Mapping[str, Any], **expected: Any) -> None:
    """Raises a ConfigError if a key of a config.json has another value than the expected one."""
    for name, value in expected.items():
        stated = hf.get(name)
        if stated not in (None, "") and stated != value:
            raise ConfigError(f"{name} {shown(stated)} is not supported; expected {value!r}")


def stated_flag(hf: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Returns a key of a config.json that is true, false, 1 or 0, or the default without it.

    Args:
      hf: the object of config.json.
      name: the key.
      default: what it means that the key is absent or null.

    Raises:
      ConfigError: it is something else.
    """
    value = _as_flag(hf.get(name))
    if value is None:
        return default
    check(isinstance(value, bool), name, value, "true or false")
    return value


def stated_object(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a key of a config.json that is an object; if it is absent or false, an empty one.

    Raises:
      ConfigError: it is something else.
    """
    value = hf.get(name)
    if value is None or value is False:
        return {}
    check(isinstance(value, Mapping), name, value, "an object")
    return value


def stop_tokens(value: Any, vocab_size: Any = None) -> tuple[int, ...]:
    """Returns ``eos_token_id`` as a tuple, whether none (also written as -1), one or several.

    Args:
      value: of the key.
      vocab_size: V; any other value than an integer: it is not known.

    Raises:
      ConfigError: one of them is no id of the vocabulary.
    """
    ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    size = vocab_size if is_integer(vocab_size) else MAX_SIZE
    for token in ids:
        is_id = token == NO_TOKEN or is_integer(token, 0, size - 1)
        check(is_id, "eos_token_id", value, f"an id from 0 to {size - 1}, or a list of such ids")
    return tuple(dict.fromkeys(token for token in ids if token != NO_TOKEN))
