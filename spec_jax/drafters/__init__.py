"""Drafters, one folder or file an algorithm, and the registry through which all else meets them.

``register`` makes a kind known, from outside of the package too; see ``DrafterKind``.
"""

from spec_jax.drafters.block.kind import DFLASH, DFLASH2, DSPARK, TREEFLASH
from spec_jax.drafters.eagle.kind import EAGLE, PEAGLE
from spec_jax.drafters.early_exit import SELF
from spec_jax.drafters.mtp.kind import MTP
from spec_jax.drafters.ngram import NGRAM
from spec_jax.drafters.registry import (
    DrafterKind,
    DraftFormat,
    Drafting,
    DraftPass,
    HeadSpec,
    Training,
    register,
)
from spec_jax.drafters.standalone.model import STANDALONE
from spec_jax.drafters.suffix import SUFFIX

__all__ = [
    "DraftFormat",
    "DraftPass",
    "DrafterKind",
    "Drafting",
    "HeadSpec",
    "Training",
    "register",
]

_HEADS = (EAGLE, PEAGLE, MTP, DFLASH, DFLASH2, DSPARK, TREEFLASH)
for _kind in (STANDALONE, NGRAM, SUFFIX, SELF, *_HEADS):
    register(_kind)
