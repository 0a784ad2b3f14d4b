"""Drafting on some devices while the target verifies on others.

A row may have ``ahead`` drafts p_1..p_m, m in 0..K-1: drafted, and not yet verified. In one tick,
at the same time,

  - the target scores [pending | p_1..p_m], m + 1 tokens;
  - the draft assumes that p_1..p_m are accepted and drafts a block d_1..d_K after them.

Then the rule decides on the chain [p_1..p_m, d_1], for which the m + 1 scores suffice. If the whole
chain is accepted, d_2..d_K are ahead, and no further token is emitted, since it has no score yet.
Otherwise the row emits what was accepted and the target's own token, drops the rest of the chain
and of the block, and has nothing ahead. With m = 0 a tick is PEARL's pre-verify, else its
post-verify.

Invariants.
  1. A tick emits 1..m+1 tokens for every active row. The target's cache holds the tokens that were
     fed, one is pending, and padding after the m-th draft counts for nothing.
  2. emitted = first + accepted + corrected + bonus, as in ``decoding``; a bonus token occurs only
     where a drafter offers no block. The drafts of a tick are those of its chain; a dropped block
     is in no count.
  3. The distribution is the target's. Every draft of a chain was drawn after its true prefix, is
     considered once, and by a rule that looks at nothing past the first rejection. Acceptance and
     replacement noise is keyed by the tick's start, and no two ticks start at the same place. The
     draft's noise is keyed by where its block begins. A later block begins there again only if the
     earlier one was dropped before its first draft was considered, so only the later block
     depends on that noise. A rule that is joint over the chain would need the scores of d_2..d_K:
     it is refused.
  4. With the match rule the tokens are plain decoding's, since its noise is keyed by position.

Only tokens and the distributions that a rule reads cross between the devices: the block one way,
the outcome of the chain the other way. The target's side decides and tells the draft's.

Source: PEARL, arXiv 2408.11850.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec_jax import decoding
from spec_jax.contracts import Proposal
from spec_jax.decoding.state import Chunk, DecodeState, System
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.errors import ConfigError
from spec_jax.meshes import to_mesh, use_mesh
from spec_jax.models.checks import require
from spec_jax.overlap import pearl
from spec_jax.overlap.pearl import DraftSide, Verified
from spec_jax.sharding import place_state

Side = jax.Device | Mesh

_KEPT = 3  # of a side's parameters


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where draft and target run: one device each, or a mesh of several.

    On a mesh, from ``make_mesh``, rows, weights and caches are split as those of a decoder on one
    mesh are:

        half = jax.devices()[:4], jax.devices()[4:]
        draft, target = (make_mesh("tensor:4", devices) for devices in half)
        decoder = SpeculativeDecoder(..., devices=Devices(draft=draft, target=target))

    Parameters already placed on these devices keep their sharding.

    Raises:
      ConfigError: a side is neither, or a mesh has other axes than ``make_mesh`` makes.
    """

    draft: Side
    target: Side

    def __post_init__(self):
        for name in ("draft", "target"):
            side = getattr(self, name)
            if isinstance(side, Mesh):
                to_mesh(side)
            elif not isinstance(side, jax.Device):
                raise ConfigError(
                    f"the {name}'s devices are {side!r}; expected a device, or a Mesh of several"
                )

    @property
    def shared(self) -> set[jax.Device]:
        """Devices that belong to both sides."""
        return _devices(self.draft) & _devices(self.target)


def _devices(side: Side) -> set[jax.Device]:
    return set(side.devices.flat) if isinstance(side, Mesh) else {side}


def mesh_of_side(side: Side) -> Mesh | None:
    """Returns the mesh that a side's programs run on; None of a device."""
    return side if isinstance(side, Mesh) else None


class SplitState(NamedTuple):
    """Stands in ``DecodeState.draft`` while draft and target are on devices of their own."""

    ahead: Proposal  # on the target's devices, with the distributions that the rule reads
    side: DraftSide  # on the draft's
    outcome: Verified  # on the draft's, of the last tick
    tick: int


def make_loop(devices: Devices, stacklevel: int = 2) -> Overlap | Any:
    """Returns a loop for these devices: an object with ``prefill`` and ``generate``.

    Where the sides share a device it is ``decoding`` itself, and a warning says so.

    Args:
      devices: of draft and target.
      stacklevel: of the warning.

    Raises:
      ConfigError: ``devices`` is not a ``Devices``.
    """
    if not isinstance(devices, Devices):
        raise ConfigError(f"devices are {devices!r}; expected overlap.Devices(draft, target)")
    if devices.shared:
        names = _names(devices.shared)
        warnings.warn(
            f"draft and target share {names} and would only take turns there, so they are not "
            "overlapped: the usual loop decodes, where the parameters are. jax sees "
            f"{len(jax.devices())} device(s); give each side its own",
            stacklevel=stacklevel,
        )
        return decoding
    return Overlap(devices)


def check(system: System) -> None:
    """Checks that drafting can run ahead of verification.

    Raises:
      ConfigError: it cannot.
    """
    drafter = system.drafter
    can_rewind = system.target.can_rewind
    require(can_rewind, "the target cannot forget rejected drafts, so nothing is drafted for it")
    cannot = f"drafter {drafter.name!r} cannot be overlapped: it"
    is_blind = not (drafter.shape.taps or drafter.shape.reads_target)
    require(is_blind, f"{cannot} reads the target's states, which are not there yet")
    require(drafter.shape.tree is None, f"{cannot} drafts trees, and what runs ahead is a chain")
    has_rewind = drafter.sync.rewind is not None
    require(has_rewind, f"{cannot} has no `rewind` to forget a block that is dropped")
    require(system.num_draft > 0, f"{cannot} drafts nothing")
    require(
        not system.needs_update_counts,
        f"drafter {drafter.name!r} drafts from earlier outputs, which overlapped drafting supports "
        "only under 'greedy' and 'match'; take one of these, or suffix_history_tokens=0",
    )
    require(
        not system.rule.is_joint,
        f"rule {system.rule.name!r} looks at drafts past the first rejection, which have no "
        "scores yet when drafting is overlapped: take 'greedy', 'residual' or 'match'",
    )


