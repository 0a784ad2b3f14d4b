"""Progress of long work: a bar on a terminal, lines of text elsewhere; and what takes long.

Work that is open says what it does at least every ten seconds, and the time left is that of its
steps, without compilation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

_LOG = logging.getLogger("spec_jax")
# By the columns of the terminal that each needs; what is still too long is cut.
_LAYOUTS = (
    (72, "{desc} {bar:24} {n}/{total} {elapsed}<{remaining}{postfix}"),
    (32, "{desc} {n}/{total} {elapsed}<{remaining}{postfix}"),
    (0, "{n}/{total} <{remaining}{postfix}"),
)
_QUIET_S = 9.0  # after which work says what it does: with the looks, within ten
_LOOK_S = 1.0  # between two looks whether it has
_USUAL = (80, 24)  # columns and lines of a terminal that states none


class _Bar(tqdm):
    """A bar that fits the terminal, whatever its size is and becomes."""

    left_s: float | None = None  # as the lines say it

    @property
    def format_dict(self) -> dict[str, Any]:
        columns, _ = _size(self.fp)
        layout = next(text for least, text in _LAYOUTS if columns >= least)
        # One column stays free: some terminals begin a new line after the last one.
        rate = {"rate": (self.total - self.n) / self.left_s} if self.left_s else {}
        found = super().format_dict | {"ncols": max(columns - 1, 1), "bar_format": layout}
        return found | rate


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


class _Open:
    """What is open, the outermost first. The innermost one speaks where nothing has for long."""

    def __init__(self):
        self.all: list[Progress | Notice] = []
        self.spoke_s = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def progress(self) -> Progress | None:
        """Returns the innermost ``Progress``."""
        return next((one for one in reversed(self.all) if isinstance(one, Progress)), None)

    def add(self, one: Progress | Notice) -> None:
        with self._lock:
            if not self.all:
                self.spoke_s = time.monotonic()
            self.all.append(one)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()

    def remove(self, one: Progress | Notice) -> None:
        with self._lock:
            if one in self.all:
                self.all.remove(one)

    def look(self) -> None:
        """Lets the innermost speak if none has for ten seconds."""
        now_s = time.monotonic()
        last = next(reversed(self.all), None)
        if last is not None and now_s - self.spoke_s >= _QUIET_S:
            self.spoke_s = now_s
            last.remind()

    def _watch(self) -> None:
        while True:
            threading.Event().wait(_LOOK_S)
            with self._lock:
                if not self.all:
                    self._thread = None
                    return
            self.look()


_open = _Open()


def leave_out(seconds: float) -> None:
    """Leaves seconds that end now, such as those of a compilation, out of the time of steps."""
    end_s = time.monotonic()
    for one in [*_open.all]:
        if isinstance(one, Progress):
            one.apart.append((end_s - seconds, end_s))


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Returns how long at least one of the spans lasts."""
    total = last = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


