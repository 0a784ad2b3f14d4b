"""One call of a decoder: its rounds, from the first step to what came out."""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.decoding import Finish
from spec_jax.engine import stats
from spec_jax.engine.text import TextTracker
from spec_jax.errors import Cancelled, InvalidDraftError


@dataclasses.dataclass(frozen=True)
class Generation:
    """What one prompt produced; ``str`` of it is its text.

    Attributes:
      text: the output without the prompt, or None where there is no tokenizer. Of a cancelled
        row it ends with a whole character, and ``tokens`` may hold the beginning of another.
      tokens: the output's ids, a stop token included.
      finish_reason: "stop_token", "stop_string", "length", "cancelled", or what went wrong:
        "nan_target", "nan_draft", "invalid_draft".
      stats: counts of this row; times are the batch's, in ``SpeculativeDecoder.stats``.
    """

    text: str | None
    tokens: tuple[int, ...]
    finish_reason: str
    stats: stats.Stats

    def __str__(self) -> str:
        return repr(self) if self.text is None else self.text


@dataclasses.dataclass(frozen=True)
class Call:
    """What a run needs to know of a decoder and of what was asked.

    Attributes:
      system: target, drafter, rule and K.
      start: prefills; the first ``DecodeState``.
      pacer: makes what runs rounds, ``(state, stop, max_rounds) -> (state, Chunk)``.
      tracker: follows the text.
      is_cancelled: by row.
      num_rounds: gives the rounds until the next stop.
      ended: takes the rows and the run's statistics.
    """

    system: decoding.System
    start: Callable[[], decoding.DecodeState]
    pacer: Callable[[], Callable]
    tracker: TextTracker
    is_cancelled: Sequence[Callable[[], bool]]
    num_rounds: Callable[[], int]
    ended: Callable[[list[Generation], stats.Stats], None]


