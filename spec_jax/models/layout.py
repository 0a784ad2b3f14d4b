"""Layouts of the weights that make decoding faster on a CPU; an accelerator uses none of them.

``by_rows`` is the way in. For passes over few tokens it keeps a copy of the weights in which

* a tied output head is an array of its own, since a CPU takes twice the time for a product with
  the transposed embedding;
* maps of one input stand side by side in one matrix (``Joined``): fewer products, each of them
  large enough for several cores;
* matrices are cut into panels of columns (``InPanels``). A CPU multiplies a few rows by
  ``[in, out]`` in tiles some columns wide, and so walks down the matrix at a stride of a whole
  row. A panel as wide as a tile is read in order. The price is a copy of the rows for each panel,
  rows / width of the matrix's own size.

``TABLE`` says where panels pay and how wide they are; the benchmark's part "layouts" measures what
it should say on a machine. ``matmul`` takes a matrix in either form, and
``attend_prefix`` reads no more of a cache than a CPU has to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from spec_jax.models.attention import attend

JOINED = (("q", "k", "v"), ("gate", "up"))  # maps that read the same input
# ``attend_prefix`` reads one or two eighths of a cache, or all of it: the copy of a longer prefix
# takes more time than its products save. A cache of fewer slots is always read whole.
PREFIXES = (1, 2)
NUM_PARTS = 8
MIN_SLOTS = 512


class Panels(NamedTuple):
    """How matrices of a kind are laid out for passes over few tokens.

    Attributes:
      since: the first jax version that this holds for.
      dtype: of the weights.
      rows: the least and the most tokens of a pass.
      is_large: whether this is about matrices of more than ``LARGE`` elements, or about others.
      widths: columns of a panel; the first that divides the matrix counts, and 0 stands for one
        panel of all columns. A matrix that none divides stays whole. Without any, maps of one
        input stay apart, too.
      min_rows: rows that the product of one token is padded to.
    """

    since: tuple[int, int]
    dtype: str
    rows: tuple[int, int]
    is_large: bool
    widths: tuple[int, ...]
    min_rows: int = 1


LARGE = 1 << 19  # elements; a larger matrix is read from memory, others from a cache
# The first line that fits counts; without one, matrices stay whole and apart. What each line was
# measured to gain is in docs/measurements.md, "Layouts on a CPU". On another machine,
# ``python -m experiments.benchmark --parts=layouts`` prints the lines that it would put here.
TABLE = (
    Panels((0, 12), "float32", (1, 1), False, (32, 16)),
    Panels((0, 12), "float32", (2, 32), False, (64, 32, 16)),
    Panels((0, 12), "float32", (1, 32), True, (64, 32, 16), min_rows=2),
    Panels((0, 12), "bfloat16", (1, 1), False, (32, 16)),
    Panels((0, 12), "bfloat16", (2, 64), False, (0,)),
    Panels((0, 12), "bfloat16", (1, 32), True, (64, 32, 16), min_rows=2),
    Panels((0, 0), "float32", (1, 16), False, (32, 16)),
)
MAX_ROWS = max(line.rows[1] for line in TABLE)


def find(
    num_rows: int, size: int, dtype: DTypeLike, table: Sequence[Panels] = TABLE
) -> Panels | None:
    """Returns the line of a table for a product of ``num_rows`` tokens, if there is one.

    Args:
      num_rows: tokens of the pass, all rows of the batch together.
      size: elements of the matrix.
      dtype: of the matrix.
      table: lines, of which the first that fits counts.
    """
    kind = (jnp.dtype(dtype).name, size > LARGE)
    fits = lambda line: line.rows[0] <= num_rows <= line.rows[1]
    of_version = lambda line: jax.__version_info__[:2] >= line.since
    lines = (line for line in table if (line.dtype, line.is_large) == kind)
    return next((line for line in lines if fits(line) and of_version(line)), None)


@flax.struct.dataclass
class InPanels:
    """A matrix dtype[in,out] in panels of its columns.

    Attributes:
      w: the panels.
      min_rows: rows that the product of one token is padded to.
    """

    w: jax.Array  # dtype[P,in,out/P]
    min_rows: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the matrix."""
        return self.w.dtype


