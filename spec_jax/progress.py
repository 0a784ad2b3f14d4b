"""Progress of long work: a bar on a terminal, lines of text elsewhere; and what takes long."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TextIO

from tqdm import tqdm

_LOG = logging.getLogger("spec_jax")
_BAR = "{desc} {bar:24} {n}/{total} {elapsed}<{remaining}{postfix}"


class Progress:
    """A bar on a terminal, lines of text elsewhere; both on stderr.

    Args:
      total: The number of steps.
      what: What the steps are, for the bar and the lines.
      num_done: Steps that were done before.
      every_s: At least so many seconds between two lines; the last step always has one.
    """

    def __init__(self, total: int, what: str, *, num_done: int = 0, every_s: float = 0.0):
        self._bar = tqdm(
            total=total, initial=num_done, desc=what, disable=None, leave=False,
            dynamic_ncols=True, bar_format=_BAR,
        )  # fmt: skip
        self._total, self._what = total, what
        self._every_s, self._said_s = every_s, time.monotonic()
        self.num_done = num_done

    @property
    def is_bar(self) -> bool:
        """Whether there is a terminal, and so a bar."""
        return not self._bar.disable

    def now(self, text: str) -> None:
        """Says what is running."""
        self._bar.set_postfix_str(text)

    def say(self, text: str) -> None:
        """Prints a line on stdout without breaking the bar."""
        self._bar.write(text)

    def step(self, text: str, count: int = 1) -> None:
        """Counts one step, or several, as done."""
        self.num_done += count
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(count)
        now_s = time.monotonic()
        is_due = now_s - self._said_s >= self._every_s or self.num_done == self._total
        if not self.is_bar and is_due:
            self._said_s = now_s
            line = f"{self._what} {self.num_done}/{self._total}: {text}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Notice:
    """Says what is running once it has taken long, and how long it took when it is closed.

    The line goes to stderr of a terminal, to the output of a notebook's cell, and elsewhere to the
    logger "spec_jax" as information.

    Args:
      what: what is running.
      after_s: how long it runs before anything is said.
    """

    def __init__(self, what: str, after_s: float = 2.0):
        self._what, self._begin_s = what, time.monotonic()
        self._stream = _stream()
        self._lock, self._is_open, self._is_said = threading.Lock(), True, False
        self._timer = threading.Timer(after_s, self._say)
        self._timer.daemon = True
        self._timer.start()

    def _say(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_said = True
                self._write(f"{self._what} …")

    def close(self) -> None:
        """Ends the line; says nothing where nothing was said."""
        self._timer.cancel()
        with self._lock:
            self._is_open = False
            if self._is_said:
                self._write(f" {time.monotonic() - self._begin_s:.1f} s\n")

    def _write(self, text: str) -> None:
        if self._stream is None:
            _LOG.info(text if text.startswith(self._what) else f"{self._what} took{text.rstrip()}")
        else:
            print(text, end="", file=self._stream, flush=True)


def _stream() -> TextIO | None:
    """Where somebody reads along: a terminal, or a notebook; None where there is neither."""
    if "ipykernel" in sys.modules:
        return sys.stdout
    return sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
