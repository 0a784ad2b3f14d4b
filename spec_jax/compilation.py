"""Compilation: how long it takes, what is compiled, and which compiled programs are kept."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from spec_jax.progress import Notice, leave_out, union_s

_BACKEND = "/jax/core/compile/backend_compile_duration"  # or reading from the compilation cache
_EVENTS = frozenset(
    (
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        _BACKEND,
    )
)
_log = logging.getLogger(__name__)
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
    leave_out(end - begin)
    if event == _BACKEND:
        _kept.num_compiled += 1
    if (program := _program.get()) is not None:
        with _lock:
            _recent.append((program.key, begin, end))


def add_span(begin: float, end: float) -> None:
    """Counts a span of ``time.time()`` as compilation in what is being timed."""
    for timed in _timed.get():
        timed.spans.append((begin, end))


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
    """Names the program that a block runs; says so if one that compiles first takes long.

    Args:
      what: its name for people.
      key: what it is compiled for. Of threads that run programs with equal keys one compiles, and
        the others wait.
    """

    def __init__(self, what: str, *key: Hashable):
        self.what = what
        self.key = (what, *key)
        self._notice: Notice | None = None

    def begin_compiling(self) -> None:
        """Called when this thread begins to compile."""
        with _lock:
            if self._notice is None:
                self._notice = Notice(f"compiling and running {self.what}")

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


_MAPS = pathlib.Path("/proc/self/maps")  # a memory map a line; Linux alone has the file
_LIMIT = 65_530  # maps of a process, by default
_LOOK_EVERY = 8  # compilations; each program holds dozens of maps, and counting them takes a while


class _Kept:
    """The compiled programs of ``bounded_jit``, in the order of their last use.

    Attributes:
      programs: a function of ``jax.jit`` by the ``bounded_jit`` and the static arguments.
      num_compiled: how often this process has compiled anything.
    """

    def __init__(self):
        self.programs: collections.OrderedDict[tuple[Hashable, ...], Any] = (
            collections.OrderedDict()
        )
        self.num_compiled = self._num_seen = self._unfreed = 0

    def use(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        """Returns the function of a key, which becomes the last that was used."""
        with _lock:
            if key not in self.programs:
                self.programs[key] = make()
            self.programs.move_to_end(key)
            return self.programs[key]

    def bound(self, result: Any) -> None:
        """Drops programs if there are too many; called after each call, with its result.

        Maps that dropping does not free, such as mapped files, raise the bound; otherwise every
        program would soon be dropped.
        """
        if self.num_compiled < self._num_seen + _LOOK_EVERY:
            return
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(result)):
            return  # within a program that is being traced
        self._num_seen = self.num_compiled
        most = min(max(_LIMIT // 3, 2 * self._unfreed), _LIMIT * 4 // 5)
        if _count_maps() > most:
            remaining = release_programs(most // 2)
            if remaining > most // 2:  # although every program was dropped
                self._unfreed = remaining


_kept = _Kept()


@contextlib.contextmanager
def usual_flags(has_x64: bool = False) -> Iterator[None]:
    """Traces the package's programs alike, whatever the caller's flags of jax are.

    Args:
      has_x64: ``jax_enable_x64`` is the caller's.
    """
    with (
        jax.enable_x64(has_x64 and jax.config.jax_enable_x64),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def _as_32_bit(x: Any) -> Any:
    if str(getattr(x, "dtype", None)) not in _NARROW:
        return x
    dtype = _NARROW[str(x.dtype)]
    return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


class bounded_jit:
    """``jax.jit`` for a process that compiles any number of programs.

    On Linux a process has at most 65,530 maps of memory by default, of which each program that is
    compiled for a CPU holds dozens; beyond them compiling ends in a crash. When a third of them is
    in use, the programs that have not been used for longest are dropped until half of that is left,
    see ``release_programs``.

    Args:
      function: what is compiled; its static arguments are keyword-only.
      static_argnames: as of ``jax.jit``; programs are dropped by their values, for all shapes.
      has_x64: with ``jax_enable_x64`` it computes with 64 bits.
      **options: of ``jax.jit``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static_argnames: str | Sequence[str] = (),
        has_x64: bool = False,
        **options: Any,
    ):
        functools.update_wrapper(self, function)
        is_one = isinstance(static_argnames, str)
        self._static_argnames = (static_argnames,) if is_one else tuple(static_argnames)
        self._has_x64 = has_x64
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _listen()
        args, kwargs = self._narrowed(args, kwargs)
        with usual_flags(self._has_x64):
            result = self._jitted(kwargs)(*args, **kwargs)
        _kept.bound(result)
        return result

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As of ``jax.jit``."""
        args, kwargs = self._narrowed(args, kwargs)
        with usual_flags(self._has_x64):
            return self._jitted(kwargs).lower(*args, **kwargs)

    def _narrowed(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments of 64 bits as 32, where the program computes with no more."""
        if jax.config.jax_enable_x64 and not self._has_x64:
            return jax.tree.map(_as_32_bit, (args, kwargs))
        return args, kwargs

    def num_programs(self) -> int:
        """Returns how many compiled programs are kept."""
        with _lock:
            jitted = [x for key, x in _kept.programs.items() if key[0] is self]
        return sum(x._cache_size() for x in jitted)

    def _jitted(self, kwargs: dict[str, Any]) -> Any:
        def make() -> Any:
            # jax shares programs between jits of one function: a partial is another one.
            function = functools.partial(self.__wrapped__)
            return jax.jit(function, static_argnames=self._static_argnames, **self._options)

        return _kept.use((self, *map(kwargs.get, self._static_argnames)), make)


def release_programs(max_maps: int) -> int:
    """Drops compiled programs until this process has few enough maps of memory.

    Those of ``bounded_jit`` that have not been used for longest are dropped first; if that is not
    enough, all programs that jax keeps. A dropped program is compiled again by its next call. Calls
    that are running, in any thread, are not affected. Only Linux reports memory maps; elsewhere
    nothing is dropped.

    Args:
      max_maps: maximum number of maps.

    Returns:
      The number of maps that remain.
    """
    before = num_maps = _count_maps()
    num_dropped = 0
    while num_maps > max_maps and _kept.programs:
        with _lock:
            count = -(-len(_kept.programs) // 4)  # at a time, as counting maps takes a while
            oldest = [_kept.programs.popitem(last=False)[1] for _ in range(count)]
        num_dropped += sum(x._cache_size() for x in oldest)
        del oldest
        num_maps = _count_maps()
    if num_maps > max_maps:
        jax.clear_caches()
        num_maps = _count_maps()
        _log.info("%d memory maps: dropped all compiled programs; %d remain", before, num_maps)
    elif num_dropped:
        text = "%d memory maps: dropped %d compiled programs; %d remain"
        _log.info(text, before, num_dropped, num_maps)
    return num_maps


def _count_maps() -> int:
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0
