"""The two splits of a corpus: what is trained on, and what is held out to evaluate."""

from __future__ import annotations

import hashlib

from spec_jax.errors import ConfigError

SPLITS = ("train", "held_out")


def check_split(split: str) -> None:
    """Raises a ConfigError unless ``split`` is one of ``SPLITS``."""
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")


def unit_hash(content: bytes) -> float:
    """Returns a number in [0, 1) that depends on ``content`` alone and is evenly spread."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64