class Progress(contextlib.AbstractContextManager):
    """A bar on a terminal or in a notebook, lines of text on stderr elsewhere.

    Where no step ends for ten seconds, a line says what is running, and for how long.

    Args:
      total: The number of steps.
      what: What the steps are, for the bar and the lines.
      num_done: Steps that were done before.
      every_s: At least so many seconds between two lines; the last step always has one.
      delay_s: Seconds before the bar appears.
      is_compiling: Whether compilation is the work; else it is no part of the time left.
    """

    def __init__(
        self,
        total: int,
        what: str,
        *,
        num_done: int = 0,
        every_s: float = 0.0,
        delay_s: float = 0.0,
        is_compiling: bool = False,
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
        self._said_s = self._moved_s = time.monotonic()
        self._is_compiling = is_compiling
        self.text = ""  # of what is running
        self._begin_s = self._said_s
        self._share: float | None = None
        self._is_first = True
        self.apart: list[tuple[float, float]] = []  # spans that are left out
        self.num_done = num_done
        self._since = (0.0, self._done)  # seconds of work, and the share done, from which on
        _open.add(self)

    @property
    def is_bar(self) -> bool:
        """Whether there is a terminal or a notebook, and so a bar."""
        return not self._bar.disable

    def now(self, text: str) -> None:
        """Says what is running; a bar that waits to appear appears."""
        self._bar.delay = 0  # so that it is cleared when it is closed
        self._bar.set_postfix_str(text)
        self.text = text
        self._moved_s = time.monotonic()

    def line(self, text: str) -> None:
        """Prints a line on stderr, with the steps done; only where there is no bar."""
        _open.spoke_s = time.monotonic()
        print(f"{self._what} {self.num_done}/{self._total}: {text}", file=sys.stderr, flush=True)

    def remind(self) -> None:
        """Says what is running, and for how long."""
        if self.is_bar:
            self._bar.refresh()
            return
        running = duration(time.monotonic() - self._moved_s)
        self.line(f"{self.text or 'running'}, {running} so far{self.left(self.num_done)}")

    def say(self, text: str) -> None:
        """Prints a line on stdout without breaking the bar."""
        _open.spoke_s = time.monotonic()
        self._bar.write(text)
        sys.stdout.flush()

    def begin(self, num_done: int) -> None:
        """Counts time from here: what came before, such as compilation, tells nothing of the rest.

        Args:
          num_done: The number of steps done.
        """
        self._move(num_done)
        self._since = (self._worked_s(), self._done)
        self._is_first = False
        bar = self._bar
        if self.is_bar:
            bar.n = bar.initial = bar.last_print_n = num_done
            bar.start_t = bar.last_print_t = time.time()
            bar.refresh()

    def step(self, text: str, count: int = 1, *, share: float | None = None) -> None:
        """Counts one step, or several, as done.

        Args:
          text: What has been done.
          count: The number of steps.
          share: The share of all work that is done, where several steps run at once; None: that of
            the steps.
        """
        self._move(self.num_done + count, share)
        self.text = ""
        self._bar.set_postfix_str(text, refresh=False)
        left = self.left(self.num_done)
        self._bar.update(count)
        is_due = self._moved_s - self._said_s >= self._every_s or self.num_done == self._total
        if not self.is_bar and is_due:
            self._said_s = self._moved_s
            self.line(text + left)

    def _move(self, num_done: int, share: float | None = None) -> None:
        self.num_done = num_done
        self._share = share
        self._moved_s = time.monotonic()

    @property
    def _done(self) -> float:
        """The share of the work that is done."""
        return self.num_done / max(self._total, 1) if self._share is None else self._share

    def left(self, num_done: int) -> str:
        """Returns " (about 3 min left)", or "" where that is not known or below five seconds.

        Compilation does not count. The steps until the first that are told, which are slower than
        the others, tell of them until there are more.

        Args:
          num_done: The number of steps done.
        """
        if num_done != self.num_done:
            self._move(num_done)
        worked_s = self._worked_s()
        begin_s, before = self._since
        bar = self._bar
        if self._done > before:
            bar.left_s = (worked_s - begin_s) / (self._done - before) * (1 - self._done)
            if self._is_first:
                self._since = (worked_s, self._done)
                self._is_first = False
        return f" (about {duration(bar.left_s)} left)" if (bar.left_s or 0) >= 5 else ""

    def _worked_s(self) -> float:
        """Seconds since the begin, without those that are left out."""
        begin_s = self._begin_s
        apart = [] if self._is_compiling else [(max(a, begin_s), b) for a, b in self.apart]
        return time.monotonic() - begin_s - union_s(apart)

    def close(self) -> None:
        """Removes the bar."""
        _open.remove(self)
        self._bar.close()

    def __exit__(self, *_) -> None:
        self.close()


def duration(seconds: float) -> str:
    """Returns a time for people: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Notice(contextlib.AbstractContextManager):
    """Says what is running once it has taken long, and how long it took when it is closed.

    A ``Progress`` that is open shows it. Else a line goes to stderr of a terminal, to the output of
    a notebook's cell, and elsewhere to the logger "spec_jax" as information.

    Args:
      what: what is running.
      after_s: how long it runs before anything is said.
      is_line: whether lines go to stderr also where it is no terminal.
    """

    def __init__(self, what: str, after_s: float = 2.0, *, is_line: bool = False):
        self._what = what
        self._begin_s = time.monotonic()
        self._stream = _stream()
        self._is_line = is_line and self._stream is None
        self._lock = threading.Lock()
        self._is_open = True
        self._is_said = False
        self._bar: Progress | None = None
        self._before = ""
        self._timer = threading.Timer(after_s, self._say)
        self._timer.daemon = True
        self._timer.start()

    def _say(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._bar = _open.progress()
            if self._bar is not None:
                self._before = self._bar.text
                self._bar.now(f"{self._what} …")
            else:
                self._is_said = True
                self._write(f"{self._what} …", f"{self._what} …")
                if self._is_line:
                    _open.add(self)

    def close(self) -> None:
        """Ends the line; says nothing where nothing was said."""
        self._timer.cancel()
        with self._lock:
            self._is_open = False
            _open.remove(self)
            if self._bar in _open.all:
                self._bar.now(self._before)
            if self._is_said:
                took = f"{time.monotonic() - self._begin_s:.1f} s"
                self._write(f" {took}\n", f"{self._what} took {took}")

    def remind(self) -> None:
        """Says how long it has taken so far."""
        running = duration(time.monotonic() - self._begin_s)
        print(f"{self._what}, {running} so far", file=sys.stderr, flush=True)

    def __exit__(self, *_) -> None:
        self.close()

    def _write(self, text: str, line: str) -> None:
        if self._stream is not None:
            print(text, end="", file=self._stream, flush=True)
        elif self._is_line:
            print(line, file=sys.stderr, flush=True)
        else:
            _LOG.info(line)


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
