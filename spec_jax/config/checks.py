"""Checks of single values, shared by every config."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

from spec_jax.errors import ConfigError, did_you_mean

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4e38


def check(ok: bool, name: str, value: Any, expected: str) -> None:
    """Raises a ``ConfigError`` that names the value and what would be right, unless ``ok``."""
    if not ok:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


def option(default: Any, is_valid: Callable[[Any], bool], expected: str, **about: Any) -> Any:
    """Declares a field of a config, with the values that it may have.

    Args:
      default: its default, which is always allowed.
      is_valid: whether a value is allowed, see ``check_options``.
      expected: the values in words.
      **about: what else is known of the field: entries of its metadata.
    """
    about = {"is_valid": is_valid, "expected": expected, **about}
    return dataclasses.field(default=default, metadata=about)


def integer(default: int | None, least: int = 0, most: int = _INT32_MAX, **about: Any) -> Any:
    """Declares a field that is an integer from ``least`` to ``most``, see ``option``."""
    is_valid = functools.partial(is_integer, least=least, most=most)
    upper = "or more" if most == _INT32_MAX else f"to {most}"
    return option(default, is_valid, f"an integer of {least} {upper}", **about)


def number(default: float | None, low: float, high: float, **about: Any) -> Any:
    """Declares a field that is a number from ``low`` to ``high``, see ``option``."""

    def is_valid(value):
        return is_number(value) and low <= value <= high

    return option(default, is_valid, f"a number from {low:g} to {high:g}", **about)


def check_options(config: Any, prefix: str = "") -> None:
    """Checks the fields of a config that ``option`` declares.

    Args:
      config: a dataclass.
      prefix: what errors put before the name of a field.

    Raises:
      ConfigError: a value is neither the field's default nor valid.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata and not (value is None and field.default is None):
            is_valid, expected = field.metadata["is_valid"], field.metadata["expected"]
            check(is_valid(value), f"{prefix}{field.name}", value, expected)


def check_name(name: str, value: Any, known: Sequence[str], others: str = "") -> None:
    """Checks that a value is one of the known names.

    Args:
      name: what the error calls the value.
      value: what was given.
      known: the names.
      others: what else is accepted, for the message.

    Raises:
      ConfigError: it is none of them; a known name that is close is suggested.
    """
    if not (isinstance(value, str) and value in known):
        raise ConfigError(
            f"{name} is {value!r}{did_you_mean(value, known)}; expected {others}one of "
            f"{', '.join(known)}"
        )


def check_integer(name: str, value: Any, least: int) -> int:
    """Returns the value as an int.

    Args:
      name: what the error calls the value.
      value: anything that can serve as an index.
      least: smallest value that is accepted; the largest is that of int32.

    Raises:
      ConfigError: the value is not an integer in this range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    is_fit = number is not None and not isinstance(value, bool) and least <= number <= _INT32_MAX
    check(is_fit, name, value, f"an integer of {least} or more")
    return number


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_integer(value: Any, least: int = 0, most: int = _INT32_MAX) -> bool:
    """Whether the value is an integer from ``least`` to ``most``, and not a bool."""
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_number and least <= value <= most


def is_number(value: Any) -> bool:
    """Whether the value is a number and not NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def is_finite(value: Any) -> bool:
    """Whether the value is a number that float32 can hold."""
    return is_number(value) and abs(value) <= _FLOAT32_MAX


def is_probability(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1
