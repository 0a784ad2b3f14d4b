"""The progress of a call of ``generate``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from spec_jax.engine.session import Session
from spec_jax.progress import Progress, is_watched

_DELAY_S = 2.0  # before a bar appears unasked
_EVERY_S = 5.0  # between two lines where there is no bar


@contextlib.contextmanager
def watched(
    session: Session, has_progress: bool | None, is_streamed: bool
) -> Iterator[Callable[[], None]]:
    """Yields a function that shows how far a session is, to be called after each of its steps.

    Args:
      session: what is run.
      has_progress: whether it is shown; None: for long sessions, where somebody reads along.
      is_streamed: somebody is shown the text.
    """
    delay_s = _DELAY_S if has_progress is None else 0.0
    if has_progress is None:
        is_main = threading.current_thread() is threading.main_thread()
        has_progress = is_watched() and is_main and not is_streamed
    if not has_progress:
        yield lambda: None
        return

    def look() -> None:
        done, running = session.progress()
        bar.step(f"{running} rows running", done - bar.num_done)

    with Progress(session.max_new_tokens, "tokens", every_s=_EVERY_S, delay_s=delay_s) as bar:
        yield look
