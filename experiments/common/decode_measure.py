"""How ``experiments.decode`` compiles and times the cells of its grid."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import operator
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.common import costs, near_ties, report
from experiments.common.grid import Bench, Cell, Run
from experiments.common.intervals import paired_speedup
from experiments.common.timing import Timer, interleave
from spec_jax import processes
from spec_jax.config import GREEDY_BELOW, SamplerConfig
from spec_jax.data.tokens import looping_share
from spec_jax.engine.decoder import Generation
from spec_jax.engine.stats import Stats
from spec_jax.progress import Progress


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

    tasks = {cell.label: functools.partial(bench.run, cell, 0) for cell in cells}
    for width in sorted({cell.k + 1 for cell in cells if not cell.tree}):
        tasks[f"target pass of {width} tokens"] = functools.partial(add_target, width)
    for method in bench.drafts:
        tasks[f"{method} pass"] = functools.partial(add_draft, method)
    run_all(tasks, "compiling")
    return timers


def measure_cell(bench: Bench, cell: Cell, repeats: int) -> dict:
    """Measures one entry of a report's ``results``, without its predicted speed-up.

    In each batch, this cell and plain decoding take turns, so that drift of the machine cancels in
    their ratio. A batch is a pair, whose times are the medians of its repeats; of a single batch
    each repeat is a pair.
    """
    plain_cell = Cell("plain", 0, cell.temperature)
    runs, plain_runs, own_s, plain_s = [], [], [], []
    for index in bench.batches:
        turns, plain_turns = [], []

        def timer(which: Cell, kept: list[Run]) -> float:
            kept.append(bench.run(which, index))
            return kept[-1].decode_s

        times = interleave({
            "plain": functools.partial(timer, plain_cell, plain_turns),
            "own": functools.partial(timer, cell, turns),
        }, repeats, is_backwards=bool(index % 2))  # fmt: skip
        own_s.append(times["own"])
        plain_s.append(times["plain"])
        runs.append(turns[0])
        plain_runs.append(plain_turns[0])
    pairs = (lambda x: x[0]) if len(runs) == 1 else (lambda x: np.median(x, axis=1))
    own_s, plain_s = pairs(own_s), pairs(plain_s)
    own_tokens, plain_tokens = (np.asarray([run.tokens for run in r]) for r in (runs, plain_runs))
    each = lambda tokens: np.broadcast_to(tokens, own_s.shape)
    speedup = paired_speedup(own_s, plain_s, each(own_tokens), each(plain_tokens))
    rows, share = [row for run in runs for row in run.rows], len(runs) / len(own_s)
    stats = functools.reduce(
        operator.add, (row.stats for row in rows),
        Stats(prefill_s=sum(run.prefill_s for run in runs), decode_s=float(own_s.sum()) * share),
    )  # fmt: skip
    is_plain, rule = cell.method == "plain", bench.decoder(cell).system().rule
    paired_s = float(plain_s.sum()) * share
    return {
        **cell._asdict(),
        "rule": rule.name,
        "is_lossless": rule.is_lossless,
        "speedup": 1.0 if is_plain else speedup.value,
        "speedup_interval": None if is_plain else [speedup.low, speedup.high],
        "num_pairs": len(own_s),
        "plain_tokens_per_s": float(plain_tokens.sum()) / paired_s if paired_s else float("nan"),
        # Plain decoding timed against itself: the effect of noise on a speed-up.
        "repeatability": speedup.value if is_plain else None,
        **_compare(bench, cell, rows, [row for run in plain_runs for row in run.rows]),
        **_of_rows(rows),
        **stats.to_dict(),
        "compile_s": bench.compile_s[cell],
    }


def is_told_apart(result: Mapping) -> bool:
    """Returns whether the interval of a result's speed-up exists and excludes 1."""
    low, high = result.get("speedup_interval") or (math.nan, math.nan)
    return low > 1 or high < 1


def _compare(
    bench: Bench, cell: Cell, rows: Sequence[Generation], plain_rows: Sequence[Generation]
) -> dict:
    """Compares the tokens with plain decoding's; None if the rule samples other tokens."""
    rule, is_cold = bench.decoder(cell).system().rule, cell.temperature < GREEDY_BELOW
    if not (is_cold and rule.is_lossless or rule.name == "match"):
        found = {"identical_to_plain": None, "identical_rows": None}
        return {**found, "rows": len(rows), "differences": []}
    same = [a.tokens == b.tokens for a, b in zip(rows, plain_rows)]
    usual = SamplerConfig()
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    has_raw_logits = all(getattr(bench.sampler, x) == getattr(usual, x) for x in penalties)
    differences = [
        near_ties.examine(bench.target, i, bench.prompts[i], plain_rows[i].tokens, rows[i].tokens)
        for i in range(len(rows)) if is_cold and has_raw_logits and not same[i]
    ]  # fmt: skip
    return {
        "identical_to_plain": all(same), "identical_rows": sum(same), "rows": len(rows),
        "differences": [d._asdict() | {"is_near_tie": d.is_near_tie} for d in differences],
    }


def _of_rows(rows: Sequence[Generation]) -> dict:
    """Returns how rows ended, and the share of their tokens that repeat in loops."""
    sizes = np.asarray([len(row.tokens) for row in rows])
    shares = np.asarray([looping_share(row.tokens) for row in rows])
    reasons = [row.finish_reason for row in rows]
    return {
        "looping_share": float((sizes * shares).sum() / max(sizes.sum(), 1)),
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }


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
            row = measure_cell(bench, cell, repeats)
            row["predicted_speedup"] = costs.predict(found, row)
            rep["results"].append(row)
            report.write_json(folder / "report.json", rep)
            bar.step(f"{cell.label}: {row['speedup']:.2f}x")
    return found