@flax.struct.dataclass
class Joined:
    """Linear maps of one input, side by side in one matrix."""

    w: jax.Array | InPanels  # dtype[in,sum of widths]
    names: tuple[str, ...] = flax.struct.field(pytree_node=False)
    widths: tuple[int, ...] = flax.struct.field(pytree_node=False)

    def columns(self, name: str) -> slice:
        """Returns the columns of the map of this name."""
        i = self.names.index(name)
        begin = sum(self.widths[:i])
        return slice(begin, begin + self.widths[i])


def by_rows(
    params: dict[str, Any], *, is_tied: bool = False, has_panels: bool = False
) -> Callable[[int | None], dict[str, Any]]:
    """Returns a function from the size of a pass to the parameters in the layout that suits it.

    If the parameters do not lie on one CPU device, that function returns ``params`` itself.
    Otherwise each layout is made when it is first asked for, and kept.

    Args:
      params: nested dict of weights, of a model or of a head.
      is_tied: the output head is the embedding, ``params["embed"]``.
      has_panels: every matrix but the embedding is applied by ``layers.linear`` or ``matmul``, so
        that it may be stored in panels.

    Returns:
      ``(num_rows) -> params`` for passes over ``num_rows`` tokens, all rows of the batch
      together. None stands for any number, as in prefill.
    """
    if not is_on_one_cpu(params):
        return lambda num_rows: params
    made: dict[Any, dict[str, Any]] = {}

    @functools.cache
    def lay_out(num_rows: int | None) -> dict[str, Any]:
        if num_rows is None or num_rows > MAX_ROWS:
            return made.setdefault(None, whole())
        like = jax.eval_shape(functools.partial(in_panels, num_rows=num_rows), whole())
        shapes = (jax.tree.structure(like), *(x.shape for x in jax.tree.leaves(like)))
        if shapes not in made:
            made[shapes] = in_panels(whole(), num_rows)
        return made[shapes]

    whole = functools.cache(lambda: with_own_head(params) if is_tied else params)
    return lay_out if has_panels else lambda num_rows: whole()


def is_on_one_cpu(params: dict[str, Any]) -> bool:
    """Returns whether all of the arrays lie on one device, and that is a CPU."""
    arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
    devices = set().union(*(x.devices() for x in arrays))
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


