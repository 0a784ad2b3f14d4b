"""The session that runs the rounds of a call, and its progress."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator

import jax
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import Timed
from spec_jax.decoding import Finish
from spec_jax.engine.cancellation import RowCancellation
from spec_jax.engine.engine import Engine
from spec_jax.engine.generation import Generation, collect, error_of
from spec_jax.engine.request import Request
from spec_jax.engine.stats import RunningStats, Stats
from spec_jax.engine.text import TextTracker
from spec_jax.errors import Cancelled
from spec_jax.progress import Progress, is_watched
from spec_jax.sampling import Samplers

# Rounds of a step: with stop strings to find; and without streaming, so that a cancellation
# token that is requested during the call is still seen.
ROUNDS_TO_STOPS = 8
ROUNDS_UNWATCHED = 32
_DELAY_S = 2.0  # before a bar appears unasked
_EVERY_S = 5.0  # between two lines where there is no bar


class Session:
    """One call of a decoder, from prefill to the result.

    The caller advances it with ``step()``. After a step, ``pieces`` holds the text that has become
    final, and cancelled rows have ended. ``close`` ends all rows. Both may be called from any
    thread; they take turns. When the last row has ended, the session is done and its statistics are
    counted.

    Args:
      engine: runs the rounds.
      request: the prompts.
      tracker: follows the text.
      cancellation: says which rows are cancelled.
      totals: gets the statistics of the call when it ends.
      samplers: the target's, one for all rows or one for each, to say what ended a row.
      rounds_per_sync: rounds of a step; None: 1 if the call streams or can be cancelled, else more.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        tracker: TextTracker,
        cancellation: RowCancellation,
        totals: RunningStats,
        samplers: Samplers,
        rounds_per_sync: int | None = None,
    ):
        self._engine = engine
        self._request = request
        self._tracker = tracker
        self._cancellation = cancellation
        self._totals = totals
        self._samplers = samplers
        self._rounds_per_sync = rounds_per_sync
        self._lock = threading.Lock()
        self._state: decoding.DecodeState | None = None
        self._ending = np.full(cancellation.batch, Finish.RUNNING, np.int32)
        self._prefill_s = self._decode_s = self._compile_s = 0.0
        self._rows: list[Generation] = []
        self._error: BaseException | None = None
        self._chunk: decoding.Chunk | None = None
        self.pieces: deque[tuple[int, str]] = deque()  # row, text
        self.is_done = False

    def step(self, *, is_closing: bool = False) -> None:
        """Prefills, the first time; then runs rounds up to the next check.

        Args:
          is_closing: end the rows that are still running, as cancelled, instead.

        Raises:
          Cancelled: every row was cancelled before its first token.
        """
        with self._lock:
            try:
                num_rounds = None if self.is_done else self._prepare(is_closing)
                if num_rounds is not None:
                    with Timed() as timed:
                        rounds = self._engine.generate(self._state, self._ending, num_rounds)
                        self._state, self._chunk = rounds
                        finish = self._look(self._chunk)
                    self._read(finish, timed)
            except Exception as error:
                self._error = error
                self._state = None
                self.is_done = True
                raise
            except BaseException:  # Ctrl-C: the next step or close finds what there is
                arrays = [x for x in jax.tree.leaves(self._state) if isinstance(x, jax.Array)]
                if any(x.is_deleted() for x in arrays):
                    self._error = Cancelled("the generation was interrupted within a round")
                    self._state = None
                    self.is_done = True
                raise

    @property
    def max_new_tokens(self) -> int:
        """Maximum output tokens of all rows together."""
        return int((self._request.limits - self._request.lengths).sum())

    def progress(self) -> tuple[int, int]:
        """Returns the output tokens so far, ended rows counted as full, and the running rows."""
        if self._chunk is None:
            return 0, len(self._ending)
        is_running = np.asarray(self._chunk.finish) == Finish.RUNNING
        total = np.where(is_running, self._chunk.total, self._request.limits)
        return int((total - np.asarray(self._request.lengths)).sum()), int(is_running.sum())

    def close(self) -> None:
        """Ends the rows that are still running, as cancelled."""
        self.step(is_closing=True)

    def result(self) -> list[Generation]:
        """Returns every row, once the session is done.

        Raises:
          Cancelled: as ``step``; or the session was closed before its first token.
          InvalidDraftError, InvalidVerdictError: see ``generation.error_of``.
          RuntimeError: the session is not done.
        """
        if not self.is_done:
            raise RuntimeError("the generation has not ended: its result is not known yet")
        if self._error is not None:
            raise self._error
        return self._rows

    def _prepare(self, is_closing: bool) -> int | None:
        """Returns how many rounds this step runs; None if it only prefills."""
        if is_closing:
            if self._state is None:
                self._error = Cancelled("the generation was closed before its first token")
                self.is_done = True
                return None
            self._ending[self._ending == Finish.RUNNING] = Finish.CANCELLED
            return 0
        cancelled = self._cancellation.rows()
        if self._state is None:
            self._check_not_all(cancelled)
            self._prefill()
            return 0 if self._tracker.has_pieces else None
        for row in cancelled:
            if self._ending[row] == Finish.RUNNING:
                self._ending[row] = Finish.CANCELLED
        # Adaptive K would measure costs first, where every row is cancelled.
        return 0 if len(cancelled) == len(self._ending) else self._num_rounds()

    def _num_rounds(self) -> int:
        if self._rounds_per_sync is not None:
            return self._rounds_per_sync
        is_watched = self._tracker.has_pieces or self._cancellation.is_watched
        limit = 1 if is_watched else ROUNDS_UNWATCHED
        return min(limit, ROUNDS_TO_STOPS) if self._tracker.is_needed else limit

    def _prefill(self) -> None:
        with Timed() as layout:  # lays weights out: no part of the times
            self._engine.params(self._cancellation.batch)
        with Timed() as timed:
            self._state = jax.block_until_ready(self._engine.prefill(self._request))
        self._prefill_s = timed.run_s
        self._compile_s += layout.compile_s + timed.compile_s
        dropped = self._cancellation.rows()
        self._check_not_all(dropped)
        for row in dropped:
            self._tracker.drop(row)

    def _check_not_all(self, cancelled: list[int]) -> None:
        if len(cancelled) == len(self._ending):
            raise Cancelled(
                "the generation was cancelled before its first token; a token that was used "
                "before begins anew after reset()"
            )

    def _look(self, chunk: decoding.Chunk) -> np.ndarray:
        """Follows the text, and returns each row's ``Finish``."""
        finish = np.asarray(chunk.finish)
        if self._tracker.is_needed:
            tokens = np.asarray(chunk.tokens)
            total = np.asarray(chunk.total)
            self._ending = self._tracker.look(tokens, total, finish)
        return finish

    def _read(self, finish: np.ndarray, timed: Timed) -> None:
        """Takes in what rounds have produced."""
        self._decode_s += timed.run_s
        self._compile_s += timed.compile_s
        self.pieces.extend(self._tracker.take())
        if (finish != Finish.RUNNING).all():
            self._finish()
            self.is_done = True  # after the pieces: a reader that sees it sees every piece
            self._state = None

    def _finish(self) -> None:
        with Timed() as timed:
            record = jax.tree.map(np.asarray, self._engine.read(self._state))
        self._compile_s += timed.compile_s
        system = self._engine.system
        self._rows = [
            collect(jax.tree.map(lambda x: x[row], record), self._tracker, row, system)
            for row in range(len(self._ending))
        ]
        times = Stats(
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            compile_s=self._compile_s,
            n1_fallbacks=len(self._rows) if self._engine.is_fallback else 0,
        )
        self._totals.add(functools.reduce(operator.add, (row.stats for row in self._rows), times))
        for row in self._rows:
            self._engine.remember(row.tokens)
        prompts = [tokens[:n].tolist() for tokens, n in zip(record.tokens, record.prompt_length)]
        args = (self._rows, system, self._samplers, prompts)
        self._error = error_of(*args, self._engine.num_ahead)


@contextlib.contextmanager
def watched(
    session: Session, has_progress: bool | None, is_streamed: bool
) -> Iterator[Callable[[], None]]:
    """Yields a function that shows the progress of a session, to be called after each step.

    Args:
      session: what is run.
      has_progress: whether it is shown; None: for long sessions, on a terminal or in a notebook.
      is_streamed: whether the text is streamed.
    """
    delay_s = _DELAY_S if has_progress is None else 0.0
    if has_progress is None:
        is_main = threading.current_thread() is threading.main_thread()
        has_progress = is_watched() and is_main and not is_streamed
    if not has_progress:
        yield lambda: None
        return

    def look() -> None:
        done, running = session.progress()
        bar.step(f"{running} rows running", done - bar.num_done)

    with Progress(session.max_new_tokens, "tokens", every_s=_EVERY_S, delay_s=delay_s) as bar:
        yield look
