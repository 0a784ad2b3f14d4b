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
_PARTS = ("rollout_s", "reward_s", "update_s")
_MEANINGS = {
    "reward": "mean of a step's rewards",
    "unequal": "share of groups whose rewards differ, without which nothing is learned",
    "kl": "distance of the policy to the reference, in nats a token",
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


def _rewards(lines: Sequence[Mapping[str, float]]) -> dict[str, Interval]:
    """Returns the mean rewards of the first and the last steps, at most half of them each.

    A line is the mean of the steps since the line before; lines at an edge are taken whole.
    """
    ends = column(lines, "step").astype(int)
    begins = np.append(0, ends[:-1])
    size = min(_ENDS, -(-ends[-1] // 2))
    found = {}
    for of in (begins < size, ends > ends[-1] - size):
        name = f"reward, steps {begins[of][0] + 1} to {ends[of][-1]}"
        found[name] = mean(column(lines, "reward")[of], (ends - begins)[of])
    return found


def summarise(lines: Sequence[Mapping[str, float]]) -> dict[str, Interval]:
    """Returns the figures of a run with their intervals over steps.

    Args:
      lines: Of metrics.jsonl, each the means of the steps since the line before.
    """
    step_s = sum(column(lines, part) for part in _PARTS)
    found = {
        **_rewards(lines),
        **{name: mean(column(lines, name)) for name in ("unequal", "kl", "tau", "rollout_tok_s")},
        "rollout share": mean(column(lines, "rollout_s") / step_s),
        "step_s": mean(step_s),
    }
    plain_s = column(lines, "plain_s")
    if (is_there := np.isfinite(plain_s)).any():
        kept = [line for line, known in zip(lines, is_there) if known]
        own_s = column(kept, "rollout_s")
        tokens = [own_s * column(kept, "rollout_tok_s"), column(kept, "plain_tokens")]
        plain_s = plain_s[is_there]
        rest_s = step_s[is_there] - own_s
        found["rollouts over plain decoding"] = paired_speedup(own_s, plain_s, *tokens)
        found["steps over plain decoding"] = paired_speedup(
            own_s + rest_s, plain_s + rest_s, *tokens
        )
        found["rows identical to plain decoding"] = mean(column(kept, "identical"))
    return found


def sentence(figures: Mapping[str, float]) -> str:
    """Returns what a run has reached."""
    of = {name: value for name, value in figures.items() if name.startswith("reward, ")}
    return "reward " + ", ".join(
        f"{value:.3f} in {name.removeprefix('reward, ')}" for name, value in of.items()
    )


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
