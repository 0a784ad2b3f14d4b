"""Checkpoints of a run: written beside the training, resumed exactly, and never in pieces."""

from __future__ import annotations

import itertools
import math
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from spec_jax.errors import TrainingError


class Checkpoints:
    """The newest states of a run, and the best one by a figure.

    ``folder/latest`` holds the last ``keep`` states, ``folder/best`` the one whose figure is
    highest. Files appear under a step's name only when they are whole.

    Args:
      folder: made if absent.
      keep: how many of the newest stay.
    """

    def __init__(self, folder: str | pathlib.Path, keep: int = 2):
        self.folder = pathlib.Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._latest_path = self.folder / "latest"
        self._latest = ocp.CheckpointManager(self._latest_path, options=options)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, best_fn=lambda figures: figures["figure"], best_mode="max"
        )
        self._best = ocp.CheckpointManager(self.folder / "best", options=options)
        self._known = self._read_best()

    def _read_best(self) -> tuple[int, float] | None:
        try:
            step = self._best.best_step()
            return None if step is None else (step, float(self._best.metrics(step)["figure"]))
        except Exception as error:  # orbax raises of many kinds
            raise TrainingError(
                f"{self.folder / 'best'} cannot be read ({_brief(error)}); move it away, and the "
                "next evaluation makes a new one"
            ) from error

    @property
    def last_step(self) -> int | None:
        """The newest step that is saved, or None."""
        return self._latest.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Begins to write a state; the training may go on, the state be donated.

        The best state is whole before a newer one is: a run that is resumed behind an
        evaluation does not repeat it.

        Raises:
          TrainingError: this or an earlier state could not be written.
        """

        def save():
            self._best.wait_until_finished()
            self._latest.save(step, args=ocp.args.StandardSave(state))

        self._guarded(step, save)

    def save_best(self, step: int, state: Any, figure: float) -> bool:
        """Keeps a state whose figure is higher than every earlier one's; says whether it is.

        Raises:
          TrainingError: this or an earlier state could not be written.
        """
        best = self._known
        if math.isnan(figure) or (best is not None and (figure <= best[1] or step <= best[0])):
            return False
        save = lambda: self._best.save(
            step, args=ocp.args.StandardSave(state), metrics={"figure": float(figure)}
        )
        self._guarded(step, save)
        self._known = (step, float(figure))
        return True

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and figure of the best state, or None."""
        return self._known

    def check(self) -> None:
        """Raises a TrainingError where a state could not be written behind the training."""
        self._guarded(None, lambda: None)

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
          TrainingError: it could not be.
        """
        self._guarded(None, lambda: (self._latest.wait_until_finished(),
                                     self._best.wait_until_finished()))

    def restore(self, state: Any, say=print) -> Any:
        """The newest sound state, or ``state`` as it is where nothing was saved.

        A checkpoint that cannot be read is moved aside, to ``refused-STEP``, and named.

        Args:
          state: of the same run, for shapes and dtypes.
          say: gets a sentence for each refused checkpoint.

        Raises:
          TrainingError: there are checkpoints, and none of them is sound.
        """
        refused = [f"{path} was refused" for path in self._latest_path.glob("refused-*")]
        for step in sorted(self._latest.all_steps(), reverse=True):
            path = self._latest_path / str(step)
            try:
                return _read(self._latest, step, state)
            except Exception as error:  # orbax and tensorstore raise of many kinds
                refused.append(f"{path} is refused: {_brief(error)}")
                names = (f"refused-{step}{'-' * bool(i)}{i or ''}" for i in itertools.count())
                aside = next(p for p in map(path.with_name, names) if not p.exists())
                path.rename(aside)
                say(f"{refused[-1]}; it is now {aside.name}")
                self._latest.reload()
        if refused:
            raise TrainingError(
                f"no checkpoint in {self._latest_path} can be read ({refused[-1]}); restore one, "
                "or start again in an empty directory"
            )
        return state

    def restore_best(self, state: Any) -> Any:
        """The best state; ``state`` gives shapes and dtypes.

        Raises:
          TrainingError: there is none, or it cannot be read.
        """
        if self.best is None:
            raise TrainingError(f"{self.folder / 'best'} holds no checkpoint")
        step = self.best[0]
        try:
            return _read(self._best, step, state)
        except Exception as error:
            raise TrainingError(
                f"{self.folder}/best/{step} cannot be read: {_brief(error)}"
            ) from error

    def _guarded(self, step: int | None, do) -> None:
        try:
            for manager in (self._latest, self._best):
                manager.check_for_errors()
            do()
        except Exception as error:
            what = "a checkpoint" if step is None else f"the checkpoint of step {step}"
            whole = [int(p.name) for p in self._latest_path.glob("*") if p.name.isdigit()]
            raise TrainingError(
                f"{what} could not be written to {self.folder}: {_brief(error)}. The last whole "
                f"one is step {max(whole, default=None)}; make room and run the same command again"
            ) from error

    def close(self) -> None:
        for manager in (self._latest, self._best):
            manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _read(manager: ocp.CheckpointManager, step: int, state: Any) -> Any:
    """Restores a state; raises a ValueError if its shapes differ or a number is not finite."""
    found = manager.restore(step, args=ocp.args.StandardRestore(state))

    def leaf(path, a, b):
        name = jax.tree_util.keystr(path)
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"{name} is {a.dtype}{list(a.shape)}; this run has {b.dtype}{list(b.shape)}"
            )
        if np.issubdtype(a.dtype, np.floating) and not bool(np.isfinite(a).all()):
            raise ValueError(f"{name} is not finite")

    jax.tree_util.tree_map_with_path(leaf, found, state)
    return found
