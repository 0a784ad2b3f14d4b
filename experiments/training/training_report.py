"""The report of a training run, when it begins and when it has ended."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.run import report
from experiments.run.tables import Section
from spec_jax.train.log import read_metrics


def write(
    folder: pathlib.Path, title: str, head: Mapping[str, Any], said: Sequence[str] = (),
    final: Mapping[str, float] | None = None, plots: Sequence[str] = (),
) -> None:  # fmt: skip
    """Writes report.json and report.md.

    Args:
      folder: The folder of the run, with its metrics.jsonl.
      title: The heading.
      head: What ``report.begin`` returned, and what else is known from the beginning.
      said: Paragraphs on it.
      final: The figures of what was exported; None: the run has not ended.
      plots: Files of the folder to show.
    """
    lines = read_metrics(folder / "metrics.jsonl")
    is_evaluation = lambda line: any(name.startswith("held_out") for name in line)
    found = [line for line in lines if is_evaluation(line)]
    names = [*dict.fromkeys(name for line in found for name in line if name != "cpu_s")]
    form = lambda value: "" if value is None else f"{value:.4g}"
    blocks = [*said]
    if final is None:
        blocks.append("The run has not ended.")
    else:
        rows = [(name, form(value)) for name, value in final.items()]
        blocks.append(Section("Exported", ("figure", "value"), rows).text(is_markdown=True))
    if found:
        rows = [[form(line.get(name)) for name in names] for line in found]
        blocks.append(Section("Evaluations", names, rows, names).text(is_markdown=True))
    blocks += [f"![{name}]({name})" for name in plots]
    blocks.append("Every logged figure is in metrics.jsonl.")
    rep = {**head, "final": final, "evaluations": found, "is_complete": final is not None}
    rep["cpu_s"] = max((line["cpu_s"] for line in lines), default=None)
    report.finish(folder, rep, report.document(title, rep, *blocks))
