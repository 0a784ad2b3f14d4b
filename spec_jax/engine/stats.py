"""Statistics of a generation: what is counted, and how.

Conventions.
  emitted    output tokens that are kept after cuts by stop tokens, stop strings and limits.
             ``emitted = first + accepted + corrected + bonus``, checked on construction.
  first      tokens that prefill sampled, one per row.
  accepted   drafted tokens that were kept.
  corrected  tokens that the target chose in place of a rejected draft.
  bonus      tokens that the target chose in rounds without a rejected draft. In plain decoding
             every token after the first is a bonus token.
  rounds     target passes after prefill that emitted a token of a row. A pass over a batch
             counts once for each active row.
  drafted    drafts offered in those rounds, by position; a row may offer fewer than K. Those whose
             place lies past the end that a limit, a stop token or a stop string sets to the row
             are not drafted but ``cut``: none of them can be emitted, whatever the rule decides.
  reached    drafts whose predecessors were all accepted; the rule never looks at later ones.
  n1_fallbacks  rows decoded one token per pass although a draft was given, because the target
             cannot undo a rejected token. Rows under ``force_n1`` are not counted.
  undrafted_rounds  rounds without drafts in which K of them would have passed the drafter's maximum
             length, see ``load_draft(max_length=...)``.
  nan_drafts rounds in which logits of the draft were not finite. Drafts of such logits are not
             offered, and the target decodes without them. Rounds after a stop string count too.
  tau        mean acceptance length: tokens emitted per round. The target's token is included,
             so a round with n accepted drafts emits n + 1.
  compile_s  time in which programs were compiled or read from the compilation cache, once for
             each shape, see ``SpeculativeDecoder.warmup``. With adaptive K it includes the first
             timing of each K. It is not part of prefill_s, decode_s or any rate.

The conditional acceptance at position i is accepted_i / reached_i; the unconditional one is
accepted_i / drafted_i. Tokens that were cut off are not counted, drafts that were cut only as such.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_jax.decoding import Finish, Kind
from spec_jax.show import page, plots
from spec_jax.show.summary import ReprMixin

_ENDS = (Finish.LENGTH, Finish.STOP_TOKEN, Finish.STOP_STRING)


@dataclasses.dataclass(frozen=True, repr=False)
class Stats(ReprMixin):
    """Counts of one or many rows; ``a + b`` adds them."""

    emitted: int = 0
    first: int = 0
    accepted: int = 0
    corrected: int = 0
    bonus: int = 0
    rounds: int = 0
    drafted_at: tuple[int, ...] = ()  # by position, 1..K
    cut_at: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()  # rounds by accepted drafts, 0..K
    expected_at: tuple[float, ...] = ()  # sums of the rule's closed form over reached positions
    n1_fallbacks: int = 0
    undrafted_rounds: int = 0
    nan_drafts: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0

    def __post_init__(self):
        parts = self.first + self.accepted + self.corrected + self.bonus
        if self.emitted != parts:
            raise AssertionError(
                f"emitted {self.emitted} != first {self.first} + accepted {self.accepted} + "
                f"corrected {self.corrected} + bonus {self.bonus}"
            )

    def __add__(self, other: Stats) -> Stats:
        def add(a, b):
            if not isinstance(a, tuple):
                return a + b
            return tuple(x + y for x, y in itertools.zip_longest(a, b, fillvalue=0))

        names = [f.name for f in dataclasses.fields(self)]
        return Stats(**{n: add(getattr(self, n), getattr(other, n)) for n in names})

    @property
    def drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def offered_at(self) -> tuple[int, ...]:
        """Drafts by position, those included that were cut."""
        pairs = itertools.zip_longest(self.drafted_at, self.cut_at, fillvalue=0)
        return tuple(drafted + cut for drafted, cut in pairs)

    @property
    def rejected(self) -> int:
        """Drafts that were reached and not accepted."""
        return sum(self.reached_at) - self.accepted

    @property
    def elapsed_s(self) -> float:
        """Prefill and decoding together, without compilation."""
        return self.prefill_s + self.decode_s

    @property
    def tau(self) -> float:
        """Mean acceptance length: average tokens per round; NaN before the first round."""
        return _ratio(self.emitted - self.first, self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return _ratio(self.accepted, self.drafted)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Conditional acceptance: accepted over reached drafts; NaN where none was reached."""
        return tuple(map(_ratio, self.accepted_at, self.reached_at))

    @property
    def unconditional_acceptance_by_position(self) -> tuple[float, ...]:
        return tuple(map(_ratio, self.accepted_at, self.drafted_at))

    @property
    def expected_by_position(self) -> tuple[float, ...]:
        """The rule's closed-form acceptance at each position, averaged over the reached drafts."""
        return tuple(map(_ratio, self.expected_at, self.reached_at))

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, divided by the decoding time without compilation."""
        return _ratio(self.emitted - self.first, self.decode_s)

    def plot(self, axes: Any = None) -> Any:
        """Draws acceptance by position, measured and expected, and rounds by accepted drafts.

        Args:
          axes: two matplotlib axes to draw on; None makes a new figure.

        Returns:
          The matplotlib figure.

        Raises:
          ConfigError: matplotlib is not installed.
        """
        return plots.plot_acceptance(
            self.acceptance_by_position,
            self.reached_at,
            self.expected_by_position,
            self.lengths,
            self.tau,
            axes,
        )

    def _repr_fields(self) -> dict[str, str]:
        kinds = {name: getattr(self, name) for name in ("first", "accepted", "corrected", "bonus")}
        parts = ", ".join(f"{count:,} {name}" for name, count in kinds.items() if count)
        facts = {"tokens": f"{self.emitted:,}" + (f" ({parts})" if parts else "")}
        facts |= {"rounds": f"{self.rounds:,}", "tau": f"{self.tau:.2f}"}
        if self.drafted:
            facts["acceptance"] = f"{self.acceptance_rate:.2f}"
        if self.undrafted_rounds:
            facts["past the draft's maximum length"] = f"{self.undrafted_rounds:,} rounds"
        if self.nan_drafts:
            facts["rounds with non-finite drafts"] = f"{self.nan_drafts:,}"
        if self.decode_s:
            facts["tokens/s"] = f"{self.tokens_per_s:.1f}"
        if self.compile_s:
            facts["compiled in"] = f"{self.compile_s:.1f} s"
        return facts

    def _repr_html_(self) -> str:
        def two(values):
            return [f"{value:.2f}" for value in values]

        rows = [
            ("position in the draft", *map(str, range(1, len(self.drafted_at) + 1))),
            ("accepted, if reached", *two(self.acceptance_by_position)),
            ("expected of the rule", *two(self.expected_by_position)),
            ("drafts reached", *map(str, self.reached_at)),
        ]
        return page.table("Stats", [*self._repr_fields().items(), *(r for r in rows if len(r) > 1)])

    def to_dict(self) -> dict:
        """Counts and derived rates as plain values for a JSON report."""
        derived = (
            "drafted",
            "rejected",
            "elapsed_s",
            "tau",
            "acceptance_rate",
            "acceptance_by_position",
            "unconditional_acceptance_by_position",
            "expected_by_position",
            "tokens_per_s",
        )

        values = dataclasses.asdict(self) | {n: getattr(self, n) for n in derived}
        return {n: list(x) if isinstance(x, tuple) else x for n, x in values.items()}


class RunningStats:
    """The sum of the statistics of finished calls; safe to use from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self.value = Stats()

    def add(self, stats: Stats) -> None:
        """Adds the statistics of one call."""
        with self._lock:
            self.value += stats

    def reset(self) -> None:
        """Starts again from zero."""
        with self._lock:
            self.value = Stats()


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")


