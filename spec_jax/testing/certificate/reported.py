"""What a drafter reports to draw from: as weights of an enumeration, and against its draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from scipy.stats import chi2

from spec_jax import decoding
from spec_jax.testing.certificate.forcing import (
    FREE,
    SMALLEST,
    DraftDistribution,
    Forced,
    check_faults,
    draws_as_reported,
    force,
    in_chunks,
    make_contexts,
    parents_of,
    possible_drafts,
    propose_afresh,
    width_of,
)
from spec_jax.testing.certificate.records import CertificateError, Range, probability, short, where
from spec_jax.testing.oracles import Row

_SAME = 1e-4  # the largest distance of two reports of one distribution, see ``_off``
_RARE = 1e-30


def all_drafts(system: decoding.System) -> list[tuple[int, ...]]:
    """Returns all that may be drafted in a round, whatever its probability."""

    def uniform(way):
        return np.ones(system.target.last_id + 1)

    dist = uniform if system.drafter.is_sampled else None
    return [draft for draft, _ in possible_drafts(parents_of(system), dist)]


def force_all(
    system: decoding.System,
    params: dict[str, Any],
    rows: Sequence[Row],
    prefixes: Sequence[tuple[int, tuple[int, ...]]],
    num_tokens: int,
    batch: int,
    stated: DraftDistribution | None = None,
) -> Forced | None:
    """Forces every draft that can be, weighted by the distributions that the drafter reports.

    Args:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      rows: prompts and samplers.
      prefixes: (row, output) before the rounds.
      num_tokens: maximum tokens of an output.
      batch: rows drafted at once.
      stated: the distributions that the drafter should report, if they are known.

    Returns:
      The rounds; the weights of each prefix sum to one. None if the drafter does not draw with
      ``Context.gumbel``.

    Raises:
      CertificateError: the drafter does not report distributions, or others than stated.
    """
    drafter = system.drafter
    parents = parents_of(system)
    drafts = all_drafts(system)
    items = [prefix for prefix in prefixes for _ in drafts]
    wanted = np.asarray(drafts * len(prefixes))
    forced = force(system, params, rows, items, wanted, num_tokens, batch)
    if not drafter.is_sampled:
        return forced
    reports = _reports(system, rows, forced, wanted, parents, stated)
    weights = np.zeros(len(items))
    seen = set()
    keep = []
    is_dropped = forced.proposal.is_dropped
    is_dropped = np.zeros(wanted.shape, bool) if is_dropped is None else np.asarray(is_dropped)
    for i, prefix in enumerate(items):
        drawn = _drawn(forced, wanted, i)
        draft, weight = _weight(prefix, drawn, is_dropped[i], reports, parents)
        if weight > 0 and (prefix, draft) not in seen:
            seen.add((prefix, draft))
            keep.append(i)
            weights[i] = weight
    total = {prefix: 0.0 for prefix in prefixes}
    for i in keep:
        total[items[i]] += weights[i]
    if any(abs(x - 1) > 1e-4 for x in total.values()):
        return None
    return forced._replace(weights=weights).at(np.asarray(keep))


def check_report(
    system: decoding.System, params: dict[str, Any], rows: Sequence[Row], forced: Forced, batch: int
) -> None:
    """Raises a CertificateError if a drafter draws from another distribution than it reports."""
    wrong = np.flatnonzero(~draws_as_reported(system, params, forced, batch))
    if len(wrong):
        row, output = forced.items[wrong[0]]
        raise CertificateError(
            f"drafter {system.drafter.name!r} draws from another distribution than "
            f"Proposal.probs, {where(rows[row], output, system.num_draft)}"
        )


def first_drafts(forced: Forced, offered: int | np.ndarray) -> Forced:
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
    return [first_drafts(forced, (number + shift) % (K + 1)) for shift in range(K + 1)]


def with_confidence(forced: Forced) -> Forced:
    """Returns the rounds with a confidence in each draft, which depends on the drafts before it."""
    proposal = forced.proposal
    drawn = defaultdict(np.random.default_rng(5).random)
    confidence = [
        [drawn[item, tuple(tokens[:i])] for i in range(len(tokens))]
        for item, tokens in zip(forced.items, proposal.tokens.tolist())
    ]
    return forced._replace(proposal=proposal.replace(confidence=np.float32(confidence)))


def _drawn(forced: Forced, wanted, i) -> list[int]:
    """The tokens that are offered, and those that were pushed where none is."""
    is_offered = np.asarray(forced.proposal.is_offered[i])
    return np.where(is_offered, forced.proposal.tokens[i], wanted[i]).tolist()


def _way(draft: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The tokens on the path to a node, its own included."""
    way = []
    while node:
        way.insert(0, draft[node - 1])
        node = parents[node - 1]
    return tuple(way)


