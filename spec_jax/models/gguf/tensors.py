"""The weights of a GGUF file under the names of transformers, plain and in float32."""

from __future__ import annotations

import dataclasses
import math
import re

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


class GgufTensors:
    """The tensors of a file, each part made plain when it is asked for.

    Files of Llama's architecture hold the rows of queries and keys of a head in pairs, (0, H/2, 1,
    H/2 + 1, …), as their rotary embedding turns them; here they are in order.

    Args:
      header: of the file.
      head_counts: of queries and keys, by the name of their tensors, where rows are in pairs.

    Raises:
      WeightsError: there are too many tensors.

    Attributes:
      bytes_read: of tensors, so far.
    """

    def __init__(self, header: Header, head_counts: dict[str, int]):
        self.bytes_read = 0
        self._header = header
        self._gguf = library(header.path)
        self._where: dict[str, tuple[str, int | None]] = {}  # by our name: the file's, the expert
        for name, entry in header.tensors.items():
            if name != ROPE_FACTORS:
                self._where |= {ours: (name, e) for ours, e in _names(name, entry)}
            if len(self._where) > _MAX_NAMES:
                raise WeightsError(f"{header.path} has over {_MAX_NAMES} matrices")
        self._head_counts = head_counts

    def names(self) -> set[str]:
        """The names of all tensors; what has no name in transformers keeps that of the file."""
        return set(self._where)

    def stored_as(self, name: str) -> str:
        """Returns the type of a tensor in the file, such as "Q4_1"."""
        return self._header.tensors[self._where[name][0]].type.name

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor in float32; nothing of it is read yet."""
        stored, expert = self._where[name]
        entry = self._header.tensors[stored]
        if expert is not None:
            size = math.prod(entry.shape[1:-1]) * entry.row_bytes
            entry = dataclasses.replace(
                entry, shape=entry.shape[1:], begin=entry.begin + expert * size
            )
        kind = re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", stored)
        heads = self._head_counts.get(kind)

        def read(part: Part) -> np.ndarray:
            if heads is None:
                return self._read(entry, part)
            return self._read_paired(entry, part, heads, stored)

        return Tensor(entry.shape, np.dtype(np.float32), read)

    def values(self, stored: str) -> np.ndarray:
        """Returns a whole tensor by its name in the file."""
        entry = self._header.tensors[stored]
        return self._read(entry, tuple(map(range, entry.shape)))

    def _read(self, entry: Entry, part: Part) -> np.ndarray:
        """Values of a part of a matrix or vector: whole rows, of which some columns are kept."""
        *lead, columns = part
        rows = lead[0] if lead else range(1)
        count = len(rows) * entry.row_bytes
        begin = entry.begin + rows.start * entry.row_bytes
        stored = np.fromfile(self._header.path, np.uint8, count, offset=begin)
        if stored.size != count:
            raise WeightsError(f"{self._header.path} ends within a tensor")
        self.bytes_read += count
        shape = (len(rows), entry.row_bytes)
        with np.errstate(all="ignore"):  # what is not finite is refused by its name later
            plain = self._gguf.quants.dequantize(stored.reshape(shape), entry.type)
        plain = plain[:, columns.start : columns.stop]
        return np.asarray(plain if lead else plain[0], np.float32)

    def _read_paired(self, entry: Entry, part: Part, heads: int, name: str) -> np.ndarray:
        """Values of a part of the rows of queries or keys, in order; heads are read whole."""
        rows = part[0]
        size = entry.shape[0] // heads
        if entry.shape[0] % heads or size % 2:
            raise WeightsError(
                f"{self._header.path}: tensor {name} has {entry.shape[0]} rows for {heads} heads"
            )
        first = rows.start // size * size
        end = -(-rows.stop // size) * size
        plain = self._read(entry, (range(first, end), *part[1:]))
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
