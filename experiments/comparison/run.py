"""One run of a comparison, from its config to its report."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.comparison import report as reports
from experiments.comparison import session
from experiments.comparison.setup import Setup
from experiments.run import cli, report
from experiments.run.memory import device_peaks, peak_bytes
from spec_jax import processes
from spec_jax.data.questions import Question
from spec_jax.evaluation import profile, teacher_forced
from spec_jax.evaluation.bench import Bench
from spec_jax.evaluation.cells import Cell
from spec_jax.evaluation.compare import results_of
from spec_jax.evaluation.costs import Costs
from spec_jax.evaluation.results import CellResult
from spec_jax.progress import Notice
from spec_jax.show.tables import Section


def run(
    name: str,
    title: str,
    config: ConfigDict,
    workdir: str | pathlib.Path | None = None,
    *,
    has_profile: bool = False,
    is_short: bool = False,
) -> dict[str, Any]:
    """Runs or continues a comparison and returns its report.

    Args:
      name: The experiment.
      title: The heading of the report.
      config: See ``configs/evaluate_zoo.py``.
      workdir: The run's folder, which is continued if it holds answers; by default runs/NAME/TIME.
      has_profile: Whether to trace rounds of every cell, too.
      is_short: Whether the screen shows the first table only; the report has all.

    Raises:
      SpecJaxError: A config, a target or questions that cannot be used, or a folder of another run.
    """
    begin_s = time.monotonic()
    if has_profile:
        profile.check()
    with Notice("loading models and questions", is_line=True):
        setup = Setup.of(config)
    resolved = json.loads(setup.config.to_json())
    folder = cli.make_workdir(name, workdir)
    sums = session.check_folder(folder, resolved)
    evaluation = session.Evaluation(setup, folder)
    rep = report.begin(name, folder, resolved) | {"title": title} | reports.start(setup)
    report.write_json(folder / session.INPUTS, sums)
    reports.print_head(rep, folder)
    if evaluation.num_saved:
        print(f"{evaluation.num_saved} answers are there; the run goes on", flush=True)
    stages = evaluation.run(show_live if setup.config.has_stream else None)
    rep["notes"] += evaluation.notes
    costs = evaluation.costs
    with Notice("examining the outputs", is_line=True):
        results = [r for stage in stages for r in _results(setup, stage, costs)]
    profiles: dict[str, profile.RoundProfile] = {}
    if has_profile:
        for stage in stages:
            profiles |= profile.profile_cells(stage.bench, stage.cells, folder / "profile")
        rep["profile"] = {label: x.to_dict() for label, x in profiles.items()}
    if setup.config.has_audit:
        rep["audit"] = reports.audit_summary(results)
    rep["costs"] = {f"{b} {d}" if d else b: x._asdict() for (b, d), x in costs.items()}
    rep["notes"] = reports.notes(rep, results, costs, setup, evaluation.num_cut)
    rep |= {
        "results": [result.to_dict() for result in results],
        "conclusions": reports.conclude(results),
        "warnings": reports.warnings(rep, results),
        "process_peak_bytes": peak_bytes(),
        "device_peak_bytes": device_peaks(),
    }
    drawings = _drawings(results, costs)
    rep |= {"is_complete": True, "elapsed_s": round(time.monotonic() - begin_s, 1)}
    sections = reports.sections(rep, results, profiles, drawings)
    cautions = [f"Beware: {line}" for line in rep["warnings"]]
    conclusions = Section("", [*rep["conclusions"], *cautions], is_brief=True)
    conditions = Section("Conditions", terms=reports.conditions(rep))
    report.finish(folder, rep, title, [conclusions, *sections, conditions])
    with Notice("drawing plots and writing the page", is_line=True):
        for file, draw in drawings.items():
            draw(folder / file)
        if processes.is_writer():  # the page reads the plots, which one process is writing
            from experiments.comparison.page import page  # needs jinja2, slow to import

            with open(folder / session.ANSWERS, encoding="utf-8") as file:
                answers = map(json.loads, file)
                page.write_page(folder / "report.html", rep, results, sections, answers)
    report.show([s for s in (*sections, conclusions) if s.is_brief or not is_short])
    print(f"\n{folder / 'report.md'}: the whole report, after {rep['elapsed_s']:.0f} s")
    return rep


def show_live(bench: Bench, cells: Sequence[Cell], question: Question) -> None:
    """Prints a prompt, dimmed on a terminal, and its continuation as it is decoded.

    Args:
      bench: What decodes; its first prompt is the question's.
      cells: The last cell with a model is shown, at the middle of its Ks.
      question: The question.
    """
    has_model = [cell for cell in cells if bench.drafts.get(cell.method) is not None]
    name = (has_model or cells)[-1].method
    same = [cell for cell in cells if cell.method == name]
    cell = same[len(same) // 2]
    text = question.plain_text()
    if question.ids:
        text = bench.target.tokenizer.decode(question.ids)
    with Notice("compiling what is shown live", is_line=True):
        bench.run(cell, 0)  # or compiling would tear the text apart
    print(f"\n── {question.name}, live by {cell.label} ".ljust(80, "─"))
    print(f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text, end="", flush=True)

    def send(row, piece):
        if row == 0:
            print(piece, end="", flush=True)

    stats = bench.run(cell, 0, on_token=send).rows[0].stats
    print(
        f"\n{'─' * 79}\n{stats.emitted} tokens, {stats.first} by prefill and the rest in "
        f"{stats.rounds} target passes; {stats.accepted} of {stats.drafted} drafts accepted\n"
    )


def _results(
    setup: Setup, stage: session.Stage, costs: Mapping[tuple[int, str | None], Costs]
) -> list[CellResult]:
    config = setup.config
    batch = stage.bench.batch
    results = results_of(
        stage.runs,
        stage.prompts,
        {dtype: x for (size, dtype), x in costs.items() if size == batch},
        categories(setup.questions.chosen),
        is_over_fastest=config.baseline == "fastest",
    )
    if not config.has_teacher_forced or batch != config.batches[0]:
        return results
    for i, cell_run in enumerate(stage.runs):
        cell = cell_run.cell
        target, drafts = stage.bench.models(cell.dtype)
        draft = drafts.get(cell.method)
        is_chain = cell.is_greedy and cell.rule == "greedy" and not cell.tree
        if is_chain and teacher_forced.has_drafts(target, draft):
            rows = cell_run.rows
            prompts = [stage.bench.prompts[prompt] for prompt in rows]
            reached, accepted = teacher_forced.unrolled(
                target, draft, prompts, [*rows.values()], num_draft=cell.k
            )
            with np.errstate(invalid="ignore"):
                rates = tuple((accepted / reached).tolist())
            results[i] = dataclasses.replace(results[i], teacher_forced=rates)
    return results


def categories(asked: Sequence[Question]) -> dict[str, tuple[str, list[int]]]:
    """Returns the group and the questions of each group and, if it has several, its categories.

    Empty if there is one category only.
    """
    if len({question.category for question in asked}) < 2:
        return {}
    parts: dict[str, tuple[str, list[int]]] = {}
    for group in dict.fromkeys(question.group for question in asked):
        members = [i for i, question in enumerate(asked) if question.group == group]
        parts[group] = group, members
        for i in members:
            if asked[i].category != group:
                parts.setdefault(asked[i].category, (group, []))[1].append(i)
    return parts


def _drawings(
    results: Sequence[CellResult], costs: Mapping[tuple[int, str | None], Costs]
) -> dict[str, Callable[[pathlib.Path], None]]:
    """Returns what draws each plot, by the name of its file."""
    from experiments.comparison import plots  # needs matplotlib, slow to import

    shown = reports.first_batch(results)
    drawings = {"acceptance.png": lambda path: plots.plot_acceptance(path, shown)}
    known = {dtype: x for (batch, dtype), x in costs.items() if batch == shown[0].batch}
    if known:
        drawings["speedup.png"] = lambda path: plots.plot_speedup(path, shown, known)
    if any(math.isfinite(r.predicted_speedup or math.nan) for r in shown if not r.cell.is_plain):
        drawings["predicted.png"] = lambda path: plots.plot_predicted(path, shown)
    if shown[0].categories and shown[0].batch == 1:
        drawings["categories.png"] = lambda path: plots.plot_categories(path, shown)
    if len(reports.by_batch(results)) > 1:
        drawings["batches.png"] = lambda path: plots.plot_batches(path, results)
    return drawings
