"""The figures of ``experiments.evaluate``: intervals, categories, and where a round's time goes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.comparison.decode_measure import Tally, busy_share, predicted_speedup
from experiments.comparison.evaluate_setup import Setup
from experiments.comparison.evaluation import Stage
from spec_jax.config import GREEDY_BELOW
from spec_jax.data.questions import Question
from spec_jax.evaluation import costs, head_eval
from spec_jax.evaluation.grid import Cell, Row
from spec_jax.intervals import Interval, jackknife, paired_speedup

_MIN_QUESTIONS = 4  # of a category; an interval of fewer says nothing


class Counts(NamedTuple):
    """What one cell did, by question.

    Attributes:
      tokens: i64[P], tokens emitted in rounds.
      rounds: i64[P], rounds.
      reached: i64[P,K], drafts at each position whose predecessors were all accepted.
      accepted: i64[P,K], those that it accepted.
    """

    tokens: np.ndarray
    rounds: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, questions: Sequence[Sequence[Row]]) -> Counts:
        """Counts the outputs of one cell, the turns of each question together."""
        counts = []
        for rows in questions:
            s = sum((row.stats for row in rows[1:]), rows[0].stats)
            counts.append((s.emitted - s.first, s.rounds, s.reached_at, s.accepted_at))
        return cls(*map(np.asarray, zip(*counts)))

    @staticmethod
    def rates(
        tokens: np.ndarray, rounds: np.ndarray, reached: np.ndarray, accepted: np.ndarray
    ) -> np.ndarray:
        """Computes tau and the conditional acceptance at each position from sums of the counts.

        Returns:
          f64[...,1+K], NaN where no draft was reached.
        """
        return np.concatenate([(tokens / rounds)[..., None], accepted / reached], axis=-1)

    def intervals(self) -> list[Interval]:
        """Returns ``rates`` of all questions with their intervals."""
        tau, *accept = jackknife(self.rates, *self)
        return [tau.within(1, self.reached.shape[1] + 1), *(x.within(0, 1) for x in accept)]


def differences(counts: Counts, first: Counts) -> list[Interval]:
    """Returns intervals of the rates of ``counts`` less those of ``first``, by question."""
    num = len(counts)
    less = lambda *sums: Counts.rates(*sums[:num]) - Counts.rates(*sums[num:])
    return jackknife(less, *counts, *first)


def figures(setup: Setup, stage: Stage, found: costs.Costs | None) -> list[dict[str, Any]]:
    """Returns the entries of a report's ``results`` of a stage.

    Args:
      setup: What was decoded.
      stage: A temperature and a batch size, measured.
      found: The costs of passes at this batch size.
    """
    asked, entries, counts = setup.questions.chosen, [], {}
    parts = categories(asked)
    for tally in stage.tallies:
        rows = tally.rows
        by_question = [[rows[i] for i in places] for places in stage.prompts]
        counts[tally.cell] = count = Counts.of(by_question)
        tau, *accept = count.intervals()
        entry = {
            **tally.result(stage.plain),
            "label": tally.cell.label,
            "batch": stage.bench.batch,
            "tau_interval": [tau.low, tau.high],
            "accept_intervals": [[x.low, x.high] for x in accept],
            "categories": {
                name: {"group": asked[chosen[0]].group, **_part(stage, tally, count, chosen)}
                for name, chosen in parts.items()
            },
        }
        if tally is not stage.plain:
            speedup = _speedup(stage, tally, range(len(asked)))
            entry["speedup_interval"] = [speedup.low, speedup.high]
        first = _first(stage.cells, tally.cell)
        if first is not None:
            entry["compared_with"] = first.label
            entry["difference"] = differences(count, counts[first])
        entries.append(entry | _times(stage, tally, entry, found))
    return entries


def categories(asked: Sequence[Question]) -> dict[str, list[int]]:
    """Returns the questions of each group and, of a group of several, of its categories.

    Empty if there is one category only.
    """
    if len({question.category for question in asked}) < 2:
        return {}
    by_group = itertools.groupby(sorted(range(len(asked)), key=lambda i: _order(asked, i)),
                                 lambda i: asked[i].group)  # fmt: skip
    found: dict[str, list[int]] = {}
    for group, members in by_group:
        found[group] = [*members]
        for i in found[group]:
            if asked[i].category != group:
                found.setdefault(asked[i].category, []).append(i)
    return found


def _order(asked: Sequence[Question], i: int) -> int:
    """The number of the first question of the same group."""
    return next(j for j, other in enumerate(asked) if other.group == asked[i].group)


def _part(stage: Stage, tally: Tally, counts: Counts, chosen: Sequence[int]) -> dict[str, Any]:
    """Returns the figures of some questions; speeds only where each is a batch of its own."""
    part = Counts(*(x[np.asarray(chosen)] for x in counts))
    tau, *accept = part.intervals()
    found = {
        "questions": len(chosen), "tau": tau.value, "tau_interval": [tau.low, tau.high],
        "acceptance_by_position": [x.value for x in accept],
    }  # fmt: skip
    if stage.bench.batch > 1:
        return found
    own_s, own_tokens = _by_question(stage, tally, chosen)
    plain_s, plain_tokens = _by_question(stage, stage.plain, chosen)
    speedup, is_plain = _speedup(stage, tally, chosen), tally is stage.plain
    if len(chosen) < _MIN_QUESTIONS:
        speedup = Interval(speedup.value, np.nan, np.nan)
    return found | {
        "tokens_per_s": float(own_tokens.sum() / max(own_s.sum(), 1e-9)),
        "plain_tokens_per_s": float(plain_tokens.sum() / max(plain_s.sum(), 1e-9)),
        "speedup": 1.0 if is_plain else speedup.value,
        "speedup_interval": None if is_plain else [speedup.low, speedup.high],
    }


def _speedup(stage: Stage, tally: Tally, chosen: Sequence[int]) -> Interval:
    """The speed-up over pairs: of questions, or of batches of several of them."""
    if stage.bench.batch > 1 or len(chosen) == 1 == len(stage.groups):
        own, plain = tally.pairs, stage.plain.pairs
    else:
        own, plain = (_by_question(stage, t, chosen) for t in (tally, stage.plain))
    return paired_speedup(own[0], plain[0], own[1], plain[1])


def _by_question(stage: Stage, tally: Tally, chosen: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Times and tokens f64[P] of questions, each of which is a group of its own batches."""
    times, tokens = [], []
    for q in chosen:
        batches = stage.groups[q].batches
        times.append(sum(np.median(tally.times_s[i]) for i in batches))
        tokens.append(sum(tally.runs[i].tokens for i in batches))
    return np.asarray(times), np.asarray(tokens)


