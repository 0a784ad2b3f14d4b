"""Checkpoints of a run, written while the training goes on and resumed exactly."""

from __future__ import annotations

import contextlib
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from spec_jax import processes
from spec_jax.errors import TrainingError


class Checkpoints:
    """Keeps the newest states of a run, and the best one by a figure.

    ``folder/latest`` holds the last ``keep`` states and ``folder/best`` the one with the highest
    figure. A checkpoint appears under its step's name only when it is complete.

    Args:
      folder: The folder of the checkpoints; it is created if it does not exist.
      keep: The number of newest states to keep.

    Attributes:
      best: The step and the figure of the best state, or None.

    Raises:
      TrainingError: The best checkpoint of an earlier run cannot be read.
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
        self.best = self._read_best()

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
        """The step of the newest checkpoint, or None."""
        return self._latest.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Starts to write a state. Training may go on at once, and donate the state.

        The best state is complete before a newer one is started, so a run that is resumed after
        an evaluation does not repeat it.

        Args:
          step: The number of steps done.
          state: The state to save, a pytree of arrays.

        Raises:
          TrainingError: This or an earlier state could not be written.
        """

        with self._writing(f"the checkpoint of step {step}"):
            self._best.wait_until_finished()
            self._latest.save(step, args=ocp.args.StandardSave(state))

    def save_best(self, step: int, state: Any, figure: float) -> bool:
        """Saves a state as the best one if its figure is higher than every earlier figure.

        Args:
          step: The number of steps done.
          state: The state to save, a pytree of arrays.
          figure: The figure to compare by, such as tau. A NaN is never the best.

        Returns:
          Whether the state was saved.

        Raises:
          TrainingError: This or an earlier state could not be written.
        """
        best_step, best = self.best or (-1, -math.inf)
        if math.isnan(figure) or figure <= best or step <= best_step:
            return False
        with self._writing(f"the checkpoint of step {step}"):
            metrics = {"figure": float(figure)}
            self._best.save(step, args=ocp.args.StandardSave(state), metrics=metrics)
        self.best = (step, float(figure))
        return True

    def check(self) -> None:
        """Raises a TrainingError if a state could not be written in the background."""
        with self._writing():
            pass

    def wait(self) -> None:
        """Waits until every state is written.

        Raises:
          TrainingError: A state could not be written.
        """
        with self._writing():
            self._latest.wait_until_finished()
            self._best.wait_until_finished()

    def restore(self, state: Any, say: Callable[[str], object] = print) -> Any:
        """Returns the newest state that can be read, or ``state`` if nothing was saved.

        A checkpoint that cannot be read is renamed to ``refused-STEP`` and reported; with several
        processes it is an error.

        Args:
          state: A state of the same run, for its shapes, dtypes and shardings: a checkpoint may
            have been saved from other devices.
          say: Called with a sentence for each checkpoint that is refused.

        Raises:
          TrainingError: There are checkpoints, and none of them can be read; or, with several
            processes, the newest cannot.
        """
        refused = [f"{path} was refused" for path in self._latest_path.glob("refused-*")]
        for step in sorted(self._latest.all_steps(), reverse=True):
            path = self._latest_path / str(step)
            try:
                return _read(self._latest, step, state)
            except Exception as error:  # orbax and tensorstore raise of many kinds
                if processes.count() > 1:  # the others may have read their parts: no way to agree
                    raise TrainingError(
                        f"{path} cannot be read ({_brief(error)}); move it away and run the same "
                        "command again: it continues from the one before"
                    ) from error
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
        """Returns the best state.

        Args:
          state: A state of the same run, for its shapes, dtypes and shardings.

        Raises:
          TrainingError: There is no best state, or it cannot be read.
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

    @contextlib.contextmanager
    def _writing(self, what: str = "a checkpoint") -> Iterator[None]:
        """Raises a TrainingError for what fails in the block, or has failed in the background."""
        try:
            for manager in (self._latest, self._best):
                manager.check_for_errors()
            yield
        except Exception as error:
            whole = [int(p.name) for p in self._latest_path.glob("*") if p.name.isdigit()]
            raise TrainingError(
                f"{what} could not be written to {self.folder}: {_brief(error)}. The last whole "
                f"one is step {max(whole, default=None)}; make room and run the same command again"
            ) from error

    def close(self) -> None:
        """Ends the background writers."""
        for manager in (self._latest, self._best):
            manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, error, trace) -> None:
        with contextlib.suppress(Exception) if error else contextlib.nullcontext():
            self.close()


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _read(manager: ocp.CheckpointManager, step: int, state: Any) -> Any:
    """Restores a state. Raises a ValueError if its shapes differ or a number is not finite."""
    found = manager.restore(step, args=ocp.args.StandardRestore(state))
    are_finite = jax.device_get(jax.tree.map(_is_finite, found))
    leaves = jax.tree_util.tree_leaves_with_path(found)
    others = zip(jax.tree.leaves(state), jax.tree.leaves(are_finite), strict=True)
    for (path, a), (b, is_finite) in zip(leaves, others, strict=True):
        name = jax.tree_util.keystr(path)
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"{name} is {a.dtype}{list(a.shape)}; this run has {b.dtype}{list(b.shape)}"
            )
        if not is_finite:
            raise ValueError(f"{name} is not finite")
    return found


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    """Computed where the array lies, as no process may hold all of it."""
    return jnp.isfinite(x).all()
