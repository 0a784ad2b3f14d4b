"""Speculative decoding as pure functions over arrays."""

from spec_jax.decoding.loop import admit, generate, prefill, read_chunk, read_row
from spec_jax.decoding.round import (
    accept,
    checked,
    decode_round,
    draft_and_score,
    judge,
    round_noise,
    score,
)
from spec_jax.decoding.state import Chunk, DecodeState, Finish, Kind, Record, System, append, cut

__all__ = [
    "Chunk",
    "DecodeState",
    "Finish",
    "Kind",
    "Record",
    "System",
    "accept",
    "admit",
    "append",
    "checked",
    "cut",
    "decode_round",
    "draft_and_score",
    "generate",
    "judge",
    "prefill",
    "read_chunk",
    "read_row",
    "round_noise",
    "score",
]
