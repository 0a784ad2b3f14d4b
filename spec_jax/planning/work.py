"""What one pass of a model or a head costs on one device, counted from its config.

Every pass reads its weights and the cache once, writes the cache entries of its tokens, and writes
and reads the logits that it scores. Of experts it reads those that one of its tokens chose: as many
different ones as are expected if every token chooses its own at random, all alike and whatever the
others choose. Weights are counted from the tables that families and heads
declare, caches from their initial state, and both as ``sharding`` splits them; so whatever is
registered is counted. Other activations are not: they may stay on the chip, as on small batches the
logits may too.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from spec_jax.drafters.registry import kind_of_draft, layer_of
from spec_jax.errors import ConfigError
from spec_jax.meshes import parse_mesh
from spec_jax.models.families import init_cache
from spec_jax.models.params import flat_table, head_counts, layer_tables, outer_table
from spec_jax.models.specs import ParamSpec
from spec_jax.planning.chips import Chip
from spec_jax.sharding import (
    REPLICATED,
    SAMPLED_ROWS,
    SHARDED,
    AxisRules,
    kv_replication,
    named,
    state_axes,
    use_axis_rules,
)

_LOGIT_BYTES = 4  # float32, whatever the weights are


@dataclasses.dataclass(frozen=True)
class Setting:
    """How models are run.

    Attributes:
      batch: B, rows over all devices.
      context: slots of each row that attention reads: the tokens before the round for programs
        that read just those, S for this library's, which read the whole cache.
      mesh: sizes of the mesh, such as "data:2,tensor:4".
      dtype: of weights and caches.
      is_sampled: rows are not greedy, so that devices exchange logits for whole rows of them.
      is_draft_replicated: the draft lies whole on every device; only its rows are split.
    """

    batch: int = 1
    context: int = 1024
    mesh: str = "data:1,tensor:1"
    dtype: str = "bfloat16"
    is_sampled: bool = False
    is_draft_replicated: bool = False

    def __post_init__(self):
        parse_mesh(self.mesh)
        if self.batch < 1 or self.context < 0:
            raise ConfigError(
                f"batch is {self.batch} and context {self.context}; expected at least one row, and "
                "no negative context"
            )

    @functools.cached_property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices."""
        names, sizes = zip(*parse_mesh(self.mesh).items())
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    @property
    def num_devices(self) -> int:
        return self.abstract_mesh.size

    @functools.cached_property
    def rows(self) -> int:
        """Rows on one device: all of them if the mesh does not divide them."""
        return _local(("batch",), (self.batch,), self.abstract_mesh, SHARDED, {})

    @functools.cached_property
    def sampled_rows(self) -> int:
        """Rows that one device samples."""
        return _local((SAMPLED_ROWS,), (self.batch,), self.abstract_mesh, SHARDED, {})

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does.

    Attributes:
      flops: floating-point operations; a multiply-add counts as two.
      hbm_bytes: read from and written to its memory.
      link_bytes: sent to other devices.
      collectives: how many times devices exchange arrays of activations or logits.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    link_bytes: float = 0.0
    collectives: int = 0

    def __add__(self, other: Work) -> Work:
        names = [field.name for field in dataclasses.fields(self)]
        return Work(*(getattr(self, name) + getattr(other, name) for name in names))

    def __mul__(self, times: int) -> Work:
        return Work(*(times * value for value in dataclasses.astuple(self)))

    def times_s(self, chip: Chip) -> dict[str, float]:
        """Seconds that memory, arithmetic and links need at the peaks of a device of the chip."""
        device = chip.per_device
        return {
            "memory": self.hbm_bytes / device.hbm_bytes_s,
            "arithmetic": self.flops / device.flops_s,
            "links": self.link_bytes / device.link_bytes_s,
        }

    def floor_s(self, chip: Chip) -> float:
        """The least time: all three overlap perfectly, and the slowest decides."""
        return max(self.times_s(chip).values())


