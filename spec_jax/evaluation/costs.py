"""What the passes of a round cost, and the speed-up that costs and acceptance predict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from spec_jax.drafters import registry
from spec_jax.engine.stats import predicted_speedup
from spec_jax.evaluation.cells import copying_methods
from spec_jax.evaluation.passes import ITERATIONS, can_split, round_timer
from spec_jax.evaluation.results import CellResult
from spec_jax.evaluation.timing import Timer, interleave
from spec_jax.loading import LoadedHead, LoadedModel

REPEATS = 9
TARGET = "target"


class TimedLoop(NamedTuple):
    """Passes of a round that are timed in one loop, see ``passes.round_timer``.

    Attributes:
      method: What drafts; ``TARGET`` if nothing does.
      num_draft: Drafted tokens per round: the target is fed num_draft + 1 tokens per row.
      num_passes: Passes of the draft.
    """

    method: str
    num_draft: int
    num_passes: int = 0

    def __str__(self) -> str:
        target = f"target pass of {self.num_draft + 1} tokens"
        if not self.num_passes:
            return target
        passes = "first pass" if self.num_passes == 1 else f"{self.num_passes} passes"
        return f"{target} and {passes} of {self.method}"


def timer_makers(
    target: LoadedModel,
    drafts: Mapping[str, LoadedModel | LoadedHead],
    ks: Mapping[str, Collection[int]],
    slots: int,
    batch: int,
    iterations: int = ITERATIONS,
) -> dict[TimedLoop, Callable[[], Timer]]:
    """Returns functions that compile timers whose times ``Costs.of_times`` takes.

    Args:
      target: The target.
      drafts: What drafts, by method.
      ks: Drafted tokens per round, by method, those that draft without a pass too.
      slots: The slots of the caches.
      batch: B, rows.
      iterations: The number of rounds in a timed call.
    """
    wanted = [TimedLoop(TARGET, k) for k in sorted({0}.union(*ks.values()))]
    for method, draft in drafts.items():
        own = sorted(set(ks.get(method, ())) - {0})
        passes = functools.partial(registry.find(draft.method).drafting.round_passes, draft.config)
        if not can_split(draft, target):
            wanted += [TimedLoop(method, k, sum(one.count for one in passes(k))) for k in own]
            continue
        first = {passes(k)[0].width: k for k in own}.values()
        wanted += [TimedLoop(method, k, 1) for k in first]
        wanted += [TimedLoop(method, k, max(k, 2)) for k in own[-1:]]
    sizes = {"slots": slots, "batch": batch, "iterations": iterations}
    make = functools.partial(round_timer, target, **sizes)
    return {
        loop: functools.partial(make, drafts.get(loop.method), loop.num_draft, loop.num_passes)
        for loop in wanted
    }


class Costs(NamedTuple):
    """Costs of passes that were measured together.

    The cost of a draft's pass is what it adds to a loop of the passes before it in a round. Timed
    alone, a small model would seem cheaper, because its weights stay in the processor's caches; in
    a round the target's weights evict them.

    A cost is significant if it is above 0 in three of four turns. Where that of the first pass of
    a round, or of those after it, is not, all passes of the round are taken to cost the same.

    Attributes:
      plain_ms: Milliseconds of a target pass of one token per row.
      draft_ms: Milliseconds of a draft pass of one token per row, after the first of a round, by
        method.
      verify_ms: Milliseconds of a target pass by its width, with that of width 1.
      slots: The slots of the caches.
      batch: The number of rows.
      first_ms: Milliseconds of the first pass of a round of k drafts, by method and k: of a head,
        the refresh. Of a method without ``draft_ms``, those of all its passes.
      insignificant: Passes whose cost is not significant, by method: k of a first one, 0 for the
        others.
    """

    plain_ms: float
    draft_ms: dict[str, float]
    verify_ms: dict[int, float]
    slots: int
    batch: int
    first_ms: dict[str, dict[int, float]] = {}
    insignificant: dict[str, list[int]] = {}

    @classmethod
    def of_models(
        cls,
        target: LoadedModel,
        drafts: Mapping[str, LoadedModel | LoadedHead],
        ks: Mapping[str, Collection[int]],
        *,
        slots: int,
        batch: int = 1,
        repeats: int = REPEATS,
    ) -> Costs:
        """Compiles passes and times them in turns.

        Args:
          target: The target.
          drafts: What drafts, by method.
          ks: Drafted tokens per round, by method.
          slots: The slots of the caches.
          batch: B, rows.
          repeats: The number of turns.
        """
        makers = timer_makers(target, drafts, ks, slots, batch, max(1, ITERATIONS // batch))
        timers = {passes: make() for passes, make in makers.items()}
        return cls.of_times(interleave(timers, repeats), slots=slots, batch=batch)

    @classmethod
    def of_times(cls, times: Mapping[TimedLoop, np.ndarray], *, slots: int, batch: int) -> Costs:
        """Returns the costs that times of interleaved repeats show.

        Args:
          times: f64[repeats] in milliseconds, of the timers of ``timer_makers``.
          slots: The slots of the caches.
          batch: B, rows.
        """
        verify_ms = {}
        first: dict[str, dict[int, np.ndarray]] = {}
        later: dict[str, np.ndarray] = {}
        for loop in sorted(times):
            method, k, num_passes = loop
            if not num_passes:
                verify_ms[k + 1] = float(np.median(times[loop]))
                continue
            # What passes add turn by turn, since drift meets both loops of a turn.
            added = times[loop] - times[TimedLoop(TARGET, k)]
            of_first = first.setdefault(method, {})
            if k not in of_first:  # the first pass, or all of them
                of_first[k] = added
                continue
            later[method] = (times[loop] - times[TimedLoop(method, k, 1)]) / (num_passes - 1)
            if not (_is_significant(of_first[k]) and _is_significant(later[method])):
                of_first[k] = later[method] = added / num_passes
        insignificant = {}
        for method, of_first in first.items():
            every = {0: later[method], **of_first} if method in later else of_first
            if ks := [k for k, added in every.items() if not _is_significant(added)]:
                insignificant[method] = ks
        return cls(
            verify_ms[1],
            {method: _cost(ms) for method, ms in later.items()},
            verify_ms,
            slots,
            batch,
            {method: {k: _cost(ms) for k, ms in of_k.items()} for method, of_k in first.items()},
            insignificant,
        )

    def is_significant(self, method: str) -> bool:
        """Returns whether the cost of a method's passes after the first is significant.

        Of a method whose passes are timed together, it is that of all of them.
        """
        marked = self.insignificant.get(method, ())
        return 0 not in marked if method in self.draft_ms else not marked

    def draft_cost(self, method: str, num_draft: int = 0) -> float:
        """Returns the cost of one drafted token in plain passes; NaN if it was not measured.

        Args:
          method: What drafts. Copied tokens count as free.
          num_draft: Drafted tokens per round: the mean of them, of which the first takes a wider
            pass, linear between the Ks that were measured; 0: the cost of the other passes.
        """
        if method in copying_methods():
            return 0.0
        first_ms = self.first_ms.get(method)
        pass_ms = self.draft_ms.get(method, 0.0 if first_ms else float("nan"))
        if num_draft and first_ms:
            pass_ms += (_between(first_ms, num_draft) - pass_ms) / num_draft
        return pass_ms / self.plain_ms

    def verify_cost(self, num_draft: int) -> float:
        """Returns the cost of a pass of K + 1 tokens in plain passes; linear between widths."""
        return _between(self.verify_ms, num_draft + 1) / self.plain_ms


def _is_significant(added_ms: np.ndarray) -> bool:
    return bool(np.quantile(added_ms, 0.25) > 0)


def _cost(added_ms: np.ndarray) -> float:
    return max(float(np.median(added_ms)), 0.0)


def _between(measured: Mapping[int, float], size: int) -> float:
    times = {int(key): ms for key, ms in measured.items()}  # as text in a report
    sizes = sorted(times)
    return float(np.interp(size, sizes, [times[key] for key in sizes]))


def predict(costs: Costs, result: CellResult, num_draft: int | None = None) -> float:
    """Returns the speed-up that a result's acceptance predicts, for its own K or a smaller one.

    Of rounds only the passes count: the rest (rule, commit, dispatch) is left out, so what is
    measured stays below. A rate is the probability that a token is drafted and accepted, since a
    drafter that copies tokens does not always have any.

    Args:
      costs: The costs of the passes.
      result: What was measured.
      num_draft: Drafted tokens per round; by default the result's.

    Returns:
      The speed-up; NaN for a tree, whose passes were not measured.
    """
    cell = result.cell
    stats = result.stats
    if cell.tree:
        return float("nan")
    num_draft = cell.k if num_draft is None else num_draft
    if num_draft == 0:
        return 1.0
    before = [stats.rounds, *stats.offered_at]
    rates = [
        rate * offered / earlier if earlier else float("nan")
        for rate, offered, earlier in zip(stats.acceptance_by_position, before[1:], before)
    ]
    return predicted_speedup(
        rates[:num_draft], costs.draft_cost(cell.method, num_draft), costs.verify_cost(num_draft)
    )
