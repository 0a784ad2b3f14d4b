"""The report of a run: its final figures, its plot, and report.html."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.comparison.page.page import write_page
from experiments.run import cli, report
from spec_jax.intervals import Interval, jackknife, paired_speedup
from spec_jax.show.tables import Section, Table

_ENDS = 20  # maximum steps at either end of a run whose rewards are compared
_UNEQUAL_AT_END = "unequal, last steps"
_FEW = 0.1  # share of groups with unequal rewards
_PARTS = ("rollout_s", "reward_s", "update_s")
_MEANINGS = {
    "reward": "mean of a step's rewards",
    "unequal": "share of groups whose rewards differ, without which nothing is learned",
    "kl": "of the policy to the reference, in nats a token; without filters and at temperature 1 "
    "an unbiased estimate",
    "tau": "output tokens a target pass of a row",
    "rollout_tok_s": "output tokens a second while rollouts are drawn",
    "rollout share": "of the time of a step",
}


def column(lines: Sequence[Mapping[str, float]], name: str) -> np.ndarray:
    """Returns a figure of every step, NaN where a step has none."""
    return np.asarray([line.get(name, np.nan) for line in lines], float)


def mean(values: np.ndarray, counts: np.ndarray | float = 1.0) -> Interval:
    """Returns a mean over steps with its interval; each value is that of ``counts`` steps."""
    is_known = np.isfinite(values)
    if not is_known.any():
        return Interval(np.nan, np.nan, np.nan)
    counts = np.broadcast_to(counts, values.shape)[is_known]
    return jackknife(lambda x, n: np.stack([x / n], axis=-1), values[is_known] * counts, counts)[0]


def _ends_of(
    lines: Sequence[Mapping[str, float]], counts: np.ndarray
) -> tuple[dict[str, Interval], Interval]:
    """Returns the mean rewards of the first and the last steps, and ``unequal`` of the latter.

    At most half of the steps each. A line is the mean of the steps since the line before; lines at
    an edge are taken whole, and none is taken twice.
    """
    ends = column(lines, "step").astype(int)
    begins = ends - counts
    size = min(_ENDS, -(-ends[-1] // 2))
    first = begins < size
    last = (ends > ends[-1] - size) & ~first
    rewards = {}
    for part in (first, last):
        if part.any():
            name = f"reward, steps {begins[part][0] + 1} to {ends[part][-1]}"
            rewards[name] = mean(column(lines, "reward")[part], counts[part])
    part = last if last.any() else first
    return rewards, mean(column(lines, "unequal")[part], counts[part])


def summarise(lines: Sequence[Mapping[str, float]]) -> dict[str, Interval]:
    """Returns the figures of a run with their intervals over steps.

    Args:
      lines: Of metrics.jsonl, each the means of the steps since the line before.
    """
    step_s = sum(column(lines, part) for part in _PARTS)
    counts = np.diff(column(lines, "step").astype(int), prepend=0)
    rewards, unequal = _ends_of(lines, counts)
    names = ("unequal", "kl", "tau", "rollout_tok_s")
    found = {
        **rewards,
        **{name: mean(column(lines, name), counts) for name in names},
        _UNEQUAL_AT_END: unequal,
        "rollout share": mean(column(lines, "rollout_s") / step_s, counts),
        "step_s": mean(step_s, counts),
    }
    kept = [line for line in lines if "plain_s" in line]
    if kept:
        compared_s, plain_s = column(kept, "compared_s"), column(kept, "plain_s")
        tokens = [column(kept, f"{name}_tokens") for name in ("compared", "plain")]
        rest_s = column(kept, "reward_s") + column(kept, "update_s")
        found["rollouts over plain decoding"] = paired_speedup(compared_s, plain_s, *tokens)
        found["steps over plain decoding"] = paired_speedup(
            compared_s + rest_s, plain_s + rest_s, *tokens
        )
        found["rows identical to plain decoding"] = mean(column(kept, "identical"))
    return found


def sentence(figures: Mapping[str, float]) -> str:
    """Returns what a run has reached."""
    rewards = {name: value for name, value in figures.items() if name.startswith("reward, ")}
    said = "reward " + ", ".join(
        f"{value:.3f} in {name.removeprefix('reward, ')}" for name, value in rewards.items()
    )
    if figures.get(_UNEQUAL_AT_END, 1.0) < _FEW:
        said += (
            "; at the end nearly all groups have equal rewards, from which nothing is learned: "
            "stop earlier, or take a harder reward, more samples or a higher temperature"
        )
    return said


def write(
    folder: pathlib.Path, lines: Sequence[Mapping[str, float]], experiment: Any
) -> dict[str, float]:
    """Writes the plot and report.html; returns the final figures.

    Args:
      folder: Of the run.
      lines: Of metrics.jsonl.
      experiment: The ``RlExperiment``.
    """
    from experiments.run import plots  # needs matplotlib, slow to import

    evaluated = [line for line in lines if "held_out_reward" in line]
    lines = [line for line in lines if "reward" in line]
    step_s = sum(column(lines, part) for part in _PARTS)
    drawn = {
        "reward": {"reward": column(lines, "reward")},
        "KL to the reference, nats": {"kl": column(lines, "kl")},
        "tau": {"tau": column(lines, "tau")},
        "rollout tokens a second": {"rollouts": column(lines, "rollout_tok_s")},
        "share of a step": {
            part.removesuffix("_s"): column(lines, part) / step_s for part in _PARTS
        },
        "groups of unequal rewards": {"unequal": column(lines, "unequal")},
    }
    drawn = {title: known for title, known in drawn.items() if np.isfinite([*known.values()]).any()}
    with plots.panels(folder / "rl.png", 3, (11, 6.4), rows=2) as axes:
        for axis in axes[len(drawn) :]:
            axis.set_axis_off()
        for axis, (title, known) in zip(axes, drawn.items()):
            for number, (name, values) in enumerate(known.items()):
                look = plots.look_of(number) | {"markersize": 2}
                axis.plot(column(lines, "step"), values, label=name, **look)
            axis.set(title=title, xlabel="step")
        held_out = column(evaluated, "held_out_reward")
        axes[0].plot(column(evaluated, "step"), held_out, label="held out", **plots.look_of(1))
    found = summarise(lines)
    rows = [(name, f"{value:.3g}") for name, value in found.items() if np.isfinite(value.value)]
    parts = [(part.removesuffix("_s"), f"{mean(column(lines, part)):.3g}") for part in _PARTS]
    sections = [
        Section("Figures", table=Table(("figure", "mean over steps (95 % interval)"), rows)),
        Section("By step", figure="rl.png"),
        Section("Seconds of a step", table=Table(("part", "mean (95 % interval)"), parts)),
        Section("Meanings", terms=_MEANINGS),
    ]
    saved = [cli.read_saved(folder / f"{name}.json") for name in ("config", "environment")]
    page = {
        "command": cli.command("rl"),
        "config": saved[0],
        "environment": saved[1],
        "models": {"target": report.facts(experiment.target, experiment.dtype)},
        "own": {},
        "mesh": None,
        "warnings": report.load_note(saved[1]),
        "prompts": {"description": experiment.summary},
    }
    write_page(folder / "report.html", page, (), sections, title=experiment.title)
    return {name: value.value for name, value in found.items() if np.isfinite(value.value)}
