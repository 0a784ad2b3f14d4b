"""How ``experiments.decode`` and ``experiments.evaluate`` compile and time cells in turns."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import math
import operator
import pathlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.comparison import auditing
from experiments.run import report
from spec_jax import processes
from spec_jax.config import GREEDY_BELOW
from spec_jax.data.tokens import looping_share
from spec_jax.engine.request import whole_slots
from spec_jax.engine.stats import Stats
from spec_jax.evaluation import costs
from spec_jax.evaluation.grid import Bench, Cell, Row, Run
from spec_jax.evaluation.timing import Timer, interleave
from spec_jax.intervals import paired_speedup
from spec_jax.progress import Progress

if TYPE_CHECKING:
    from spec_jax.testing import RowAudit

_SAVED_EVERY_S = 10.0  # how often a report without all turns is saved


def run_all(tasks: Mapping[str, Callable[[], object]], what: str) -> None:
    """Runs tasks, two at a time, with progress: one compilation alone leaves cores idle.

    Several processes run one at a time, since they must run their programs in the same order.
    """
    at_once = 2 if processes.count() == 1 else 1
    with Progress(len(tasks), what) as bar, concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(task): name for name, task in tasks.items()}
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
                bar.step(futures[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def cost_slots(bench: Bench, cells: Sequence[Cell]) -> int:
    """Returns the cache slots of the timed passes: as many as decoding chains has."""
    widest = max(cell.k for cell in cells if not cell.tree)
    return whole_slots(bench.longest + bench.max_new_tokens + widest + 1)


def compile_all(
    bench: Bench, cells: Sequence[Cell], *, has_passes: bool = True
) -> dict[costs.Passes, Timer]:
    """Compiles every program of the run; returns the timers of the passes of rounds.

    Args:
      bench: What decodes.
      cells: The cells; each decodes the first batch once.
      has_passes: Whether to compile the passes, too.
    """
    timers: dict[costs.Passes, Timer] = {}
    tasks = {cell.label: functools.partial(bench.run, cell, 0) for cell in cells}
    if has_passes:
        ks = {c.method: {d.k for d in cells if d.method == c.method and not d.tree} for c in cells}
        makers = costs.timer_makers(
            bench.target, bench.drafts, ks, cost_slots(bench, cells), bench.batch
        )
        add = lambda what, make: timers.update({what: make()})
        tasks |= {str(what): functools.partial(add, what, make) for what, make in makers.items()}
    run_all(tasks, "compiling")
    return timers


class Tally:
    """What one cell has done so far.

    Attributes:
      runs: The first run of each batch.
      times_s: The decoding times of each batch, one a turn.
    """

    def __init__(self, bench: Bench, cell: Cell, max_examined: int | None = None):
        """Begins with nothing.

        Args:
          bench: What decodes.
          cell: The cell.
          max_examined: How many rows that part from plain decoding's are examined; None: all.
        """
        self.bench, self.cell, self.max_examined = bench, cell, max_examined
        self.runs: dict[int, Run] = {}
        self.times_s: dict[int, list[float]] = {}
        self._differences: dict[int, RowAudit] = {}

    def run(self, index: int) -> float:
        """Decodes batch ``index`` once; returns the time."""
        run = self.bench.run(self.cell, index)
        self.runs.setdefault(index, run)
        self.times_s.setdefault(index, []).append(run.decode_s)
        return run.decode_s

    def only(self, batches: Collection[int]) -> Tally:
        """Returns what was done in some of the batches."""
        part = Tally(self.bench, self.cell, self.max_examined)
        part.runs = {i: run for i, run in self.runs.items() if i in batches}
        part.times_s = {i: times for i, times in self.times_s.items() if i in batches}
        part._differences = self._differences
        return part

    @property
    def rows(self) -> dict[int, Row]:
        """The output of every prompt, by its index."""
        return {
            i: row for index, run in self.runs.items()
            for i, row in zip(self.bench.chosen(index), run.rows)
        }  # fmt: skip

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Times and tokens f64[N] of what an interval is over.

        A batch's time is the median of its turns; of a single batch every turn counts.
        """
        times, tokens = [*self.times_s.values()], [run.tokens for run in self.runs.values()]
        if len(times) == 1:
            return np.asarray(times[0]), np.full(len(times[0]), tokens[0])
        return np.asarray([np.median(x) for x in times]), np.asarray(tokens)

    def difference(self, row: int, plain: Tally) -> RowAudit:
        """Returns where a row parts from plain decoding's, and why; computed once."""
        if row not in self._differences:
            found = auditing.examine(self.bench, self.cell, row, self.rows, plain.rows)
            self._differences |= found
        return self._differences[row]

    def result(self, plain: Tally) -> dict:
        """Returns the entry of a report's ``results``, without its predicted speed-up.

        Args:
          plain: Plain decoding, which took turns with this cell.
        """
        (own_s, own_tokens), (plain_s, plain_tokens) = self.pairs, plain.pairs
        speedup = paired_speedup(own_s, plain_s, own_tokens, plain_tokens)
        share = len(self.runs) / len(own_s)  # of the turns of a single batch
        prefill_s = sum(run.prefill_s for run in self.runs.values())
        stats = functools.reduce(
            operator.add, (row.stats for row in self.rows.values()),
            Stats(prefill_s=prefill_s, decode_s=float(own_s.sum()) * share),
        )  # fmt: skip
        is_plain, rule = self.cell == plain.cell, self.bench.decoder(self.cell).system().rule
        return {
            **self.cell._asdict(),
            "rule": rule.name,
            "is_lossless": rule.is_lossless,
            "speedup": 1.0 if is_plain else speedup.value,
            "speedup_interval": None if is_plain else [speedup.low, speedup.high],
            "num_pairs": len(own_s),
            "plain_tokens_per_s": float(plain_tokens.sum() / max(plain_s.sum(), 1e-9)),
            **_compare(self, plain),
            **_of_rows([*self.rows.values()]),
            **stats.to_dict(),
            "tokens_per_s": float(own_tokens.sum() / max(own_s.sum(), 1e-9)),
            "compile_s": self.bench.compile_s.get(self.cell, 0.0),
        }


