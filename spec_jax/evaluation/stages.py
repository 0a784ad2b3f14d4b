"""The stages of a round in a profiler's trace, and the time that each of them takes.

The trace names operations of the compiled program. The program's text says of each of them which
``jax.named_scope`` it was traced in, and the scopes of ``spec_jax/decoding/round.py`` and of the
models are the stages.
"""

from __future__ import annotations

import gzip
import itertools
import json
import pathlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

STAGES = ("draft", "verify", "accept", "commit")
PARTS = ("draft_pass", "attention", "ssm", "mlp", "experts", "unembed")
LOOP = ("loop", "")  # what belongs to no stage: the loop's own condition and counters
DELAYS = ("delays", "")  # what runs took beyond the median of their operation
_CONTAINERS = {"while", "conditional", "call"}  # the operations inside of them are events too

Stage = tuple[str, str]  # one of STAGES, and one of PARTS or "" for its other operations


class OperationRun(NamedTuple):
    """One run of an operation.

    Attributes:
      name: The instruction of the compiled program.
      begin_ns: When it began.
      end_ns: When its result was ready.
    """

    name: str
    begin_ns: float
    end_ns: float


class StageTotal(NamedTuple):
    """What one stage took.

    Attributes:
      stage: One of ``STAGES``, "loop", or "delays".
      part: One of ``PARTS``; "" for the stage's other operations.
      time_ns: The time by the clock, the gap before each operation included: the median run of each
        operation, times the number of its runs.
      busy_ns: The part of it in which an operation of the stage ran.
      operations: The number of operations that ran.
    """

    stage: str
    part: str
    time_ns: float
    busy_ns: float
    operations: int


def stage_of(scope: str) -> Stage:
    """Returns the stage of a scope such as "jit(generate)/while/body/verify/mlp/mul"."""
    names = iter(scope.split("/"))
    stage = next((name for name in names if name in STAGES), None)
    if stage is None:
        return LOOP
    return stage, next((name for name in names if name in PARTS), "")


def read_program(text: str) -> dict[str, Stage]:
    """Returns the stage of every instruction of a compiled program but of loops and calls.

    An instruction that the compiler has added has no scope, and counts to the stage of the next
    one of its computation in the schedule, or else of the one before.

    Args:
      text: Of the program, as ``Compiled.as_text()`` returns it.
    """
    from spec_jax.planning import hlo  # its room imports optax, which is slow

    stages: dict[str, Stage] = {}
    for computation in hlo.read(text).computations.values():
        waiting: list[str] = []
        last = LOOP
        for name, instruction in computation.instructions.items():
            if instruction.opcode in _CONTAINERS:
                continue
            waiting.append(name)
            if "/" in instruction.op_name:
                last = stage_of(instruction.op_name)
                stages |= dict.fromkeys(waiting, last)
                waiting = []
        stages |= dict.fromkeys(waiting, last)
    return stages