@dataclasses.dataclass(frozen=True)
class Stack:
    """The weights and the cache that a pass goes through, counted on one device.

    Attributes:
      matrices: elements of the maps that every token is multiplied with.
      experts: elements of the maps of all routed experts, of the device's part.
      chosen: which share of the routed experts a token chooses.
      vectors: elements of norms, biases and the like.
      width: D, the width of an embedding's row.
      embed: elements of an embedding that is read by rows only.
      head: elements of the output head.
      vocab: logits a token, of the device's part.
      is_vocab_split: other devices have other logits.
      reduced: widths of the products that devices have to add up, in total.
      num_reduced: how many products those are.
      slot_bytes: the cache's bytes for one slot of a row.
      fixed_bytes: the cache's bytes for a row that do not grow with its slots.
      sliding_bytes: of ``slot_bytes``, those of layers with a sliding window.
      most_slots: how many slots such layers have at most.
      queries: query heads per key-value head, times how many products take each number of a slot:
        one, or of latents both. Their second read is not counted: in blocks it is of the chip.
    """

    matrices: int = 0
    experts: int = 0
    chosen: float = 0.0
    vectors: int = 0
    width: int = 0
    embed: int = 0
    head: int = 0
    vocab: int = 0
    is_vocab_split: bool = False
    reduced: int = 0
    num_reduced: int = 0
    slot_bytes: float = 0.0
    fixed_bytes: float = 0.0
    sliding_bytes: float = 0.0
    most_slots: int = 0
    queries: float = 1.0

    @classmethod
    def of(
        cls,
        config: Any,
        setting: Setting,
        *,
        is_draft: bool = False,
        part: str | None = None,
        skipped_weights: tuple[str, ...] = (),
        num_layers: int | None = None,
    ) -> Stack:
        """Counts a model, or a head of any registered kind.

        Args:
          config: of the model or the head.
          setting: its mesh and dtype count.
          is_draft: whether it lies as drafts do.
          part: of a head that has several, see ``HeadSpec.parts``; None: the first.
          skipped_weights: patterns of the names of weights that are not read, see ``DraftPass``.
          num_layers: how many of a model's layers are run; None: all of them.
        """
        is_replicated = is_draft and setting.is_draft_replicated
        mesh = setting.abstract_mesh
        what = (part, skipped_weights, num_layers)
        return _stack(config, mesh, is_replicated, setting.dtype, *what)

    def slots_bytes(self, context: float) -> float:
        """The cache's bytes of a row for a context of so many tokens, without ``fixed_bytes``."""
        unseen = max(context - self.most_slots, 0)
        return self.slot_bytes * context - self.sliding_bytes * unseen

    @property
    def num_params(self) -> int:
        """Elements of all weights on the device."""
        return self.matrices + self.experts + self.vectors + self.head + self.embed

    def experts_read(self, tokens: int) -> float:
        """Elements of the experts that are expected to be chosen by any of so many tokens."""
        return self.experts * (1 - (1 - self.chosen) ** tokens)

    def run(
        self,
        setting: Setting,
        tokens: int,
        scored: int = 0,
        scorer: Stack | None = None,
        *,
        attends: bool = True,
    ) -> Work:
        """Returns the work of one pass.

        Args:
          setting: batch, context and dtype of the pass.
          tokens: T, fed in each row.
          scored: how many of them are given logits.
          scorer: whose output head is used; None: its own, or that of none.
          attends: whether it reads the cache.
        """
        scorer = scorer or self
        rows = setting.rows
        item = setting.itemsize
        size = setting.abstract_mesh.shape["tensor"]
        context = setting.context if attends else 0
        fed = rows * tokens
        logits = rows * scored * scorer.vocab
        maps = self.matrices + self.chosen * self.experts  # that a token is multiplied with
        flops = 2 * fed * maps + 2 * rows * scored * scorer.head
        flops += 2 * fed * self.queries * self.slots_bytes(context) / item
        flops += 4 * fed * self.fixed_bytes / item  # a state is updated, then read out
        read = item * (self.matrices + self.vectors + fed * self.width)
        read += item * self.experts_read(fed)
        read += rows * (self.slots_bytes(context) + self.fixed_bytes)
        read += item * scorer.head * (scored > 0) + _LOGIT_BYTES * logits
        written = fed * self.slot_bytes + rows * self.fixed_bytes + _LOGIT_BYTES * logits
        sent = 2 * (size - 1) / size * item * fed * self.reduced  # all-reduces around a ring
        is_exchanged = setting.is_sampled and scored > 0 and scorer.is_vocab_split
        if is_exchanged:
            whole = _LOGIT_BYTES * logits * size * setting.sampled_rows / rows
            sent += (size - 1) / size * whole
            read, written = read + whole, written + whole
        return Work(flops, read + written, sent, self.num_reduced + is_exchanged)


