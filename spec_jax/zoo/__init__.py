"""The zoo: small trained models that ship with the package, see MODEL_CARD.md.

It has a code model, a much smaller draft model that was distilled from it and shares its
vocabulary, and five drafts that read the code model's states: an EAGLE-1 and an EAGLE-3 head, an
MTP module, and two heads that draft a block in one pass, DFlash and DSpark. All are Hugging Face
directories.
"""

from __future__ import annotations

import pathlib

_HERE = pathlib.Path(__file__).parent
NAMES = (
    "zoo/target",
    "zoo/draft",
    "zoo/eagle1",
    "zoo/eagle3",
    "zoo/mtp",
    "zoo/dflash",
    "zoo/dspark",
)
ZOO = {name: _HERE / name.removeprefix("zoo/") for name in NAMES}


def path(name: str) -> pathlib.Path | None:
    """Returns the directory of a zoo model, or None if the zoo has no such name."""
    return ZOO.get(name)
