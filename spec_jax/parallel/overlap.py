"""Drafting on some devices while the target verifies on others.

A row has ``ahead`` drafts p_1..p_m, m in 0..K-1, that are drafted and not judged. In one tick, at
the same time,

  - the target scores [pending | p_1..p_m], m + 1 rows;
  - the draft takes p_1..p_m for accepted and drafts a block d_1..d_K behind them.

Then the rule judges the chain [p_1..p_m, d_1], whose last draft needs no more rows than there are.
If all of it is accepted, d_2..d_K are ahead, and no token follows: its row is not scored yet.
Otherwise the row emits what was accepted and the target's own token, drops the rest of the chain
and of the block, and is ahead by nothing. With m = 0 a tick is PEARL's pre-verify, else its
post-verify.

Invariants.
  1. A tick emits 1..m+1 tokens for every active row: the target's cache holds the tokens that
     were fed, one is pending, and rows of the padding behind the m-th draft count for nothing.
  2. emitted = first + accepted + corrected + bonus, as in ``decode``; a bonus token arises only
     where a drafter offers no block. The drafts of a tick are those of its chain; a dropped block
     is in no count.
  3. The law is the target's. Every draft that is judged was drawn behind its true prefix, is
     judged once, and by a rule that looks at nothing past the first rejection. Coins and
     replacement are named by the tick's start, and no two ticks begin at one place. The draft's
     noise is named by where its block begins: a later block begins there again only if the earlier
     one was dropped before its first draft was judged, so nothing depends on the noise but the
     later block. A rule that is joint over the chain would need the rows of d_2..d_K: refused.
  4. With the match rule the tokens are plain decoding's, since its noise is named by position.

Only tokens and the laws that a rule reads cross between the devices: the block one way, what
became of the chain the other way. One side decides and tells the other.

Source: PEARL, arXiv 2408.11850.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax import decoding
from spec_jax.contracts import Proposal
from spec_jax.decoding.state import Chunk, DecodeState, System
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.errors import ConfigError
from spec_jax.sampling import Counts, Sampler

Side = jax.Device | jax.sharding.Sharding

_KEPT = 3  # of a side's parameters


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where draft and target run: a device each, or a sharding over several.

    Parameters that lie on a side's devices already, sharded there in a way of their own, stay so.

    Raises:
      ConfigError: a side is neither a device nor a sharding.
    """

    draft: Side
    target: Side

    def __post_init__(self):
        for name in ("draft", "target"):
            side = getattr(self, name)
            if not isinstance(side, Side):
                raise ConfigError(
                    f"the {name}'s devices are {side!r}; expected a device, or a Sharding over some"
                )

    @property
    def shared(self) -> set[jax.Device]:
        """Devices of both sides."""
        return _devices(self.draft) & _devices(self.target)


def _devices(side: Side) -> set[jax.Device]:
    return side.device_set if isinstance(side, jax.sharding.Sharding) else {side}


class Span(NamedTuple):
    """What ran when, and where.

    Attributes:
      what: "prefill", "draft", "verify", or "accept", which is also what crosses to the target.
      tick: counted from 0 since prefill, itself -1.
      devices: their names.
      begin_s, end_s: of ``time.perf_counter``, results being ready at the end.
    """

    what: str
    tick: int
    devices: str
    begin_s: float
    end_s: float


@flax.struct.dataclass
class Ruling:
    """What became of a chain; all that the draft is told."""

    tokens: jax.Array  # i32[B,K+1], emitted, of which the first n_emit count
    n_emit: jax.Array  # i32[B]
    is_whole: jax.Array  # bool[B], every draft of the chain was accepted and kept, d_1 the last


@flax.struct.dataclass
class DraftSide:
    """What the draft knows: what is committed, and its own tokens behind it."""

    tokens: jax.Array  # i32[B,M+K], prompt and output
    length: jax.Array  # i32[B], tokens fed to the target
    counts: Counts
    sampler: Sampler
    request: jax.Array  # u32[B], the target's seed of each row
    ahead: Proposal  # tokens alone
    block: Proposal  # tokens alone, drafted last
    draft: Any  # the drafter's state, of ``length + ahead.n_draft`` tokens


class Apart(NamedTuple):
    """In the place of a drafter's state: what a ``DecodeState`` needs while the two are apart."""

    ahead: Proposal  # on the target's devices, with the laws that the rule reads
    side: DraftSide  # on the draft's
    ruling: Ruling  # on the draft's, of the last tick
    tick: int


