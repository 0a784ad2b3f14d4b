"""Speculative decoding as pure functions over arrays."""

from spec_jax.decoding.calls import call_accept
from spec_jax.decoding.loop import (
    feed,
    feed_in_passes,
    finish_feeding,
    generate,
    insert,
    prefill,
    read_chunk,
    read_row,
    read_rows,
)
from spec_jax.decoding.observers import LOGPROBS, Logprobs, acceptance_by_kind, expected_acceptance
from spec_jax.decoding.round import (
    accept,
    commit,
    decode_round,
    draft,
    emit,
    propose,
    round_noise,
    score,
    target_pass,
    verify,
)
from spec_jax.decoding.state import Chunk, DecodeState, Finish, Kind, Record, System, append

__all__ = [
    "LOGPROBS",
    "Chunk",
    "DecodeState",
    "Finish",
    "Kind",
    "Logprobs",
    "Record",
    "System",
    "accept",
    "acceptance_by_kind",
    "append",
    "call_accept",
    "commit",
    "decode_round",
    "draft",
    "emit",
    "expected_acceptance",
    "feed",
    "feed_in_passes",
    "finish_feeding",
    "generate",
    "insert",
    "prefill",
    "propose",
    "read_chunk",
    "read_row",
    "read_rows",
    "round_noise",
    "score",
    "target_pass",
    "verify",
]
