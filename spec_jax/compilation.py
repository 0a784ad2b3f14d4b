"""Compilation: how long it takes, what is compiled, and where compiled programs are kept."""

from __future__ import annotations

import collections
import contextvars
import functools
import pathlib
import threading
import time
from collections.abc import Hashable, Iterable
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from spec_jax.progress import Notice

_EVENTS = frozenset(
    (
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        "/jax/core/compile/backend_compile_duration",  # or reading from the compilation cache
    )
)
_KEPT_OVER_S = 0.3  # programs that took longer to compile are kept on disk


def enable_compilation_cache(path: str | pathlib.Path | None = None) -> pathlib.Path:
    """Keeps compiled programs on disk, so that later processes do not compile them again.

    A folder that jax has been given before (``JAX_COMPILATION_CACHE_DIR`` sets one) stays, unless
    ``path`` names another.

    Args:
      path: the folder; by default ``~/.cache/spec_jax/jax-VERSION``.

    Returns:
      The folder.
    """
    before = jax.config.jax_compilation_cache_dir
    if path is None:
        usual = pathlib.Path.home() / ".cache" / "spec_jax" / f"jax-{jax.__version__}"
        path = usual if before is None else before
    folder = pathlib.Path(path).expanduser()
    if str(folder) != before:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _KEPT_OVER_S)
        compilation_cache.reset_cache()  # jax decides at its first compilation whether it has one
    return folder


# What is being timed, and the program that is about to run; threads that work for a call copy its
# context.
_timed: contextvars.ContextVar[tuple[Timed, ...]] = contextvars.ContextVar("timed", default=())
_program: contextvars.ContextVar[NamedProgram | None] = contextvars.ContextVar(
    "program", default=None
)
_lock = threading.Lock()
# Recent compilations by the key of their program, of all threads: (key, begin, end).
_recent: collections.deque[tuple[Hashable, float, float]] = collections.deque(maxlen=256)


@functools.cache
def _listen() -> None:
    """Registers with jax, which calls listeners in the thread that compiles."""
    jax.monitoring.register_scalar_listener(_begin_event)
    jax.monitoring.register_event_time_span_listener(_end_event)


def _begin_event(event: str, value: float, **_: Any) -> None:
    if event in _EVENTS and (program := _program.get()) is not None:
        program.begin_compiling()


def _end_event(event: str, begin: float, end: float, **_: Any) -> None:
    if event not in _EVENTS:
        return
    add_span(begin, end)
    if (program := _program.get()) is not None:
        with _lock:
            _recent.append((program.key, begin, end))


def add_span(begin: float, end: float) -> None:
    """Counts a span of ``time.time()`` as compilation in what is being timed."""
    for timed in _timed.get():
        timed.spans.append((begin, end))


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Returns how long at least one of the spans lasts."""
    total = last = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


class Timed:
    """Times a block, with compilation apart.

    Compilation is tracing, lowering and compiling in this thread, or reading a compiled program
    from disk; waiting for another thread that compiles the same ``NamedProgram``; and ``add_span``.

    Attributes:
      run_s: time without compilation, once the block has ended.
      compile_s: time of compilation.
    """

    def __init__(self):
        self.run_s = self.compile_s = 0.0
        self.spans: list[tuple[float, float]] = []

    def __enter__(self) -> Timed:
        _listen()
        self._token = _timed.set((*_timed.get(), self))
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        total_s = time.perf_counter() - self._begin
        _timed.reset(self._token)
        self.compile_s = min(union_s(self.spans), total_s)
        self.run_s = total_s - self.compile_s


class NamedProgram:
    """Names the program that a block runs; says so if its compilation takes long.

    Args:
      what: its name for people.
      key: what it is compiled for. Of threads that run programs with equal keys one compiles, and
        the others wait.
    """

    def __init__(self, what: str, *key: Hashable):
        self.what, self.key = what, (what, *key)
        self._notice: Notice | None = None

    def begin_compiling(self) -> None:
        """Called when this thread begins to compile."""
        with _lock:
            if self._notice is None:
                self._notice = Notice(f"compiling {self.what}")

    def __enter__(self) -> NamedProgram:
        self._token = _program.set(self)
        self._begin = time.time()
        return self

    def __exit__(self, *_) -> None:
        _program.reset(self._token)
        if self._notice is not None:
            self._notice.close()
        with _lock:
            while_here = [x for x in _recent if x[2] > self._begin]
        for key, begin, end in while_here:
            if key == self.key:
                add_span(max(begin, self._begin), end)
