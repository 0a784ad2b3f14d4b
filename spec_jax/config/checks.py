"""Checks of single values, shared by every config, and the fields that declare them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

from spec_jax.errors import ConfigError, did_you_mean

MAX_INT = 2**31 - 1  # ids, positions and shapes are 32-bit integers on every device
MAX_FLOAT = 3.4e38


def shown(value: Any) -> str:
    """Returns a value as messages show it: cut, as a stranger's file may hold any amount."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check(ok: bool, name: str, value: Any, expected: str) -> None:
    """Raises a ``ConfigError`` that names the value and what would be right, unless ``ok``."""
    if not ok:
        raise ConfigError(f"{name} is {shown(value)}; expected {expected}")


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
    with contextlib.suppress(TypeError):  # an array without dimensions is an index, too
        value = value if isinstance(value, bool) else operator.index(value)
    check(is_integer(value, least), name, value, f"an integer of {least} or more")
    return value


def is_list(value: Any) -> bool:
    """Whether the value is a sequence and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_integer(value: Any, least: int = -MAX_INT, most: int = MAX_INT) -> bool:
    """Whether the value is an integer from ``least`` to ``most``, and not a bool."""
    is_integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integral and least <= value <= most


def is_count(value: Any) -> bool:
    """Whether the value is an integer of 0 or more."""
    return is_integer(value, 0)


def is_number(value: Any, low: float = -MAX_FLOAT, high: float = MAX_FLOAT) -> bool:
    """Whether the value is a number from ``low`` to ``high``, and neither a bool nor NaN."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and low <= value <= high


def is_probability(value: Any) -> bool:
    """Whether the value is a number from 0 to 1."""
    return is_number(value, 0, 1)


def option(default: Any, is_valid: Callable[[Any], bool], expected: str, **about: Any) -> Any:
    """Declares a field of a config, with the values that it may have.

    Args:
      default: its default; None is allowed where it is the default.
      is_valid: whether another value is allowed, see ``check_options``.
      expected: the values in words.
      **about: what else is known of the field: entries of its metadata.
    """
    about = {"is_valid": is_valid, "expected": expected, **about}
    return dataclasses.field(default=default, metadata=about)


def integer(default: int | None, least: int = 0, most: int = MAX_INT, **about: Any) -> Any:
    """Declares a field that is an integer from ``least`` to ``most``, see ``option``."""
    is_valid = functools.partial(is_integer, least=least, most=most)
    upper = "or more" if most == MAX_INT else f"to {most}"
    return option(default, is_valid, f"an integer of {least} {upper}", **about)


def number(
    default: float | None, low: float = -MAX_FLOAT, high: float = MAX_FLOAT, **about: Any
) -> Any:
    """Declares a field that is a number from ``low`` to ``high``, see ``option``."""
    expected = f"a number from {low:g} to {high:g}"
    if high == MAX_FLOAT:
        expected = "a finite number" + (f" of {low:g} or more" if low > -MAX_FLOAT else "")
    return option(default, functools.partial(is_number, low=low, high=high), expected, **about)


def check_options(config: Any, prefix: str = "") -> None:
    """Checks the fields of a config that ``option`` declares.

    Args:
      config: a dataclass.
      prefix: what errors put before the name of a field.

    Raises:
      ConfigError: a value is not valid.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata and not (value is None and field.default is None):
            is_fit = field.metadata["is_valid"](value)
            check(is_fit, f"{prefix}{field.name}", value, field.metadata["expected"])
