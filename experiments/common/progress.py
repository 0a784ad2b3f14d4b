"""Several tasks at a time, with their progress."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping

from spec_jax.progress import Progress


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
