"""Compares the roofline with published pairs of accepted tokens and speed-up.

    python -m experiments.published --workdir=DIR

For every pair of ``planning/published.json`` with a known acceptance, the speed-up is predicted
from that acceptance, the model's shape and the chip's published peaks; no constant is fitted.
Prints predicted and published speed-ups side by side, and the error by group. The run's folder gets
config.json, environment.json, report.json, report.md and published.png. Cost: seconds on any
machine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments.planning.plan_report import OVERHEADS_MS
from experiments.run import cli, plots, report
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.models.config import ModelConfig
from spec_jax.planning.chips import Topology
from spec_jax.planning.presets import PRESETS
from spec_jax.planning.roofline import Pass, Prediction, RoundWork, Setting, Stack, decode_round
from spec_jax.show.tables import Section
from spec_jax.tree import DynamicTree, Tree

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
PATH = pathlib.Path(__file__).parent / "planning" / "published.json"
CONTEXT = 512  # of rows whose source does not say it; at batch 1 it hardly matters
STATED, BORROWED, UNSTATED, NO_TAU = (
    "hardware and tau stated",
    "tau of another source",
    "hardware not stated",
    "tau not stated",
)
GROUPS = (STATED, BORROWED, UNSTATED, NO_TAU)
# Where no hardware is named, the prediction is that of each of these; see ``PublishedPair.chips``.
USUAL = ("a100:1", "h100:1", "rtx3090:1")
# EAGLE-1's static tree, ``mc_sim_7b_63`` in the authors' repository.
EAGLE_1_TREE = Tree.from_paths(
    [
        [0],
        [1],
        [2],
        [3],
        [0, 0],
        [0, 1],
        [0, 2],
        [1, 0],
        [1, 1],
        [2, 0],
        [2, 1],
        [3, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 1, 0],
        [0, 1, 1],
        [0, 2, 0],
        [0, 2, 1],
        [1, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 2],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1],
    ]
)


class PublishedPair(NamedTuple):
    """One published pair.

    Attributes:
      source: a key of ``sources``.
      group: one of ``GROUPS``.
      topologies: the chips that it ran on; ``USUAL`` if they are not stated.
      target: a name in ``PRESETS``.
      method: the drafter.
      num_draft: K, the number of nodes of a tree.
      tree: None for a chain.
      setting: batch, context and mesh.
      task: the task of the prompts.
      temperature: None if it is not stated.
      tau: tokens per target pass; None if it is not stated.
      speedup: the speed-up over plain decoding.
      plain_tok_s: tokens a second of plain decoding; None if they are not stated.
    """

    source: str
    group: str
    topologies: tuple[str, ...]
    target: str
    method: str
    num_draft: int
    tree: Tree | DynamicTree | None
    setting: Setting
    task: str
    temperature: float | None
    tau: float | None
    speedup: float
    plain_tok_s: float | None


def load(path: pathlib.Path = PATH) -> tuple[list[PublishedPair], dict[str, Any]]:
    """Returns the rows, and the whole file with its sources and the pairs that are left out."""
    file = json.loads(path.read_text(encoding="utf-8"))
    return [row for run in file["runs"] for row in _rows(run)], file


def _rows(run: dict[str, Any]) -> list[PublishedPair]:
    shape = run.get("tree")
    tree = EAGLE_1_TREE if shape == "eagle-1" else shape and DynamicTree(*shape)
    topologies = (run["hardware"],) if run["hardware"] else USUAL
    plain = run.get("plain_tok_s", [])
    rows = []
    for i, (task, batch, tau, speedup) in enumerate(run["pairs"]):
        if tau is None:
            group = NO_TAU
        elif not run["hardware"]:
            group = UNSTATED
        else:
            group = BORROWED if {"tau_from", "baseline_from"} & set(run) else STATED
        setting = Setting(batch, run.get("context", CONTEXT), run.get("mesh", "tensor:1"))
        rows.append(
            PublishedPair(
                run["source"],
                group,
                topologies,
                run["target"],
                run["method"],
                tree.num_nodes if tree else run["num_draft"],
                tree,
                setting,
                task,
                run["temperature"],
                tau,
                speedup,
                plain[i] if i < len(plain) else None,
            )
        )
    return rows


def count_round(row: PublishedPair) -> RoundWork:
    """Counts the passes of a row's rounds."""
    target = PRESETS[row.target]
    if row.method in _BLOCK_ROUNDS:
        return _BLOCK_ROUNDS[row.method](target, row.num_draft, row.setting)
    draft = _DRAFTS[row.method](target)
    return decode_round(target, draft, row.num_draft, row.setting, row.tree)


