"""Published pairs of accepted tokens and speed-up, and what the roofline predicts from the first.

    python tests/support/published.py    # prints every pair, and the errors by group

For every pair of ``tests/recorded/published.json`` with a known acceptance the speed-up is
predicted from that acceptance, the model's shape and the chip's published peaks; no constant is
fitted.
"""

import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spec_jax.drafters.block.config import DFlashConfig, DSparkConfig
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.planning.chips import Topology
from spec_jax.planning.presets import PRESETS
from spec_jax.planning.roofline import Prediction, RoundWork, Setting, round_work
from spec_jax.show.tables import Section, Table
from spec_jax.tree import DynamicTree, Tree

PATH = pathlib.Path(__file__).parents[1] / "recorded" / "published.json"
CONTEXT = 512  # of rows whose source does not say it; at batch 1 it hardly matters
STATED = "hardware and tau stated"
BORROWED = "tau of another source"
UNSTATED = "hardware not stated"
NO_TAU = "tau not stated"
GROUPS = (STATED, BORROWED, UNSTATED, NO_TAU)
# Where no hardware is named, the prediction is that of each of these; see ``PublishedPair.chips``.
USUAL = ("a100:1", "h100:1", "rtx3090:1")
OVERHEADS_MS = (0.3, 1.0)  # a pass
# EAGLE-1's static tree, ``mc_sim_7b_63`` in the authors' repository: the ranks along each path.
EAGLE_1_TREE = Tree.from_paths(
    [int(rank) for rank in path]
    for path in "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 "
    "0000 0001 0002 00000 00001".split()
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


def load(path: pathlib.Path = PATH) -> tuple[list[PublishedPair], dict[str, Any]]:
    """Returns the rows, and the whole file with its sources and the pairs that are left out."""
    file = json.loads(path.read_text(encoding="utf-8"))
    return [row for run in file["runs"] for row in _rows(run)], file


def _rows(run: dict[str, Any]) -> list[PublishedPair]:
    shape = run.get("tree")
    tree = EAGLE_1_TREE if shape == "eagle-1" else shape and DynamicTree(*shape)
    topologies = (run["hardware"],) if run["hardware"] else USUAL
    stated = BORROWED if {"tau_from", "baseline_from"} & set(run) else STATED
    rows = []
    for task, batch, tau, speedup in run["pairs"]:
        group = NO_TAU if tau is None else stated if run["hardware"] else UNSTATED
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
            )
        )
    return rows


_EAGLE_1 = functools.partial(EagleConfig.of_target, version=1, fc_bias=True)
_DRAFTS = {
    "ngram": lambda target: "ngram",
    "eagle-1": _EAGLE_1,
    "eagle-2": _EAGLE_1,  # the same head with another tree
    "eagle-3": functools.partial(EagleConfig.of_target, draft_vocab_size=32000),
}
_BLOCKS = {"dflash": (DFlashConfig, 1), "dspark": (DSparkConfig, 0)}  # tokens beside the drafts


def count_round(row: PublishedPair) -> RoundWork:
    """Counts the passes of a row's rounds."""
    target = PRESETS[row.target]
    if row.method in _BLOCKS:
        kind, more = _BLOCKS[row.method]
        draft = kind.of_target(target, num_layers=5, block_size=row.num_draft + more)
    else:
        draft = _DRAFTS[row.method](target)
    return round_work(target, draft, row.num_draft, row.setting, row.tree)


class PredictedPair(NamedTuple):
    """A row with its prediction.

    Attributes:
      row: the published pair.
      low, high: range of the predicted speed-up over the row's topologies; NaN without a tau.
      implied_tau: the tokens per pass that would explain the published speed-up, for the first
        topology.
    """

    row: PublishedPair
    low: float
    high: float
    implied_tau: float

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
      row: the published pair.
      overhead_s_per_pass: see ``RoundWork.floor_s``.
    """
    plain, one = round_work(PRESETS[row.target], setting=row.setting), count_round(row)
    found = []
    for name in row.topologies:
        chip = Topology.parse(name).chip
        tau = math.nan if row.tau is None else row.tau
        times = (round_.floor_s(chip, overhead_s_per_pass) for round_ in (plain, one))
        found.append(Prediction(row.num_draft, tau, *times, row.setting.batch))
    speedups = [p.speedup for p in found]
    implied_tau = row.speedup * found[0].round_s / found[0].plain_s
    return PredictedPair(row, min(speedups), max(speedups), implied_tau)


def bias(found: Sequence[PredictedPair]) -> float:
    """The geometric mean of predicted over published speed-ups."""
    return float(np.exp(np.log([c.ratio for c in found]).mean()))


def sections(rows: Sequence[PublishedPair]) -> list[Section]:
    """Returns a table of the pairs of each group, and one of the errors."""
    tables, errors = [], []
    for group in GROUPS:
        found = [compare(row) for row in rows if row.group == group]
        header = ("source", "on", "target", "drafter", "K", "B", "task", "tau", "published")
        tables.append(
            Section(group, table=Table((*header, "predicted"), [*map(_cells, found)], ("tau",)))
        )
        if group == NO_TAU:
            continue
        at = (bias([compare(c.row, ms / 1e3) for c in found]) for ms in (0.0, *OVERHEADS_MS))
        error = np.abs(np.asarray([c.ratio for c in found]) - 1)
        logs = np.log([(c.predicted, c.row.speedup) for c in found])
        cells = *(f"{x:.2f}" for x in at), f"{np.median(error):.0%}", f"{error.max():.0%}"
        correlation = np.corrcoef(logs.T)[0, 1]
        errors.append((group, str(len(found)), *cells, f"{correlation:.2f}"))
    biases = ("predicted / published", *(f"at {ms:g} ms a pass" for ms in OVERHEADS_MS))
    header = ("group", "pairs", *biases, "median error", "largest", "correlation")
    return [*tables, Section("errors", table=Table(header, errors, header[1:]))]


def _cells(c: PredictedPair) -> tuple[str, ...]:
    row, is_known = c.row, c.row.tau is not None
    k = str(row.num_draft)
    if row.tree is not None:
        kind = "" if isinstance(row.tree, DynamicTree) else "static "
        k += f", {kind}tree {row.tree.depth} deep"
    return (
        row.source,
        row.topologies[0] if len(row.topologies) == 1 else "not stated",
        row.target,
        row.method,
        k,
        str(row.setting.batch),
        row.task,
        f"{row.tau:.2f}" if is_known else f"({c.implied_tau:.2f})",
        f"{row.speedup:.2f}",
        f"{c.predicted:.2f}" if is_known else "–",
    )


if __name__ == "__main__":
    print("\n\n".join(section.console() for section in sections(load()[0])))
