"""Replicates a draft on every device of a mesh, for drafts too small to be worth splitting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
from jax.sharding import PartitionSpec as P

from spec_jax.contracts import Drafter, Sync
from spec_jax.sharding import REPLICATED, state_axes, use_axis_rules


@flax.struct.dataclass
class WholeState:
    """A drafter's state that is split by rows only."""

    state: Any

    def axes(self) -> WholeState:
        """The logical axes of the arrays, see ``sharding``."""

        def rows(axes):
            return P(*(name if name == "batch" else None for name in axes))

        axes = state_axes(self.state)
        return WholeState(jax.tree.map(rows, axes, is_leaf=lambda x: isinstance(x, P)))


@functools.cache
def replicated(drafter: Drafter) -> Drafter:
    """Returns the drafter, which now splits its rows over a mesh and nothing else.

    Its weights must be replicated too; without a mesh nothing changes.

    Args:
      drafter: of any kind, as it is decoded with: what wraps it comes first.
    """

    def whole(function: Callable[..., Any] | None, has_proposal: bool = False):
        if function is None:
            return None

        def run(*args):
            args = (x.state if isinstance(x, WholeState) else x for x in args)
            with use_axis_rules(REPLICATED):
                result = function(*args)
            if has_proposal:
                return result[0], WholeState(result[1])
            return WholeState(result)

        return run

    sync = drafter.sync
    return drafter._replace(
        init=whole(drafter.init),
        prefill=whole(drafter.prefill),
        propose=whole(drafter.propose, has_proposal=True),
        commit=whole(drafter.commit),
        insert_row=whole(drafter.insert_row),
        sync=Sync(whole(sync.catch_up), whole(sync.defer_commit), sync.max_lag, whole(sync.rewind)),
    )
