"""What a comparison has measured of a cell."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spec_jax.engine.stats import Stats
from spec_jax.evaluation.bench import CellOutput
from spec_jax.evaluation.cells import Cell
from spec_jax.evaluation.places import PlaceResult
from spec_jax.evaluation.token_kinds import TOKEN_KINDS
from spec_jax.intervals import Interval, jackknife, shares

if TYPE_CHECKING:
    from spec_jax.testing import RowAudit

NONE = Interval(math.nan, math.nan, math.nan)


def figure(name: str, interval: Interval) -> dict[str, Any]:
    """Returns the entries of report.json of a figure; its interval is None where there is none."""
    bounds = None if math.isnan(interval.low) else interval.bounds
    return {name: interval.value, f"{name}_interval": bounds}


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
    def of(cls, questions: Sequence[Sequence[CellOutput]]) -> Counts:
        """Counts the outputs of one cell, the turns of each question together."""
        counts = []
        for rows in questions:
            s = sum((row.stats for row in rows[1:]), rows[0].stats)
            counts.append((s.emitted - s.first, s.rounds, s.reached_at, s.accepted_at))
        return cls(*map(np.asarray, zip(*counts)))

    def intervals(self) -> tuple[Interval, tuple[Interval, ...]]:
        """Returns tau and the acceptance by position of all questions, with their intervals."""
        (tau,) = jackknife(
            lambda tokens, rounds: (tokens / rounds)[..., None], self.tokens, self.rounds
        )
        return tau.within(1, self.reached.shape[1] + 1), tuple(shares(self.accepted, self.reached))

    def less(self, other: Counts) -> tuple[Interval, ...]:
        """Returns intervals of the rates of these counts less those of others, by question."""

        def rates(tokens, rounds, reached, accepted):
            return np.concatenate([(tokens / rounds)[..., None], accepted / reached], axis=-1)

        def less(*sums):
            return rates(*sums[: len(self)]) - rates(*sums[len(self) :])

        tau, *accept = jackknife(less, *self, *other)
        return tau, *(x.within(-1, 1) for x in accept)


class CategoryResult(NamedTuple):
    """The figures of the questions of one category; speeds only of batches of one prompt."""

    group: str
    questions: int
    tau: Interval
    acceptance: tuple[Interval, ...]
    tokens_per_s: float | None = None
    speedup: Interval | None = None
    plain_tokens_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns an entry of ``categories`` of report.json."""
        entry = {
            "group": self.group,
            "questions": self.questions,
            **figure("tau", self.tau),
            "acceptance_by_position": [x.value for x in self.acceptance],
        }
        if self.speedup is None:
            return entry
        speeds = ("tokens_per_s", "plain_tokens_per_s")
        entry |= {name: getattr(self, name) for name in speeds}
        return entry | figure("speedup", self.speedup)


class KindResult(NamedTuple):
    """The drafts of one kind of token: how many were reached and accepted, and the share."""

    reached: int
    accepted: int
    acceptance: Interval

    @classmethod
    def of(cls, questions: Sequence[Sequence[CellOutput]]) -> dict[str, KindResult]:
        """Counts the outputs of one cell; returns nothing if its rows were not counted by kind."""
        name = "acceptance_by_kind"
        if any(name not in row.seen for rows in questions for row in rows):
            return {}
        counts = np.asarray([sum(np.asarray(row.seen[name]) for row in rows) for rows in questions])
        reached, accepted = np.moveaxis(counts, 2, 0)
        sums = (x.sum(axis=0).tolist() for x in (reached, accepted))
        found = zip(TOKEN_KINDS, *sums, shares(accepted, reached))
        return {kind: cls(*entry) for kind, *entry in found}

    def to_dict(self) -> dict[str, Any]:
        """Returns an entry of ``acceptance_by_kind`` of report.json."""
        counts = {"reached": self.reached, "accepted": self.accepted}
        return counts | {"acceptance": self.acceptance.value, "interval": self.acceptance.bounds}


class RoundTime(NamedTuple):
    """Of what a round consists, in milliseconds.

    Attributes:
      round_ms: The mean time of a round of a batch; of plain decoding, of a token.
      verify_ms: A pass of K + 1 tokens; None of a tree, whose passes were not measured.
      draft_ms: What its K draft passes add; None where they were not measured.
      plain_rest_ms: The ``rest_ms`` of plain decoding.
      draft_cost: A draft pass after the first of a round over a target pass of one token; where
        passes are not told apart, their cost per drafted token.
      is_draft_cost_significant: Whether that cost differs from 0.
    """

    round_ms: float
    verify_ms: float | None = None
    draft_ms: float | None = None
    plain_rest_ms: float | None = None
    draft_cost: float | None = None
    is_draft_cost_significant: bool = True

    @property
    def rest_ms(self) -> float | None:
        """Acceptance, commits and dispatch; 0 where ``is_busy``."""
        if self.verify_ms is None:
            return None
        return max(self.round_ms - self.verify_ms - self.draft_ms, 0.0)

    @property
    def parts_ms(self) -> dict[str, float | None]:
        """Passes and rest of a round, by name."""
        return {"verify": self.verify_ms, "draft": self.draft_ms, "rest": self.rest_ms}

    @property
    def is_busy(self) -> bool:
        """Whether the passes, timed apart, took longer than whole rounds, as on a busy machine."""
        return self.verify_ms is not None and self.verify_ms + self.draft_ms > self.round_ms

    def to_dict(self, is_plain: bool) -> dict[str, Any]:
        """Returns the entries of report.json."""
        entry = {
            "round_ms": self.round_ms,
            "draft_cost": self.draft_cost,
            "is_draft_cost_significant": self.is_draft_cost_significant,
        }
        if self.verify_ms is None:
            return entry
        rest = {"rest of a round": self.rest_ms, "rest of plain": self.plain_rest_ms}
        return entry | {"round_parts_ms": self.parts_ms, "difference_ms": {} if is_plain else rest}


