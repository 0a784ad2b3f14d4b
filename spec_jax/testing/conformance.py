"""Conformance of a drafter: what holds of every kind, with every rule, in chains and in trees.

``check_conformance`` takes a decoder, so a kind of your own is tested as those of the package are.
Rounds in which some drafts are accepted and others are not are run one by one, in two compiled
programs; every property of a state is asserted from them. ``certify`` proves the distribution.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.decoding import DecodeState, Finish, Kind, System
from spec_jax.engine.adaptive.runner import catch_up, system_of
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.queue import DecodeQueue
from spec_jax.engine.request import Request, make_request, whole_slots
from spec_jax.errors import ConfigError, SpecJaxError
from spec_jax.meshes import use_mesh
from spec_jax.sampling import make_sampler
from spec_jax.sharding import take_rows

NUM_TOKENS = 24  # that the longest row emits
_ENDS_EARLY = 5  # and that the second row emits
_SURE = 1e6  # a bias that leaves no other token


class ConformanceError(SpecJaxError, AssertionError):
    """A decoder lacks a property that every decoder has; the message names it."""


class Conformance(NamedTuple):
    """What ``check_conformance`` found.

    Attributes:
      drafter: its name.
      rule: the name of the rule.
      passed: the names of the checks.
      lengths: how many rounds accepted 0, 1, ... drafts.
    """

    drafter: str
    rule: str
    passed: tuple[str, ...]
    lengths: tuple[int, ...]


def check_conformance(
    decoder: SpeculativeDecoder, checks: Sequence[str] | None = None
) -> Conformance:
    """Checks that a decoder has the properties of every decoder, whatever it drafts with.

        decoder = SpeculativeDecoder(target, drafter=make, config=config)
        print(check_conformance(decoder))

    The prompts have several lengths, the samplers several temperatures, and one row ends early.
    Three tokens are made probable, for target and draft alike, so that some drafts are accepted.

    Args:
      decoder: of a target with a small vocabulary and any drafter, rule, tree and mesh. The rule
        "match" shows most: its tokens are those of plain decoding at every temperature.
      checks: names of ``ROUNDS`` and ``CALLS``; None: all of them. Those of ``CALLS`` compile
        further programs.

    Raises:
      ConformanceError: a check fails.
      ConfigError: there is no check of a name.
    """
    checks = (*ROUNDS, *CALLS) if checks is None else tuple(checks)
    for name in checks:
        if name not in ROUNDS and name not in CALLS:
            known = ", ".join((*ROUNDS, *CALLS))
            raise ConfigError(f"no check is named {name!r}; known: {known}")
    run = _Run(decoder)
    for name in checks:
        (ROUNDS | CALLS)[name](run)
    return Conformance(run.system.drafter.name, run.system.rule.name, checks, run.lengths)


@functools.partial(jax.jit, static_argnames="system")
def _draft_and_verify(params, state: DecodeState, system: System):
    proposal, state = decoding.draft(params, state, system)
    scores, state = decoding.verify(params["target"], state, proposal, system)
    return proposal, scores, state


@functools.partial(jax.jit, static_argnames="system")
def _accept_and_commit(params, state, proposal, scores, system: System):
    verdict = decoding.accept(state, proposal, scores, system)
    return decoding.commit(params, state, proposal, scores, verdict, system)


@functools.partial(jax.jit, static_argnames="system")
def _rewind(state: DecodeState, n: jax.Array, system: System) -> DecodeState:
    draft = system.drafter.sync.rewind(state.draft, n)
    return state.replace(target=state.target.rewind(n), draft=draft)


_take_rows = jax.jit(take_rows)


class _Run:
    """Rows that a decoder decodes round by round.

    Attributes:
      system: target, drafter, rule and K; drafts that are sampled come with their distributions.
      prompts: ids of each row.
      samplers: of each row.
      states: before the first round and after each one.
      asked: the next drafts of each state, and the target's scores of them.
    """

    def __init__(self, decoder: SpeculativeDecoder):
        V = decoder.target.model.last_id + 1
        self.decoder = decoder
        self.prompts = [[i % V for i in ids] for ids in ((1, 2, 3), (4, 5, 6, 7, 6), (2,), (3, 1))]
        self.limits = [NUM_TOKENS, _ENDS_EARLY, NUM_TOKENS, NUM_TOKENS - 7]
        likely = tuple((i, 9.0 - i // 3) for i in (1, 2, 3) if i < V)
        self.samplers = [
            SamplerConfig(temperature=2.0, seed=1, logit_bias=likely),
            SamplerConfig(temperature=0.0, logit_bias=likely),
            SamplerConfig(temperature=3.0, seed=2),
            SamplerConfig(temperature=0.7, seed=3, logit_bias=likely),
        ]
        try:
            self.engine = decoder.engine(self.samplers)
        except ConfigError:  # the greedy rule
            cold = functools.partial(dataclasses.replace, temperature=0.0)
            self.samplers = list(map(cold, self.samplers))
            self.engine = decoder.engine(self.samplers)
        given = self.engine.system
        rule = given.rule._replace(needs_probs=given.rule.needs_probs or given.drafter.is_sampled)
        self.system = given._replace(rule=rule)
        self.params = self.engine.params(len(self.prompts))
        self.states = [self.prefill(self.prompts, self.samplers)]
        self.asked = []
        while True:
            asked = self.ask(self.states[-1])
            self.asked.append(asked[:2])
            if not self.states[-1].is_active.any():
                break
            self.states.append(self.round(asked))

    @functools.cached_property
    def plain(self) -> SpeculativeDecoder:
        return SpeculativeDecoder(self.decoder.target, mesh=self.decoder.mesh)

    def plain_outputs(self, request: Request) -> list[list[int]]:
        """What plain decoding emits."""
        engine = self.plain.engine(self.samplers)
        running = jnp.zeros(len(self.prompts), jnp.int32)
        return outputs(engine.generate(engine.prefill(request), running, 2**30)[0])

    @property
    def is_coupled(self) -> bool:
        """Whether all tokens are those of plain decoding."""
        return self.system.rule.is_coupled or self.system.rule.is_greedy

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many rounds of a row accepted 0, 1, ... drafts, those cut by its end left out."""
        counts = np.zeros(self.system.depth + 1, int)
        for before, after in zip(self.states, self.states[1:]):
            n = np.asarray(after.length - before.length)
            is_whole = np.asarray(before.is_active & after.is_active)
            np.add.at(counts, n[is_whole] - 1, 1)
        return tuple(counts.tolist())

    def request(self, prompts, samplers, limits=None) -> Request:
        """Lays out rows of the width that prompts and outputs have together."""
        sampler = make_sampler(samplers, len(prompts), self.system.target.vocab_size)
        limits = self.limits if limits is None else limits
        width = max(map(len, self.prompts)) + NUM_TOKENS
        return make_request(self.engine.system, prompts, limits, sampler, sampler, pad_to=width)

    def prefill(self, prompts, samplers, limits=None) -> DecodeState:
        return self.engine.prefill(self.request(prompts, samplers, limits))

    def ask(self, state: DecodeState, system: System | None = None):
        """The next drafts, the target's scores of them, and the state with both."""
        with use_mesh(self.decoder.mesh):
            return _draft_and_verify(self.params, state, system=system or self.system)

    def round(self, asked, system: System | None = None) -> DecodeState:
        """The state after the round that ``ask`` began."""
        proposal, scores, state = asked
        with use_mesh(self.decoder.mesh):
            args = (self.params["draft"], state, proposal, scores)
            return _accept_and_commit(*args, system=system or self.system)

    def afresh(self, state: DecodeState) -> DecodeState:
        """The state of which target and drafter were prefilled with the same tokens."""
        rows = zip(np.asarray(state.tokens), np.asarray(state.length), self.samplers)
        prompts = []
        samplers = []
        for tokens, length, sampler in rows:
            prompts.append(tokens[:length].tolist())
            pending = ((int(tokens[length]), _SURE),)  # prefill draws it again
            samplers.append(dataclasses.replace(sampler, logit_bias=pending))
        fresh = self.prefill(prompts, samplers, [2] * len(prompts))
        return state.replace(target=fresh.target, draft=fresh.draft)

    def check_equal(self, check: str, state, expected, when: str) -> None:
        """Raises ConformanceError where the next drafts of two states or their scores differ.

        Args:
          check: its name.
          state: a state, or what ``ask`` returned.
          expected: likewise.
          when: after what they differ.
        """
        ours, theirs = (x if isinstance(x, tuple) else self.ask(x)[:2] for x in (state, expected))
        difference = _difference(*(jax.tree.map(np.asarray, x) for x in (ours, theirs)))
        if difference is not None:
            raise ConformanceError(f"{self.name(check)} {when}: {difference}")

    def name(self, check: str) -> str:
        drafter = self.system.drafter
        rule = self.system.rule
        return f"{check} of drafter {drafter.name!r} with rule {rule.name!r},"