def row_stats(
    kind: np.ndarray,
    offered: np.ndarray,
    num_draft: int,
    expected: np.ndarray | None = None,
    *,
    finish: int = Finish.LENGTH,
    drafted_until: float = math.inf,
) -> Stats:
    """Counts one row from its record.

    Args:
      kind: i8[M'], the ``Kind`` of each output token that is kept, in order.
      offered: i16[M'], drafts offered by the round that begins at this token; -1 if none begins.
      num_draft: K.
      expected: f32[M'], the rule's closed-form acceptance where a draft was reached, else NaN.
      finish: the ``Finish`` of the row. One that was cancelled, stopped at a fault or is running
        has no end past which drafts are cut.
      drafted_until: after more of these tokens than this, K drafts pass the drafter's maximum.
    """
    K = num_draft
    drafted, cut, reached, accepted = np.zeros((4, K), int)
    expected_sum = np.zeros(K if expected is not None else 0)
    lengths = np.zeros(K + 1, int)
    starts = np.flatnonzero(offered >= 0)
    for begin, end in zip(starts, [*starts[1:], len(kind)]):
        n_accept = int((kind[begin:end] == Kind.ACCEPTED).sum())
        n_reached = n_accept + int(kind[end - 1] == Kind.CORRECTED)
        room = len(kind) - begin if finish in _ENDS else K
        drafted[: min(offered[begin], room)] += 1
        cut[room : offered[begin]] += 1
        reached[:n_reached] += 1
        accepted[:n_accept] += 1
        lengths[n_accept] += 1
        if expected is not None:
            expected_sum[:n_reached] += expected[begin : begin + n_reached]

    def of_kind(k):
        return int((kind == k).sum())

    return Stats(
        emitted=len(kind),
        first=of_kind(Kind.FIRST),
        accepted=of_kind(Kind.ACCEPTED),
        corrected=of_kind(Kind.CORRECTED),
        bonus=of_kind(Kind.BONUS),
        rounds=len(starts),
        drafted_at=tuple(map(int, drafted)),
        cut_at=tuple(map(int, cut)),
        reached_at=tuple(map(int, reached)),
        accepted_at=tuple(map(int, accepted)),
        lengths=tuple(map(int, lengths)),
        expected_at=tuple(map(float, expected_sum)),
        undrafted_rounds=int(((offered == 0) & (np.arange(len(kind)) > drafted_until)).sum()),
    )


def predicted_speedup(
    conditional_acceptance: Sequence[float], draft_cost: float, verify_cost: float = 1.0
) -> float:
    """Predicts the speed-up over plain decoding from acceptance and costs.

    It is ``(1 + sum_i prod_{j<=i} a_j) / (K c + v)``. All costs are in units of one target pass
    over one token. Source: Leviathan et al., arXiv 2211.17192, theorem 3.8, with a rate for each
    position and a verify pass that may cost more than a pass over one token.

    Args:
      conditional_acceptance: a_j by position, K values; NaN counts as 0.
      draft_cost: c, the cost of one drafted token.
      verify_cost: v, the cost of a pass over K + 1 tokens and the rest of the round.
    """
    tokens = 1.0
    reach = 1.0
    for rate in conditional_acceptance:
        reach *= 0.0 if np.isnan(rate) else rate
        tokens += reach
    return tokens / (len(conditional_acceptance) * draft_cost + verify_cost)
