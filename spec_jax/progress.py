"""Progress of long work: a bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

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