def make_loop(
    devices: Devices, timeline: list[Span] | None = None, stacklevel: int = 2
) -> Overlap | Any:
    """A loop for these devices: something with ``prefill`` and ``generate``.

    Where the sides share a device it is ``decode`` itself, and a warning says so.

    Args:
      devices: of draft and target.
      timeline: gets what runs when.
      stacklevel: of the warning.

    Raises:
      ConfigError: no ``Devices``.
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
    return Overlap(devices, timeline)


def check(system: System) -> None:
    """Checks that drafting can run ahead of what is verified.

    Raises:
      ConfigError: it cannot.
    """
    drafter, rule = system.drafter, system.rule
    if drafter.taps:
        reason = "reads the target's states, which are not there when it runs ahead"
    elif drafter.tree is not None:
        reason = "drafts trees, and what runs ahead is a chain"
    elif drafter.rewind is None:
        reason = "has no `rewind` to forget a block that is dropped"
    elif system.num_draft == 0:
        reason = "drafts nothing"
    else:
        reason = None
    if not system.target.can_rewind:
        raise ConfigError("the target cannot forget rejected drafts, so nothing is drafted for it")
    if reason is not None:
        raise ConfigError(f"drafter {drafter.name!r} cannot be overlapped: it {reason}")
    if rule.is_joint:
        raise ConfigError(
            f"rule {rule.name!r} looks at drafts past the first rejection, which are not scored "
            "yet when drafting is overlapped: take 'greedy', 'residual' or 'match'"
        )


class Overlap:
    """``decoding.prefill`` and ``decoding.generate`` with draft and target on devices of their own.

    Args:
      devices: of draft and target, none of them shared.
      timeline: gets what runs when.
    """

    def __init__(self, devices: Devices, timeline: list[Span] | None = None):
        if devices.shared:
            raise ConfigError(f"draft and target share {_names(devices.shared)}; see make_loop")
        self.devices, self.timeline = devices, timeline
        self._placed: dict[str, tuple] = {"target": (), "draft": ()}

    def prefill(
        self, params, tokens, lengths, limit, stop_tokens, sampler, draft_sampler, *,
        system: System, slots: int,
    ) -> DecodeState:  # fmt: skip
        """As ``decoding.prefill``; ``draft`` of the state is an ``Apart``.

        Raises:
          ConfigError: see ``check``; or the draft's cache cannot go back.
          ShapeError: as ``decoding.prefill``.
        """
        check(system)
        params = self._place(params)
        state = self._timed(
            "prefill", -1, self.devices.target, decoding.prefill, {**params, "draft": None}, tokens,
            lengths, limit, stop_tokens, sampler, draft_sampler,
            system=_alone(system), slots=slots,
        )
        # All that the draft is told of the target's side before the first tick.
        known = (tokens, state.tokens, state.length, state.counts, draft_sampler, sampler.seed)
        side, ruling = self._timed(
            "prefill", -1, self.devices.draft, _prefill_draft, params["draft"],
            *self._send("draft", known), system=system, slots=slots,
        )
        block = jax.eval_shape(
            functools.partial(draft_block, system=system), params["draft"], side, ruling
        )[0]
        ahead = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), block)
        return state.replace(draft=Apart(self._send("target", ahead), side, ruling, 0))

    def generate(
        self, params, state: DecodeState, stop: jax.Array, max_rounds: jax.Array | int,
        min_active: jax.Array | int = 1, *, system: System,
    ) -> tuple[DecodeState, Chunk]:  # fmt: skip
        """As ``decoding.generate``, a round being a tick. Donates the state."""
        params = self._place(params)
        (ahead, side, ruling, tick), state = state.draft, state.replace(draft=())
        begin, row_ticks = tick, 0
        state = state.replace(finish=jnp.where(state.is_active, stop, state.finish))
        num_active = int(state.is_active.sum())
        # A small program runs in the thread that calls it, on a CPU: the draft's gets its own.
        with ThreadPoolExecutor(1, "draft") as worker:
            while tick - begin < int(max_rounds) and num_active >= max(1, int(min_active)):
                drafting = worker.submit(
                    self._timed, "draft", tick, self.devices.draft, draft_block, params["draft"],
                    side, ruling, system=system,
                )
                state, logits = self._timed(
                    "verify", tick, self.devices.target, score_ahead, params["target"], state,
                    ahead.tokens, system=_alone(system),
                )
                block, side = drafting.result()
                state, ahead, ruling, active = self._timed(
                    "accept", tick, self.devices.target, self._accept, state, ahead, block,
                    logits, system=_alone(system),
                )
                ruling = self._send("draft", ruling)
                tick, row_ticks, num_active = tick + 1, row_ticks + num_active, int(active)
        chunk = decoding.read_chunk(state, jnp.int32(tick - begin), jnp.int32(row_ticks))
        return state.replace(draft=Apart(ahead, side, ruling, tick)), chunk

    def _accept(self, state, ahead, block, logits, *, system):
        return settle(state, ahead, self._send("target", block), logits, system=system)

    def _send(self, name: str, tree):
        return jax.device_put(tree, getattr(self.devices, name))

    def _place(self, params) -> dict:
        """The parameters, each on its side; copied there the first time, and then kept.

        Of either side the last few that were given are kept: a decoder gives prefill and rounds
        different layouts, and a drafter that copies from past outputs gets new ones.
        """

        def placed(name):
            given = params[name]
            for known, copy in self._placed[name]:
                if known is given:
                    return copy
            copy = _put(given, getattr(self.devices, name))
            self._placed[name] = ((given, copy), *self._placed[name][: _KEPT - 1])
            return copy

        return {name: placed(name) for name in ("target", "draft")}

    def _timed(self, what: str, tick: int, side: Side, function, *args, **kwargs):
        begin = time.perf_counter()
        result = jax.block_until_ready(function(*args, **kwargs))
        if self.timeline is not None:
            end = time.perf_counter()
            self.timeline.append(Span(what, tick, _names(_devices(side)), begin, end))
        return result


def _alone(system: System) -> System:
    """What the target's side is compiled for: every drafter shares its programs."""
    return system._replace(drafter=NO_DRAFT)


