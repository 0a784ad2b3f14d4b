"""Speculative decoding as pure functions over arrays."""

from spec_jax.decoding.loop import generate, insert, prefill, read_chunk, read_row
from spec_jax.decoding.round import (
    accept,
    apply_rule,
    decode_round,
    draft_and_score,
    round_noise,
    score,
    validate_proposal,
)
from spec_jax.decoding.state import (
    Chunk,
    DecodeState,
    Finish,
    Kind,
    Record,
    System,
    append,
    apply_limits,
)

__all__ = [
    "Chunk",
    "DecodeState",
    "Finish",
    "Kind",
    "Record",
    "System",
    "accept",
    "insert",
    "append",
    "validate_proposal",
    "apply_limits",
    "decode_round",
    "draft_and_score",
    "generate",
    "apply_rule",
    "prefill",
    "read_chunk",
    "read_row",
    "round_noise",
    "score",
]
