"""Cancelling a generation from any thread, task or callback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from spec_jax import processes
from spec_jax.errors import ConfigError


class CancellationToken:
    """Ends the generations that hold it; safe to use from any thread.

    ``cancel`` ends every generation that is running, at its next round. Those that begin while
    the token is cancelled end before their first token. ``reset`` lets new ones begin; it does
    not bring back what was cancelled before it.

    Attributes:
      is_cancelled: whether it is cancelled, and has not been reset since.
      is_exposed: whether it has been handed out, so that it may be cancelled.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._times = 0
        self.is_cancelled = False
        self.is_exposed = False

    def cancel(self) -> None:
        """Cancels; calling it again has no effect."""
        with self._lock:
            self._times += 1
            self.is_cancelled = True

    def reset(self) -> None:
        """Lets new generations begin."""
        self.is_cancelled = False

    def watch(self) -> Callable[[], bool]:
        """Returns a function that tells whether the token is cancelled, or was cancelled since this
        call."""
        before = self._times
        return lambda: self.is_cancelled or self._times != before


class RowCancellation:
    """Which rows of a call are cancelled, by the decoder's token or by the call's own.

    With several processes, the tokens of the first process count.

    Args:
      of_decoder: cancels every row.
      of_call: cancels every row, or a list of one token a row, of which some may be None.
      batch: B.

    Attributes:
      batch: B.

    Raises:
      ConfigError: ``of_call`` is neither a token nor one for each row.
    """

    def __init__(
        self,
        of_decoder: CancellationToken,
        of_call: CancellationToken | Sequence[CancellationToken | None] | None,
        batch: int,
    ):
        is_one = isinstance(of_call, CancellationToken | None)
        tokens = [of_call] * batch if is_one else of_call
        is_fit = isinstance(tokens, Sequence) and len(tokens) == batch
        if not is_fit or not all(isinstance(t, CancellationToken | None) for t in tokens):
            raise ConfigError(
                f"cancellation_token is {of_call!r}; expected a CancellationToken, or a list of "
                f"{batch}, one a row"
            )
        self.batch = batch
        self._of_decoder = of_decoder
        self._has_own = of_call is not None
        self._whole = of_decoder.watch()
        self._own = [self._whole if token is None else token.watch() for token in tokens]
        self._is_watched: bool | None = None  # in process 0; None where there is only one

    @property
    def is_watched(self) -> bool:
        """Whether cancellation is possible: a token was given, or the decoder's was handed out."""
        return self._is_watched_here if self._is_watched is None else self._is_watched

    @property
    def _is_watched_here(self) -> bool:
        return self._has_own or self._of_decoder.is_exposed

    def rows(self) -> list[int]:
        """Returns the rows that are cancelled so far."""
        rows = list(range(self.batch))
        if not self._whole():
            rows = [row for row in rows if self._own[row]()]
        if processes.count() > 1:
            rows, self._is_watched = processes.from_writer([rows, self._is_watched_here])
        return rows