class _Side:
    """What runs on one side's devices."""

    def __init__(self, where: Side):
        self.where = where
        self.mesh = mesh_of_side(where)
        self._placed: tuple = ()  # of parameters, the latest first

    def run(self, function, *args, **kwargs):
        """Runs a program, and waits for its results."""
        with use_mesh(self.mesh):
            return jax.block_until_ready(function(*args, **kwargs))

    def send(self, state):
        """Copies a state to these devices."""
        return place_state(state, self.mesh) if self.mesh else jax.device_put(state, self.where)

    def place(self, params):
        """Returns parameters on these devices; copies are made once, and the last few are kept.

        Prefill and rounds use different layouts, and the parameters of a drafter that copies from
        past outputs change.
        """
        for known, copy in self._placed:
            if known is params:
                return copy

        def put(x):
            is_there = isinstance(x, jax.Array) and x.sharding.device_set == _devices(self.where)
            if is_there and x.sharding.num_devices > 1:
                return x  # sharded already, perhaps in its own way
            where = NamedSharding(self.mesh, PartitionSpec()) if self.mesh else self.where
            return jax.device_put(x, where)

        copy = jax.tree.map(put, params)
        self._placed = ((params, copy), *self._placed[: _KEPT - 1])
        return copy


class Overlap:
    """``decoding.prefill`` and ``decoding.generate`` with draft and target on devices of their own.

    Args:
      devices: of draft and target, none of them shared.
    """

    def __init__(self, devices: Devices):
        if devices.shared:
            raise ConfigError(f"draft and target share {_names(devices.shared)}; see make_loop")
        self._draft = _Side(devices.draft)
        self._target = _Side(devices.target)

    def prefill(self, params, *request, system: System, slots: int, samples: int = 1):
        """As ``decoding.prefill``, with its arguments; ``draft`` of the state is a ``SplitState``.

        Raises:
          ConfigError: see ``check``; or the draft's cache cannot go back.
          ShapeError: as ``decoding.prefill``.
        """
        check(system)
        both = {"target": self._target.place(params["target"]), "draft": None}
        sizes = {"slots": slots, "samples": samples}
        state = self._target.run(decoding.prefill, both, *request, system=_alone(system), **sizes)
        # All that the draft needs of the target's side before the first tick.
        seeds = (state.sampler.seed, state.sampler.is_greedy)
        known = (request[0], state.tokens, state.length, state.draft_sampler, *seeds)
        params = self._draft.place(params["draft"])
        known = self._draft.send(known)
        side, outcome = self._draft.run(
            pearl.prefill_draft, params, *known, system=system, slots=slots
        )
        with use_mesh(self._draft.mesh):
            draft_ahead = functools.partial(pearl.draft_ahead, system=system)
            block, _ = jax.eval_shape(draft_ahead, params, side, outcome)
        ahead = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), block)
        return state.replace(draft=SplitState(self._target.send(ahead), side, outcome, 0))

    def generate(
        self,
        params,
        state: DecodeState,
        stop: jax.Array,
        max_rounds: jax.Array | int,
        min_active: jax.Array | int = 1,
        *,
        system: System,
    ) -> tuple[DecodeState, Chunk]:
        """As ``decoding.generate``, a round being a tick. Donates the state."""
        (ahead, side, outcome, tick), state = state.draft, state.replace(draft=())
        draft_params = self._draft.place(params["draft"])
        target_params = self._target.place(params["target"])
        alone = _alone(system)
        begin = tick
        row_ticks = 0
        state = state.replace(finish=jnp.where(state.is_active, stop, state.finish))
        num_active = int(state.is_active.sum())
        # On a CPU a small program runs in the thread that calls it: the draft gets its own.
        with ThreadPoolExecutor(1, "draft") as worker:
            while tick - begin < int(max_rounds) and num_active >= max(1, int(min_active)):
                context = contextvars.copy_context()
                drafted = (pearl.draft_ahead, draft_params, side, outcome)
                drafting = worker.submit(context.run, self._draft.run, *drafted, system=system)
                state, logits, features = self._target.run(
                    pearl.score_ahead, target_params, state, ahead.tokens, system=alone
                )
                block, side = drafting.result()
                block = self._target.send(block)
                state, ahead, outcome, active = self._target.run(
                    pearl.accept_chain, state, ahead, block, logits, features, system=alone
                )
                outcome = self._draft.send(outcome)
                tick, row_ticks, num_active = tick + 1, row_ticks + num_active, int(active)
        with use_mesh(self._target.mesh):
            chunk = decoding.read_chunk(state, jnp.int32(tick - begin), jnp.int32(row_ticks))
        return state.replace(draft=SplitState(ahead, side, outcome, tick)), chunk


def _alone(system: System) -> System:
    """The system of the target's side alone, so that all drafters share its programs."""
    return system._replace(drafter=NO_DRAFT)


def _names(devices: set[jax.Device]) -> str:
    return ", ".join(str(d) for d in sorted(devices, key=lambda d: d.id))
