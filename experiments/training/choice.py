"""Which step of a training run has the best head, by how much, and how sure that is."""

from __future__ import annotations

import json
import math
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.run.journal import Journal
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError
from spec_jax.intervals import Interval, jackknife

EVALUATIONS = "evaluations.jsonl"
_FORM = "an evaluation with step, setting, tokens and rounds"


class Evaluations:
    """What each prompt took at each evaluated step, in a file that a resumed run continues.

    Args:
      folder: The folder of the run.
      setting: What evaluations must share to be compared: prompts, K, new tokens.
    """

    def __init__(self, folder: pathlib.Path, setting: Any):
        self._journal = Journal(folder / EVALUATIONS)
        self._setting = zlib.crc32(json.dumps(setting).encode())
        self._lines: dict[int, Mapping[str, Any]] = {}
        self._journal.read(self._take, _FORM)

    def _take(self, line: Mapping[str, Any]) -> None:
        tokens = line["tokens"]
        rounds = line["rounds"]
        assert len(tokens) == len(rounds) > 0
        if line["setting"] == self._setting:
            self._lines[line["step"]] = line  # a step that was evaluated again is the same

    def append(self, step: int, rows: Sequence[Stats]) -> None:
        """Saves the counts of every prompt at a step.

        Args:
          step: The number of steps done.
          rows: What each prompt took, in their order.
        """
        line = {
            "step": step,
            "setting": self._setting,
            "tokens": [s.emitted - s.first for s in rows],
            "rounds": [s.rounds for s in rows],
        }
        with self._journal:
            self._journal.append([line])
        self._lines[step] = line

    def choice(self, step: int) -> dict[str, Any] | None:
        """Compares a step with the best of the others, prompt by prompt.

        Args:
          step: The step whose state is exported.

        Returns:
          "step", "tau" and "interval", "prompts", and "evaluated", the number of steps; with
          several, "other", the step with the highest tau besides, its "other_tau", and
          "difference" with its "difference_interval". None if the step was not evaluated with this
          setting.

        Raises:
          ConfigError: The evaluations have different numbers of prompts.
        """
        if step not in self._lines:
            return None
        own = self._counts(step)
        tau = _tau(own)
        found = {
            "step": step,
            "tau": tau.value,
            "interval": [tau.low, tau.high],
            "prompts": len(own[0]),
            "evaluated": len(self._lines),
        }
        taus = {s: _tau(self._counts(s)).value for s in self._lines if s != step}
        taus = {s: value for s, value in taus.items() if not math.isnan(value)}
        if not taus:
            return found
        other = max(taus, key=lambda s: (taus[s], s))
        theirs = self._counts(other)
        if len(theirs[0]) != len(own[0]):
            raise ConfigError(
                f"{self._journal.path}: steps {step} and {other} have {len(own[0])} and "
                f"{len(theirs[0])} prompts; expected the same prompts at every step"
            )
        (difference,) = jackknife(
            lambda t, r, u, q: np.stack([t / r - u / q], axis=-1), *own, *theirs
        )
        return found | {
            "other": other,
            "other_tau": taus[other],
            "difference": difference.value,
            "difference_interval": [difference.low, difference.high],
        }

    def _counts(self, step: int) -> list[np.ndarray]:
        return [np.asarray(self._lines[step][name], float) for name in ("tokens", "rounds")]


def _tau(counts: Sequence[np.ndarray]) -> Interval:
    (found,) = jackknife(lambda tokens, rounds: np.stack([tokens / rounds], axis=-1), *counts)
    return found.within(1.0, math.inf)


def describe(choice: Mapping[str, Any]) -> str:
    """Returns a sentence on what ``Evaluations.choice`` has found."""

    def span(low, high):
        return f" ({low:.2f} to {high:.2f})" if low < high else ""

    on = f"on {choice['prompts']} prompt{'s' * (choice['prompts'] > 1)}"
    tau = f"tau {choice['tau']:.2f}{span(*choice['interval'])} {on}"
    if "other" not in choice:
        return f"step {choice['step']}, the only one that was evaluated: {tau}"
    difference = choice["difference"]
    low, high = choice["difference_interval"]
    is_ahead = difference >= 0
    what = "more than the next best" if is_ahead else "less than the best"
    sure = "" if low > 0 or high < 0 else ", not significant"
    sign = 1 if is_ahead else -1
    bounds = sorted((sign * low, sign * high))
    return (
        f"step {choice['step']} {'won' if is_ahead else 'is exported'}, of "
        f"{choice['evaluated']} evaluated: {tau}, {abs(difference):.2f}{span(*bounds)} {what}, "
        f"step {choice['other']}{sure}"
    )
