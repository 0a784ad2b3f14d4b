"""Traces decoding rounds and says by stage where their time goes."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spec_jax import decoding, processes
from spec_jax.decoding import DecodeState, System
from spec_jax.errors import ConfigError
from spec_jax.evaluation import stages
from spec_jax.evaluation.bench import Bench
from spec_jax.evaluation.cells import Cell
from spec_jax.meshes import use_mesh
from spec_jax.progress import Progress
from spec_jax.show.tables import Section, Table

_ROUNDS = 32  # at most, in one call
_CALLS = 7  # without a trace; the median counts
_TRACES = 3  # the fastest call is kept: a trace costs time, which is not the rounds' own
_HEADER = ("stage", "ms a round", "share", "of it waiting", "operations")
LEGEND = (
    "Milliseconds are those of a round without a trace, divided as the traced round is. Waiting: "
    "no operation ran, and the runtime prepared the next one. Operations: how many ran in a round. "
    "Of each operation the median run counts; beyond the medians: what runs took longer than that, "
    "because a core was busy or because they differ."
)
_BUSY = 1.25  # times the fastest call that a quarter of the calls take where others use the machine


class StageTime(NamedTuple):
    """The time of a stage of a round, or of a part of one."""

    stage: str
    part: str
    ms: float  # of a round
    share: float
    waiting_ms: float
    operations: float


@dataclasses.dataclass(frozen=True)
class RoundProfile:
    """Where the time of a round goes.

    Attributes:
      rounds: The rounds of a call.
      round_ms: Milliseconds of a round without a trace.
      traced_ms: With it.
      covered: The share of the traced round that the stages add up to.
      stages: The stages, in their order.
      note: Why there are no stages; empty if there are.
      spread: How many times as long as the fastest call without a trace a slow one took: the upper
        quartile.
    """

    rounds: int
    round_ms: float
    traced_ms: float
    covered: float
    stages: tuple[StageTime, ...] = ()
    note: str = ""
    spread: float = 1.0

    @property
    def overhead(self) -> float:
        """How many times as long a traced round takes."""
        return self.traced_ms / self.round_ms

    def to_dict(self) -> dict[str, Any]:
        """Returns the values for report.json."""
        stages = [stage._asdict() for stage in self.stages]
        return dataclasses.asdict(self) | {"overhead": self.overhead, "stages": stages}


def check() -> None:
    """Raises ConfigError where rounds cannot be traced."""
    if processes.count() > 1:
        raise ConfigError(
            f"--profile traces one process; these are {processes.count()}: run it with one"
        )


def profile_rounds(
    system: System, params: Any, state: DecodeState, folder: pathlib.Path, mesh: Mesh | None
) -> RoundProfile:
    """Times rounds without a trace, traces them, and adds their time up by stage.

    Args:
      system: Target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      state: Of ``decoding.prefill``; it is copied, not consumed.
      folder: Gets the profiler's files, which TensorBoard and XProf open, and
        ``stages.trace.json.gz``, which Perfetto opens.
      mesh: The devices that it runs on; None: those of its arrays.
    """
    args = (jnp.zeros_like(state.finish), jnp.int32(_ROUNDS), jnp.int32(1))

    def fresh() -> DecodeState:
        return jax.block_until_ready(jax.tree.map(jnp.copy, state))

    def call(carry: DecodeState) -> tuple[float, int]:
        begin = time.perf_counter()
        _, chunk = jax.block_until_ready(run(params, carry, *args))
        return (time.perf_counter() - begin) * 1e3, int(chunk.rounds)

    with use_mesh(mesh):
        run = decoding.generate.lower(params, state, *args, system=system).compile()
        program = stages.read_program(run.as_text())
        call(fresh())
        call_ms, counts = zip(*(call(fresh()) for _ in range(_CALLS)))
        count = max(counts[0], 1)
        traced_ms, spans = _trace(call, fresh, folder, program)
    totals = stages.add_up(spans, program)
    round_ms = float(np.median(call_ms)) / count
    total_ms = sum(stage.time_ns for stage in totals) / 1e6
    traced_ms = max(traced_ms, total_ms)  # the last operations may end after the call
    spread = float(np.quantile(call_ms, 0.75)) / min(call_ms)
    note = ""
    if totals:
        stages.write_trace(folder / "stages.trace.json.gz", spans, program)
    else:
        platform = jax.tree.leaves(state)[0].devices().pop().platform
        note = f"the profiler of {platform} has named no operation of the program"
    times = []
    for s in totals:
        share = s.time_ns / 1e6 / traced_ms
        waiting_ms = (s.time_ns - s.busy_ns) / 1e6 / traced_ms * round_ms
        operations = s.operations / count
        times.append(StageTime(s.stage, s.part, share * round_ms, share, waiting_ms, operations))
    covered = total_ms / traced_ms
    times = tuple(times)
    return RoundProfile(counts[0], round_ms, traced_ms / count, covered, times, note, spread)


def _trace(call, fresh, folder, program) -> tuple[float, list[stages.OperationRun]]:
    """Traces calls; returns the time of the fastest, and its operations."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    best = None
    for _ in range(_TRACES):
        carry = fresh()
        with tempfile.TemporaryDirectory() as place:
            with jax.profiler.trace(place, profiler_options=options):
                call_ms, _ = call(carry)
            if best is None or call_ms < best:
                best = call_ms
                shutil.rmtree(folder / "plugins", ignore_errors=True)
                shutil.copytree(place, folder, dirs_exist_ok=True)
    path = next(folder.glob("plugins/profile/*/*.xplane.pb"), None)
    return best, [] if path is None else stages.read_spans(path, program)


