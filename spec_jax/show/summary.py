"""Short texts of objects, for consoles, notebooks and messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from spec_jax.show import page

MAX_CHARS = 240  # of a whole text
_MAX_VALUE = 90  # characters of one value


def cut(text: str, size: int = MAX_CHARS) -> str:
    """Returns the text, or its beginning and an ellipsis where it is longer than ``size``."""
    return text if len(text) <= size else text[: size - 1] + "…"


def count_text(count: int) -> str:
    """Returns a number in three digits and its unit, such as 97.2k or 8.03B."""
    count = round(count, min(0, 3 - len(str(count))))  # 999,999 is 1.00M
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            value = count / size
            return f"{value:.{max(0, 3 - len(str(int(value))))}f}{unit}"
    return str(count)


class ReprMixin:
    """Gives a class a short ``repr`` and a table in notebooks, both made of the same fields.

    A dataclass that inherits from it is declared with ``repr=False``.
    """

    def _repr_fields(self) -> Mapping[str, str]:
        """Returns what there is to say, by name; the name "" has the title."""
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = dict(self._repr_fields())
        title = facts.pop("", "")
        said = ", ".join(f"{name} {cut(value, _MAX_VALUE)}" for name, value in facts.items())
        title = f"{cut(title, _MAX_VALUE)}: " if title else ""
        return cut(f"{type(self).__name__}({title}{said}", MAX_CHARS - 1) + ")"

    def _repr_html_(self) -> str:
        facts = dict(self._repr_fields())
        title = facts.pop("", "")
        return page.table(f"{type(self).__name__} {title}".strip(), list(facts.items()))


def short_repr(*always: str) -> Callable[[Any], str]:
    """Returns a ``__repr__`` for a dataclass that leaves out fields which are at their default.

    Args:
      *always: fields that are shown even so.
    """

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            has_factory = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if has_factory else field.default
            if field.repr and (field.name in always or value != default):
                shown.append(f"{field.name}={cut(repr(value), _MAX_VALUE)}")
        return cut(f"{type(self).__name__}({', '.join(shown)}", MAX_CHARS - 1) + ")"

    return __repr__
