"""The loop around a training step: logs, evaluation, checkpoints, and an orderly end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from spec_jax import processes
from spec_jax.compilation import NamedProgram, Timed
from spec_jax.errors import TrainingError
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Lines
from spec_jax.train.means import merge, report
from spec_jax.train.step import TrainState

_SAME_S = 0.5  # programs such as timeout send a Ctrl-C on, which then arrives twice


class Preemption:
    """Turns SIGTERM and the first Ctrl-C into a flag, so that a run can save and end.

    Another Ctrl-C ends the run at once. Used as a context manager. It does nothing outside of the
    main thread.

    Args:
      clock: returns the seconds since some point in time.

    Attributes:
      asked_by: "SIGTERM" or "Ctrl-C" once one of them has come; "" before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.asked_by = ""
        self._asked_s = -math.inf
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, _) -> None:
        now_s = self._clock()
        if number == signal.SIGTERM:
            self.asked_by = "SIGTERM"
        elif self._asked_s == -math.inf:
            self.asked_by = "Ctrl-C"
            self._asked_s = now_s
            with contextlib.suppress(OSError):  # print is not safe in a signal handler
                os.write(2, b"\nCtrl-C: saving and ending; again: ending at once\n")
        elif now_s - self._asked_s > _SAME_S:
            raise KeyboardInterrupt

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            if handler is not None:
                signal.signal(number, handler)


class _Figures:
    """The figures of the steps since the last line; they stay on their devices until read.

    Args:
      describe_batch: Says which data the batch of a step holds.
      checkpoints: Where states are saved, for error messages.
    """

    def __init__(self, describe_batch: Callable[[int], str], checkpoints: Checkpoints | None):
        self._describe_batch = describe_batch
        self._checkpoints = checkpoints
        self._pending: list[tuple[int, dict]] = []
        self._read: list[dict] = []
        self._num_tokens = 0
        self._began_s = time.monotonic()

    def add(self, done: int, figures: dict, num_tokens: int) -> None:
        """Adds the figures of the step after which ``done`` steps are done."""
        self._pending.append((done, figures))
        self._num_tokens += num_tokens

    def read(self) -> None:
        """Reads the figures that are pending.

        Raises:
          TrainingError: A loss or gradient is not finite.
        """
        for done, figures in jax.device_get(self._pending):
            for key, name in {"loss": "loss", "grad_norm": "norm of the gradient"}.items():
                if not math.isfinite(figures[key]):
                    data = self._describe_batch(done - 1)
                    what = f"the {name} is {figures[key]} at step {done}{data and f' ({data})'}"
                    if self._checkpoints is not None:
                        last = self._checkpoints.last_step
                        what = f"{what}; the last good checkpoint is of step {last}"
                    raise TrainingError(f"{what}: lower the rates, or leave that data out")
            self._read.append(figures)
        self._pending.clear()

    def summary(self) -> tuple[Mapping, int]:
        """Returns the figures since the last summary, merged, and the tokens per second."""
        means = merge(*self._read)
        rate = round(self._num_tokens / (time.monotonic() - self._began_s))
        self._read.clear()
        self._num_tokens = 0
        self._began_s = time.monotonic()
        return means, rate

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the seconds of a block out of the tokens per second."""
        begin_s = time.monotonic()
        yield
        self._began_s += time.monotonic() - begin_s


def train_loop(
    state: TrainState,
    *,
    step_fn: Callable[[TrainState, Any], tuple[TrainState, dict]],
    batch_at: Callable[[int], Any],
    num_steps: int,
    checkpoints: Checkpoints | None,
    log: Lines,
    tokens_per_step: Callable[[Any], int],
    log_every: int = 10,
    summarise: Callable[[Mapping], Mapping] = report,
    evaluate: Callable[[TrainState], Mapping[str, float]] | None = None,
    eval_every: int = 0,
    best_by: str | None = None,
    checkpoint_every_s: float = 300.0,
    describe_batch: Callable[[int], str] = lambda step: "",
) -> tuple[TrainState, bool]:
    """Trains from ``state.step`` to ``num_steps``, or until SIGTERM or Ctrl-C ends the run.

    Either of them saves a checkpoint first; a second Ctrl-C ends the run at once. A state is saved
    only after all losses and gradients up to it were found to be finite. Several
    processes save and end at the same steps: those that are logged.

    Args:
      state: A fresh or restored state; it is consumed.
      step_fn: One jitted step that donates the state, ``(state, batch) -> (state, figures)``.
      batch_at: The batch of a step, a pure function of the step's number.
      num_steps: The number of steps of the whole run.
      checkpoints: Where states are saved; None saves none, and no signal is caught.
      log: Where figures are written.
      tokens_per_step: The number of tokens that a batch trains on.
      log_every: Steps between two lines; each line holds the figures since the last one.
      summarise: Turns the merged figures of steps into what is written.
      evaluate: ``state -> figures``, or None.
      eval_every: Steps between two evaluations; 0 evaluates after the last step only.
      best_by: The figure of ``evaluate`` that chooses the best state, or None.
      checkpoint_every_s: Seconds between two checkpoints.
      describe_batch: Says which data the batch of a step holds, for error messages.

    Returns:
      The last state, and whether all steps were done.

    Raises:
      TrainingError: A loss or gradient is not finite, or a checkpoint could not be written.
    """
    figures = _Figures(describe_batch, checkpoints)
    saved_s = time.monotonic()
    first = int(state.step)
    preemption = Preemption()
    with contextlib.nullcontext() if checkpoints is None else preemption:
        for step in range(first, num_steps):
            with Timed(), NamedProgram("the training step"):  # which say that it is compiled
                batch = batch_at(step)
                state, of_step = step_fn(state, batch)
            done = step + 1
            if step == first:
                jax.block_until_ready(of_step)
                log.begin(done)
            figures.add(done, of_step, tokens_per_step(batch))
            is_last = done == num_steps
            is_asked = bool(preemption.asked_by)
            is_due = time.monotonic() - saved_s > checkpoint_every_s
            if checkpoints is not None and processes.count() > 1:
                is_agreed = done % log_every == 0 or is_last
                is_asked = is_agreed and processes.any_process(is_asked)
                is_due = is_agreed and processes.from_writer(is_due)
            if done % log_every == 0 or is_last or is_asked:
                figures.read()
                means, tok_s = figures.summary()
                log.write(done, **summarise(means), tok_s=tok_s)
                log.advance(done)
            if checkpoints is not None:
                checkpoints.check()
            if evaluate and (is_last or (eval_every and done % eval_every == 0)):
                figures.read()
                with figures.paused():
                    log.now("evaluating")
                    evaluated = evaluate(state)
                    log.write(done, **evaluated)
                    if best_by is not None:
                        checkpoints.save_best(done, state, evaluated[best_by])
                    log.now("")
            if checkpoints is not None and (is_last or is_asked or is_due):
                figures.read()
                if checkpoints.last_step != done:
                    checkpoints.save(done, state)
                saved_s = time.monotonic()
            if is_asked and not is_last:
                checkpoints.wait()
                by = preemption.asked_by or "SIGTERM in another process"
                log.say(f"{by}: saved at step {done}; the same command goes on from there")
                return state, False
    if checkpoints is not None:
        checkpoints.wait()
    return state, True