def _reports(system, rows, forced: Forced, wanted, parents, stated):
    """The distribution f64[V] after each (prefix, way) at which a draft was offered."""
    reports = {}
    probs = np.asarray(forced.proposal.probs, np.float64)
    name = system.drafter.name
    K = system.num_draft
    is_offered = np.asarray(forced.proposal.is_offered)
    for i, prefix in enumerate(forced.items):
        draft = _drawn(forced, wanted, i)
        row, output = prefix
        for node in np.flatnonzero(is_offered[i]).tolist():
            parent = parents[node]
            key = prefix, _way(draft, parents, parent)
            q = probs[i, parent]
            if key not in reports:
                if not (q.min() >= 0 and abs(q.sum() - 1) < 1e-3):
                    raise CertificateError(
                        f"drafter {name!r} reports {short(q)} as a distribution, after the drafts "
                        f"{key[1]}, {where(rows[row], output, K)}"
                    )
                reports[key] = q
                if stated is not None:
                    should = stated(rows[row], output, key[1])
                    off = _off(should, q)
                    token = int(off.argmax())
                    if off[token] > _SAME:
                        raise CertificateError(
                            f"drafter {name!r} reports probability {probability(q[token])} for "
                            f"token {token} and should report {probability(should[token])}, after "
                            f"the drafts {key[1]}, {where(rows[row], output, K)}"
                        )
            elif _off(reports[key], q).max() > _SAME:
                raise CertificateError(
                    f"drafter {name!r} reports {short(q)} where it draws token {draft[node]}, and "
                    f"{short(reports[key])} where it draws another: the report may not depend on "
                    f"the draw; after the drafts {key[1]}, {where(rows[row], output, K)}"
                )
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
        q = reports.get((prefix, _way(drawn, parents, parent)))
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


def check_draws(
    system: decoding.System,
    params: dict[str, Any],
    rows: Sequence[Row],
    prefixes: Sequence[tuple[int, tuple[int, ...]]],
    num_tokens: int,
    trials: int,
    batch: int,
    alpha: float,
) -> tuple[float, int]:
    """Tests by chi-square that the drafter draws from what it reports, with noise of its own.

    Args:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      rows: prompts and samplers.
      prefixes: (row, output) before the rounds.
      num_tokens: maximum tokens of an output.
      trials: seeds for each prefix.
      batch: rows drafted at once.
      alpha: smallest p-value that passes.

    Returns:
      The p-value, corrected for the number of tests, and the number of rounds drafted.

    Raises:
      CertificateError: the draws have another distribution.
    """
    parents = parents_of(system)
    tests = []
    num_rounds = 0
    contexts = make_contexts(
        rows, prefixes, width_of(rows, num_tokens, system.num_draft), system.target.vocab_size
    )
    propose = jax.jit(lambda contexts: propose_afresh(system, params, contexts, None)[1])
    for i, (row, output) in enumerate(prefixes):
        index = np.full(trials, i)
        seeds = (np.arange(trials) + i * trials).astype(np.uint32)
        tokens, length, sampler, draft_sampler = jax.tree.map(lambda x: x[index], contexts)
        samplers = (sampler.replace(seed=seeds), draft_sampler.replace(seed=seeds))
        proposal = in_chunks(propose, batch, (tokens, length, *samplers))
        check_faults(system, rows, [prefixes[i]] * trials, proposal)
        num_rounds += trials
        for p_value, cell in _tests(proposal, parents):
            tests.append((p_value, cell, row, output))
    if not tests:
        return 1.0, num_rounds
    p_value, cell, row, output = min(tests, key=lambda test: test[0])
    p_value = min(1.0, p_value * len(tests))
    if not p_value >= alpha:
        drafts, token, seen, size, q = cell
        raise CertificateError(
            f"drafter {system.drafter.name!r} draws token {token} with probability "
            f"{probability(seen / size)} (of {size:,} draws) and reports {probability(q)}, after "
            f"the drafts "
            f"{drafts}, {where(rows[row], output, system.num_draft)}"
        )
    return p_value, num_rounds


def _tests(proposal, parents):
    """Yields the p-value of every node's tokens, given the drafts before, and the worst cell."""
    tokens = np.asarray(proposal.tokens, np.int64)
    probs = np.asarray(proposal.probs, np.float64)
    V = probs.shape[2]
    before = np.zeros(len(tokens), np.int64)
    is_offered = np.asarray(proposal.is_offered)
    for i, parent in enumerate(parents):
        offered = np.flatnonzero(is_offered[:, i])
        statistic = 0.0
        freedom = 0
        cells = []
        for code in np.unique(before[offered]):
            at = offered[before[offered] == code]
            q = probs[at, parent].mean(axis=0)
            q[[tokens[at[0], j] for j in range(i) if parents[j] == parent]] = 0.0
            if q.sum() <= 1e-9:
                continue  # the drafter's own choice
            q = q / q.sum()
            seen = np.bincount(tokens[at, i], minlength=V)
            drafts = _way(tokens[at[0]].tolist(), parents, parent)
            for token in range(V):
                off = (seen[token] - q[token] * len(at)) / np.sqrt(max(q[token] * len(at), 1e-3))
                cells.append((abs(off), (drafts, token, int(seen[token]), len(at), q[token])))
            if seen[q <= 1e-9].any():
                statistic = np.inf
            expected = q * len(at)
            is_large = expected >= 5
            rest = [x[~is_large].sum() for x in (seen, expected)]
            alone = [(o, e) for o, e in zip(seen[is_large], expected[is_large])]
            if rest[1] >= 5:
                alone.append(tuple(rest))
            if len(alone) > 1:
                # Without a pooled rest the cells do not sum to the total, and lose no freedom.
                statistic += sum((o - e) ** 2 / e for o, e in alone)
                freedom += len(alone) - (rest[1] >= 5 or rest[1] <= 1e-9)
        if cells and (freedom or np.isinf(statistic)):
            worst = max(cells, key=lambda cell: cell[0])[1]
            yield float(chi2.sf(statistic, max(freedom, 1))), worst
        before = before * V + tokens[:, i]
