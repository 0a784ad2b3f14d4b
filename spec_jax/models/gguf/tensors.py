"""The weights of a GGUF file under the names of transformers, plain and in float32."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from spec_jax.errors import WeightsError
from spec_jax.models.gguf.header import Entry, Header, library
from spec_jax.models.parts import Part, Tensor

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MAX_NAMES = 1 << 18  # 36 thousand in Qwen3-235B
ROPE_FACTORS = "rope_freqs.weight"  # not a weight: see ``config``


def tensors_of(header: Header, head_counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns the tensors of a file in float32, each part made plain when it is asked for.

    Files of Llama's architecture hold the rows of queries and keys of a head in pairs, (0, H/2, 1,
    H/2 + 1, …), as their rotary embedding turns them; here they are in order.

    Args:
      header: of the file.
      head_counts: of queries and keys, by the name of their tensors, where rows are in pairs.

    Raises:
      WeightsError: there are too many tensors.
    """
    return {
        name: _tensor(header, stored, expert, head_counts)
        for name, (stored, expert) in places(header).items()
    }


def places(header: Header) -> dict[str, tuple[str, int | None]]:
    """Returns by the name of each tensor which one of the file it is in, and as which expert.

    What has no name in transformers keeps that of the file.

    Raises:
      WeightsError: there are too many tensors.
    """
    stored_in: dict[str, tuple[str, int | None]] = {}
    for stored, entry in header.tensors.items():
        if stored != ROPE_FACTORS:
            stored_in |= {name: (stored, e) for name, e in _names(stored, entry)}
        if len(stored_in) > _MAX_NAMES:
            raise WeightsError(f"{header.path} has over {_MAX_NAMES} matrices")
    return stored_in


def _tensor(
    header: Header, stored: str, expert: int | None, head_counts: Mapping[str, int]
) -> Tensor:
    """A tensor of the file, or one expert of it."""
    entry = header.tensors[stored]
    if expert is not None:
        size = math.prod(entry.shape[1:-1]) * entry.row_bytes
        begin = entry.begin + expert * size
        entry = dataclasses.replace(entry, shape=entry.shape[1:], begin=begin)
    heads = head_counts.get(re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", stored))

    def read(part: Part) -> np.ndarray:
        if heads is None:
            return read_part(header, entry, part)
        return _read_paired(header, entry, part, heads, stored)

    return Tensor(entry.shape, np.dtype(np.float32), read)


def read_part(header: Header, entry: Entry, part: Part) -> np.ndarray:
    """Returns values of a part of a matrix or vector: of whole rows, the columns in it.

    Args:
      header: of the file.
      entry: the matrix or vector.
      part: of it, one or two ranges.

    Raises:
      WeightsError: the file ends within it.
    """
    *lead, columns = part
    rows = lead[0] if lead else range(1)
    count = len(rows) * entry.row_bytes
    begin = entry.begin + rows.start * entry.row_bytes
    stored = np.fromfile(header.path, np.uint8, count, offset=begin)
    if stored.size != count:
        raise WeightsError(f"{header.path} ends within a tensor")
    shape = (len(rows), entry.row_bytes)
    with np.errstate(all="ignore"):  # what is not finite is refused by its name later
        plain = library(header.path).quants.dequantize(stored.reshape(shape), entry.type)
    plain = plain[:, columns.start : columns.stop]
    return np.asarray(plain if lead else plain[0], np.float32)


def _read_paired(header: Header, entry: Entry, part: Part, heads: int, name: str) -> np.ndarray:
    """Values of a part of the rows of queries or keys, in order; heads are read whole."""
    rows = part[0]
    size = entry.shape[0] // heads
    if entry.shape[0] % heads or size % 2:
        raise WeightsError(
            f"{header.path}: tensor {name} has {entry.shape[0]} rows for {heads} heads"
        )
    first = rows.start // size * size
    end = -(-rows.stop // size) * size
    plain = read_part(header, entry, (range(first, end), *part[1:]))
    pairs = plain.reshape(-1, size // 2, 2, *plain.shape[1:])
    ordered = pairs.swapaxes(1, 2).reshape(plain.shape)
    return ordered[rows.start - first : rows.stop - first]


def _names(name: str, entry: Entry) -> list[tuple[str, int | None]]:
    """The names in transformers of a tensor, each with its expert where it is of one."""
    found = re.fullmatch(r"(?:blk\.(\d{1,5})\.)?(\w+)\.(weight|bias)", name)
    layer, kind, what = found.groups() if found else (None, None, None)
    if layer is None:
        return [(f"{_OUTER[kind]}.{what}" if kind in _OUTER else name, None)]
    prefix = f"model.layers.{int(layer)}."
    is_stack = len(entry.shape) == 3 and entry.shape[0] <= _MAX_NAMES and what == "weight"
    if kind in _EXPERTS and is_stack:
        ours = f"{prefix}mlp.experts.{{}}.{_EXPERTS[kind]}.weight"
        return [(ours.format(e), e) for e in range(entry.shape[0])]
    return [(f"{prefix}{_LAYER[kind]}.{what}" if kind in _LAYER else name, None)]