def with_own_head(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the same weights with a tied head as a separate array, ``[in, out]``.

    Not for training, which would untie it.
    """
    return params if "head" in params else {**params, "head": jnp.array(params["embed"].T)}


def in_panels(
    params: dict[str, Any], num_rows: int, table: Sequence[Panels] = TABLE
) -> dict[str, Any]:
    """Returns the same weights with maps of one input joined, and matrices in panels.

    Embeddings and stacked layers stay as they are, and so does what no line of the table is about
    and what is in panels already.

    Args:
      params: nested dict of weights.
      num_rows: tokens of the passes that they are for.
      table: what is laid out, and how.
    """
    layers = params.get("layers", {})
    is_stacked = not all(isinstance(layer, dict) for layer in layers.values())

    def panels(name, w):
        if name == "embed" or (name == "layers" and is_stacked):
            return w
        if isinstance(w, dict):
            return in_panels(w, num_rows, table)
        if isinstance(w, Joined):
            return w.replace(w=to_panels(w.w, num_rows, table))
        return to_panels(w, num_rows, table) if getattr(w, "ndim", None) == 2 else w

    return {name: panels(name, w) for name, w in join(params, num_rows, table).items()}


def join(params: dict[str, Any], num_rows: int, table: Sequence[Panels] = TABLE) -> dict[str, Any]:
    """Returns a layer's weights with the maps of ``JOINED`` side by side, if panels pay."""
    for names in JOINED:
        ws = [params.get(name) for name in names]
        if not all(getattr(w, "ndim", None) == 2 for w in ws):
            continue
        size = sum(w.size for w in ws)
        is_alike = len({(w.shape[0], w.dtype) for w in ws}) == 1
        line = find(num_rows, size, ws[0].dtype, table) if is_alike else None
        if line is not None and line.widths:
            joined = Joined(jnp.concatenate(ws, axis=1), names, tuple(w.shape[1] for w in ws))
            params = {name: w for name, w in params.items() if name not in names}
            params["+".join(names)] = joined
    return params


def weight(params: dict[str, Any], name: str) -> jax.Array:
    """Returns the weight of this name, whichever layout it is in."""
    if name in params:
        return from_panels(params[name])
    joined = find_joined(params, name)
    return from_panels(joined.w)[:, joined.columns(name)]


def find_joined(params: dict[str, Any], name: str) -> Joined:
    """Returns the joined maps that contain the one of this name."""
    return next(w for w in params.values() if isinstance(w, Joined) and name in w.names)


def to_panels(
    w: jax.Array | InPanels, num_rows: int, table: Sequence[Panels] = TABLE
) -> jax.Array | InPanels:
    """Returns a matrix dtype[in,out] in panels, or as it is if they gain nothing."""
    if isinstance(w, InPanels):
        return w
    line, size = find(num_rows, w.size, w.dtype, table), w.shape[1]
    widths = (n or size for n in (() if line is None else line.widths))
    width = next((n for n in widths if size % n == 0), None)
    if width is None:
        return w
    panels = jnp.array(w.reshape(w.shape[0], -1, width).transpose(1, 0, 2))
    return InPanels(panels, line.min_rows)


def from_panels(w: jax.Array | InPanels) -> jax.Array:
    """Returns the matrix dtype[in,out] of what ``to_panels`` returned."""
    if not isinstance(w, InPanels):
        return w
    return w.w.transpose(1, 0, 2).reshape(w.w.shape[1], -1)


def matmul(x: jax.Array, w: jax.Array | InPanels) -> jax.Array:
    """Returns ``x @ w``, whichever layout ``w`` is in.

    Args:
      x: dtype[...,in].
      w: dtype[in,out], or its panels; with more than ``MAX_ROWS`` rows they are put together
        first, so pass the whole matrix there.

    Returns:
      dtype[...,out].
    """
    num_rows = math.prod(x.shape[:-1])
    if not isinstance(w, InPanels) or num_rows > MAX_ROWS:
        return x @ from_panels(w)
    rows = x.reshape(num_rows, -1)
    if num_rows == 1:
        rows = jnp.broadcast_to(rows, (w.min_rows, x.shape[-1]))
    copies = jnp.broadcast_to(rows, (w.w.shape[0], *rows.shape))
    # A CPU multiplies bfloat16 faster if float32 is asked for, which it sums in anyway.
    y = jnp.einsum("pti,pio->pto", copies, w.w, preferred_element_type=jnp.float32).astype(x.dtype)
    y = y.transpose(1, 0, 2).reshape(len(rows), -1)[:num_rows]
    return y.reshape(*x.shape[:-1], -1)


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
        k_n, v_n, mask = k[..., :n, :], v[..., :n, :], mask_BTS[..., :n]
        return attend(q_BTNH, k_n, v_n, mask, scale=scale)

    if S < MIN_SLOTS or k.ndim == 4:
        return over(S)
    step = -(-S // NUM_PARTS)
    prefixes = [functools.partial(over, n) for n in (*(i * step for i in PREFIXES), S)]
    last = jnp.where(mask_BTS.any(axis=(0, 1)), jnp.arange(S), 0).max()
    choose = lambda: jax.lax.switch(last // step, prefixes)  # beyond the last: the last
    return jax.lax.platform_dependent(cpu=choose, default=prefixes[-1])
