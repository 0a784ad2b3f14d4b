"""One call of a decoder, and the stream of its text for threads and for event loops."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np

from spec_jax.compilation import Timed
from spec_jax.config import check_integer
from spec_jax.decoding import Finish, Kind
from spec_jax.decoding.loop import pass_sizes
from spec_jax.engine import request
from spec_jax.engine.build import DecoderParts
from spec_jax.engine.driver import Driver
from spec_jax.engine.generation import Generation, collect, error_of
from spec_jax.engine.request import GenerateOptions
from spec_jax.engine.stats import RunningStats, Stats
from spec_jax.engine.text import TextTracker
from spec_jax.errors import Cancelled
from spec_jax.progress import Progress, is_watched
from spec_jax.sampling import make_samplers

Piece = str | tuple[int, str]
OnToken = Callable[..., object]  # (text), of a batch (row, text)

_END = object()
_DELAY_S = 2.0  # before a bar appears unasked
_EVERY_S = 5.0  # between two lines where there is no bar


class Stream:
    """Iterates over pieces of text as they become final, with ``for`` or ``async for``.

    For one prompt a piece is a string; for a batch it is ``(row, text)``. A piece never ends inside
    a character, and a row's pieces join to its final text. Rounds run when the next piece is
    requested: ``for`` runs them in the caller's thread, ``async for`` in the decoder's own thread,
    so that the event loop stays free. (Context managers of jax have no effect in that thread: set a
    precision with ``jax.config.update``.) Nothing runs between two requests, so a stream may be
    dropped at any time; closing it (``with``, ``async with``, ``close``, ``aclose``) adds its
    tokens to the statistics.

    A task that is cancelled while it waits for a piece ends the stream after that round. Closing an
    event loop does not: no piece is lost, and another loop, or a plain ``for``, may continue.
    Concurrent callers take turns, and each piece is returned once.

    Args:
      decoder: whose call it is.
      prompts: see ``SpeculativeDecoder.generate``.
      max_new_tokens: likewise.
      options: likewise.
      has_pieces: whether there is text to iterate over.

    Raises:
      PromptError, ConfigError: see ``SpeculativeDecoder.generate``.
    """

    def __init__(
        self,
        decoder: DecoderParts,
        prompts: request.Prompt | list[request.Prompt] | None,
        max_new_tokens: int | None,
        options: GenerateOptions,
        *,
        has_pieces: bool = True,
    ):
        ids, self._is_single = request.encode_all(
            decoder.target, prompts, options.messages, options.chat_template_kwargs
        )
        samples = 1
        if options.num_samples is not None:
            samples = check_integer("num_samples", options.num_samples, 1)
            self._is_single = False
            ids = [prompt for prompt in ids for _ in range(samples)]
        self._rounds_per_sync = options.rounds_per_sync
        if self._rounds_per_sync is not None:
            check_integer("rounds_per_sync", self._rounds_per_sync, 1)
        B = len(ids)
        self._totals = decoder.totals
        self._worker = decoder.worker
        self._counted = RunningStats()  # of this call
        driver = Driver(decoder, options, self._counted.add, batch=B, has_pieces=has_pieces)
        self._driver = driver
        for row, prompt in enumerate(ids):
            driver.add(row, row, prompt)
        system = driver.engine.system
        sampler, draft_sampler = make_samplers(
            driver.samplers,
            driver.draft_samplers,
            B,
            system.target.vocab_size,
            options.seeds,
            decoder.drafter.defaults.draft_temperature,
        )
        self._request = request.make_request(
            system,
            ids,
            request.output_limits(ids, max_new_tokens, options.max_length, decoder.max_length),
            sampler,
            draft_sampler,
            stop_tokens=driver.stop_tokens,
            pad_to=options.pad_to,
            samples=samples,
        )
        self._lock = threading.Lock()
        self._ending = np.full(B, Finish.RUNNING, np.int32)
        self._rows: list[Generation] = []
        self._error: BaseException | None = None
        self._is_done = False  # the last row has ended
        self._is_closed = False
        self._is_interrupted = False

    @property
    def result(self) -> Generation | list[Generation]:
        """The ``Generation``, or a list of them, once the stream has ended or is closed.

        Raises:
          Cancelled: every row was cancelled before its first token.
          InvalidDraftError: see ``SpeculativeDecoder.generate``.
          RuntimeError: the stream has not ended.
        """
        if not self._is_done:
            raise RuntimeError("the generation has not ended: its result is not known yet")
        if self._error is not None:
            raise self._error
        return self._rows[0] if self._is_single else self._rows

    def close(self) -> None:
        """Ends the rows that are still running. Blocks while a round is running."""
        self._is_closed = True
        self._step(is_closing=True)

    async def aclose(self) -> None:
        """``close``, without blocking the event loop."""
        self._is_closed = True
        await asyncio.shield(self._in_thread(self.close))  # it is counted in any case

    def abandon(self) -> None:
        """Ends the rows that are still running, from the decoder's own thread, without waiting."""
        self._is_interrupted = True
        with contextlib.suppress(RuntimeError):  # the interpreter is on its way out
            self._worker.submit(self._step, is_closing=True)

    def warm_up(self) -> None:
        """Runs every program of calls whose prompts are padded as these are."""
        B, T = self._request.tokens.shape
        for size in pass_sizes(self._driver.engine.system):
            if size <= T:
                lengths = np.full(B, size, np.int32)
                self._driver.prefill(self._request._replace(lengths=lengths, limits=lengths + 1))
        self._step()  # prefills
        self._step()
        self.close()

    def with_origins(self) -> Iterator[tuple[str, str]]:
        """Yields the pieces of a single prompt, split where the kind of their tokens changes.

        Yields:
          A text, and the kind of its tokens, see ``Trace``.
        """
        (row,) = self._driver.rows.values()
        text = TextTracker(row.text.tokenizer, row.prompt, has_pieces=True)
        kinds: list[str] = []  # of each character that no piece has had yet
        num = 0
        for piece in self:
            tokens, known = self._origins()
            for n in range(num, len(tokens)):
                kinds += [known[n]] * len(text.look(tokens[: n + 1], Finish.RUNNING)[1])
            num = max(num, len(tokens))
            of_piece = itertools.zip_longest(
                piece, kinds[: len(piece)], fillvalue=(known or [""])[-1]
            )
            kinds = kinds[len(piece) :]
            for kind, part in itertools.groupby(of_piece, key=lambda pair: pair[1]):
                yield "".join(char for char, _ in part), kind

    def _origins(self) -> tuple[list[int], list[str]]:
        """Returns the output tokens of the only row so far, and the kind of each."""
        with self._lock:
            state = self._driver.state
            if state is None:
                found = self._rows[:1]
                return next(((list(x.tokens), list(x.trace.kinds)) for x in found), ([], []))
            kinds = np.asarray(state.kind)[0]
            tokens = np.asarray(state.tokens)[0][kinds > 0]
            return tokens.tolist(), [Kind(k).name.lower() for k in kinds[kinds > 0].tolist()]

    def drain(
        self, on_token: OnToken | None = None, has_progress: bool | None = None
    ) -> Generation | list[Generation]:
        """Runs to the end, calls ``on_token`` with every piece, and returns ``result``."""
        with self, self._shown(has_progress, on_token is not None) as show:
            while (piece := self._take()) is not _END:
                if piece is None:
                    self._step()
                    show()
                else:
                    on_token(*self._arguments(piece))
        return self.result

    async def drain_async(self, on_token: OnToken | None = None) -> Generation | list[Generation]:
        """``drain`` in the event loop, where ``on_token`` may be a coroutine function."""
        try:
            async for piece in self:
                called = on_token(*self._arguments(piece))
                if inspect.isawaitable(called):
                    await called
        except Exception:
            await self.aclose()
            raise
        except BaseException:  # cancelled, or GeneratorExit of a closed loop: none can be awaited
            self.abandon()
            raise
        return self.result

    def _arguments(self, piece: Piece) -> tuple:
        return (piece,) if self._is_single else piece

    @contextlib.contextmanager
    def _shown(self, has_progress: bool | None, is_streamed: bool) -> Iterator[Callable[[], None]]:
        """Yields a function that shows the progress, to be called after each step.

        Args:
          has_progress: whether it is shown; None: of long calls, on a terminal or in a notebook.
          is_streamed: whether the text is streamed.
        """
        delay_s = _DELAY_S if has_progress is None else 0.0
        if has_progress is None:
            is_main = threading.current_thread() is threading.main_thread()
            has_progress = is_watched() and is_main and not is_streamed
        if not has_progress:
            yield lambda: None
            return
        limits = self._request.limits
        lengths = np.asarray(self._request.lengths)

        def show() -> None:
            chunk = self._driver.chunk
            if chunk is None:
                bar.step(f"{len(lengths)} rows running", 0)
                return
            is_running = np.asarray(chunk.finish) == Finish.RUNNING
            total = np.where(is_running, chunk.total, limits)  # ended rows count as full
            done = int((total - lengths).sum())
            bar.step(f"{int(is_running.sum())} rows running", done - bar.num_done)

        num_tokens = int((limits - self._request.lengths).sum())
        with Progress(num_tokens, "tokens", every_s=_EVERY_S, delay_s=delay_s) as bar:
            yield show

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        while (piece := self._take()) is None:
            self._step()
        if piece is _END:
            raise StopIteration
        return piece

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        while (piece := self._take()) is None:
            try:
                await self._in_thread(self._step)
            except asyncio.CancelledError:
                self.abandon()
                raise
        if piece is _END:
            raise StopAsyncIteration
        return piece

    async def _in_thread(self, act: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._worker, act)

    def _take(self):
        """Returns the next piece, ``_END`` after the last one, or None if a step must run first."""
        if self._is_closed:
            return _END
        if self._is_interrupted:
            raise Cancelled(
                "the stream ended when the task that waited for a piece was cancelled; after "
                "aclose() its result holds what there is"
            )
        is_done = self._is_done  # before the pieces are looked at: it is set after them
        try:
            row, text = self._driver.pieces.popleft()
        except IndexError:
            if not is_done:
                return None
        else:
            return text if self._is_single else (row, text)
        if self._error is not None:
            raise self._error
        return _END

    def _step(self, *, is_closing: bool = False) -> None:
        """Prefills, the first time; then runs rounds up to the next check.

        It may be called from any thread; callers take turns. Afterwards the driver's ``pieces``
        hold the text that has become final, and cancelled rows have ended. When the last row has
        ended, the call is counted.

        Args:
          is_closing: end the rows that are still running, as cancelled, instead.

        Raises:
          Cancelled: every row was cancelled before its first token.
        """
        driver = self._driver
        with self._lock:
            try:
                num_rounds = None if self._is_done else self._prepare(is_closing)
                if num_rounds is not None:
                    driver.state, driver.chunk = driver.engine.generate(
                        driver.state, self._ending, num_rounds
                    )
                    finish, self._ending = driver.look()
                    if (finish != Finish.RUNNING).all():
                        self._finish()
                        driver.state = None
                        self._is_done = True  # after the pieces: who sees it sees every piece
            except Exception as error:
                self._fail(error)
                raise
            except BaseException:  # Ctrl-C: the next step or close finds what there is
                arrays = [x for x in jax.tree.leaves(driver.state) if isinstance(x, jax.Array)]
                if any(x.is_deleted() for x in arrays):
                    self._fail(Cancelled("the generation was interrupted within a round"))
                raise

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
        engine = driver.engine
        with Timed() as timed:  # reading is no part of the times
            record = engine.read(driver.state)
        driver.count(Stats(compile_s=timed.compile_s))
        record = jax.tree.map(np.asarray, record)
        self._rows = [
            collect(jax.tree.map(lambda x: x[place], record), row.text, engine.system)
            for place, row in driver.rows.items()
        ]
        for row in self._rows:  # once all are there: Ctrl-C until now leaves nothing counted
            driver.count_row(row)
        self._totals.add(self._counted.value)
        prompts = [row.prompt for row in driver.rows.values()]
        args = (self._rows, engine.system, driver.samplers, prompts)
        self._error = error_of(*args, engine.num_ahead)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._driver.state = None
        self._is_done = True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error) -> None:
        await self.aclose()
