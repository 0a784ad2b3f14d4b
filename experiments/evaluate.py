"""Compares drafters with plain decoding of the same tokens, by category and batch size.

    python -m experiments.evaluate
    python -m experiments.evaluate --config.target=PATH --config.drafts=HEAD1,HEAD2,ngram
    python -m experiments.evaluate --config.data=question.jsonl --config.batches=1,4,16,32
    python -m experiments.evaluate --config.drafter=docs.examples.my_drafter:make

Every drafter, K, tree and temperature takes turns with plain decoding, question by question, and
every turn of a conversation is answered; later turns follow plain decoding's own answers, so that
all of them answer the same prompts. Intervals are 95 % confidence intervals over the questions.
Greedy heads are also compared with the unrolling that trains them ("teacher-forced"): each tests
the other.
A run leaves config.json, environment.json, report.json, report.md, report.html, plots, and
answers.jsonl, a line for each answer. If it is stopped, the same command with its --workdir goes
on.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from configs import evaluate_zoo
from experiments.comparison import (
    auditing,
    decode_report,
    evaluate_figures,
    evaluate_report,
    evaluation,
)
from experiments.comparison.evaluate_setup import Setup
from experiments.run import cli, report


def evaluate(config: ConfigDict, workdir: str | pathlib.Path | None = None) -> dict[str, Any]:
    """Runs or continues the experiment and returns its report.

    Args:
      config: See ``configs/evaluate_zoo.py``.
      workdir: The run's folder, which is continued if it holds answers; by default
        runs/evaluate/TIME.

    Raises:
      SpecJaxError: A config, a target or questions that cannot be used, or a folder of another run.
    """
    begin_s = time.monotonic()
    setup = Setup.of(config)
    resolved = json.loads(setup.config.to_json())
    folder = cli.make_workdir("evaluate", workdir)
    sums = evaluation.check_folder(folder, resolved)
    run = evaluation.Evaluation(setup, folder)
    rep = report.begin("evaluate", folder, resolved) | evaluate_report.start(setup)
    report.write_json(folder / evaluation.INPUTS, sums)
    decode_report.print_head(rep, folder)
    if run.num_saved:
        print(f"{run.num_saved} answers are there; the run goes on", flush=True)
    stages = run.run()
    rep["notes"] += run.notes
    forced = {}
    for stage in stages:
        costs = run.costs(stage.bench.batch)
        if costs is not None:
            rep["costs"][stage.bench.batch] = costs._asdict()
        if setup.config.has_teacher_forced and stage.bench.batch == setup.config.batches[0]:
            forced = evaluate_figures.teacher_forced(setup, stage)
        entries = evaluate_figures.figures(setup, stage, costs)
        found = lambda entry, forced: (
            {"teacher_forced": forced[entry["label"]]} if entry["label"] in forced else {}
        )
        rep["results"] += [entry | found(entry, forced) for entry in entries]
    if setup.config.has_audit:
        rep["audit"] = auditing.summary(rep["results"])
    rep["notes"] = evaluate_report.notes(rep, setup, run.num_cut)
    rep |= evaluate_report.finish(rep)
    drawings = _drawings(rep, run)
    rep |= {"is_complete": True, "elapsed_s": round(time.monotonic() - begin_s, 1)}
    report.finish(folder, rep, evaluate_report.markdown(rep, [*drawings]))
    for name, draw in drawings.items():
        draw(folder / name)
    from experiments.comparison.page.page import write_page  # needs jinja2, slow to import

    write_page(folder / "report.html", rep, run.answers())
    evaluate_report.print_results(rep, folder)
    return rep


def _drawings(
    rep: dict[str, Any], run: evaluation.Evaluation
) -> dict[str, Callable[[pathlib.Path], None]]:
    """Returns what draws each plot, by the name of its file."""
    from experiments.comparison import evaluate_plots  # need matplotlib, slow to import
    from experiments.run import plots  # need matplotlib, slow to import

    shown = evaluate_report.first_batch(rep["results"])
    costs = run.costs(shown[0]["batch"])
    found = {"acceptance.png": lambda path: plots.plot_acceptance(path, shown)}
    if costs is not None:
        found["speedup.png"] = lambda path: plots.plot_speedup(path, shown, costs)
    if shown[0]["categories"] and shown[0]["batch"] == 1:
        found["categories.png"] = lambda path: evaluate_plots.plot_categories(path, shown)
    if len({r["batch"] for r in rep["results"]}) > 1:
        found["batches.png"] = lambda path: evaluate_plots.plot_batches(path, rep["results"])
    return found


def main() -> None:
    cli.enable_compilation_cache()
    evaluate(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        evaluate_zoo,
        "Folder of this run, continued if it holds answers; by default runs/evaluate/TIME.",
    )
    cli.run(main)
