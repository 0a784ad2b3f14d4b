"""All drafts of a round, forced, and their probabilities as the drafter reports them.

A draft is forced by pushing the noise with which the drafter's own functions draw it. The reports
weigh the drafts of an enumeration, and are compared with ordinary draws.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.contracts import Prompt, Proposal
from spec_jax.decoding.calls import call_prefill
from spec_jax.engine.generation import find_raised
from spec_jax.sampling import make_sampler
from spec_jax.testing.certificate.records import (
    ALPHA,
    CertificateError,
    ProposalError,
    Range,
    probability,
    short,
    where,
)
from spec_jax.testing.oracles import Row, TableFit, fit_table

DraftDistribution = Callable[[Row, Sequence[int], Sequence[int]], np.ndarray]

# XLA may compute in float32 what is written in bfloat16, and would hide what other devices do.
AS_WRITTEN = {"xla_allow_excess_precision": False}
DRAFT_SEED = 7  # of the draft samplers of many rows, whose drafts must differ all the same
FREE = -1  # a token that the enumeration does not force
SMALLEST = 2.0**-126  # float32 above 0
_HAIR = 3e-3  # by so much a draft outweighs the other tokens; a near tie is nearer
_BUCKET = 8  # histories are padded to a multiple of it, so that settings share programs
_SAME = 1e-4  # the largest distance of two reports of one distribution, see ``_off``
_RARE = 1e-30
_PER_CELL = 5  # draws that a cell of a table should have on average

Item = tuple[int, tuple[int, ...]]  # a row, and its output before a round


class Forced(NamedTuple):
    """Rounds whose drafts were forced; NumPy arrays with one row for each of N items.

    Attributes:
      items: N times (row, output before the round).
      weights: f64[N], the probability of the item.
      contexts: what the drafter saw.
      logits: f32[N,K+1,V], the target's.
      proposal: what the drafter returned.
    """

    items: Sequence[Item]
    weights: np.ndarray
    contexts: Any
    logits: np.ndarray
    proposal: Proposal

    def at(self, index: np.ndarray) -> Forced:
        """Returns some of the items."""
        pick = functools.partial(jax.tree.map, lambda x: x[index])
        return Forced(
            [self.items[i] for i in index],
            self.weights[index],
            pick(self.contexts),
            self.logits[index],
            pick(self.proposal),
        )


def path_tokens(draft: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Returns the tokens on the path to a node, its own included.

    Args:
      draft: the token of each node but the root.
      parents: the parent of each of these nodes.
      node: where the path ends; 0 is the root.
    """
    path = []
    while node:
        path.insert(0, draft[node - 1])
        node = parents[node - 1]
    return tuple(path)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """What drafts rounds with forced noise, through the functions that the decoder calls.

    Attributes:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      rows: prompts and samplers.
      num_tokens: maximum tokens of an output; longer ones compile other programs.
      batch: rows drafted at once.
    """

    system: decoding.System
    params: dict[str, Any]
    rows: Sequence[Row]
    num_tokens: int = 3
    batch: int = 1032  # caches of so many rows are written by one scatter

    @property
    def parents(self) -> Sequence[int]:
        """The parent of each draft's node, which is known before a round."""
        drafter = self.system.drafter
        is_chain = drafter.shape.tree is None or not drafter.is_sampled
        return range(self.system.num_draft) if is_chain else drafter.shape.tree.parents

    def all_drafts(self) -> list[tuple[int, ...]]:
        """Returns all that may be drafted in a round, siblings all different.

        Where siblings have used up the tokens, one is ``FREE``: the drafter's own choice, as are
        all those of a deterministic drafter.
        """
        parents = self.parents
        if not self.system.drafter.is_sampled:
            return [(FREE,) * len(parents)]
        ids = set(range(self.system.target.last_id + 1))
        drafts = [()]
        for node, parent in enumerate(parents):
            siblings = [j for j in range(node) if parents[j] == parent]
            if len(siblings) >= len(ids) and node + 1 in parents:
                raise ValueError(f"node {node + 1} has children, and no token is left for it")
            drafts = [
                (*draft, token)
                for draft in drafts
                for token in sorted(ids.difference(draft[j] for j in siblings)) or [FREE]
            ]
        return drafts

    def contexts(self, items: Sequence[Item]) -> Any:
        """Returns what the decoder would hand to the drafter after each item, as NumPy arrays."""
        V = self.system.target.vocab_size
        width = max(len(row.prompt) for row in self.rows)
        width += self.num_tokens + self.system.num_draft + 2
        width = -(-width // _BUCKET) * _BUCKET
        tokens = np.zeros((len(items), width), np.int32)
        length = np.zeros(len(items), np.int32)
        outputs = np.zeros_like(tokens)
        for i, (row, output) in enumerate(items):
            history = (*self.rows[row].prompt, *output)
            tokens[i, : len(history)] = history
            length[i] = len(history) - 1
            outputs[i, : len(output)] = output
        # The samplers of all rows, whichever are left: all calls share programs.
        of = np.asarray([item[0] for item in items])
        sides = zip(*(row[1:] for row in self.rows))
        samplers = [make_sampler(side, len(self.rows), V) for side in sides]
        samplers = jax.tree.map(lambda x: np.asarray(x)[of], samplers)
        num_output = np.asarray([len(output) for _, output in items], np.int32)

        def start(x):
            return x.start(tokens, length + 1 - num_output, V).advance(outputs, num_output)

        sampler, draft_sampler = jax.tree.map(np.asarray, [jax.jit(start)(x) for x in samplers])
        return tokens, length, sampler, draft_sampler

    def propose(self, contexts: Any, gumbel: np.ndarray) -> tuple[np.ndarray, Proposal]:
        """Returns the target's logits f32[N,K+1,V] and the proposal, drawn with this noise."""
        propose = functools.partial(_propose_as_written, self.system, self.params)
        return in_chunks(propose, self.batch, contexts, gumbel)

    def force(self, items: Sequence[Item], drafts: np.ndarray) -> Forced:
        """Drafts given tokens, by pushing the noise that the drafter draws with, and scores them.

        Args:
          items: N times (row, output before the round).
          drafts: i64[N,K], the tokens, FREE where nothing is pushed.

        Returns:
          The rounds, each of weight 1. Whether the drafts are the ones pushed is not checked.

        Raises:
          ProposalError: a proposal is at fault.
        """
        K = self.system.num_draft
        contexts = self.contexts(items)
        push = np.zeros((len(items), K, self.system.target.vocab_size), np.float32)
        for i, parent in enumerate(self.parents):
            at = np.flatnonzero(drafts[:, i] != FREE)
            push[at, parent, drafts[at, i]] = 1e4 * (K - i)  # the first sibling is pushed hardest
        logits, proposal = self.propose(contexts, push)
        is_checked = True
        if proposal.probs is not None:
            # No ordinary noise draws a token whose probability underflows: see
            # ``draws_as_reported``.
            rows = np.arange(len(items))[:, None]
            is_never = proposal.probs[rows, list(self.parents), proposal.tokens] == 0
            is_drawn = (proposal.tokens == drafts) & np.asarray(proposal.is_offered)
            is_checked = ~(is_drawn & is_never).any(axis=1)
        self.check_faults(items, proposal, is_checked)
        return Forced(items, np.ones(len(items)), contexts, logits, proposal)

    def check_faults(
        self, items: Sequence[Item], proposal: Proposal, is_checked: np.ndarray | bool = True
    ) -> None:
        """Raises a ProposalError where the decoder would stop a row because of the proposal.

        Args:
          items: N times (row, output before the round).
          proposal: what the drafter returned.
          is_checked: bool[N].
        """
        at = np.flatnonzero((proposal.fault != decoding.Finish.RUNNING) & is_checked)
        if len(at):
            row, output = items[at[0]]
            finish = decoding.Finish(int(proposal.fault[at[0]]))
            raised = find_raised(finish, self.system, (*self.rows[row].prompt, *output))
            what = f"makes a proposal that stops the row ({finish.name.lower()})"
            if raised is not None:
                what = f"raised {type(raised).__name__}: {raised}"
            place = where(self.rows[row], output, self.system.num_draft)
            name = self.system.drafter.name
            raise ProposalError(f"drafter {name!r} {what}, {place}") from raised

    def draws_as_reported(self, forced: Forced) -> np.ndarray:
        """Returns bool[N]: each draft is the Gumbel-max draw from its report.

        Under ordinary noise, and under noise that outweighs the report, so that all tokens are
        equally near to being drawn, and the drafts themselves nearer by a hair: tokens that are
        drawn once in a million times are compared as sharply as others.
        """
        is_drawn = np.ones(len(forced.items), bool)
        proposal = forced.proposal
        if proposal.probs is None:
            return is_drawn
        gumbel = np.random.default_rng(0).gumbel(size=proposal.probs.shape)
        # -ln q, and a little more for the drafts, the first sibling's most. A token of probability
        # 0 has at most the smallest float32.
        outweighing = -np.log(np.maximum(proposal.probs, SMALLEST), dtype=np.float32)
        outweighing[proposal.probs == 0] -= 1
        for i, parent in enumerate(self.parents):
            siblings = list(self.parents[i:]).count(parent)
            outweighing[np.arange(len(gumbel)), parent, proposal.tokens[:, i]] += _HAIR * siblings
        for noise in (gumbel.astype(np.float32), outweighing):
            drawn = self.propose(forced.contexts, noise)[1]
            is_drawn &= matches_report(drawn, noise, self.parents)
        return is_drawn


def matches_report(drawn: Proposal, gumbel: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """bool[N], whether each token is its parent's Gumbel-max draw, earlier siblings left out.

    Args:
      drawn: what the drafter returned, of N rounds.
      gumbel: f32[N,K,V], the noise that it drew with.
      parents: of the nodes.
    """
    probs = np.array(drawn.probs)
    is_drawn = np.ones(len(drawn.tokens), bool)
    is_offered = np.asarray(drawn.is_offered)
    for i, parent in enumerate(parents):
        q = probs[:, parent]
        token = drawn.tokens[:, i]
        at = np.flatnonzero((q.max(axis=1) > 0) & is_offered[:, i])
        is_drawn[at] &= is_argmax(token[at], q[at], gumbel[at, parent])
        np.put_along_axis(q, token[:, None], 0.0, axis=1)
    return is_drawn


def is_argmax(tokens, probs, gumbel) -> np.ndarray:
    """Whether the tokens are the Gumbel-max draws from ``probs``, near ties aside.

    Args:
      tokens: i64[...].
      probs: f32[...,V].
      gumbel: f32[...,V], the noise.
    """
    with np.errstate(divide="ignore"):
        scores = np.log(np.asarray(probs, np.float64)) + gumbel
    drawn = np.take_along_axis(scores, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    return drawn >= scores.max(axis=-1) - 1e-3


def in_chunks(function, chunk, *trees):
    """Calls ``function`` on NumPy arrays a chunk of rows at a time: one compiled shape."""
    size = len(jax.tree.leaves(trees)[0])
    results = []
    for begin in range(0, size, chunk):
        index = np.minimum(np.arange(begin, begin + chunk), size - 1)
        result = function(*jax.tree.map(lambda x: x[index], trees))
        results.append(jax.tree.map(np.asarray, result))
    return jax.tree.map(lambda *x: np.concatenate(x)[:size], *results)


def propose_afresh(system: decoding.System, params, contexts, gumbel):
    """Prefills both models afresh, drafts with forced noise, scores the window.

    Args:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      contexts: see ``Drafting.contexts``.
      gumbel: f32[N,K,V], the drafter's noise; None: its own.

    Returns:
      The target's logits f32[N,K+1,V], and the proposal.
    """
    tokens, length, sampler, draft_sampler = contexts
    target, drafter, *_ = system
    size, width = tokens.shape
    slots = width + system.lookahead_slots
    cache = target.init_cache(params["target"], size, slots)
    fed = target.forward(params["target"], tokens, cache)
    pending = jnp.take_along_axis(tokens, length[:, None], axis=1)[:, 0]
    prompt = Prompt(tokens, length, pending, fed.features)
    state = call_prefill(drafter, params["draft"], prompt, slots)
    cache = fed.cache.commit(length)
    rows = (tokens, length, draft_sampler, sampler.seed)
    context = system.context(*rows, None, params["target"], cache)
    context = context._replace(is_coupled=False, has_probs=True, gumbel=gumbel)
    proposal, _ = decoding.propose(params["draft"], state, context, system)
    logits, _, _ = decoding.target_pass(
        params["target"], cache, tokens, proposal.tokens, system, proposal.paths
    )
    return logits, proposal


_propose_as_written = bounded_jit(
    propose_afresh, static_argnames="system", compiler_options=AS_WRITTEN
)


@functools.partial(bounded_jit, static_argnames="system")
def propose_next(system: decoding.System, params, state: decoding.DecodeState, gumbel):
    """Returns what the drafter proposes next after a state, with given noise.

    Args:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      state: of all rows.
      gumbel: f32[B,K,V], the noise.
    """
    rows = (state.tokens, state.length, state.draft_sampler, state.sampler.seed)
    # Without is_greedy, since the report is also compared where no rule would read it.
    context = system.context(*rows, None, params["target"], state.target)
    context = context._replace(is_coupled=False, has_probs=True, gumbel=gumbel)
    return decoding.propose(params["draft"], state.draft, context, system)[0]


def force_all(
    drafting: Drafting, prefixes: Sequence[Item], stated: DraftDistribution | None = None
) -> Forced | None:
    """Forces every draft that can be, weighted by the distributions that the drafter reports.

    Args:
      drafting: what drafts.
      prefixes: (row, output) before the rounds.
      stated: the distributions that the drafter should report, if they are known.

    Returns:
      The rounds; the weights of each prefix sum to one. None if the drafter does not draw with
      ``Context.gumbel``.

    Raises:
      CertificateError: the drafter does not report distributions, or others than stated.
    """
    parents = drafting.parents
    drafts = drafting.all_drafts()
    items = [prefix for prefix in prefixes for _ in drafts]
    wanted = np.asarray(drafts * len(prefixes))
    forced = drafting.force(items, wanted)
    if not drafting.system.drafter.is_sampled:
        return forced
    # The tokens that are offered, and those that were pushed where none is.
    drawn = np.where(forced.proposal.is_offered, forced.proposal.tokens, wanted).tolist()
    reports = _reports(drafting, forced, drawn, stated)
    is_dropped = forced.proposal.is_dropped
    is_dropped = np.zeros(wanted.shape, bool) if is_dropped is None else np.asarray(is_dropped)
    weights = {}  # of each (prefix, draft), at the first of its items
    for i, prefix in enumerate(items):
        draft, weight = _weight(prefix, drawn[i], is_dropped[i], reports, parents)
        if weight > 0:
            weights.setdefault((prefix, draft), (i, weight))
    total = dict.fromkeys(prefixes, 0.0)
    for (prefix, _), (_, weight) in weights.items():
        total[prefix] += weight
    if any(abs(x - 1) > 1e-4 for x in total.values()):
        return None
    keep, kept = map(np.asarray, zip(*weights.values()))
    return forced.at(keep)._replace(weights=kept)


def check_report(drafting: Drafting, forced: Forced) -> None:
    """Raises a CertificateError if a drafter draws from another distribution than it reports."""
    wrong = np.flatnonzero(~drafting.draws_as_reported(forced))
    if len(wrong):
        row, output = forced.items[wrong[0]]
        raise CertificateError(
            f"drafter {drafting.system.drafter.name!r} draws from another distribution than "
            f"Proposal.probs, {where(drafting.rows[row], output, drafting.system.num_draft)}"
        )


def truncate_drafts(forced: Forced, offered: int | np.ndarray) -> Forced:
    """Returns the rounds with at most some drafts; the others are blank.

    Args:
      forced: N rounds.
      offered: how many, of each round i64[N], as many after the same text.
    """
    proposal = forced.proposal
    offered = np.broadcast_to(offered, len(forced.items))
    groups = {}
    for i, item in enumerate(forced.items):
        groups.setdefault((item, tuple(proposal.tokens[i, : offered[i]].tolist())), []).append(i)
    index = np.asarray([group[0] for group in groups.values()])
    weights = np.asarray([forced.weights[group].sum() for group in groups.values()])
    some = forced.at(index)
    offered = offered[index]
    is_offered = np.arange(proposal.tokens.shape[1]) < offered[:, None]

    def blank(x):
        return None if x is None else np.where(is_offered[:, :, None], x, 0.0).astype(x.dtype)

    cut = some.proposal.replace(
        n_draft=np.minimum(some.proposal.n_draft, offered),
        tokens=np.where(is_offered, some.proposal.tokens, 0),
        probs=blank(some.proposal.probs),
        logits=blank(some.proposal.logits),
    )
    return some._replace(weights=weights, proposal=cut)


def mixed_lengths(forced: Forced) -> list[Forced]:
    """Returns the rounds with 0 to K drafts offered, of all lengths side by side in each batch."""
    K = forced.proposal.tokens.shape[1]
    numbers = {item: i for i, item in enumerate(dict.fromkeys(forced.items))}
    number = np.asarray([numbers[item] for item in forced.items])
    return [truncate_drafts(forced, (number + shift) % (K + 1)) for shift in range(K + 1)]


def with_confidence(forced: Forced) -> Forced:
    """Returns the rounds with a confidence in each draft, which depends on the drafts before it."""
    proposal = forced.proposal
    drawn = defaultdict(np.random.default_rng(5).random)
    confidence = [
        [drawn[item, tuple(tokens[:i])] for i in range(len(tokens))]
        for item, tokens in zip(forced.items, proposal.tokens.tolist())
    ]
    return forced._replace(proposal=proposal.replace(confidence=np.float32(confidence)))


def _reports(
    drafting: Drafting, forced: Forced, drawn: Sequence[Sequence[int]], stated
) -> dict[tuple[Item, tuple[int, ...]], np.ndarray]:
    """The distribution f64[V] after each (prefix, path) at which a draft was offered."""
    reports = {}
    probs = np.asarray(forced.proposal.probs, np.float64)
    is_offered = np.asarray(forced.proposal.is_offered)
    for i, node in np.argwhere(is_offered).tolist():
        prefix = forced.items[i]
        row = drafting.rows[prefix[0]]
        parent = drafting.parents[node]
        path = path_tokens(drawn[i], drafting.parents, parent)
        q = probs[i, parent]
        known = reports.get((prefix, path))
        wrong = None
        if known is None:
            reports[prefix, path] = q
            if not (q.min() >= 0 and abs(q.sum() - 1) < 1e-3):
                wrong = f"reports {short(q)} as a distribution,"
            elif stated is not None:
                should = stated(row, prefix[1], path)
                off = _off(should, q)
                token = int(off.argmax())
                if off[token] > _SAME:
                    wrong = (
                        f"reports probability {probability(q[token])} for token {token} and "
                        f"should report {probability(should[token])},"
                    )
        elif _off(known, q).max() > _SAME:
            wrong = (
                f"reports {short(q)} where it draws token {drawn[i][node]}, and {short(known)} "
                "where it draws another: the report may not depend on the draw;"
            )
        if wrong is not None:
            place = where(row, prefix[1], drafting.system.num_draft)
            name = drafting.system.drafter.name
            raise CertificateError(f"drafter {name!r} {wrong} after the drafts {path}, {place}")
    return reports


def _off(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """f64[V], how far two distributions are apart, relative to the larger of two probabilities."""
    larger = np.maximum(p, q)
    return np.abs(p - q) / np.maximum(larger, _RARE) * (larger > SMALLEST)


def report_range(forced: Forced, parents: Sequence[int]) -> Range | None:
    """Returns the range of the distributions that drafts were drawn from; None if not reported."""
    if forced.proposal.probs is None:
        return None
    probs = np.asarray(forced.proposal.probs)[:, list(parents)]
    return Range.of(probs[np.asarray(forced.proposal.is_offered)])


def _weight(prefix, draft, is_dropped, reports, parents):
    """(draft, probability): tokens that are the drafter's choice, or never offered, are FREE."""
    drawn, draft, weight = draft, list(draft), 1.0
    for i, parent in enumerate(parents):
        q = reports.get((prefix, path_tokens(drawn, parents, parent)))
        if q is None or (parent > 0 and is_dropped[parent - 1]):
            draft[i] = FREE
            continue
        left = q.copy()
        left[[drawn[j] for j in range(i) if parents[j] == parent]] = 0.0
        if left.sum() > 0:
            weight *= left[draft[i]] / left.sum()
        else:
            draft[i] = FREE
    return tuple(draft), weight


def check_draws(drafting: Drafting, prefixes: Sequence[Item], trials: int) -> tuple[float, int]:
    """Tests by chi-square that the drafter draws from what it reports, with noise of its own.

    Args:
      drafting: what drafts.
      prefixes: (row, output) before the rounds.
      trials: seeds for each prefix, all drafted at once.

    Returns:
      The p-value, corrected for the number of tests, and the number of rounds drafted.

    Raises:
      CertificateError: the draws have another distribution.
    """
    system = drafting.system
    tests = []
    contexts = drafting.contexts(prefixes)
    propose = jax.jit(lambda *x: propose_afresh(system, drafting.params, x, None)[1])
    for i, prefix in enumerate(prefixes):
        seeds = (np.arange(trials) + i * trials).astype(np.uint32)
        context = jax.tree.map(lambda x: np.repeat(x[i : i + 1], trials, axis=0), contexts)
        tokens, length, *samplers = context
        samplers = [sampler.replace(seed=seeds) for sampler in samplers]
        proposal = jax.tree.map(np.asarray, propose(tokens, length, *samplers))
        drafting.check_faults([prefix] * trials, proposal)
        tests += [(fit, drafts, *prefix) for fit, drafts in _fits(proposal, drafting.parents)]
    num_rounds = trials * len(prefixes)
    if not tests:
        return 1.0, num_rounds
    fit, drafts, row, output = min(tests, key=lambda test: test[0].p_value)
    p_value = min(1.0, fit.p_value * len(tests))
    if not p_value >= ALPHA:
        raise CertificateError(
            f"drafter {system.drafter.name!r} draws token {fit.token} with probability "
            f"{probability(fit.seen / fit.size)} (of {fit.size:,} draws) and reports "
            f"{probability(fit.expected / fit.size)}, after the drafts {drafts}, "
            f"{where(drafting.rows[row], output, system.num_draft)}"
        )
    return p_value, num_rounds


def _fits(proposal: Proposal, parents: Sequence[int]) -> Iterator[tuple[TableFit, tuple[int, ...]]]:
    """Yields how the tokens of every node fit, and the drafts before the one that fits least."""
    tokens = np.asarray(proposal.tokens, np.int64)
    probs = np.asarray(proposal.probs, np.float64)
    V = probs.shape[2]
    rows = np.arange(len(tokens))
    before = np.zeros(len(tokens), np.int64)
    for i, parent in enumerate(parents):
        q = probs[:, parent].copy()
        for j in range(i):
            if parents[j] == parent:
                q[rows, tokens[:, j]] = 0.0
        total = q.sum(axis=1)
        # Where nothing is left to draw from, the token is the drafter's own choice.
        at = np.flatnonzero(np.asarray(proposal.is_offered)[:, i] & (total > 1e-9))
        q = q[at] / total[at, None]
        _, group = np.unique(before[at], return_inverse=True)
        if V * _PER_CELL * (group.max(initial=0) + 1) > len(at):
            group = np.zeros(len(at), np.int64)
        if V * _PER_CELL <= len(at):
            fit = fit_table(tokens[at, i], np.where(q > 1e-9, q, 0.0), group)
            draft = tokens[at[group == fit.group][0]].tolist()
            yield fit, path_tokens(draft, parents, parent)
        before = before * V + tokens[:, i]
