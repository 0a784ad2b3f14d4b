"""The session that runs the rounds of a call, and its progress."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np

from spec_jax.config import check_integer
from spec_jax.decoding import Finish, Kind
from spec_jax.decoding.loop import pass_sizes
from spec_jax.engine import request
from spec_jax.engine.build import DecoderSpec
from spec_jax.engine.cancellation import CancellationToken, RowCancellation
from spec_jax.engine.driver import Driver
from spec_jax.engine.generation import Generation, error_of
from spec_jax.engine.options import GenerateOptions
from spec_jax.engine.stats import RunningStats
from spec_jax.engine.text import TextTracker
from spec_jax.errors import Cancelled
from spec_jax.progress import Progress, is_watched
from spec_jax.sampling import make_samplers

_DELAY_S = 2.0  # before a bar appears unasked
_EVERY_S = 5.0  # between two lines where there is no bar


class Session:
    """One call of a decoder, from prefill to the result. It decodes nothing when it is made.

    The caller advances it with ``step()``. After a step, ``pieces`` holds the text that has become
    final, and cancelled rows have ended. ``close`` ends all rows. Both may be called from any
    thread; they take turns. When the last row has ended, the session is done and its statistics are
    counted.

    Args:
      spec: of the decoder.
      token: the decoder's, which cancels every call.
      totals: gets the statistics of the call when it ends.
      prompts: see ``SpeculativeDecoder.generate``.
      max_new_tokens: likewise.
      options: likewise.
      has_pieces: whether the text is streamed.

    Attributes:
      is_single: whether the call is of a single prompt.
      is_done: whether the last row has ended.
      pieces: text that has become final, as (row, text).

    Raises:
      PromptError, ConfigError: see ``SpeculativeDecoder.generate``.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        token: CancellationToken,
        totals: RunningStats,
        prompts: request.Prompt | list[request.Prompt] | None,
        max_new_tokens: int | None,
        options: GenerateOptions,
        *,
        has_pieces: bool = False,
    ):
        template_kwargs = options.chat_template_kwargs
        ids, self.is_single = request.encode_all(
            spec.target, prompts, options.messages, template_kwargs
        )
        samples = 1
        if options.num_samples is not None:
            samples = check_integer("num_samples", options.num_samples, 1)
            self.is_single = False
            ids = [prompt for prompt in ids for _ in range(samples)]
        self._rounds_per_sync = options.rounds_per_sync
        if self._rounds_per_sync is not None:
            check_integer("rounds_per_sync", self._rounds_per_sync, 1)
        B = len(ids)
        self._totals = totals
        self._counted = RunningStats()  # of this call
        cancellation = RowCancellation(token, options.cancellation_token, B)
        driver = Driver(spec, options, cancellation, self._counted.add, has_pieces=has_pieces)
        self._driver = driver
        for row, prompt in enumerate(ids):
            driver.add(row, row, prompt)
        system = driver.engine.system
        samplers = make_samplers(
            driver.samplers,
            driver.draft_samplers,
            B,
            system.target.vocab_size,
            options.seeds,
            spec.drafter.draft_temperature,
        )
        self._request = request.make_request(
            system,
            ids,
            request.output_limits(ids, max_new_tokens, options.max_length, spec.max_length),
            *samplers,
            stop_tokens=driver.stop_tokens,
            pad_to=options.pad_to,
            samples=samples,
        )
        self._lock = threading.Lock()
        self._ending = np.full(B, Finish.RUNNING, np.int32)
        self._rows: list[Generation] = []
        self._error: BaseException | None = None
        self.pieces = driver.pieces
        self.is_done = False

    def step(self, *, is_closing: bool = False) -> None:
        """Prefills, the first time; then runs rounds up to the next check.

        Args:
          is_closing: end the rows that are still running, as cancelled, instead.

        Raises:
          Cancelled: every row was cancelled before its first token.
        """
        driver = self._driver
        with self._lock:
            try:
                num_rounds = None if self.is_done else self._prepare(is_closing)
                if num_rounds is not None:
                    driver.run(self._ending, num_rounds)
                    finish, self._ending = driver.look()
                    if (finish != Finish.RUNNING).all():
                        self._finish()
                        driver.state = None
                        self.is_done = True  # after the pieces: who sees it sees every piece
            except Exception as error:
                self._fail(error)
                raise
            except BaseException:  # Ctrl-C: the next step or close finds what there is
                arrays = [x for x in jax.tree.leaves(driver.state) if isinstance(x, jax.Array)]
                if any(x.is_deleted() for x in arrays):
                    self._fail(Cancelled("the generation was interrupted within a round"))
                raise

    def warm_up(self) -> None:
        """Runs every program of calls whose prompts are padded as these are."""
        prompts = self._request
        B, T = prompts.tokens.shape
        for size in pass_sizes(self._driver.engine.system):
            if size <= T:
                lengths = np.full(B, size, np.int32)
                self._driver.prefill(prompts._replace(lengths=lengths, limits=lengths + 1))
        self.step()  # prefills
        self.step()
        self.close()

    @property
    def max_new_tokens(self) -> int:
        """Maximum output tokens of all rows together."""
        return int((self._request.limits - self._request.lengths).sum())

    def progress(self) -> tuple[int, int]:
        """Returns the output tokens so far, ended rows counted as full, and the running rows."""
        chunk = self._driver.chunk
        if chunk is None:
            return 0, len(self._ending)
        is_running = np.asarray(chunk.finish) == Finish.RUNNING
        total = np.where(is_running, chunk.total, self._request.limits)
        return int((total - np.asarray(self._request.lengths)).sum()), int(is_running.sum())

    def follow(self, row: int = 0) -> TextTracker:
        """Returns what follows the text of a row once more, from its beginning."""
        followed = self._driver.rows[row]
        return TextTracker(followed.text.tokenizer, followed.prompt, has_pieces=True)

    def origins(self, row: int = 0) -> tuple[list[int], list[str]]:
        """Returns the output tokens of a row so far, and the kind of each, see ``Trace``."""
        with self._lock:
            state = self._driver.state
            if state is None:
                found = self._rows[row : row + 1]
                return next(((list(x.tokens), list(x.trace.kinds)) for x in found), ([], []))
            kinds = np.asarray(state.kind)[row]
            tokens = np.asarray(state.tokens)[row][kinds > 0]
            return tokens.tolist(), [Kind(k).name.lower() for k in kinds[kinds > 0].tolist()]

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

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._driver.state = None
        self.is_done = True

    def _prepare(self, is_closing: bool) -> int | None:
        """Returns how many rounds this step runs; None if it only prefills."""
        driver = self._driver
        if is_closing:
            if driver.state is None:
                self._fail(Cancelled("the generation was closed before its first token"))
                return None
            self._ending[self._ending == Finish.RUNNING] = Finish.CANCELLED
            return 0
        cancelled = driver.cancellation.rows()
        if driver.state is None:
            self._check_not_all(cancelled)
            driver.state = driver.prefill(self._request)
            dropped = driver.cancellation.rows()
            self._check_not_all(dropped)
            for row in dropped:
                driver.rows[row].text.drop()
            return 0 if driver.has_pieces else None
        for row in cancelled:
            if self._ending[row] == Finish.RUNNING:
                self._ending[row] = Finish.CANCELLED
        if len(cancelled) == len(self._ending):
            return 0  # adaptive K would measure costs first
        return self._rounds_per_sync or driver.num_rounds()

    def _check_not_all(self, cancelled: list[int]) -> None:
        if len(cancelled) == len(self._ending):
            raise Cancelled(
                "the generation was cancelled before its first token; a token that was used "
                "before begins anew after reset()"
            )

    def _finish(self) -> None:
        """Collects the rows, and counts the call."""
        driver = self._driver
        record = driver.timed(None, driver.engine.read, driver.state)
        record = jax.tree.map(np.asarray, record)
        self._rows = [
            driver.collect(row, jax.tree.map(lambda x: x[place], record))
            for place, row in driver.rows.items()
        ]
        for row in self._rows:  # once all are there: Ctrl-C until now leaves nothing counted
            driver.count_row(row)
        self._totals.add(self._counted.value)
        prompts = [row.prompt for row in driver.rows.values()]
        args = (self._rows, driver.engine.system, driver.samplers, prompts)
        self._error = error_of(*args, driver.engine.num_ahead)


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
