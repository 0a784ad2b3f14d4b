"""Checkpoints of other projects, read as our own parameters and written from them."""

from spec_jax.formats.eagle import ImportedHead, read_head
from spec_jax.formats.eagle_export import write_head
from spec_jax.formats.files import draft_kind
from spec_jax.formats.mtp import ImportedMtp, read_mtp
from spec_jax.formats.mtp_export import write_mtp

__all__ = [
    "ImportedHead",
    "ImportedMtp",
    "draft_kind",
    "read_head",
    "read_mtp",
    "write_head",
    "write_mtp",
]
