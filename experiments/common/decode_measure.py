"""How ``experiments.decode`` compiles and times the cells of its grid."""

from __future__ import annotations

import concurrent.futures
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from experiments.common import costs, report
from experiments.common.grid import Bench, Cell
from experiments.common.timing import Timer
from spec_jax import processes
from spec_jax.progress import Progress


def run_all(tasks: Mapping[str, Callable[[], None]], what: str) -> None:
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
    needed = bench.longest + bench.max_new_tokens + widest + 1
    return -(-needed // 128) * 128


def compile_all(bench: Bench, cells: Sequence[Cell]) -> dict[tuple[str, int], Timer]:
    """Compiles every program of the run; returns the timers of the passes by role and width."""
    timers, slots, batch = {}, cost_slots(bench, cells), bench.batch

    def add_target(width: int) -> None:
        params = bench.target.decoding_params(width * batch)
        timer = costs.pass_timer(bench.target.model, params, width, slots, batch)
        timers["target", width] = timer

    def add_draft(method: str) -> None:
        timer = costs.draft_timer(bench.drafts[method], bench.target, slots, batch)
        timers.update({(method, 1): timer} if timer else {})

    tasks = {cell.label: functools.partial(bench.compile, cell) for cell in cells}
    for width in sorted({cell.k + 1 for cell in cells if not cell.tree}):
        tasks[f"target pass of {width} tokens"] = functools.partial(add_target, width)
    for method in bench.drafts:
        tasks[f"{method} pass"] = functools.partial(add_draft, method)
    run_all(tasks, "compiling")
    return timers


def measure(
    rep: dict, bench: Bench, cells: Sequence[Cell], repeats: int, folder: pathlib.Path
) -> costs.Costs:
    """Fills ``rep["results"]``, saves the report after each row, and returns the passes' costs."""
    timers = compile_all(bench, cells)
    with Progress(len(cells) + 1, "measuring") as bar:
        bar.now("passes")
        found = costs.Costs.measure(timers, slots=cost_slots(bench, cells), batch=bench.batch)
        rep["costs"] = found._asdict()
        bar.step("passes")
        for cell in cells:
            bar.now(cell.label)
            row = bench.measure(cell, repeats)
            row["predicted_speedup"] = costs.predict(found, row)
            rep["results"].append(row)
            bench.refresh_plain(rep["results"], cell.temperature)
            report.write_json(folder / "report.json", rep)
            bar.step(f"{cell.label}: {row['speedup']:.2f}x")
    return found