class Session:
    """``decoding.generate``, stopped every few rounds; whoever drives it decides when to go on.

    ``step`` goes to the next stop: text that has become final is then in ``pieces``, and rows
    that are cancelled have ended. ``close`` ends every row where it is. Both may be called from
    any thread and take turns. When the last row has ended the run is done, and is counted.
    """

    def __init__(self, call: Call):
        self._call, self._lock = call, threading.Lock()
        self._pace: Callable | None = None
        self._state: decoding.DecodeState | None = None
        self._ending = np.full(len(call.is_cancelled), Finish.RUNNING, np.int32)
        self._prefill_s = self._decode_s = 0.0
        self._rows: list[Generation] = []
        self._error: BaseException | None = None
        self.pieces: deque[tuple[int, str]] = deque()  # row, text
        self.is_done = False

    def step(self) -> None:
        """Prefills, the first time; then runs rounds until the next stop.

        Raises:
          Cancelled: every row was cancelled before its first token.
        """
        self._go(lambda: self._prefill() if self._state is None else self._advance())

    def close(self) -> None:
        """Ends the rows that are still running, as cancelled."""
        self._go(self._cancel)

    def result(self) -> list[Generation]:
        """Of every row, once the run is done.

        Raises:
          Cancelled: as ``step``; or the run was closed before its first token.
          InvalidDraftError: the drafter proposed an id outside of the vocabulary.
          RuntimeError: the run is not done.
        """
        if not self.is_done:
            raise RuntimeError("the generation has not ended: its result is not known yet")
        if self._error is not None:
            raise self._error
        return self._rows

    def _go(self, act: Callable[[], bool]) -> None:
        with self._lock:
            if self.is_done:
                return
            try:
                is_over = act()
            except Exception as error:
                self._error, self._state, self.is_done = error, None, True
                raise
            except BaseException:  # Ctrl-C: whoever goes on or closes finds what there is
                arrays = [x for x in jax.tree.leaves(self._state) if isinstance(x, jax.Array)]
                if any(x.is_deleted() for x in arrays):
                    self._error = Cancelled("the generation was interrupted within a round")
                    self._state, self.is_done = None, True
                raise
            self.pieces.extend(self._call.tracker.take())
            self.is_done = is_over  # last: whoever sees it sees every piece

    def _cancelled_rows(self) -> list[int]:
        return [row for row, is_cancelled in enumerate(self._call.is_cancelled) if is_cancelled()]

    def _prefill(self) -> bool:
        self._check_any_is_wanted(self._cancelled_rows())
        self._pace = self._call.pacer()  # lays out weights the first time: no part of the times
        begin = time.perf_counter()
        self._state = jax.block_until_ready(self._call.start())
        self._prefill_s = time.perf_counter() - begin
        dropped = self._cancelled_rows()
        self._check_any_is_wanted(dropped)
        for row in dropped:
            self._call.tracker.drop(row)
        return self._call.tracker.has_pieces and self._decode(0)

    def _check_any_is_wanted(self, cancelled: list[int]) -> None:
        if len(cancelled) == len(self._ending):
            raise Cancelled(
                "the generation was cancelled before its first token; a token that was used "
                "before begins anew after reset()"
            )

    def _advance(self) -> bool:
        cancelled = self._cancelled_rows()
        for row in cancelled:
            if self._ending[row] == Finish.RUNNING:
                self._ending[row] = Finish.CANCELLED
        is_over = len(cancelled) == len(self._ending)  # adaptive K would measure costs first
        return self._decode(0 if is_over else self._call.num_rounds())

    def _cancel(self) -> bool:
        if self._state is None:
            self._error = Cancelled("the generation was closed before its first token")
            return True
        self._ending[self._ending == Finish.RUNNING] = Finish.CANCELLED
        return self._decode(0)

    def _decode(self, num_rounds: int) -> bool:
        """Runs rounds; whether every row has ended."""
        call, begin = self._call, time.perf_counter()
        self._state, chunk = self._pace(
            self._state, jnp.asarray(self._ending), jnp.int32(num_rounds)
        )
        finish = np.asarray(chunk.finish)
        if call.tracker.is_needed:
            self._ending = call.tracker.look(
                np.asarray(chunk.tokens), np.asarray(chunk.total), finish
            )
        self._decode_s += time.perf_counter() - begin
        is_over = bool((finish != Finish.RUNNING).all())
        if is_over:
            self._finish()
        return is_over

    def _finish(self) -> None:
        record = jax.tree.map(np.asarray, decoding.Record.of(self._state))
        call = self._call
        self._rows = [
            collect(jax.tree.map(lambda x: x[row], record), call.tracker, row, call.system.depth)
            for row in range(len(self._ending))
        ]
        times = stats.Stats(prefill_s=self._prefill_s, decode_s=self._decode_s)
        counts = functools.reduce(operator.add, (row.stats for row in self._rows), times)
        self._state = None
        call.ended(self._rows, counts)
        bad = [i for i, row in enumerate(self._rows) if row.finish_reason == "invalid_draft"]
        if bad:
            self._error = InvalidDraftError(
                f"drafter {call.system.drafter.name!r} proposed ids outside of the vocabulary "
                f"0..{call.system.target.last_id}, or parents that make no tree, in rows {bad}; "
                "those rows stopped there; all rows' tokens are in this error's `generations`",
                self._rows,
            )


def collect(record: decoding.Record, tracker: TextTracker, row: int, depth: int) -> Generation:
    """Makes one row's record, on the host, into what a caller sees.

    Args:
      record: of the row alone.
      tracker: what has followed the row's text.
      row: its number there.
      depth: the most drafts that a round accepts.
    """
    begin, tokens, kind = int(record.prompt_length), record.tokens, record.kind
    ids = tokens[begin : begin + int((kind > 0).sum())].tolist()
    n, text, finish = tracker.result(row, ids, Finish(int(record.finish)))
    kept = slice(begin, begin + n)
    expected = None if record.expected is None else record.expected[kept]
    return Generation(
        text=text,
        tokens=tuple(ids[:n]),
        finish_reason=finish.name.lower(),
        stats=stats.row_stats(kind[kept], record.offered[kept], depth, expected),
    )