def profile_cells(
    bench: Bench, cells: Sequence[Cell], folder: pathlib.Path
) -> dict[str, RoundProfile]:
    """Profiles the first batch of every cell.

    Args:
      bench: What decodes.
      cells: The cells.
      folder: Gets a folder for each cell.

    Returns:
      The profile of each cell, by its label.
    """
    profiles = {}
    with Progress(len(cells), "profiling") as bar:
        for cell in cells:
            engine, request = bench.request(cell, 0)
            profiles[cell.label] = profile_rounds(
                engine.system,
                engine.params(bench.batch),
                engine.prefill(request),
                folder / re.sub(r"[^\w.=-]+", "_", cell.label),
                bench.devices.mesh,
            )
            bar.step(cell.label)
    return profiles


def sections(records: Mapping[str, RoundProfile]) -> list[Section]:
    """Returns a table of stages for each profile.

    Args:
      records: The records by what was profiled.
    """
    found = [_section(label, record) for label, record in records.items()]
    return [found[0]._replace(text=[LEGEND, *found[0].text]), *found[1:]] if found else []


def _section(label: str, record: RoundProfile) -> Section:
    def line(name, ms, share, waiting, count):
        return (name, f"{ms:.3f}", f"{share:.1%}", f"{waiting:.3f}", f"{count:.1f}")

    title = (
        f"{label}: a round takes {record.round_ms:.3f} ms; traced, "
        f"{record.traced_ms:.3f} ({record.overhead:.2f} times as long)"
    )
    busy = [
        f"The machine was busy: a call without a trace took up to {record.spread:.2f} times as "
        "long as the fastest. Trace again when it is quiet."
    ] * (record.spread > _BUSY)
    if record.note:
        return Section(title, [record.note, *busy], is_brief=True)
    rows = [
        line(stages.name_of((s.stage, s.part)), s.ms, s.share, s.waiting_ms, s.operations)
        for s in record.stages
    ]
    rest = max(1 - record.covered, 0.0)
    rows.append(line("begin and end of the call", rest * record.round_ms, rest, 0, 0))
    return Section(title, busy, Table(_HEADER, rows, _HEADER[1:]), is_brief=True)
