"""Streaming: an iterator over final pieces of text, for threads and for event loops."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from spec_jax.decoding import Finish
from spec_jax.engine.generation import Generation
from spec_jax.engine.session import Session, watched
from spec_jax.errors import Cancelled

Piece = str | tuple[int, str]
OnToken = Callable[..., object]  # (text), of a batch (row, text)

_END = object()


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
    """

    def __init__(self, session: Session, worker: Executor):
        self._session = session
        self._worker = worker
        self._is_single = session.is_single
        self._is_closed = self._is_interrupted = False

    @property
    def result(self) -> Generation | list[Generation]:
        """The ``Generation``, or a list of them, once the stream has ended or is closed.

        Raises:
          Cancelled: every row was cancelled before its first token.
          InvalidDraftError: see ``SpeculativeDecoder.generate``.
          RuntimeError: the stream has not ended.
        """
        rows = self._session.result()
        return rows[0] if self._is_single else rows

    def close(self) -> None:
        """Ends the rows that are still running. Blocks while a round is running."""
        self._is_closed = True
        self._session.close()

    async def aclose(self) -> None:
        """``close``, without blocking the event loop."""
        self._is_closed = True
        await asyncio.shield(self._in_thread(self._session.close))  # it is counted in any case

    def abandon(self) -> None:
        """Ends the rows that are still running, from the decoder's own thread, without waiting."""
        self._is_interrupted = True
        with contextlib.suppress(RuntimeError):  # the interpreter is on its way out
            self._worker.submit(self._session.close)

    def with_origins(self) -> Iterator[tuple[str, str]]:
        """Yields the pieces of a single prompt, split where the kind of their tokens changes.

        Yields:
          A text, and the kind of its tokens, see ``Trace``.
        """
        text = self._session.follow()
        kinds: list[str] = []  # of each character that no piece has had yet
        num = 0
        for piece in self:
            tokens, known = self._session.origins()
            for n in range(num, len(tokens)):
                kinds += [known[n]] * len(text.look(tokens[: n + 1], Finish.RUNNING)[1])
            num = max(num, len(tokens))
            of_piece = itertools.zip_longest(
                piece, kinds[: len(piece)], fillvalue=(known or [""])[-1]
            )
            kinds = kinds[len(piece) :]
            for kind, part in itertools.groupby(of_piece, key=lambda pair: pair[1]):
                yield "".join(char for char, _ in part), kind

    def drain(
        self, on_token: OnToken | None = None, has_progress: bool | None = None
    ) -> Generation | list[Generation]:
        """Runs to the end, calls ``on_token`` with every piece, and returns ``result``."""
        with self, watched(self._session, has_progress, on_token is not None) as look:
            while (piece := self._take()) is not _END:
                if piece is None:
                    self._session.step()
                    look()
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

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        while (piece := self._take()) is None:
            self._session.step()
        if piece is _END:
            raise StopIteration
        return piece

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        while (piece := self._take()) is None:
            try:
                await self._in_thread(self._session.step)
            except asyncio.CancelledError:
                self.abandon()
                raise
        if piece is _END:
            raise StopAsyncIteration
        return piece

    def _take(self):
        """Returns the next piece, ``_END`` after the last one, or None if a step must run first."""
        if self._is_closed:
            return _END
        if self._is_interrupted:
            raise Cancelled(
                "the stream ended when the task that waited for a piece was cancelled; after "
                "aclose() its result holds what there is"
            )
        is_done = self._session.is_done  # before the pieces are looked at: it is set after them
        try:
            row, text = self._session.pieces.popleft()
        except IndexError:
            return _END if is_done and self._session.result() else None
        return text if self._is_single else (row, text)

    async def _in_thread(self, act: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._worker, act)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error) -> None:
        await self.aclose()
