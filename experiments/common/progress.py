"""Progress of long work, on stderr."""

from __future__ import annotations

import concurrent.futures
import sys
import time
from collections.abc import Callable, Mapping

from tqdm import tqdm


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
            dynamic_ncols=True, bar_format="{desc} {bar:24} {n}/{total} {elapsed} {postfix}",
        )
        self._total, self._done, self._what = total, num_done, what
        self._every_s, self._said_s = every_s, time.monotonic()

    def now(self, text: str) -> None:
        """Says what is running."""
        self._bar.set_postfix_str(text)

    def step(self, text: str) -> None:
        """Counts one step as done."""
        self._done += 1
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        now_s = time.monotonic()
        is_due = now_s - self._said_s >= self._every_s or self._done == self._total
        if self._bar.disable and is_due:
            self._said_s = now_s
            print(f"{self._what} {self._done}/{self._total}: {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()


def run_all(tasks: Mapping[str, Callable[[], None]], what: str) -> None:
    """Runs tasks, two at a time, with progress: one compilation alone leaves cores idle."""
    with Progress(len(tasks), what) as bar, concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = {pool.submit(task): name for name, task in tasks.items()}
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
                bar.step(futures[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