def read_spans(path: str | pathlib.Path, names: Iterable[str]) -> list[OperationRun]:
    """Returns the runs of a program's operations in a trace, in the order in which they began.

    Where devices have lines of their own in the trace, those of the busiest device are read.

    Args:
      path: The ``.xplane.pb`` file of the trace.
      names: The instructions of the program.
    """
    names = frozenset(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib's own types
        planes = [*jax.profiler.ProfileData.from_file(str(path)).planes]
        devices = [plane for plane in planes if plane.name.startswith("/device:")]
        spans = max((_spans([plane], names) for plane in devices), key=len, default=[])
        return spans or _spans(planes, names)


def _spans(planes: Iterable[Any], names: frozenset[str]) -> list[OperationRun]:
    begun = []
    ends = {}
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        stats = dict(event.stats)
        if event.name.startswith("end: "):  # a CPU says apart when a result is ready
            ends[stats.get("_c")] = event.start_ns
            continue
        name = stats.get("hlo_op", event.name.split(" = ")[0].lstrip("%"))
        if name in names:
            begun.append((event.start_ns, event.start_ns + event.duration_ns, name, stats))
    begun.sort(key=lambda event: event[:2])
    return [
        OperationRun(name, begin, max(begin, ends.get(stats.get("_p"), end)))
        for begin, end, name, stats in begun
    ]


def moments(spans: Sequence[OperationRun]) -> Iterator[tuple[float, float, tuple[int, ...], int]]:
    """Yields the moments in which nothing begins and nothing ends, from first to last operation.

    Returns:
      Begin and end in nanoseconds; the indices of the operations that run, none where all wait; and
      the index of the operation that begins or ends next.
    """
    marks = [(span.begin_ns, 0, i) for i, span in enumerate(spans)]
    marks += [(span.end_ns, 1, i) for i, span in enumerate(spans)]
    marks.sort()
    running: dict[int, None] = {}
    for (begin, is_end, i), (end, _, following) in itertools.pairwise(marks):
        if is_end:
            del running[i]
        else:
            running[i] = None
        if end > begin:
            yield begin, end, tuple(running), following


def add_up(spans: Sequence[OperationRun], stages: Mapping[str, Stage]) -> list[StageTotal]:
    """Adds up by stage the time from the first operation's begin to the last one's end.

    Every moment counts once. Where several operations run at once, each gets its share; where none
    runs, the moment counts to the next one, which it prepares. Of each operation the median run
    counts, or the mean if that is less, so that a product that once waited for a core does not make
    its stage look slow. What all runs took beyond that is an entry of its own, never below zero, so
    that the entries still add up to the whole.

    Args:
      spans: The runs of operations.
      stages: The stage of each operation.

    Returns:
      One entry for each stage that ran, in the order of ``STAGES`` and ``PARTS``, then the delays.
    """
    if not spans:
        return []
    waited_ns, ran_ns = np.zeros((2, len(spans)))
    for begin, end, running, following in moments(spans):
        if running:
            ran_ns[[*running]] += (end - begin) / len(running)
        else:
            waited_ns[following] += end - begin
    runs: dict[str, list[int]] = {}
    for i, span in enumerate(spans):
        runs.setdefault(span.name, []).append(i)
    count = Counter()
    time_ns = Counter()
    busy_ns = Counter()
    for name, chosen in runs.items():
        busy, waiting = (len(chosen) * _usual(x[chosen]) for x in (ran_ns, waited_ns))
        count[stages[name]] += len(chosen)
        busy_ns[stages[name]] += busy
        time_ns[stages[name]] += busy + waiting

    def order(stage):
        return ((*STAGES, "loop").index(stage[0]), (*PARTS, "").index(stage[1]))

    rest_ns = max(float((ran_ns + waited_ns).sum()) - sum(time_ns.values()), 0.0)  # of rounding
    return [
        *(StageTotal(*s, time_ns[s], busy_ns[s], count[s]) for s in sorted(count, key=order)),
        StageTotal(*DELAYS, rest_ns, rest_ns, 0),
    ]


def _usual(times: np.ndarray) -> float:
    return float(min(np.median(times), np.mean(times)))


def name_of(stage: Stage) -> str:
    """Returns a stage's name for a table: "verify: attention"."""
    of, part = stage
    if stage == DELAYS:
        return "beyond the medians"
    if of in ("accept", "loop") and not part:
        return of
    return f"{of}: {part.replace('_', ' ') or 'other'}"


def write_trace(
    path: str | pathlib.Path, spans: Sequence[OperationRun], stages: Mapping[str, Stage]
) -> None:
    """Writes a trace that Perfetto opens, with one line of stages, one of parts, and operations.

    Args:
      path: The file, a ``.json.gz``.
      spans: The runs of operations.
      stages: The stage of each operation.
    """
    lines = {1: "stage", 2: "part", 3: "operations"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": line, "name": "thread_name", "args": {"name": name}}
        for line, name in lines.items()
    ]
    shown: dict[int, dict[str, Any]] = {}
    for begin, end, running, following in moments(spans):
        of = Counter(stages[spans[i].name] for i in running or (following,))
        stage = max(of, key=of.get)
        for line, name in ((1, stage[0]), (2, name_of(stage))):
            last = shown.get(line)
            if last is not None and last["name"] == name:
                last["dur"] = end / 1e3 - last["ts"]
                continue
            shown[line] = _event(line, name, begin, end)
            events.append(shown[line])
    free_ns: list[float] = []  # when each line of operations is free again
    for span in spans:
        line = next((i for i, end in enumerate(free_ns) if end <= span.begin_ns), len(free_ns))
        free_ns[line : line + 1] = [span.end_ns]
        event = _event(3 + line, span.name, span.begin_ns, span.end_ns)
        events.append(event | {"args": {"stage": name_of(stages[span.name])}})
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)


def _event(line: int, name: str, begin_ns: float, end_ns: float) -> dict[str, Any]:
    """Returns an event of the Trace Event Format, whose unit is the microsecond."""
    times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return {"ph": "X", "pid": 1, "tid": line, "name": name} | times
