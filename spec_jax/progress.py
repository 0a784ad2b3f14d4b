"""Progress of long work: a bar on a terminal, lines of text elsewhere; and what takes long."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any, ClassVar, TextIO

from tqdm import tqdm

_LOG = logging.getLogger("spec_jax")
# By the columns of the terminal that each needs; what is still too long is cut.
_LAYOUTS = (
    (72, "{desc} {bar:24} {n}/{total} {elapsed}<{remaining}{postfix}"),
    (32, "{desc} {n}/{total} {elapsed}<{remaining}{postfix}"),
    (0, "{n}/{total} <{remaining}{postfix}"),
)
_USUAL = (80, 24)  # columns and lines of a terminal that states none


class _Bar(tqdm):
    """A bar that fits the terminal, whatever its size is and becomes."""

    @property
    def format_dict(self) -> dict[str, Any]:
        columns, _ = _size(self.fp)
        layout = next(text for least, text in _LAYOUTS if columns >= least)
        # One column stays free: some terminals begin a new line after the last one.
        return super().format_dict | {"ncols": max(columns - 1, 1), "bar_format": layout}


def _size(stream: TextIO | CellText) -> tuple[int, int]:
    """Returns columns and lines of a terminal, the usual ones where it states none."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return _USUAL
    return size.columns or _USUAL[0], size.lines or _USUAL[1]


class CellText:
    """A text in the output of a notebook's cell that changes in place, written to as to a file.

    As on a terminal, what follows a carriage return replaces the line.
    """

    def __init__(self):
        self._text = self._shown = ""
        self._handle = None

    def write(self, text: str) -> int:
        """Adds text; ``flush`` shows it."""
        lines = (self._text + text).split("\n")
        self._text = "\n".join([*(line.rsplit("\r", 1)[-1] for line in lines[:-1]), lines[-1]])
        return len(text)

    def flush(self) -> None:
        """Shows what was written."""
        shown = "\n".join(line.rsplit("\r", 1)[-1] for line in self._text.split("\n"))
        if shown == self._shown:
            return
        self._shown = shown
        found = {"text/plain": shown}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(found, raw=True, display_id=True)
        else:
            self._handle.update(found, raw=True)


class Progress:
    """A bar on a terminal or in a notebook, lines of text on stderr elsewhere.

    Args:
      total: The number of steps.
      what: What the steps are, for the bar and the lines.
      num_done: Steps that were done before.
      every_s: At least so many seconds between two lines; the last step always has one.
      delay_s: Seconds before the bar appears.
    """

    _bars: ClassVar[list[Progress]] = []  # those on the screen, the outermost first

    def __init__(
        self,
        total: int,
        what: str,
        *,
        num_done: int = 0,
        every_s: float = 0.0,
        delay_s: float = 0.0,
    ):
        # tqdm hides bars in the last line of a terminal, also of one that has no other.
        look = {"disable": None, "nrows": max(_size(sys.stderr)[1], 3)}
        if in_notebook():  # each bar is an output of its own, so all are at the top
            look = {"disable": False, "file": CellText(), "position": 0}
        self._bar = _Bar(
            total=total, initial=num_done, desc=what, leave=False, delay=delay_s, **look
        )
        self._total = total
        self._what = what
        self._every_s = every_s
        self._said_s = time.monotonic()
        self._since = (time.monotonic(), num_done)
        self._is_first = True
        self.num_done = num_done
        if self.is_bar:
            self._bars.append(self)

    @property
    def is_bar(self) -> bool:
        """Whether there is a terminal or a notebook, and so a bar."""
        return not self._bar.disable

    def now(self, text: str) -> None:
        """Says what is running; a bar that waits to appear appears."""
        self._bar.delay = 0  # so that it is cleared when it is closed
        self._bar.set_postfix_str(text)

    def say(self, text: str) -> None:
        """Prints a line on stdout without breaking the bar."""
        self._bar.write(text)

    def begin(self, num_done: int) -> None:
        """Counts time from here: what came before, such as compilation, tells nothing of the rest.

        Args:
          num_done: The number of steps done.
        """
        self._since = (time.monotonic(), num_done)
        self._is_first = False
        self.num_done = num_done
        bar = self._bar
        if self.is_bar:
            bar.n = bar.initial = bar.last_print_n = num_done
            bar.start_t = bar.last_print_t = time.time()
            bar.refresh()

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
            print(line + self.left(self.num_done), file=sys.stderr, flush=True)

    def left(self, num_done: int) -> str:
        """Returns " (about 3 min left)", or "" where that is not known or below five seconds.

        The steps until the first call, which compile, tell of the others in that call alone.

        Args:
          num_done: The number of steps done.
        """
        now_s = time.monotonic()
        begin_s, before = self._since
        if num_done <= before:
            return ""
        left_s = (now_s - begin_s) / (num_done - before) * (self._total - num_done)
        if self._is_first:
            self._since = (now_s, num_done)
            self._is_first = False
        return f" (about {duration(left_s)} left)" if left_s >= 5 else ""

    def close(self) -> None:
        """Removes the bar."""
        if self in self._bars:
            self._bars.remove(self)
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def duration(seconds: float) -> str:
    """Returns a time for people: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Notice:
    """Says what is running once it has taken long, and how long it took when it is closed.

    A bar that is open shows it. Else a line goes to stderr of a terminal, to the output of a
    notebook's cell, and elsewhere to the logger "spec_jax" as information.

    Args:
      what: what is running.
      after_s: how long it runs before anything is said.
    """

    def __init__(self, what: str, after_s: float = 2.0):
        self._what = what
        self._begin_s = time.monotonic()
        self._stream = _stream()
        self._lock = threading.Lock()
        self._is_open = True
        self._is_said = False
        self._bar: Progress | None = None
        self._timer = threading.Timer(after_s, self._say)
        self._timer.daemon = True
        self._timer.start()

    def _say(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._bar = next(reversed(Progress._bars), None)
            if self._bar is not None:
                self._bar.now(f"{self._what} …")
            else:
                self._is_said = True
                self._write(f"{self._what} …")

    def close(self) -> None:
        """Ends the line; says nothing where nothing was said."""
        self._timer.cancel()
        with self._lock:
            self._is_open = False
            if self._bar in Progress._bars:
                self._bar.now("")
            if self._is_said:
                self._write(f" {time.monotonic() - self._begin_s:.1f} s\n")

    def _write(self, text: str) -> None:
        if self._stream is None:
            _LOG.info(text if text.startswith(self._what) else f"{self._what} took{text.rstrip()}")
        else:
            print(text, end="", file=self._stream, flush=True)


def in_notebook() -> bool:
    """Whether this process runs a notebook's cells."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def is_watched() -> bool:
    """Whether progress is visible: on a terminal or in a notebook."""
    return _stream() is not None


def _stream() -> TextIO | CellText | None:
    """Where progress is shown: a terminal or a notebook; None where there is neither."""
    if in_notebook():
        return CellText()
    return sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
