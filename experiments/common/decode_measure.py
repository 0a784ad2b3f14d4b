"""How ``experiments.decode`` compiles and times the cells of its grid."""

from __future__ import annotations

import concurrent.futures
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from experiments.common import costs, report
from experiments.common.grid import Bench, Cell
from experiments.common.timing import Timer
from spec_jax.progress import Progress


def run_all(tasks: Mapping[str, Callable[[], None]], what: str) -> None:
    """Runs tasks, two at a time, with progress: one compilation alone leaves cores idle."""
    with Progress(len(tasks), what) as bar, concurrent.futures.ThreadPoolExecutor(2) as pool:
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

    def add(role: str, width: int, make: Callable[..., Timer], *args) -> None:
        timers[role, width] = make(*args)

    def add_pass(role: str, width: int) -> None:
        model = bench.target if role == "target" else bench.drafts[role]
        params = model.decoding_params(width * batch)
        add(role, width, costs.pass_timer, model.model, params, width, slots, batch)

    tasks = {cell.label: functools.partial(bench.compile, cell) for cell in cells}
    chains = [cell for cell in cells if not cell.tree]
    passes = [("target", width) for width in sorted({c.k + 1 for c in chains})]
    passes += [("standalone", 1)] if "standalone" in bench.drafts else []
    for role, width in passes:
        tasks[f"{role} pass of width {width}"] = functools.partial(add_pass, role, width)
    for method, cell in {cell.method: cell for cell in chains}.items():
        decoder = bench.decoder(cell)
        head = decoder.draft and decoder.draft.head(decoder.system().target)
        if head is not None:
            params = decoder.params(batch)["draft"]
            tasks[f"{method} pass"] = functools.partial(
                add, method, 1, costs.head_timer, head, params, slots, batch
            )
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
