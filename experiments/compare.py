"""Shows what changed from one evaluation to another.

    python -m experiments.compare runs/evaluate/A runs/evaluate/B

Both are folders of experiments.evaluate or experiments.decode, such as before
and after an edit. Cells of one method and one setting are compared: speed-up,
tau and acceptance by position. Others are named. The interval of a change is
made of those of both runs, as if their prompts had nothing in common, so it is
rather too wide. The run's folder gets config.json, environment.json,
report.json, report.md and changes.png.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.run import cli, config_help, report
from spec_jax.errors import ConfigError, SpecJaxError
from spec_jax.evaluation.cells import Cell
from spec_jax.intervals import Interval
from spec_jax.show.tables import Section, Table

# Keys of a config that choose the cells, or how often and how they are shown.
_CHOICES = (
    "drafts drafter rule best_k ks trees temperatures rules copying_rules batches repeats order "
    "num_shown has_stream has_expected has_acceptance_by_kind has_acceptance_by_place has_audit "
    "has_teacher_forced"
).split()
_Cells = dict[tuple[Cell, int], Mapping[str, Any]]  # entries of report.json


def _interval(value: float | None, ends: Sequence[float | None] | None) -> Interval:
    numbers = (math.nan if x is None else x for x in (value, *(ends or (None, None))))
    return Interval(*numbers)


def figures(entry: Mapping[str, Any]) -> dict[str, Interval]:
    """Returns the figures of an entry of report.json by name."""
    found = {n: _interval(entry[n], entry[f"{n}_interval"]) for n in ("speedup", "tau")}
    rates = zip(entry["acceptance_by_position"], entry["accept_intervals"])
    return found | {f"accepted at {i}": _interval(*rate) for i, rate in enumerate(rates, 1)}


def change(before: Interval, after: Interval) -> Interval:
    """Returns the difference of two independent figures.

    Source: Zou and Donner (2008), the intervals of whose difference keep those of both figures.
    """
    value = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Interval(value, value - down, value + up)


def not_compared(before: _Cells, after: _Cells) -> list[str]:
    """Names the cells that only one run has, and the settings of the method in the other one."""
    said = []
    for name, own, other in (("A", before, after), ("B", after, before)):
        for cell, batch in (key for key in own if key not in other):
            kind = (cell.method, cell.temperature)
            near = (key for key in other if (key[0].method, key[0].temperature) == kind)
            there = ", ".join(f"{c.label}, batch {b}" for c, b in near if (c, b) not in own)
            more = f"; the other has {there}" if there else ""
            said.append(f"only in {name}: {cell.label}, batch {batch}{more}")
    return said


def compare(before: str, after: str, workdir: str | None = None) -> dict[str, Any]:
    """Compares two runs and returns the report.

    Args:
      before: The folder of a run, A.
      after: That of another one, B.
      workdir: The folder of this run; by default runs/compare/TIME.

    Raises:
      ConfigError: A folder holds no report of an evaluation.
    """
    from experiments.run.plots import panels  # needs matplotlib, slow to import

    found = []
    for folder in (before, after):
        saved = cli.read_saved(pathlib.Path(folder) / "report.json")
        if "results" not in saved or "prompts" not in saved:
            raise ConfigError(
                f"{folder} holds no evaluation; expected a folder of evaluate or decode"
            )
        found.append(saved)
    cells = [
        {(Cell(*(e[n] for n in Cell._fields)), e["batch"]): e for e in saved["results"] if e["k"]}
        for saved in found
    ]
    settings = [config_help.flat(saved["config"]) | saved["prompts"] for saved in found]
    differs = {
        key: [one.get(key) for one in settings]
        for key in {**settings[0], **settings[1]}
        if settings[0].get(key) != settings[1].get(key) and key not in _CHOICES
    }
    folder = cli.open_workdir("compare", workdir)
    rep = report.begin("compare", folder, {"before": before, "after": after})
    skipped = [
        f"nothing is compared: {k} is {a} in A and {b} in B" for k, (a, b) in differs.items()
    ]
    skipped += not_compared(*cells)
    header = ["method", "T", "figure", "A", "B", "B less A"]
    rows = []
    changes = {}
    for key in (key for key in cells[0] if key in cells[1] and not differs):
        a, b = (figures(one[key]) for one in cells)
        changes[key] = {name: change(a[name], b[name]) for name in a}
        start = [key[0].name, f"{key[0].temperature:g}"]
        for name, found in changes[key].items():
            mark = " *" if found.low > 0 or found.high < 0 else ""
            values = [f"{x[name].value:.2f}" for x in (a, b)]
            rows.append([*start, name, *values, f"{found:+.2f}{mark}"])
    terms = {"A": before, "B": after, "B less A": "with its 95 % interval; * = excludes 0"}
    sections = [
        Section("What changed", (), Table(header, rows, ("T", "A", "B"), "method"), terms),
        Section("Not compared", skipped),
    ]
    if changes:
        sections.append(Section("Changes", figure="changes.png"))
        size = (9, 1.2 + 0.32 * len(changes))
        with panels(folder / "changes.png", 2, size, sharey=True) as axes:
            for axis, name in zip(axes, ("speedup", "tau")):
                value, low, high = np.asarray([found[name] for found in changes.values()]).T
                bars = np.nan_to_num(np.maximum([value - low, high - value], 0))
                axis.errorbar(value, range(len(value)), xerr=bars, fmt="o", capsize=3)
                axis.axvline(0, color="0.45", linewidth=1)
                axis.set_xlabel(f"change of {name} (bars: 95 %)")
            axes[0].set_yticks(range(len(changes)), [cell.label for cell, _ in changes])
            axes[0].invert_yaxis()
    rep |= {
        "not_compared": skipped,
        "changes": [{**c._asdict(), "batch": b, **found} for (c, b), found in changes.items()],
    }
    report.finish(folder, rep, "Two evaluations beside each other", sections)
    report.show([s for s in sections if s.text or s.table and s.table.rows])
    print(f"\n{folder / 'report.md'}")
    return rep


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line and compares the two runs that it names."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="A", help="the folder of a run")
    parser.add_argument("after", metavar="B", help="that of another one")
    parser.add_argument("--workdir", help="folder of this run; by default runs/compare/TIME")
    found = parser.parse_args(arguments)
    try:
        compare(found.before, found.after, found.workdir)
    except SpecJaxError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
