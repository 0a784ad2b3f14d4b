"""Holds the roofline against published pairs of accepted tokens and speed-up.

    python -m experiments.published --workdir=DIR

Every pair of ``common/published.json`` with a known acceptance is predicted from that acceptance,
the model's shape and the chip's published peaks; no constant is fitted. Prints predicted beside
published, and the error by group. The run's folder gets config.json, environment.json,
report.json, report.md and published.png. Cost: seconds on any machine.
"""

from __future__ import annotations

import pathlib

import jax
from absl import flags

from experiments.planning.published import GROUPS, NO_TAU, PredictedPair, compare, load, summarise
from experiments.run import cli, plots, report
from spec_jax.show.tables import Section
from spec_jax.tree import DynamicTree

HEADER = (
    "source",
    "on",
    "target",
    "drafter",
    "K",
    "B",
    "task",
    "tau",
    "published",
    "predicted",
    "error",
)
NUMBERS = ("K", "B", "tau", "published", "predicted", "error")


def run(workdir: str | pathlib.Path | None) -> dict:
    """Compares all pairs; returns what report.json holds.

    Args:
      workdir: The run's folder; by default runs/published/TIME.
    """
    folder = cli.open_workdir("published", workdir)
    head = report.begin("published", folder, {})
    rows, file = load()
    found = [compare(row) for row in rows]
    groups = {name: [c for c in found if c.row.group == name] for name in GROUPS}
    summary = {name: summarise(groups[name]) for name in GROUPS if name != NO_TAU}
    plain = [c for c in found if c.row.plain_tok_s]
    sections = [
        *(
            Section(f"{name}, {len(members)} pairs", HEADER, [*map(_cells, members)], NUMBERS)
            for name, members in groups.items()
        ),
        Section(
            "predicted over published",
            ("group", "pairs", "bias", "median error", "largest", "correlation"),
            [
                (
                    name,
                    str(s["rows"]),
                    f"{s['bias']:.2f}x",
                    f"{s['median_error']:.0%}",
                    f"{s['max_error']:.0%}",
                    f"{s['correlation']:.2f}",
                )
                for name, s in summary.items()
            ],
            ("pairs", "bias", "median error", "largest", "correlation"),
        ),
        Section(
            "plain decoding, tokens/s",
            ("source", "on", "target", "B", "published", "at most", "reached"),
            [*map(_plain, plain)],
            ("B", "published", "at most", "reached"),
        ),
        Section(
            f"left out: {sum(count for count, *_ in file['left_out'])} pairs",
            ("pairs", "of", "because"),
            [(str(n), *why) for n, *why in file["left_out"]],
        ),
    ]
    print("\n" + "\n\n".join(section.text() for section in sections))
    record = head | {
        "summary": summary,
        "sources": file["sources"],
        "left_out": file["left_out"],
        "pairs": [_record(c) for c in found],
    }
    blocks = (section.text(is_markdown=True) for section in sections)
    report.finish(folder, record, report.document("Predicted and published", record, *blocks))
    plots.plot_published(
        folder / "published.png",
        [
            (c.row.method, c.row.group, c.row.speedup, c.predicted)
            for c in found
            if c.row.group != NO_TAU
        ],
    )
    print(f"{folder / 'published.png'} written")
    return record


def _cells(c: PredictedPair) -> tuple[str, ...]:
    row, is_known = c.row, c.row.tau is not None
    on = row.topologies[0] if len(row.topologies) == 1 else "not stated"
    k = str(row.num_draft)
    if row.tree is not None:
        kind = "" if isinstance(row.tree, DynamicTree) else "static "
        k += f", {kind}tree {row.tree.depth} deep"
    return (
        row.source,
        on,
        row.target,
        row.method,
        k,
        str(row.setting.batch),
        row.task,
        f"{row.tau:.2f}" if is_known else f"({c.implied_tau:.2f})",
        f"{row.speedup:.2f}",
        f"{c.predicted:.2f}" if is_known else "–",
        f"{c.ratio - 1:+.0%}" if is_known else "–",
    )


def _plain(c: PredictedPair) -> tuple[str, ...]:
    row = c.row
    return (
        row.source,
        row.topologies[0],
        row.target,
        str(row.setting.batch),
        f"{row.plain_tok_s:,.0f}",
        f"{c.plain_floor_tok_s:,.0f}",
        f"{row.plain_tok_s / c.plain_floor_tok_s:.0%}",
    )


def _record(c: PredictedPair) -> dict:
    row = c.row
    return {
        "source": row.source,
        "group": row.group,
        "topologies": row.topologies,
        "target": row.target,
        "method": row.method,
        "k": row.num_draft,
        "is_tree": row.tree is not None,
        "batch": row.setting.batch,
        "mesh": row.setting.mesh,
        "context": row.setting.context,
        "task": row.task,
        "temperature": row.temperature,
        "tau": row.tau,
        "speedup": row.speedup,
        "predicted_low": c.low,
        "predicted_high": c.high,
        "ratio": c.ratio,
        "implied_tau": c.implied_tau,
        "plain_tok_s": row.plain_tok_s,
        "plain_floor_tok_s": c.plain_floor_tok_s,
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # shapes alone are looked at
    run(_WORKDIR.value)


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string(
        "workdir", None, "Folder of this run; by default runs/published/TIME."
    )
    cli.run(main)
