"""Figures of a run: JSONL to keep, TensorBoard to watch, a bar or lines to see."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax import processes
from spec_jax.errors import TrainingError
from spec_jax.models.files import write_text
from spec_jax.progress import Progress


def flatten(figures: Mapping[str, object]) -> dict[str, float]:
    """Returns the numbers by name. Those of an array are named by position: ``name_1``, …

    What is NaN has no figure, such as the acceptance of drafts that were never reached.
    """
    flat: dict[str, float] = {}
    for name, value in figures.items():
        if np.ndim(value) == 0:
            number = value if isinstance(value, (int, float)) else float(value)
            flat |= {name: number} if number == number else {}
        else:
            known = ((i, float(x)) for i, x in enumerate(np.asarray(value), 1))
            flat |= {f"{name}_{i}": x for i, x in known if x == x}
    return flat


class Lines:
    """Keeps the figures of a run by step, in memory, and shows how far it is.

    Args:
      progress: Counts the steps; None shows nothing.
    """

    def __init__(self, progress: Progress | None):
        self.lines: list[dict[str, Any]] = []
        self.progress = progress

    def write(self, step: int, **figures: Any) -> None:
        """Adds figures to those of a step.

        Args:
          step: The number of steps done.
          **figures: By name.
        """
        if not self.lines or self.lines[-1]["step"] != step:
            self.lines.append({"step": step})
        self.lines[-1] |= figures

    def advance(self, step: int) -> None:
        """Shows that a step is done, whose figures were written."""
        if self.progress is not None:
            text = f"loss {self.lines[-1]['loss']:.3g}"
            self.progress.step(text, step - self.progress.num_done)

    def begin(self, step: int) -> None:
        """Counts time from here: the time left is estimated from the steps after ``step``."""
        if self.progress is not None:
            self.progress.begin(step)

    def now(self, text: str) -> None:
        """Shows what is running, until the next figures."""
        if self.progress is not None:
            self.progress.now(text)

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self.progress is not None:
            self.progress.say(text)


class Log(Lines):
    """Writes figures by step to metrics.jsonl, to tensorboard/ and to the screen.

    A resumed run drops the lines that were written after its checkpoint and writes them again;
    its first mean is over fewer steps. ``cpu_s`` counts the CPU seconds of this process and of
    those that it resumes. Of several processes the first one writes.

    Args:
      folder: The folder of the run.
      first_step: The number of steps done before; 0 for a new run.
      num_steps: The number of steps of the whole run.
    """

    def __init__(self, folder: pathlib.Path, first_step: int, num_steps: int):
        self._path = folder / "metrics.jsonl"
        self._before_s = 0.0
        self._shown: dict[str, float] = {}
        if not processes.is_writer():
            super().__init__(None)
            return
        from tensorboardX import SummaryWriter  # imports protobuf, so only when a run begins

        lines = read_metrics(self._path) if first_step else []
        if lines:
            self._before_s = max(line["cpu_s"] for line in lines)
        kept = [line for line in lines if line["step"] <= first_step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        purge = {"purge_step": first_step + 1} if first_step else {}
        self._board = SummaryWriter(str(folder / "tensorboard"), **purge)
        super().__init__(Progress(num_steps, "training", num_done=first_step))

    def write(self, step: int, **figures: object) -> None:
        """Writes the figures of a step, and prints them if there is no terminal for a bar.

        Args:
          step: The number of steps done.
          **figures: Numbers or arrays by name, see ``flatten``.

        Raises:
          TrainingError: metrics.jsonl could not be written.
        """
        if self.progress is None:
            return
        cpu_s = self._before_s + time.process_time()
        figures = {"step": step, **flatten(figures), "cpu_s": round(cpu_s, 1)}
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")
        except OSError as error:
            raise TrainingError(
                f"{self._path} could not be written: {error}; make room and run the same command "
                "again"
            ) from error
        for name, value in figures.items():
            if name != "step":
                self._board.add_scalar(name, value, step)
        if not self.progress.is_bar:
            line = " ".join(f"{k}={_short(v)}" for k, v in figures.items())
            self.progress.say(line + self.progress.left(step))
        self._shown |= {k: v for k, v in figures.items() if k in ("loss", "tok_s", "tau")}

    def advance(self, step: int) -> None:
        """Moves the bar to a step. Without a terminal there is none, and ``write`` prints."""
        if self.progress is not None and self.progress.is_bar:
            text = ", ".join(f"{k}={_short(v)}" for k, v in self._shown.items())
            self.progress.step(text, step - self.progress.num_done)

    def close(self) -> None:
        """Removes the bar and closes the TensorBoard file."""
        if self.progress is None:
            return
        self.progress.close()
        with contextlib.suppress(OSError):  # a full disk, which ``write`` has reported
            self._board.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(path: pathlib.Path) -> list[dict]:
    """Returns the lines of a metrics.jsonl without a last one that was cut off."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
