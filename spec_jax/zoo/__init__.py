"""The small trained models that ship with the package; see MODEL_CARD.md.

Both are Hugging Face directories: a code model and a much smaller draft of the same
vocabulary, distilled from it.
"""

from __future__ import annotations

import pathlib

_HERE = pathlib.Path(__file__).parent
ZOO = {"zoo/target": _HERE / "target", "zoo/draft": _HERE / "draft"}
NAMES = tuple(ZOO)


def path(name: str) -> pathlib.Path | None:
    """The directory of a zoo model, or None if the zoo has no such name."""
    return ZOO.get(name)
