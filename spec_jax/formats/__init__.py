"""Checkpoints that other projects write, as our own parameters."""

from spec_jax.formats.eagle import ImportedHead, read_head

__all__ = ["ImportedHead", "read_head"]
