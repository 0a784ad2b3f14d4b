"""Checkpoints that other projects write, as our own parameters."""

from spec_jax.formats.mtp import ImportedMtp, read_mtp

__all__ = ["ImportedMtp", "read_mtp"]