def _first(cells: Sequence[Cell], cell: Cell) -> Cell | None:
    """The first drafter's chain of the same K, with which another one's is compared."""
    if cell.tree or not cell.k:
        return None
    same = [c for c in cells if c.k == cell.k and not c.tree]
    return None if same[0].method == cell.method else same[0]


def _times(
    stage: Stage, tally: Tally, entry: Mapping[str, Any], found: costs.Costs | None
) -> dict[str, Any]:
    """Returns the predicted speed-up, and of what a round consists, in milliseconds.

    A round is a verify pass, the passes of the draft, and the rest: acceptance, commits, dispatch.
    ``difference_ms`` is that rest, of the cell and of plain decoding. The prediction is for the
    rows that run, see ``busy_share``.
    """
    busy = busy_share([*tally.runs.values()])
    if found is None:
        return {"predicted_speedup": None, "busy_share": busy}
    own, plain = (_round_ms(t) for t in (tally, stage.plain))
    k, cell = tally.cell.k, tally.cell
    draft = found.draft_cost(cell.method) if k else 0.0
    told = {
        "predicted_speedup": predicted_speedup(found, tally, stage.plain, dict(entry)),
        "busy_share": busy,
        "round_ms": own,
        "draft_cost": draft if k else None,
        "is_draft_cost_told": found.is_told(cell.method),
    }
    if cell.tree or not np.isfinite(draft):
        return told
    verify_ms = found.verify_cost(k) * found.plain_ms
    draft_ms = k * found.draft_cost(cell.method, k) * found.plain_ms if k else 0.0
    rest, of_plain = own - verify_ms - draft_ms, plain - found.plain_ms
    return told | {
        "round_parts_ms": {"verify": verify_ms, "draft": draft_ms, "rest": rest},
        "difference_ms": {"rest of a round": rest, "rest of plain": of_plain} if k else {},
    }


def _round_ms(tally: Tally) -> float:
    """The mean time of a round of a batch."""
    seconds = sum(float(np.median(times)) for times in tally.times_s.values())
    return 1e3 * seconds / max(sum(run.passes for run in tally.runs.values()), 1)


def teacher_forced(setup: Setup, stage: Stage) -> dict[str, list[float]]:
    """Compares greedy chains of heads with the unrolling that trains them, at the same starts.

    Returns:
      The acceptance by position, by the cell's label.
    """
    found = {}
    for tally in stage.tallies:
        draft, cell = setup.drafts.get(tally.cell.method), tally.cell
        is_head = draft is not None and draft.head(setup.target.model) is not None
        is_greedy = cell.temperature < GREEDY_BELOW and cell.rule == "greedy"
        if not is_head or cell.tree or not is_greedy:
            continue
        rows = tally.rows
        reached, accepted = head_eval.teacher_forced(
            setup.target, draft, [stage.bench.prompts[i] for i in rows], [*rows.values()],
            num_draft=cell.k,
        )  # fmt: skip
        with np.errstate(invalid="ignore"):
            found[cell.label] = (accepted / reached).tolist()
    return found