def outputs(state: DecodeState) -> list[list[int]]:
    """What each row has emitted."""
    rows = zip(*map(np.asarray, (state.tokens, state.prompt_length, state.total)))
    return [tokens[begin:end].tolist() for tokens, begin, end in rows]


def _difference(ours, theirs) -> str | None:
    """Says where drafts or scores differ; None: nowhere."""
    a, p = ours
    b, q = theirs
    for row in range(len(a.tokens)):
        if a.n_draft[row] != b.n_draft[row]:
            return f"row {row} has {a.n_draft[row]} drafts in place of {b.n_draft[row]}"
        n = int(a.n_draft[row])
        for name in ("tokens", "parents"):
            x, y = (getattr(proposal, name) for proposal in (a, b))
            if x is not None and x[row, :n].tolist() != y[row, :n].tolist():
                what = f"{name} of its drafts are {x[row, :n].tolist()}"
                return f"row {row}: the {what} in place of {y[row, :n].tolist()}"
        if a.probs is not None:
            nodes = np.arange(n) if a.parents is None else a.parents[row, :n]
            off = np.abs(a.probs[row][nodes] - b.probs[row][nodes])
            if not (off < 1e-4).all():
                return f"row {row}: the distributions of its drafts differ by {off.max():.1e}"
        x = p.logits[row, : n + 1]
        y = q.logits[row, : n + 1]
        if not np.allclose(x, y, rtol=1e-4, atol=1e-4):
            off = np.abs(np.where(x == y, 0, x - y)).max()
            return f"row {row}: the target's logits differ by {off:.1e}"
    return None


