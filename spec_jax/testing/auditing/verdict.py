"""The verdict on two greedy outputs that diverge, from recorded numbers: rounding or a bug."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# In units of the honest pass's error; docs/decisions.md has the measurements.
LOCAL_FACTOR = 3.0  # of the logits after one prefix
POOLED_FACTOR = 1.3  # of all of a row, on average; more of a few positions, see ``judge``


@dataclasses.dataclass(frozen=True)
class RowAudit:
    """The audit's result for one prompt. Positions count output tokens from 0.

    Attributes:
      row: the number of the prompt.
      verdict: "identical", "rounding" or "bug".
      evidence: sentences.
      at: the position of the first difference; None where there is none.
      tokens: the two tokens there, of plain decoding and of the other; None where an output ended.
      gap: the distance, in float32, of the worse of the two below the best logit.
      rounding: the largest error of a logit there in the dtype of the weights.
      deviations: the largest distance of each decoding's logits from the float32 pass, as a
        multiple of that of a pass without a cache in the same dtype.
      pooled: likewise, root mean square of all positions up to the difference.
    """

    row: int
    verdict: str
    evidence: tuple[str, ...] = ()
    at: int | None = None
    tokens: tuple[int | None, int | None] | None = None
    gap: float | None = None
    rounding: float | None = None
    deviations: tuple[float, ...] = ()
    pooled: tuple[float, ...] = ()

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.verdict == "rounding"

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, for JSON."""
        return dataclasses.asdict(self) | {"is_near_tie": self.is_near_tie}

    def __str__(self) -> str:
        where = "" if self.at is None else f" at token {self.at}"
        return f"row {self.row}: {self.verdict}{where}; " + "; ".join(self.evidence)


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of ``audit``.

    Attributes:
      num_rows: prompts whose outputs were compared.
      rows: the examined rows: those that differ, or all. For the others only the equality of the
        tokens is known.
      width: K + 1, the tokens of a verify pass.
    """

    num_rows: int
    rows: tuple[RowAudit, ...]
    width: int

    def of(self, verdict: str) -> tuple[RowAudit, ...]:
        """Returns the rows with this verdict."""
        return tuple(row for row in self.rows if row.verdict == verdict)

    @property
    def num_not_examined(self) -> int:
        """How many rows were not examined, since their outputs are identical."""
        return self.num_rows - len(self.rows)

    @property
    def is_explained(self) -> bool:
        """Whether no examined row shows a bug, so that every row that differs is explained."""
        return not self.of("bug")

    def to_dict(self) -> dict[str, Any]:
        """Returns counts and rows, for JSON."""
        counts = {verdict: len(self.of(verdict)) for verdict in _DESCRIPTIONS}
        counts["not_examined"] = self.num_not_examined
        rows = [row.to_dict() for row in self.rows]
        return {"num_rows": self.num_rows, **counts, "width": self.width, "rows": rows}

    def __str__(self) -> str:
        plural = "s" * (self.num_rows != 1)
        count = len(self.rows)
        parts = []
        if count:
            kinds = (f"{len(self.of(verdict))} {text}" for verdict, text in _DESCRIPTIONS.items())
            parts.append(f"{count} examined ({', '.join(kinds)})")
        if self.num_not_examined:
            parts.append(f"{self.num_not_examined} not examined, with identical outputs")
        lines = [f"{self.num_rows} prompt{plural}: {', '.join(parts)}"]
        return "\n".join([*lines, *(f"  {row}" for row in self.rows if row.verdict != "identical")])


_DESCRIPTIONS = {"identical": "identical", "rounding": "explained by rounding", "bug": "with a bug"}


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Returns the first position at which two outputs differ; None if they are the same."""
    pairs = zip(first, second)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return None if at == len(first) == len(second) else at


class Trail(NamedTuple):
    """How a decoding's own logits support its tokens.

    Attributes:
      name: of the decoding, for sentences.
      ratio: f64[N], how far its logits are from the float32 pass, over how far those of the
        honest pass are.
      pooled: the same of all positions together, root mean square.
      own_gap: f64[N], how far its token lies below the best of its own logits.
      tolerance: what of that gap the rounding of one logit explains.
      parts_at: the position where the second run gave another token than the first; None if
        nowhere.
    """

    name: str
    ratio: np.ndarray
    pooled: float
    own_gap: np.ndarray
    tolerance: float
    parts_at: int | None = None


def judge(
    at: int | None,
    gaps: np.ndarray,
    rounding: np.ndarray,
    trails: Sequence[Trail],
    taken: Sequence[str] = (),
) -> tuple[str, tuple[str, ...]]:
    """Returns the verdict on one row and its evidence, from recorded numbers alone.

    Args:
      at: the position of the first difference; None where there is none.
      gaps: f64[N], how far, by the float32 pass, the token at each position lies below the best;
        at the difference the worse of the two.
      rounding: f64[N], the largest error of a logit at each position.
      trails: of the decodings that were run again.
      taken: says which token each output takes at the difference; none where there is none.
    """
    wrong = []
    right = []
    for trail in trails:
        n = len(trail.ratio)
        # The fewer positions, the farther their average may be: as far as one of them alone.
        most = max(POOLED_FACTOR, 1 + (LOCAL_FACTOR - 1) / max(n, 1))
        missed = np.flatnonzero(trail.own_gap > trail.tolerance)
        if len(missed):
            i = int(missed[0])
            wrong.append(
                f"{trail.name} emits a token at {i} that is not the best of its own logits "
                f"there, but {trail.own_gap[i]:.2g} below"
            )
        far = np.flatnonzero(~(trail.ratio <= LOCAL_FACTOR))
        if len(far):
            i = int(far[0])
            wrong.append(
                f"{trail.name}'s own logits at token {i} are {trail.ratio[i]:.1f} times as far "
                f"from float32 as by rounding alone (limit {LOCAL_FACTOR:g})"
            )
        elif n and not trail.pooled <= most:
            wrong.append(
                f"{trail.name}'s own logits are on average {trail.pooled:.2f} times as far from "
                f"float32 as by rounding alone (limit {most:.2g})"
            )
        elif n:
            right.append(
                f"{trail.name}'s own logits are {trail.pooled:.2f} times as far from float32 as by "
                f"rounding alone, at one token {trail.ratio.max():.2f}"
            )
        if trail.parts_at is not None:
            right.append(f"{trail.name}, run again, diverges from its output at {trail.parts_at}")
    is_far = ~(gaps <= 2 * rounding)
    shared = np.flatnonzero(is_far[:at])
    if len(shared):
        i = int(shared[0])
        wrong.append(
            f"the token at {i} lies {gaps[i]:.2g} below the best in float32, where rounding moves "
            f"a logit by up to {rounding[i]:.2g}"
        )
    is_bug = bool(wrong) or bool(is_far.any())
    evidence = wrong if is_bug else right
    if at is not None:
        evidence.append(
            f"at {at} {', and '.join(taken)} in float32, where rounding moves a logit by up to "
            f"{rounding[at]:.2g}"
        )
    if is_bug:
        return "bug", tuple(evidence)
    return ("identical" if at is None else "rounding"), tuple(evidence)
