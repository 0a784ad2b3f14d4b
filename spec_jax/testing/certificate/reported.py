"""What a drafter reports to draw from: as weights of an enumeration, and against its draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from spec_jax.contracts import Proposal
from spec_jax.testing.certificate.forcing import (
    FREE,
    SMALLEST,
    DraftDistribution,
    Drafting,
    Forced,
    Item,
    path_tokens,
    propose_afresh,
)
from spec_jax.testing.certificate.records import (
    ALPHA,
    CertificateError,
    Range,
    probability,
    short,
    where,
)
from spec_jax.testing.oracles import TableFit, fit_table

_SAME = 1e-4  # the largest distance of two reports of one distribution, see ``_off``
_RARE = 1e-30
_PER_CELL = 5  # draws that a cell of a table should have on average


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


def reported(forced: Forced, parents: Sequence[int]) -> Range | None:
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
