"""Grouped-query attention, over a cache or within whole sequences."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from spec_jax.models.sees import Sees
from spec_jax.sharding import ambient, constrain, shard_map_over, spec

# ``attend_prefix`` reads one or two eighths of a cache, or all of it: the copy of a longer prefix
# takes more time than its products save. Of a long cache it may read less, see ``prefix_sizes``. A
# cache of fewer slots is always read whole.
PREFIXES = (1, 2)
NUM_PARTS = 8
MIN_SLOTS = 512
MIN_PREFIX = 256  # a shorter prefix is not worth a program of its own

# ``attend_filled`` reads blocks of slots. Each step of its loop costs microseconds beside what it
# reads and computes, so a block is large; its scores lie in memory, so it is not larger.
BLOCK_BYTES = 2**23  # of keys and values of a device
SCORE_BYTES = 2**25  # of scores, likewise
MIN_BLOCK = 512
MIN_BLOCKED = 8192  # a cache of fewer slots is read whole

# On a CPU a block is copied before it is read, which pays for many tokens: their scores then fit
# into its caches.
CPU_TOKENS = 32
CPU_BLOCK = 256

MIN_SPLASH = 1024  # tokens; shorter sequences are not attended over by a TPU's kernel
SPLASH_BLOCK = 512

SUMS = "attention sums"  # of ``causal_parts``, as policies of ``jax.checkpoint`` know them


def attend(
    q_BTNH: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask_BTS: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Attends from T queries over S slots. The softmax is computed in float32.

    Args:
      q_BTNH: dtype[B,T,N,H], queries.
      k: dtype[B,G,S,H] or dtype[B*G,S,H], keys.
      v: values, shaped as ``k`` but of any width. Masked ones must be finite too; keys may be NaN.
      mask_BTS: bool[B|1,T,S], True where a query sees a slot.
      scale: multiplies the scores; by default 1/sqrt(H).

    Returns:
      dtype[B,T,N*H], where H is the width of the values.
    """
    B, T, N, H = q_BTNH.shape
    *lead, S, _ = k.shape
    G = math.prod(lead) // B
    q = grouped(q_BTNH, G).reshape(*lead, -1, H)
    scores = jnp.einsum("...mh,...sh->...ms", q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, G, N // G, T, S) * (H**-0.5 if scale is None else scale)
    scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(*lead, -1, S)
    out = jnp.einsum("...ms,...sh->...mh", weights, v)
    return ungrouped(out.reshape(B, G, N // G, T, -1))


def prefix_sizes(num_slots: int) -> list[int]:
    """Returns how many slots ``attend_prefix`` may read, ascending; the last is all of them.

    An eighth is halved until ``MIN_PREFIX``, so that what a long cache costs depends on what it
    holds.
    """
    step = -(-num_slots // NUM_PARTS)
    halves = []
    while step // 2 ** (len(halves) + 1) >= MIN_PREFIX:
        halves.insert(0, step // 2 ** (len(halves) + 1))
    return [*halves, *(i * step for i in PREFIXES), num_slots]


def attend_prefix(
    q_BTNH: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask_BTS: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Attends as ``attend`` does, but on a CPU reads only a prefix of the slots.

    The prefix is the shortest of a few that contains every slot seen. It costs a copy of its
    slots, which does not pay for a layer of a stack, which has been copied already, nor on a mesh,
    where a choice by all rows would have to cross it. On other platforms all slots are read and
    nothing is chosen.

    Args and Returns are those of ``attend``.
    """
    S = mask_BTS.shape[2]

    def over(n):
        k_n = k[..., :n, :]
        v_n = v[..., :n, :]
        mask = mask_BTS[..., :n]
        return attend(q_BTNH, k_n, v_n, mask, scale=scale)

    if S < MIN_SLOTS or k.ndim == 4:
        return over(S)
    sizes = prefix_sizes(S)
    prefixes = [functools.partial(over, n) for n in sizes]
    last = jnp.where(mask_BTS.any(axis=(0, 1)), jnp.arange(S), 0).max()

    def choose():
        return jax.lax.switch((last >= jnp.asarray(sizes[:-1])).sum(), prefixes)

    return jax.lax.platform_dependent(cpu=choose, default=prefixes[-1])


def attend_cache(q_BTNH: jax.Array, cache: Any, index: Any, sees: Sees, scale: Any) -> jax.Array:
    """Attends over one layer of a cache that holds the pass's keys and values already.

    ``cache.attention`` says how, see ``config.ATTENTIONS``: by ``attend_filled``, which is also how
    a CPU attends from many tokens, or by ``attend_prefix``, which is also taken if a mesh splits
    query heads and not key-value heads.

    Args:
      q_BTNH: dtype[B,T,N,H], queries.
      cache: a ``KVCache``.
      index: of the layer.
      sees: what the tokens see.
      scale: multiplies the scores; None means 1/sqrt(H).

    Returns:
      dtype[B,T,N*H], where H is the width of the values.
    """

    def whole():
        mask = sees(cache.positions(jnp.arange(cache.slots, dtype=jnp.int32), sees.end))
        return attend_prefix(q_BTNH, *cache.layer(index), mask, scale=scale)

    arrays = cache.arrays if cache.is_stacked else cache.layer(index)

    def in_blocks(block=None):
        options = dict(scale=scale, block=block)
        return attend_filled(q_BTNH, *arrays, index, sees, cache.positions, **options)

    if not _splits_alike(q_BTNH, arrays[0]):
        return whole()
    if cache.attention != "auto":
        return in_blocks()
    on_cpu = default = whole
    if cache.slots >= MIN_SLOTS and q_BTNH.shape[1] >= CPU_TOKENS:
        on_cpu = functools.partial(in_blocks, CPU_BLOCK)
    if cache.slots >= MIN_BLOCKED:
        default = in_blocks
    return whole() if on_cpu is default else jax.lax.platform_dependent(cpu=on_cpu, default=default)


def _splits_alike(q_BTNH, keys):
    """Whether a device has the query heads of its key-value heads, and no others."""
    mesh = ambient()
    if mesh is None:
        return True

    def heads(name, count):
        return spec((name,), (count,), mesh)

    return heads("heads", q_BTNH.shape[2]) == heads("kv_heads", keys.shape[-3])


def slot_block(num_slots: int, slot_bytes: int, score_bytes: int) -> int:
    """Returns the block size of ``attend_filled``: a power of two, or all slots.

    Args:
      num_slots: S.
      slot_bytes: of a slot's keys and values in all rows.
      score_bytes: of the scores of all queries against a slot.
    """
    most = min(BLOCK_BYTES // slot_bytes, SCORE_BYTES // score_bytes)
    return min(max(MIN_BLOCK, 1 << max(most, 1).bit_length() - 1), num_slots)


def attend_filled(
    q_BTNH: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: int | jax.Array,
    sees: Sees,
    positions: Callable[[jax.Array, jax.Array], jax.Array] = lambda slots, end: slots,
    *,
    scale: float | None = None,
    block: int | None = None,
) -> jax.Array:
    """Attends over the slots up to the last one of the longest row, in blocks.

    One loop adds a block of slots to an online softmax. So slots after the longest row are not
    read, and the memory for scores and masks depends on the block, not on the number of slots. On a
    mesh each device takes as many steps as its own rows need.

    Args:
      q_BTNH: dtype[B,T,N,H], queries.
      keys: dtype[L,B,G,S,H], dtype[B,G,S,H] or dtype[B*G,S,H].
      values: likewise, of any width. Masked ones must be finite too; keys may be NaN.
      layer: of a stack; without one it is ignored.
      sees: what the tokens see, which the cache holds already.
      positions: which position each slot holds, see ``KVCache.positions``.
      scale: multiplies the scores; by default 1/sqrt(H).
      block: slots of a block; by default ``slot_block`` of what a device holds.

    Returns:
      dtype[B,T,N*H], where H is the width of the values.
    """
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    axes = P("layers", "batch", "kv_heads", "slots", "head_dim")[-keys.ndim :]
    axes = P() if keys.ndim == 3 else P(*axes)
    run = functools.partial(_over_blocks, positions=positions, scale=scale, block=block)
    heads = P("batch", None, "heads")
    sees, sees_axes = sees.on_devices()
    run = shard_map_over(run, (heads, axes, axes, P(), sees_axes), heads)
    return run(q_BTNH, keys, values, jnp.int32(layer), sees).reshape(*q_BTNH.shape[:2], -1)


def _over_blocks(q_BTNH, keys, values, layer, sees, *, positions, scale, block):
    """``attend_filled`` on one device, dtype[B,T,N,H]."""
    B, T, N, H = q_BTNH.shape
    is_stacked = keys.ndim == 5
    *lead, S, _ = keys.shape[is_stacked:]
    G = math.prod(lead) // B
    if block is None:
        width = (keys.shape[-1] + values.shape[-1]) * keys.dtype.itemsize
        block = slot_block(S, B * G * width, 4 * B * N * T)
    q = grouped(q_BTNH, G).reshape(*lead, -1, H)

    def add(carry):
        i, sums = carry
        begin = jnp.minimum(i * block, S - block)

        def cut(x):
            size = (1,) * is_stacked + (*lead, block, x.shape[-1])
            at = (layer,) * is_stacked + (*[0] * len(lead), begin, 0)
            return jax.lax.dynamic_slice(x, at, size).reshape(size[is_stacked:])

        slots = begin + jnp.arange(block, dtype=jnp.int32)
        mask = sees(positions(slots, sees.end)) & (slots >= i * block)  # the last one may overlap
        scores = _product("...mh,...sh->...ms", q, cut(keys)) * scale
        scores = scores.reshape(B, G, N // G, T, block)
        scores = jnp.where(mask[:, None, None], scores, -1e30).reshape(*lead, -1, block)
        return i + 1, _add(sums, scores, "...ms,...sh->...mh", cut(values))

    count = -(-S // block)
    used = -(-sees.end.max() // block)
    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    sums = (zeros - 1e30, zeros, jnp.zeros((*zeros.shape, values.shape[-1]), jnp.float32))

    # The second bound is redundant: from it XLA infers a static trip count, which plans read.
    def more(carry):
        return (carry[0] < used) & (carry[0] < count)

    _, (_, total, out) = jax.lax.while_loop(more, add, (jnp.int32(0), sums))
    out = (out / total[..., None]).astype(values.dtype)
    return ungrouped(out.reshape(B, G, N // G, T, -1)).reshape(B, T, N, -1)


def _add(sums, scores, product, values):
    """Adds the scores of further keys and their values to the sums of an online softmax."""
    highest, total, out = sums
    high = jnp.maximum(highest, scores.max(axis=-1))
    kept = jnp.exp(highest - high)
    weights = jnp.exp(scores - high[..., None])
    part = _product(product, weights.astype(values.dtype), values)
    return high, total * kept + weights.sum(axis=-1), out * kept[..., None] + part


def block_size(num_rows: int) -> int:
    """Returns the block size of ``causal_attention``: an eighth of the rows, between 64 and 256.

    Smaller blocks compute fewer masked scores and larger ones take fewer steps of the loop.
    """
    return 64 * min(max(round(num_rows / 512), 1), 4)


def causal_attention(
    q_BTNH: jax.Array,
    k_BGTH: jax.Array,
    v_BGTH: jax.Array,
    sees: Sees,
    *,
    block: int | None = None,
    scale: float | None = None,
    kind: str = "auto",
) -> jax.Array:
    """Attends within whole sequences: every token sees itself and tokens before it.

    By ``causal_parts``, or on a TPU, of long sequences, by ``by_splash``; and all at once if the
    sequences are short, or the tokens see what is not a chain.

    Args:
      q_BTNH: dtype[B,T,N,H], queries.
      k_BGTH: dtype[B,G,T,H], keys.
      v_BGTH: dtype[B,G,T,H], values, of any width.
      sees: what the tokens see.
      block: see ``causal_parts``.
      scale: multiplies the scores; by default 1/sqrt(H).
      kind: see ``config.ATTENTIONS``; "xla" never takes the kernel.

    Returns:
      dtype[B,T,N*H], where H is the width of the values.
    """
    T = q_BTNH.shape[1]
    if sees.inside is not None or T <= (block or block_size(T)):
        mask = sees(jnp.arange(T, dtype=jnp.int32))
        return attend(q_BTNH, k_BGTH, v_BGTH, mask, scale=scale)

    def by_parts(q_BTNH, k, v):
        q = grouped(q_BTNH, k.shape[1])
        _, total, out = causal_parts(q, k, v, sees, block=block, scale=scale)
        return ungrouped((out / total[..., None]).astype(v.dtype))

    if kind != "auto" or not _has_splash(q_BTNH, k_BGTH, v_BGTH):
        return by_parts(q_BTNH, k_BGTH, v_BGTH)
    on_tpu = functools.partial(by_splash, sees=sees, scale=scale)
    return jax.lax.platform_dependent(q_BTNH, k_BGTH, v_BGTH, tpu=on_tpu, default=by_parts)


def _has_splash(q_BTNH, k_BGTH, v_BGTH):
    """Whether a TPU attends by splash attention: long sequences of heads that fill its lanes."""
    widths = {q_BTNH.shape[-1], v_BGTH.shape[-1]}
    fits = q_BTNH.shape[1] >= MIN_SPLASH and len(widths) == 1 and min(widths) % 128 == 0
    return fits and _splits_alike(q_BTNH, k_BGTH)


def by_splash(
    q_BTNH: jax.Array,
    k_BGTH: jax.Array,
    v_BGTH: jax.Array,
    sees: Sees,
    *,
    scale: float | None = None,
    is_interpreted: bool = False,
) -> jax.Array:
    """``causal_attention`` by jax's kernel for TPUs, which has a gradient of its own.

    Queries are scaled before the products, and rounded to their own dtype.

    Args:
      q_BTNH: dtype[B,T,N,H], queries.
      k_BGTH: dtype[B,G,T,H], keys.
      v_BGTH: dtype[B,G,T,H], values, as wide as the keys.
      sees: what the tokens see, a chain.
      scale: multiplies the scores; by default 1/sqrt(H).
      is_interpreted: runs on any platform, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # takes long to import

    T, N, H = q_BTNH.shape[1:]
    scale = H**-0.5 if scale is None else scale

    def attend_rows(q_BNTH, k, v, begins):
        at_the_end = [(0, 0), (0, 0), (0, -T % SPLASH_BLOCK), (0, 0)]  # which no token sees
        q, k, v = (jnp.pad(x, at_the_end) for x in (q_BNTH, k, v))
        sizes = [field for field in splash.BlockSizes.__dataclass_fields__ if "block" in field]
        shape = (q.shape[2], q.shape[2])
        mask = splash.CausalMask(shape)
        if sees.size is not None:
            mask = splash.LocalMask(shape, (sees.size - 1, 0), 0)
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * q.shape[1]),
            block_sizes=splash.BlockSizes(**dict.fromkeys(sizes, SPLASH_BLOCK)),
            interpret=is_interpreted,
        )
        if begins is None:
            return jax.vmap(kernel)(q, k, v)[:, :, :T]
        # A token sees those before it whose documents begin at the same place.
        begins = jnp.pad(begins, [(0, 0), (0, -T % SPLASH_BLOCK)], constant_values=-1)
        return jax.vmap(kernel)(q, k, v, splash.SegmentIds(begins, begins))[:, :, :T]

    heads = P("batch", "heads")
    keys = P("batch", "kv_heads")
    q = (q_BTNH.astype(jnp.float32) * scale).astype(q_BTNH.dtype).transpose(0, 2, 1, 3)
    out = shard_map_over(attend_rows, (heads, keys, keys, P("batch")), heads)(
        q, k_BGTH, v_BGTH, sees.begins
    )
    return out.transpose(0, 2, 1, 3).reshape(-1, T, N * H)


def grouped(q_BTNH: jax.Array, num_groups: int) -> jax.Array:
    """Returns queries dtype[B,G,R,T,H], the R query heads of a key-value head beside each other."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, num_groups, N // num_groups, H).transpose(0, 2, 3, 1, 4)


def ungrouped(out_BGRTH: jax.Array) -> jax.Array:
    """Returns the heads' outputs side by side, dtype[B,T,N*H]."""
    B, _, _, T, _ = out_BGRTH.shape
    return out_BGRTH.transpose(0, 3, 1, 2, 4).reshape(B, T, -1)


def causal_parts(
    q_BGRTH: jax.Array,
    k_BGTH: jax.Array,
    v_BGTH: jax.Array,
    sees: Sees,
    *,
    block: int | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the sums of causal attention, which can be joined with those of further keys.

    One loop runs over the pairs of a block of queries and a block of keys that it sees, and
    another one computes the gradient, for which scores are computed again. So the scores of one
    pair are in memory at a time, and compile time does not depend on the number of tokens.

    Source: FlashAttention, arXiv 2205.14135.

    Args:
      q_BGRTH: queries, see ``grouped``.
      k_BGTH: dtype[B,G,T,H], keys.
      v_BGTH: dtype[B,G,T,H], values, of any width.
      sees: what the tokens see, of those up to each of them.
      block: number of tokens in a block, by default ``block_size``.
      scale: multiplies the scores; by default 1/sqrt(H).

    Returns:
      ``highest`` f32[B,G,R,T], each query's highest score, without a gradient; the sum
      f32[B,G,R,T] of exp(score - highest), and that of its products with the values,
      f32[B,G,R,T,H].
    """
    T, H = q_BGRTH.shape[-2:]
    block = block or block_size(T)

    def split(x):  # the padding is at the end, where no token sees it
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -T % block), (0, 0)])
        return _shared(jnp.moveaxis(x.reshape(*x.shape[:-2], -1, block, x.shape[-1]), -3, 0))

    low = None if isinstance(sees.low, int) else sees.low
    if low is not None:
        low = jnp.pad(low, [(0, 0), (0, -T % block)]).reshape(len(low), -1, block)
        low = constrain(low.swapaxes(0, 1), None, "batch")
    # A block of queries sees at most so many blocks of keys before its own.
    reach = None if sees.size is None else -(-(sees.size - 1) // block)
    scale = H**-0.5 if scale is None else scale
    blocks = split(q_BGRTH), split(k_BGTH), split(v_BGTH)
    highest, total, out = _causal_blocks(*blocks, low, scale, reach)

    def join(x):
        return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:])[:, :, :, :T]

    return jax.lax.stop_gradient(join(highest)), join(total), join(out)


def _shared(x):
    """Splits blocks [blocks,B,G,...] by rows and key-value heads."""
    return constrain(x, None, "batch", "kv_heads")


def _pairs(num_blocks, reach):
    """The blocks of queries and of keys of every pair, i32[P] twice."""
    row, column = np.tril_indices(num_blocks)
    is_near = row - column <= (num_blocks if reach is None else reach)
    return jnp.asarray(row[is_near]), jnp.asarray(column[is_near])


def _block_scores(q, k, low, row, column, scale):
    """f32[B,G,R,M,S] of one pair."""
    scores = _product("bgrmh,bgsh->bgrms", q[row], k[column]) * scale
    order = jnp.arange(q.shape[-2])
    seen = (row > column) | (order <= order[:, None])
    if low is not None:
        seen &= (column * len(order) + order >= low[row][..., None])[:, None, None]
    return jnp.where(seen, scores, -1e30)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _causal_blocks(q, k, v, low, scale, reach):
    """``causal_parts`` of blocks."""
    return _causal_forward(q, k, v, low, scale, reach)[0]


def _causal_forward(q, k, v, low, scale, reach):
    def add(carry, pair):
        row, column = pair
        scores = _block_scores(q, k, low, row, column, scale)
        own = _add(tuple(x[row] for x in carry), scores, "bgrms,bgsh->bgrmh", v[column])
        return tuple(x.at[row].set(part) for x, part in zip(carry, own)), None

    zeros = _shared(jnp.zeros(q.shape[:-1], jnp.float32))
    out = _shared(jnp.zeros((*zeros.shape, v.shape[-1]), jnp.float32))
    sums, _ = jax.lax.scan(add, (zeros - 1e30, zeros, out), _pairs(len(q), reach))
    sums = tuple(checkpoint_name(x, SUMS) for x in sums)
    return sums, (q, k, v, low, sums[0])


def _causal_backward(scale, reach, kept, gradients):
    q, k, v, low, highest = kept
    _, d_total, d_out = gradients
    d_out = d_out.astype(v.dtype)

    def add(carry, pair):
        d_q, d_k, d_v = carry
        row, column = pair
        weights = jnp.exp(_block_scores(q, k, low, row, column, scale) - highest[row][..., None])
        d_weights = _product("bgrmh,bgsh->bgrms", d_out[row], v[column])
        d_scores = weights * (d_weights + d_total[row][..., None]) * scale
        weights, d_scores = weights.astype(v.dtype), d_scores.astype(q.dtype)
        d_q = d_q.at[row].add(_product("bgrms,bgsh->bgrmh", d_scores, k[column]))
        d_k = d_k.at[column].add(_product("bgrms,bgrmh->bgsh", d_scores, q[row]))
        d_v = d_v.at[column].add(_product("bgrms,bgrmh->bgsh", weights, d_out[row]))
        return (d_q, d_k, d_v), None

    zeros = [_shared(jnp.zeros(x.shape, jnp.float32)) for x in (q, k, v)]
    sums, _ = jax.lax.scan(add, tuple(zeros), _pairs(len(q), reach))
    return *(x.astype(of.dtype) for x, of in zip(sums, (q, k, v))), None


_causal_blocks.defvjp(_causal_forward, _causal_backward)