@dataclasses.dataclass(frozen=True)
class CellResult:
    """What was measured of a cell beside plain decoding of the same prompts.

    Attributes:
      cell: The cell; its rule is the name of the one that was used.
      batch: B, prompts decoded together.
      is_lossless: Whether the rule keeps the target's distribution.
      speedup: Tokens per second over those of plain decoding; of plain decoding 1.
      tokens_per_s: Decoded tokens per second, without prefill and compilation.
      plain_tokens_per_s: Those of plain decoding, which took turns with the cell.
      num_pairs: The pairs of times that the interval of the speed-up is over.
      stats: Counts and times of all rows.
      tau: Mean acceptance length, tokens emitted per target pass.
      acceptance: By position, of the drafts whose predecessors were all accepted, the share
        that was accepted; of a tree, by level.
      identical_rows: Rows whose tokens equal plain decoding's; None where the rule samples other
        tokens of the same distribution.
      differences: Rows that diverge from plain decoding, as far as they were examined.
      looping_share: The share of tokens that repeat in loops.
      finish_reasons: Rows by how they ended.
      predicted_speedup: The speed-up that acceptance and the costs of passes predict; None if
        it is not known, NaN of a tree.
      busy_share: The share of the rows that run in a round, on average.
      round_time: Of what a round consists; None if passes were not measured.
      categories: By category, if there are several.
      kinds: Acceptance by kind of token, if it was counted.
      places: Acceptance by place in the chain or tree, if it was counted.
      compared_with: The label of the first draft's cell of the same K; empty if there is none.
      difference: Tau and acceptance less that cell's, by question.
      teacher_forced: The acceptance of the unrolling that trains the head, by position.
    """

    cell: Cell
    batch: int
    is_lossless: bool
    speedup: Interval
    tokens_per_s: float
    plain_tokens_per_s: float
    num_pairs: int
    stats: Stats
    tau: Interval
    acceptance: tuple[Interval, ...]
    identical_rows: int | None
    differences: tuple[RowAudit, ...] = ()
    looping_share: float = 0.0
    finish_reasons: Mapping[str, int] = dataclasses.field(default_factory=dict)
    predicted_speedup: float | None = None
    busy_share: float = math.nan
    round_time: RoundTime | None = None
    categories: Mapping[str, CategoryResult] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, KindResult] = dataclasses.field(default_factory=dict)
    places: Mapping[str, PlaceResult] = dataclasses.field(default_factory=dict)
    compared_with: str = ""
    difference: tuple[Interval, ...] = ()
    teacher_forced: tuple[float, ...] = ()

    @property
    def rows(self) -> int:
        """The number of prompts."""
        return sum(self.finish_reasons.values())

    @property
    def is_identical(self) -> bool | None:
        """Whether every token equals plain decoding's; None where that is not asked."""
        return None if self.identical_rows is None else self.identical_rows == self.rows

    @property
    def num_unexamined(self) -> int:
        """Rows that diverge from plain decoding and were not examined."""
        if self.is_identical is not False:
            return 0
        return self.rows - self.identical_rows - len(self.differences)

    @property
    def has_near_ties_alone(self) -> bool:
        """Whether rounding explains every row that diverges from plain decoding."""
        return not self.num_unexamined and all(d.is_near_tie for d in self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry of ``results`` of report.json."""
        entry = {
            **self.cell._asdict(),
            "label": self.cell.label,
            "batch": self.batch,
            "is_lossless": self.is_lossless,
            **figure("speedup", self.speedup),
            "num_pairs": self.num_pairs,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "identical_to_plain": self.is_identical,
            "identical_rows": self.identical_rows,
            "rows": self.rows,
            "differences": [d.to_dict() for d in self.differences],
            "looping_share": self.looping_share,
            "finish_reasons": dict(self.finish_reasons),
            **self.stats.to_dict(),
            "tokens_per_s": self.tokens_per_s,
            "tau_interval": self.tau.bounds,
            "accept_intervals": [x.bounds for x in self.acceptance],
            "categories": {n: x.to_dict() for n, x in self.categories.items()},
            "predicted_speedup": self.predicted_speedup,
            "busy_share": self.busy_share,
        }
        if self.round_time is not None:
            entry |= self.round_time.to_dict(self.cell.is_plain)
        if self.kinds:
            entry["acceptance_by_kind"] = {n: x.to_dict() for n, x in self.kinds.items()}
        if self.places:
            entry["acceptance_by_place"] = {n: x.to_dict() for n, x in self.places.items()}
        if self.difference:
            entry |= {"compared_with": self.compared_with, "difference": self.difference}
        if self.teacher_forced:
            entry["teacher_forced"] = list(self.teacher_forced)
        return entry