def _block_round(
    target: ModelConfig, num_draft: int, setting: Setting, *, has_markov: bool = False
) -> RoundWork:
    """Counts the round of a DFlash draft: one pass of five layers over the block, not causal.

    Its keys and values come from five of the target's states, joined by one map. DSpark adds a
    product of rank 256 over the vocabulary for every drafted token.

    Source: DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147.
    """
    own = Stack.of(target, setting)
    block = Stack.of(dataclasses.replace(target, num_hidden_layers=5), setting)
    D, states = target.hidden_size, 2 * target.num_key_value_heads * target.head_dim
    share = setting.abstract_mesh.shape["tensor"]
    inject = Stack(matrices=(5 * D * D + 5 * D * states) // share)
    passes = [
        Pass("verify", 1, own.run(setting, num_draft + 1, num_draft + 1)),
        Pass("refresh", 1, inject.run(setting, num_draft + 1)),
        Pass("draft", 1, block.run(setting, num_draft + 1, num_draft, own)),
    ]
    if has_markov:
        bias = Stack(matrices=256 * target.vocab_size // share)
        passes.append(Pass("draft", num_draft, bias.run(setting, 1)))
    return RoundWork(tuple(passes))


# What the methods of the published pairs are here; the last two are no kinds of the package.
_EAGLE_1 = functools.partial(EagleConfig.of_target, version=1, fc_bias=True)
_DRAFTS = {
    "ngram": lambda target: "ngram",
    "eagle-1": _EAGLE_1,
    "eagle-2": _EAGLE_1,  # the same head with another tree
    "eagle-3": functools.partial(EagleConfig.of_target, draft_vocab_size=32000),
}
_BLOCK_ROUNDS = {"dflash": _block_round, "dspark": functools.partial(_block_round, has_markov=True)}


class PredictedPair(NamedTuple):
    """A row with its prediction.

    Attributes:
      row: the published pair.
      low, high: range of the predicted speed-up over the row's topologies; NaN without a tau.
      implied_tau: the tokens per pass that would explain the published speed-up, for the first
        topology.
      plain_floor_tok_s: maximum tokens a second of plain decoding, for the first topology.
    """

    row: PublishedPair
    low: float
    high: float
    implied_tau: float
    plain_floor_tok_s: float

    @property
    def predicted(self) -> float:
        """The middle of the range."""
        return math.sqrt(self.low * self.high)

    @property
    def ratio(self) -> float:
        """Predicted over published speed-up."""
        return self.predicted / self.row.speedup


def compare(row: PublishedPair, overhead_s_per_pass: float = 0.0) -> PredictedPair:
    """Predicts a row's speed-up; tau is the only measured figure that it uses.

    Args:
      row: The published pair.
      overhead_s_per_pass: See ``RoundWork.floor_s``.
    """
    plain, one = decode_round(PRESETS[row.target], setting=row.setting), count_round(row)
    found = []
    for name in row.topologies:
        chip = Topology.parse(name).chip
        tau = math.nan if row.tau is None else row.tau
        times = (round_.floor_s(chip, overhead_s_per_pass) for round_ in (plain, one))
        found.append(Prediction(row.num_draft, tau, *times, row.setting.batch))
    speedups, first = [p.speedup for p in found], found[0]
    return PredictedPair(
        row,
        min(speedups),
        max(speedups),
        row.speedup * first.round_s / first.plain_s,
        first.plain_tok_s,
    )


def summarise(comparisons: Sequence[PredictedPair]) -> dict[str, Any]:
    """Returns how far predictions are from published speed-ups.

    Returns:
      ``rows``; ``bias``, the geometric mean of predicted over published; ``median_error`` and
      ``max_error`` of the absolute relative difference; ``correlation`` of the logarithms.
    """
    ratio = np.asarray([c.ratio for c in comparisons])
    error = np.abs(ratio - 1)
    both = np.log([(c.predicted, c.row.speedup) for c in comparisons])
    return {
        "rows": len(ratio),
        "bias": float(np.exp(np.log(ratio).mean())),
        "median_error": float(np.median(error)),
        "max_error": float(error.max()),
        "correlation": float(np.corrcoef(both.T)[0, 1]) if len(ratio) > 2 else math.nan,
    }


_SUMMARY = ("group", "pairs", "median error", "largest", "correlation")
_BIASES = ("bias", *(f"at {ms:g} ms a pass" for ms in OVERHEADS_MS))


def run(workdir: str | pathlib.Path | None) -> dict:
    """Compares all pairs; returns the content of report.json.

    Args:
      workdir: The run's folder; by default runs/published/TIME.
    """
    folder = cli.open_workdir("published", workdir)
    head = report.begin("published", folder, {})
    rows, file = load()
    found = [compare(row) for row in rows]
    groups = {name: [c for c in found if c.row.group == name] for name in GROUPS}
    summary = {name: summarise(groups[name]) for name in GROUPS if name != NO_TAU}
    for name, of_group in summary.items():
        of_group["bias_by_overhead_ms"] = {
            ms: summarise([compare(c.row, ms / 1e3) for c in groups[name]])["bias"]
            for ms in (0.0, *OVERHEADS_MS)
        }
    plain = [c for c in found if c.row.plain_tok_s]
    sections = [
        *(
            Section(f"{name}, {len(members)} pairs", HEADER, [*map(_cells, members)], NUMBERS)
            for name, members in groups.items()
        ),
        Section(
            "predicted over published",
            (*_SUMMARY[:2], *_BIASES, *_SUMMARY[2:]),
            [
                (
                    name,
                    str(s["rows"]),
                    *(f"{bias:.2f}x" for bias in s["bias_by_overhead_ms"].values()),
                    f"{s['median_error']:.0%}",
                    f"{s['max_error']:.0%}",
                    f"{s['correlation']:.2f}",
                )
                for name, s in summary.items()
            ],
            (*_SUMMARY[1:2], *_BIASES, *_SUMMARY[2:]),
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