def _check_tokens(run: _Run) -> None:
    """Tokens are those of plain decoding, and each has a kind."""
    state = run.states[-1]
    rule = run.system.rule
    total = np.asarray(state.total - state.prompt_length)
    if (np.asarray(state.finish) != Finish.LENGTH).any() or total.tolist() != run.limits:
        reasons = [Finish(int(x)).name.lower() for x in state.finish]
        raise ConformanceError(
            f"{run.name('tokens')} rows end after {total.tolist()} tokens in place of "
            f"{run.limits} ({', '.join(reasons)})"
        )
    plain_rows = run.plain_outputs(run.request(run.prompts, run.samplers))
    for row, (ours, plain) in enumerate(zip(outputs(state), plain_rows)):
        is_cold = run.samplers[row].temperature == 0 and rule.is_lossless
        if (run.is_coupled or is_cold) and ours != plain:
            at = next(i for i, (a, b) in enumerate(zip(ours, plain)) if a != b)
            raise ConformanceError(
                f"{run.name('tokens')} row {row}: token {at} is {ours[at]}, and plain decoding "
                f"emits {plain[at]} after {plain[:at]}"
            )
    counts = np.bincount(np.asarray(state.kind).ravel(), minlength=len(Kind))[1:]
    if counts.sum() != sum(run.limits) or counts[Kind.FIRST - 1] != len(run.prompts):
        raise ConformanceError(f"{run.name('tokens')} kinds count {counts.tolist()}")


def _check_acceptance(run: _Run) -> None:
    """Rounds accept some drafts and not others: otherwise the other checks show little."""
    is_some = any(run.lengths[1:])
    is_cut = any(run.lengths[:-1])
    if not (is_some and is_cut):
        what = "every draft" if is_some else "no draft"
        raise ConformanceError(
            f"{run.name('acceptance')} {what} is accepted, so the states after rounds of mixed "
            "acceptance are not tested; give it a better or a worse draft, or more temperature"
        )


def _check_states(run: _Run) -> None:
    """After every round, drafts and scores are those after a fresh prefill of the same tokens."""
    if run.system.drafter.memory is not None and run.params["draft"] is None:
        return  # it remembers more than the row's text
    for number, (state, asked) in enumerate(zip(run.states, run.asked)):
        when = f"after {number} rounds as against a fresh prefill of the same tokens"
        run.check_equal("states", asked, run.afresh(state), when)