def _local(axes, shape, mesh, axis_rules: AxisRules, counts: Mapping[str, int]) -> int:
    """Elements of one device's part of an array."""
    return math.prod(named(axes, shape, mesh, axis_rules, counts).shard_shape(shape))


def _cache_bytes(
    config: Any, mesh: AbstractMesh, axis_rules: AxisRules, dtype: str, num_layers: int | None
) -> dict[str, float]:
    """The fields of ``Stack`` with the bytes of a row on one device."""
    if config is None:  # a head without a cache
        return {}

    def size(slots: int) -> float:
        sizes = (mesh.shape["data"], slots, jnp.dtype(dtype))
        init = functools.partial(init_cache, config, *sizes, num_layers)
        with jax.sharding.use_abstract_mesh(mesh), use_axis_rules(axis_rules):
            state = jax.eval_shape(init)
        leaves = zip(jax.tree.leaves(state), jax.tree.leaves(state_axes(state)), strict=True)
        return sum(
            _local(axes, x.shape, mesh, axis_rules, {}) * x.dtype.itemsize
            for x, axes in leaves
            if jnp.issubdtype(x.dtype, jnp.floating)
        )

    one = size(1)
    slot = size(2) - one
    fields = {"slot_bytes": slot, "fixed_bytes": one - slot}
    if getattr(config, "sliding_window", None) is None:
        return fields
    most = config.sliding_window + config.max_pass
    sliding = slot - (size(most + 2) - size(most + 1))
    return fields | {"sliding_bytes": sliding, "most_slots": most}


@functools.lru_cache(maxsize=1024)
def _stack(
    config: Any,
    mesh: AbstractMesh,
    is_replicated: bool,
    dtype: str,
    part: str | None,
    skipped_weights: tuple[str, ...],
    num_layers: int | None,
) -> Stack:
    axis_rules = REPLICATED if is_replicated else SHARDED
    head_spec = kind_of_draft(config).head
    is_head = head_spec is not None
    layer = layer_of(config) if is_head else config
    outer = {} if is_head else dict(outer_table(config))
    layers = [] if is_head else layer_tables(config)[:num_layers]
    if is_head:
        parts = head_spec.parts_of(config)
        table = flat_table(parts[next(iter(parts)) if part is None else part])
        for name, p in table.items():
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in skipped_weights):
                outer[name] = p
    head = outer.pop("head", None)
    embed = outer.pop("embed", None)
    counts = head_counts(layer)

    def local(p):
        return _local(p.axes, p.shape, mesh, axis_rules, counts)

    def is_summed(p: ParamSpec) -> bool:  # into the residual stream, over a split input
        return p.axes[-1] == "embed" and len(p.axes) > 1 and local(p) < math.prod(p.shape)

    specs = [p for table in (outer, *layers) for p in table.values()]
    V = config.target_vocab_size if is_head else config.vocab_size
    width = config.target_hidden_size if layer is None else layer.hidden_size
    shared = ParamSpec((V, width), ("vocab", "embed"), "")  # with the target
    summed = [p.shape[-1] for p in (*specs, embed or shared) if is_summed(p)]
    if head is None and not is_head:  # tied: the embedding is read whole to score
        head, embed = embed._replace(axes=embed.axes[::-1], shape=embed.shape[::-1]), None
    vocab = 0 if head is None else _local(head.axes[1:], head.shape[1:], mesh, axis_rules, counts)
    heads, groups = (getattr(layer, f"num_{name}_heads", 1) for name in ("attention", "key_value"))
    uses = getattr(layer, "products_per_slot", 1)

    routed = [p for p in specs if "{e}" in p.hf_name]
    num_chosen = getattr(layer, "num_experts_per_tok", 1)
    maps = [p for p in specs if (p.is_linear or p.is_map) and p not in routed]
    return Stack(
        matrices=sum(map(local, maps)),
        experts=sum(map(local, routed)),
        chosen=num_chosen / counts.get("experts", 1) if routed else 0.0,
        vectors=sum(local(p) for p in specs if not (p.is_linear or p.is_map)),
        width=width,
        embed=0 if embed is None else local(embed),
        head=0 if head is None else local(head),
        vocab=vocab,
        is_vocab_split=head is not None and vocab < head.shape[1],
        reduced=sum(summed),
        num_reduced=len(summed),
        **_cache_bytes(layer, mesh, axis_rules, dtype, num_layers),
        queries=uses * heads / (groups * kv_replication("kv_heads", groups, mesh, axis_rules)),
    )
