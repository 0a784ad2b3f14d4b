"""Layouts of weights that make decoding faster on a CPU; an accelerator uses none of them.

``CpuLayout.prepare`` is the way in. For passes over few tokens it keeps a copy of the weights in
which

* a tied output head is an array of its own, since a CPU takes twice the time for a product with
  the transposed embedding;
* matrices are cut into panels of columns (``InPanels``). A CPU multiplies a few rows by
  ``[in, out]`` in tiles some columns wide, and so walks down the matrix at a stride of a whole
  row. A panel as wide as a tile is read in order. The price is a copy of the rows for each panel,
  rows / width of the matrix's own size;
* maps of one input stand side by side in one matrix: fewer products, each of them large enough for
  several cores.

``TABLE`` says where panels pay and how wide they are; docs/measurements.md has the times that
decided. ``matmul`` takes a matrix in either form.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

JOINED = (("q", "k", "v"), ("gate", "up"))  # maps that read the same input
EMBEDDINGS = ("embed",)  # of a model: matrices of which tokens take rows


class Panels(NamedTuple):
    """How matrices of a kind are laid out for passes over few tokens.

    Attributes:
      dtype: of the weights.
      rows: the least and the most tokens of a pass.
      is_large: whether this is about matrices of more than ``LARGE`` elements, or about others.
      widths: columns of a panel; the first that divides the matrix counts, and 0 stands for one
        panel of all columns. A matrix that none divides stays whole.
      min_rows: rows that the product of one token is padded to.
    """

    dtype: str
    rows: tuple[int, int]
    is_large: bool
    widths: tuple[int, ...]
    min_rows: int = 1


LARGE = 1 << 19  # elements; a larger matrix is read from memory, others from a cache
# Without a line that fits, matrices stay whole and apart, as with older versions of jax.
TABLE = (
    Panels("float32", (1, 1), False, (32, 16)),
    Panels("float32", (2, 8), False, (64, 32, 16)),
    Panels("float32", (1, 32), True, (64, 32, 16), min_rows=2),
    Panels("bfloat16", (1, 1), False, (32, 16)),
    Panels("bfloat16", (2, 8), False, (0,)),
    Panels("bfloat16", (1, 8), True, (64, 32, 16), min_rows=2),
)
TABLE = TABLE if jax.__version_info__ >= (0, 12) else ()
MAX_ROWS = max((line.rows[1] for line in TABLE), default=0)


@flax.struct.dataclass
class InPanels:
    """A matrix dtype[in,out] in panels of its columns, or several maps of one input side by side.

    Attributes:
      w: the panels.
      min_rows: rows that the product of one token is padded to.
      columns: those of each map, by its name; empty for one map.
    """

    w: jax.Array  # dtype[P,in,out/P]
    min_rows: int = flax.struct.field(pytree_node=False, default=1)
    columns: tuple[tuple[str, int, int], ...] = flax.struct.field(pytree_node=False, default=())

    @property
    def dtype(self) -> jnp.dtype:
        """Of the matrix."""
        return self.w.dtype


class CpuLayout:
    """The weights of a model or a head, as passes on a CPU read them fastest.

    Weights that do not lie on one CPU device stay as they are. Each layout is made when it is first
    asked for, and kept; layouts share the matrices that they cut alike.

    Args:
      params: nested dict of weights.
      is_tied: the output head is the embedding, ``params["embed"]``.
      has_panels: every matrix but embeddings is applied by ``layers.linear`` or ``matmul``, so
        that it may be stored in panels.
      embeddings: their names.
    """

    def __init__(
        self,
        params: Any,
        *,
        is_tied: bool = False,
        has_panels: bool = False,
        embeddings: Collection[str] = EMBEDDINGS,
    ):
        self._params = params
        self._is_tied = is_tied
        self._has_panels = has_panels
        self._embeddings = embeddings
        self._layouts: dict[tuple[Panels, ...], Any] = {}  # by the lines of ``TABLE`` that fit
        self._panels: dict[Any, InPanels] = {}
        self._lock = threading.Lock()  # of programs that compile at once one lays weights out

    def prepare(self, rows: int | None = None) -> Any:
        """Returns the weights in the layout that suits a pass.

        Args:
          rows: tokens of the pass, all rows of the batch together; None: any number, as in prefill.
        """
        fits = tuple(line for line in TABLE if rows in range(line.rows[0], line.rows[1] + 1))
        if not fits or not self._has_panels or not self._is_on_one_cpu:
            return self._whole
        with self._lock:
            if fits not in self._layouts:
                laid_out = in_panels(self._whole, rows, self._embeddings, self._panels)
                self._layouts[fits] = laid_out
            return self._layouts[fits]

    @functools.cached_property
    def _is_on_one_cpu(self) -> bool:
        """Whether all of the arrays lie on one device, and that is a CPU."""
        arrays = (x for x in jax.tree.leaves(self._params) if isinstance(x, jax.Array))
        devices = set().union(*(x.devices() for x in arrays))
        return len(devices) == 1 and all(device.platform == "cpu" for device in devices)

    @functools.cached_property
    def _whole(self) -> Any:
        """The weights with a tied head as an array of its own, ``[in, out]``."""
        params = self._params
        if not self._is_tied or "head" in params or not self._is_on_one_cpu:
            return params
        return {**params, "head": jnp.array(params["embed"].T)}


def in_panels(
    params: dict[str, Any],
    num_rows: int,
    embeddings: Collection[str] = EMBEDDINGS,
    known: dict[Any, InPanels] | None = None,
) -> dict[str, Any]:
    """Returns the same weights with maps of one input joined, and matrices in panels.

    Embeddings and stacked layers (see ``runs.name_of``) stay as they are, and so does what no line
    of ``TABLE`` is about and what is in panels already.

    Args:
      params: nested dict of weights.
      num_rows: tokens of the passes that they are for.
      embeddings: the names of those.
      known: the panels of these weights that were cut before, which are not cut again.
    """
    joined = {}
    apart = {*params}
    for names in JOINED:
        ws = [params.get(name) for name in names]
        is_alike = all(getattr(w, "ndim", None) == 2 for w in ws)
        is_alike = is_alike and len({(w.shape[0], w.dtype) for w in ws}) == 1
        panels = to_panels(ws, num_rows, known) if is_alike else None
        if panels is not None:
            ends = np.cumsum([w.shape[1] for w in ws]).tolist()
            columns = tuple(zip(names, [0, *ends], ends))
            joined["+".join(names)] = panels.replace(columns=columns)
            apart -= {*names}
    laid_out = {}
    for name, w in params.items():
        if name not in apart:
            continue
        if isinstance(w, dict) and ":" not in name:
            w = in_panels(w, num_rows, embeddings, known)
        elif name not in embeddings and getattr(w, "ndim", None) == 2:
            w = to_panels([w], num_rows, known) or w
        laid_out[name] = w
    return laid_out | joined


def find(params: dict[str, Any], name: str) -> tuple[Any, slice | None]:
    """Returns what holds the map of this name, and its columns there if it is one of several."""
    if name in params:
        return params[name], None
    for w in params.values():
        for other, begin, end in w.columns if isinstance(w, InPanels) else ():
            if other == name:
                return w, slice(begin, end)
    raise KeyError(name)


def to_panels(
    matrices: Sequence[jax.Array], num_rows: int, known: dict[Any, InPanels] | None = None
) -> InPanels | None:
    """Returns matrices dtype[in,out] side by side, in panels; None if these gain nothing.

    Args:
      matrices: all with as many rows and of one dtype.
      num_rows: tokens of the passes that they are for.
      known: see ``in_panels``.
    """
    known = {} if known is None else known
    kind = (matrices[0].dtype.name, sum(w.size for w in matrices) > LARGE)
    total = sum(w.shape[1] for w in matrices)
    for line in TABLE:
        if (line.dtype, line.is_large) == kind and line.rows[0] <= num_rows <= line.rows[1]:
            width = next((n or total for n in line.widths if total % (n or total) == 0), None)
            if width is None:
                continue
            key = (*map(id, matrices), width, line.min_rows)
            if key not in known:
                whole = jnp.concatenate(matrices, axis=1) if len(matrices) > 1 else matrices[0]
                panels = whole.reshape(whole.shape[0], -1, width).transpose(1, 0, 2)
                known[key] = InPanels(jnp.array(panels), line.min_rows)
            return known[key]
    return None


def from_panels(w: jax.Array | InPanels) -> jax.Array:
    """Returns the matrix dtype[in,out], whichever layout it is in."""
    if not isinstance(w, InPanels):
        return w
    return w.w.transpose(1, 0, 2).reshape(w.w.shape[1], -1)


def _of_two_rows(x, w):
    """The product of one row, which a GPU would compute, and write, element by element."""
    rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
    return (rows @ w)[:1].reshape(*x.shape[:-1], -1)


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
        w = from_panels(w)
        if num_rows > 1:
            return x @ w
        return jax.lax.platform_dependent(x, w, cuda=_of_two_rows, default=jnp.matmul)
    rows = x.reshape(num_rows, -1)
    if num_rows == 1:
        rows = jnp.broadcast_to(rows, (w.min_rows, x.shape[-1]))
    copies = jnp.broadcast_to(rows, (w.w.shape[0], *rows.shape))
    # A CPU multiplies bfloat16 faster if float32 is asked for, which it sums in anyway.
    y = jnp.einsum("pti,pio->pto", copies, w.w, preferred_element_type=jnp.float32).astype(x.dtype)
    y = y.transpose(1, 0, 2).reshape(len(rows), -1)[:num_rows]
    return y.reshape(*x.shape[:-1], -1)