def _check_rows(run: _Run) -> None:
    """Rows that change places draft as before."""
    at = len(run.states) // 2
    order = np.arange(len(run.prompts))[::-1]
    with use_mesh(run.decoder.mesh):
        moved = _take_rows(run.states[at], jnp.asarray(order))
    expected = jax.tree.map(lambda x: np.asarray(x)[order], run.asked[at])
    run.check_equal("rows", moved, expected, "in another place of the batch")


def _check_insert(run: _Run) -> None:
    """A row that is inserted drafts as where it was prefilled, and the others as before."""
    copy = functools.partial(jax.tree.map, jnp.copy)
    at = len(run.states) // 2
    row = 1
    source = 3
    state = run.engine.insert(copy(run.states[at]), row, copy(run.states[0]), source)
    expected = jax.tree.map(
        lambda x, new: np.concatenate([x[:row], new[source:][:1], x[row + 1 :]]),
        *(jax.tree.map(np.asarray, run.asked[i]) for i in (at, 0)),
    )
    run.check_equal("insert", state, expected, "after row 3 was inserted as row 1")


def _check_rewind(run: _Run) -> None:
    """Without its last tokens, a state is that of a fresh prefill of the others."""
    drafter = run.system.drafter
    if drafter.sync.rewind is None or not hasattr(run.states[-1].target, "rewind"):
        return
    state = run.states[len(run.states) // 2]
    room = np.asarray(state.length - state.prompt_length)
    n = jnp.asarray(np.minimum(room, [1, 0, 2, 3]), jnp.int32)
    with use_mesh(run.decoder.mesh):
        back = _rewind(state, n, system=run.system)
    run.check_equal("rewind", back, run.afresh(back), f"without the last {n.tolist()} tokens")


def _check_snapshot(run: _Run) -> None:
    """Caches that are restored from a snapshot draft as when it was made."""
    at = len(run.states) // 2
    earlier = run.states[at]
    last = run.states[-1]

    def is_cache(node):
        return hasattr(node, "restore_from_snapshot")

    def back(ours, old):
        return ours.restore_from_snapshot(old.snapshot()) if is_cache(ours) else old

    target = jax.tree.map(back, last.target, earlier.target, is_leaf=is_cache)
    draft = jax.tree.map(back, last.draft, earlier.draft, is_leaf=is_cache)
    restored = earlier.replace(target=target, draft=draft)
    run.check_equal("snapshot", restored, run.asked[at], "after a snapshot was restored")


def _check_idle(run: _Run) -> None:
    """Rounds of K = 0, and the drafter's ``catch_up`` after them, leave no gap in its state."""
    drafter = run.system.drafter
    if drafter.shape.tree is not None:
        return  # K is the number of nodes
    idle = system_of(run.system, 0)
    state = run.states[1]
    for _ in range(3):
        state = run.round(run.ask(state, idle), idle)
    if drafter.sync.catch_up is not None:
        with use_mesh(run.decoder.mesh):
            state = catch_up(run.params, jax.tree.map(jnp.copy, state), system=run.system)
    run.check_equal("idle", state, run.afresh(state), "after three rounds without drafts")


def _call(run: _Run, prompts=None, decoder=None, **options) -> list[Any]:
    """The rows of a call that draws its drafts as the rounds do."""
    options = {"sampler": run.samplers, **options}
    return (decoder or run.decoder).generate(
        prompts or run.prompts,
        NUM_TOKENS,
        draft_sampler=options["sampler"],
        stop_tokens=(),
        **options,
    )


def _check_rows_of_call(run: _Run, check: str, rows, expected) -> None:
    if run.decoder.adaptive is not None and not run.is_coupled:
        return  # K depends on measured times, and the tokens on K
    for row, (ours, theirs) in enumerate(zip(rows, expected, strict=True)):
        if list(ours.tokens) != list(theirs):
            raise ConformanceError(
                f"{run.name(check)} row {row} emits {list(ours.tokens)}, expected {list(theirs)}"
            )


def _check_generate(run: _Run) -> None:
    """A call's tokens are those of the rounds one by one, however many it runs at once."""
    expected = outputs(run.states[-1])
    for rounds in (None, 1):
        rows = _call(run, rounds_per_sync=rounds)
        cut = [dataclasses.replace(row, tokens=row.tokens[:n]) for row, n in zip(rows, run.limits)]
        _check_rows_of_call(run, "generate", cut, expected)


def _check_queue(run: _Run) -> None:
    """A queue that refills rows gives each prompt what a call gives it."""
    one = run.samplers[0]
    B = len(run.prompts)
    prompts = [*run.prompts, *run.prompts[:2]]
    seeds = [one.seed + i for i in range(B + 2)]
    rows = DecodeQueue(
        run.decoder,
        prompts,
        batch=B,
        max_new_tokens=NUM_TOKENS,
        stop_tokens=(),
        sampler=one,
        draft_sampler=one,
    )
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    calls = (slice(B), slice(2, None))
    first, last = (_call(run, prompts[x], sampler=one, seeds=seeds[x]) for x in calls)
    expected = [row.tokens for row in (*first, *last[-2:])]
    _check_rows_of_call(run, "queue", rows, expected)


def _check_samples(run: _Run) -> None:
    """Several samples of a prompt are those of as many rows with that prompt."""
    one = run.samplers[0]
    two = run.prompts[:2]
    options = dict(sampler=one, seeds=[5, 6, 5, 7])
    rows = _call(run, two, num_samples=2, **options)
    expected = _call(run, [two[0], two[0], two[1], two[1]], **options)
    _check_rows_of_call(run, "samples", rows, [row.tokens for row in expected])


def _check_logprobs(run: _Run) -> None:
    """Asking for log-probabilities changes no token, and they equal those of plain decoding."""
    rows = _call(run, logprobs=True)
    plain = _call(run, decoder=run.plain, logprobs=True)
    if not run.is_coupled:
        return _check_rows_of_call(run, "logprobs", rows, [row.tokens for row in _call(run)])
    _check_rows_of_call(run, "logprobs", rows, [row.tokens for row in plain])
    for row, (ours, theirs) in enumerate(zip(rows, plain)):
        for name, x, y in zip(ours.logprobs._fields, ours.logprobs, theirs.logprobs):
            if not np.allclose(x, y, rtol=1e-4, atol=1e-4):
                raise ConformanceError(
                    f"{run.name('logprobs')} {name} of row {row} are {x}, and those of plain "
                    f"decoding {y}"
                )
    return None


def _check_end(run: _Run) -> None:
    """Rows that end with the cache, in whose last slots a round is cut, are plain decoding's."""
    room = [1, 2, run.system.depth + 1, 40]
    size = whole_slots(1) - run.system.lookahead_slots  # with what a round writes ahead, all slots
    longest = [model.max_length for model in (run.system.target, run.system.drafter)]
    if any(n is not None and n < size for n in longest) or not run.is_coupled:
        return
    prompts = [(ids * size)[: size - n] for ids, n in zip(run.prompts, room)]
    sampler = make_sampler(run.samplers, len(prompts), run.system.target.vocab_size)
    slots = whole_slots(1)
    request = make_request(run.engine.system, prompts, room, sampler, sampler, slots=slots)
    state = run.engine.prefill(request)
    while state.is_active.any():
        state = run.round(run.ask(state))
    for row, (ours, theirs) in enumerate(zip(outputs(state), run.plain_outputs(request))):
        if ours != theirs:
            raise ConformanceError(f"{run.name('end')} row {row} emits {ours}, expected {theirs}")
    is_beyond = np.arange(state.tokens.shape[1]) >= np.asarray(state.total)[:, None]
    if np.asarray(state.kind)[is_beyond].any():
        raise ConformanceError(f"{run.name('end')} a row has more tokens than its limit")


ROUNDS: dict[str, Callable[[_Run], None]] = {
    "tokens": _check_tokens,
    "acceptance": _check_acceptance,
    "states": _check_states,
    "rows": _check_rows,
    "insert": _check_insert,
    "rewind": _check_rewind,
    "snapshot": _check_snapshot,
}
"""Checks of states and tokens round by round; together they compile a few programs."""

CALLS: dict[str, Callable[[_Run], None]] = {
    "idle": _check_idle,
    "generate": _check_generate,
    "queue": _check_queue,
    "samples": _check_samples,
    "logprobs": _check_logprobs,
    "end": _check_end,
}
"""Checks of other rounds and of whole calls, each of which compiles programs of its own."""
