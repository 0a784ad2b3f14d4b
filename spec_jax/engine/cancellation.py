"""Cancelling a generation from any thread, task or callback."""

from __future__ import annotations

import threading
from collections.abc import Callable


class CancellationToken:
    """Ends the generations that hold it; safe to use from any thread.

    ``cancel`` ends every generation that is running, at its next round. Those that begin while
    the token is cancelled end before their first token. ``reset`` lets new ones begin; it does
    not bring back what was cancelled before it.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._times, self._is_cancelled = 0, False

    @property
    def is_cancelled(self) -> bool:
        """Cancelled, and not reset since."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Cancels; a second time does nothing more."""
        with self._lock:
            self._times, self._is_cancelled = self._times + 1, True

    def reset(self) -> None:
        """Makes the token as good as new."""
        self._is_cancelled = False

    def watch(self) -> Callable[[], bool]:
        """A question to ask: is the token cancelled, or was it since this call?"""
        before = self._times
        return lambda: self._is_cancelled or self._times != before