def _names(devices: set[jax.Device]) -> str:
    return ", ".join(str(d) for d in sorted(devices, key=lambda d: d.id))


def _put(tree, side: Side):
    there = _devices(side)
    is_there = lambda x: isinstance(x, jax.Array) and x.sharding.device_set == there
    is_sharded = lambda x: len(there) > 1 and is_there(x)
    return jax.tree.map(lambda x: x if is_sharded(x) else jax.device_put(x, side), tree)


@functools.partial(jax.jit, static_argnames=("system", "slots"))
def _prefill_draft(
    params, prompts, tokens, length, counts, sampler, request, *, system: System, slots: int
) -> tuple[DraftSide, Ruling]:
    """The draft's side before the first tick, and the ruling that nothing has happened yet."""
    (B, _), K, drafter = tokens.shape, system.num_draft, system.drafter
    first = jnp.take_along_axis(tokens, length[:, None], axis=1)[:, 0]
    draft = drafter.init(params, B, slots + K)  # K more: a block stands behind what is ahead
    draft = drafter.prefill(params, draft, prompts, length, first, None)
    none = lambda: Proposal(jnp.zeros((B, K), jnp.int32), jnp.zeros((B,), jnp.int32))
    side = DraftSide(
        jnp.pad(tokens, ((0, 0), (0, K))), length, counts, sampler, request, none(), none(), draft
    )
    ruling = Ruling(
        jnp.zeros((B, K + 1), jnp.int32), jnp.zeros((B,), jnp.int32), jnp.zeros((B,), bool)
    )
    return side, ruling


@functools.partial(jax.jit, static_argnames="system", donate_argnames="side")
def draft_block(
    params, side: DraftSide, ruling: Ruling, *, system: System
) -> tuple[Proposal, DraftSide]:
    """The draft's part of a tick: learns of the last one, then drafts behind what is ahead.

    Args:
      params: the draft's.
      side: as the last tick left it; donated.
      ruling: of the last tick.
      system: target, drafter, rule and K.

    Returns:
      The block, made safe to feed, and the side.
    """
    side = _follow(params, side, ruling, system.drafter)
    ahead = side.ahead
    view = decoding.append(side, {"tokens": ahead.tokens}, side.length + 1, ahead.n_draft)
    context = system.context(
        view.tokens, side.length + ahead.n_draft, side.sampler, view.counts, side.request
    )
    block, draft = decoding.propose(params, side.draft, context, system)
    return block, side.replace(draft=draft, block=Proposal(block.tokens, block.n_draft))


