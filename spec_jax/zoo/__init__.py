"""The small trained models that ship with the package; see MODEL_CARD.md.

A code model, a much smaller draft of the same vocabulary, distilled from it (both Hugging Face
directories), and what was trained to draft from its states: heads of EAGLE-1 and EAGLE-3, and an
MTP module.
"""

from __future__ import annotations

import pathlib

_HERE = pathlib.Path(__file__).parent
NAMES = ("zoo/target", "zoo/draft", "zoo/eagle1", "zoo/eagle3", "zoo/mtp")
ZOO = {name: _HERE / name.removeprefix("zoo/") for name in NAMES}


def path(name: str) -> pathlib.Path | None:
    """The directory of a zoo model, or None if the zoo has no such name."""
    return ZOO.get(name)