def take_turns(
    tallies: Sequence[Tally], turns: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Measures cells of one temperature; yields each turn after it.

    In a turn plain decoding and every cell decode one batch, so that drift of the machine cancels
    in their ratios, and every other turn runs backwards.

    Args:
      tallies: Of plain decoding, then of the others.
      turns: The number of the repeat and of the batch of each turn.
    """
    for repeat, index in turns:
        timers = {tally.cell: functools.partial(tally.run, index) for tally in tallies}
        interleave(timers, 1, is_backwards=bool((repeat + index) % 2))
        yield repeat, index


def is_told_apart(result: Mapping) -> bool:
    """Returns whether the interval of a result's speed-up exists and excludes 1."""
    low, high = result.get("speedup_interval") or (math.nan, math.nan)
    return low > 1 or high < 1


def _compare(ours: Tally, plain: Tally) -> dict:
    """Compares the tokens with plain decoding's; None if the rule samples other tokens."""
    bench, cell, rows = ours.bench, ours.cell, ours.rows
    rule, is_cold = bench.decoder(cell).system().rule, cell.temperature < GREEDY_BELOW
    if not (is_cold and rule.is_lossless or rule.name == "match"):
        found = {"identical_to_plain": None, "identical_rows": None}
        return {**found, "rows": len(rows), "differences": []}
    parted = [i for i, row in rows.items() if row.tokens != plain.rows[i].tokens]
    examined = parted[: ours.max_examined] if is_cold else []
    differences = [ours.difference(i, plain) for i in examined]
    return {
        "identical_to_plain": not parted, "identical_rows": len(rows) - len(parted),
        "rows": len(rows),
        "differences": [d.to_dict() for d in differences],
    }


def _of_rows(rows: Sequence[Row]) -> dict:
    """Returns how rows ended, and the share of their tokens that repeat in loops."""
    sizes = np.asarray([len(row.tokens) for row in rows])
    shares = np.asarray([looping_share(row.tokens) for row in rows])
    reasons = [row.finish_reason for row in rows]
    return {
        "looping_share": float((sizes * shares).sum() / max(sizes.sum(), 1)),
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }


def busy_share(runs: Sequence[Run]) -> float:
    """Returns the share of a batch's rows that run in a round, on average; 1 of single rows.

    A round of a batch takes its time until the last row ends, and rows whose drafts are accepted
    more often, or that meet a stop token, end earlier. NaN where there was no round.
    """
    rounds = sum(row.stats.rounds for run in runs for row in run.rows)
    of = sum(run.passes * len(run.rows) for run in runs)
    return rounds / of if of else float("nan")


def predicted_speedup(
    found: costs.Costs, tally: Tally, plain: Tally, result: dict[str, Any]
) -> float:
    """Returns the speed-up that acceptance and costs predict for the rows that run.

    Args:
      found: The costs of passes.
      tally: A cell's.
      plain: Plain decoding's.
      result: The cell's entry of ``results``.
    """
    busy, plain_busy = (busy_share([*t.runs.values()]) for t in (tally, plain))
    return costs.predict(found, result) * busy / plain_busy


def measure(
    rep: dict, bench: Bench, cells: Sequence[Cell], repeats: int, folder: pathlib.Path
) -> costs.Costs:
    """Fills ``rep["results"]``, saves the report meanwhile, and returns the passes' costs."""
    timers = compile_all(bench, cells)
    by_temperature: dict[float, list[Cell]] = {}
    for cell in cells:
        by_temperature.setdefault(cell.temperature, []).append(cell)
    turns = repeats * len(bench.batches)
    with Progress(turns * len(by_temperature) + 1, "measuring") as bar:
        bar.now("passes")
        found = costs.Costs.measure(timers, slots=cost_slots(bench, cells), batch=bench.batch)
        rep["costs"] = found._asdict()
        bar.step("passes")
        saved_s = time.monotonic()
        for temperature, group in by_temperature.items():
            before = rep["results"]
            tallies = [Tally(bench, cell) for cell in group]
            # The repeats of a batch are as far apart as there are batches.
            order = itertools.product(range(repeats), bench.batches)
            for turn, _ in enumerate(take_turns(tallies, order), 1):
                if turn == turns or time.monotonic() - saved_s > _SAVED_EVERY_S:
                    rows = [tally.result(tallies[0]) for tally in tallies]
                    rows = [
                        r | {"predicted_speedup": predicted_speedup(found, t, tallies[0], r)}
                        for t, r in zip(tallies, rows)
                    ]
                    rep["results"], saved_s = [*before, *rows], time.monotonic()
                    report.write_json(folder / "report.json", rep)
                bar.step(f"T={temperature:g}, turn {turn} of {turns}")
    return found