def _follow(params, side: DraftSide, ruling: Ruling, drafter) -> DraftSide:
    """The side after a ruling: its own block is ahead, or is dropped and forgotten."""
    ahead = left_ahead(side.block, ruling.is_whole)
    gained = ruling.n_emit + ahead.n_draft - side.ahead.n_draft
    # The tokens gained are the whole block; or the target's own, behind all that was ahead.
    own = jnp.take_along_axis(ruling.tokens, side.ahead.n_draft[:, None], axis=1)
    tokens = jnp.where(ruling.is_whole[:, None], side.block.tokens, own)
    draft = drafter.commit(params, side.draft, tokens, jnp.maximum(gained, 0), None, None)
    draft = drafter.rewind(draft, jnp.maximum(-gained, 0))
    side = decoding.append(side, {"tokens": ruling.tokens}, side.length + 1, ruling.n_emit)
    return side.replace(length=side.length + ruling.n_emit, ahead=ahead, draft=draft)


@functools.partial(jax.jit, static_argnames="system", donate_argnames="state")
def score_ahead(
    params, state: DecodeState, ahead: jax.Array, *, system: System
) -> tuple[DecodeState, jax.Array]:
    """The target's pass of a tick over [pending | ahead].

    Args:
      params: the target's.
      state: donated.
      ahead: i32[B,K], of which the last column never counts.
      system: target, drafter, rule and K.

    Returns:
      The state with the window in its cache, and f32[B,K,V].
    """
    logits, _, cache = decoding.target_pass(
        params, state.target, state.tokens, ahead[:, :-1], system
    )
    return state.replace(target=cache), logits


@functools.partial(jax.jit, static_argnames="system", donate_argnames=("state", "ahead"))
def settle(
    state: DecodeState, ahead: Proposal, block: Proposal, logits: jax.Array, *,
    system: System,
) -> tuple[DecodeState, Proposal, Ruling, jax.Array]:  # fmt: skip
    """The end of a tick: judges [ahead | the block's first draft] and commits.

    Args:
      state: with the window in its cache; donated.
      ahead: what the window holds; donated.
      block: what was drafted behind it.
      logits: f32[B,K,V], of the window.
      system: target, drafter, rule and K.

    Returns:
      The state, what is ahead now, the ruling, and i32[], the rows that are active.
    """
    num_rows = ahead.n_draft + 1
    # The row behind a whole chain is not scored: a copy of the one before stands there.
    rows = jnp.minimum(jnp.arange(system.num_draft + 1), ahead.n_draft[:, None])
    logits = jnp.take_along_axis(logits, rows[:, :, None], axis=1)
    chain = joined(ahead, block)
    scores = decoding.score(logits, state.sampler, state.counts, chain, system.rule)
    verdict = decoding.accept(state, chain, scores, system)
    state, n_emit = decoding.emit(state, chain, scores, verdict, system, num_rows)
    is_whole = (verdict.n_accept == num_rows) & (n_emit == num_rows)
    state = state.replace(target=state.target.commit(n_emit))
    ruling = Ruling(verdict.tokens, n_emit, is_whole)
    return state, left_ahead(block, is_whole), ruling, state.is_active.sum(dtype=jnp.int32)


def joined(ahead: Proposal, block: Proposal) -> Proposal:
    """The chain [ahead | the block's first draft, where it has one] in K columns."""
    is_ahead = jnp.arange(ahead.tokens.shape[1]) < ahead.n_draft[:, None]

    def join(a, b):
        return jnp.where(is_ahead if a.ndim == 2 else is_ahead[:, :, None], a, b[:, :1])

    without = lambda proposal: proposal.replace(n_draft=None, fault=None)
    chain = jax.tree.map(join, without(ahead), without(block))
    n_draft = ahead.n_draft + jnp.minimum(block.n_draft, 1)
    return chain.replace(n_draft=n_draft, fault=block.fault)


def left_ahead(block: Proposal, is_whole: jax.Array) -> Proposal:
    """What is ahead once the block's first draft has been accepted: the others, or nothing."""
    without = block.replace(n_draft=None, fault=None)
    moved = jax.tree.map(lambda x: jnp.roll(x, -1, axis=1), without)
    return moved.replace(n_draft=jnp.where(is_whole, block.n_draft - 1, 0), fault=block.fault)
