"""``--profile``: traces decoding rounds and says by stage where their time goes."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments.run.tables import Section
from spec_jax import decoding, processes
from spec_jax.decoding import DecodeState, System
from spec_jax.engine.request import make_request
from spec_jax.errors import ConfigError
from spec_jax.evaluation import stages
from spec_jax.evaluation.grid import Bench, Cell
from spec_jax.meshes import use_mesh
from spec_jax.sampling import make_sampler

ROUNDS = 32  # at most, in one call
_CALLS = 7  # without a trace; the median counts
_TRACES = 3  # the fastest call is kept: a trace costs time, which is not the rounds' own
_HEADER = ("stage", "ms a round", "share", "of it waiting", "operations")
LEGEND = (
    "Milliseconds are those of a round without a trace, divided as the traced round is. Waiting: "
    "no operation ran, and the runtime prepared the next one. Operations: how many ran in a round. "
    "Of each operation the median run counts; beyond the medians: what runs took longer than that, "
    "because a core was busy or because they differ; it may be below zero."
)


def define_flag() -> flags.FlagHolder:
    """Defines ``--profile``."""
    return flags.DEFINE_bool(
        "profile", False, "Also trace decoding rounds: profile/ of the run's folder, and a table "
        "of the time by stage.",
    )  # fmt: skip


def check() -> None:
    """Raises ConfigError where rounds cannot be traced."""
    if processes.count() > 1:
        raise ConfigError(
            f"--profile traces one process; these are {processes.count()}: run it with one"
        )


def profile_rounds(
    system: System, params: Any, state: DecodeState, folder: pathlib.Path, *,
    rounds: int = ROUNDS, mesh: Mesh | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Times rounds without a trace, traces them, and adds their time up by stage.

    Args:
      system: Target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      state: Of ``decoding.prefill``; it is copied, not consumed.
      folder: Gets the profiler's files, which TensorBoard and XProf open, and
        ``stages.trace.json.gz``, which Perfetto opens.
      rounds: The maximum rounds of one call.
      mesh: The devices that it runs on; None: those of its arrays.

    Returns:
      ``rounds`` of a call, ``round_ms`` without a trace and ``traced_ms`` with it, ``overhead``,
      the second over the first; ``covered``, the share of the traced round that the stages add up
      to; ``stages``, a list of ``stage``, ``part``, ``ms`` of a round, ``share``, ``waiting_ms``
      and ``operations``; and ``note``, empty or why there is none.
    """
    args = (jnp.zeros_like(state.finish), jnp.int32(rounds), jnp.int32(1))

    def call() -> tuple[float, int]:
        carry = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        begin = time.perf_counter()
        _, chunk = jax.block_until_ready(run(params, carry, *args))
        return (time.perf_counter() - begin) * 1e3, int(chunk.rounds)

    with use_mesh(mesh):
        run = decoding.generate.lower(params, state, *args, system=system).compile()
        program = stages.read_program(run.as_text())
        call()
        call_ms, counts = zip(*(call() for _ in range(_CALLS)))
        count = max(counts[0], 1)
        traced_ms, spans = _trace(call, folder, program)
    found = stages.add_up(spans, program)
    record = {
        "rounds": counts[0], "round_ms": float(np.median(call_ms)) / count,
        "traced_ms": traced_ms / count, "stages": [], "note": "",
    }  # fmt: skip
    record["overhead"] = record["traced_ms"] / record["round_ms"]
    total_ms = sum(stage.time_ns for stage in found) / 1e6
    record["covered"] = total_ms / traced_ms
    if not found:
        platform = jax.tree.leaves(state)[0].devices().pop().platform
        record["note"] = f"the profiler of {platform} has named no operation of the program"
        return record
    stages.write_trace(folder / "stages.trace.json.gz", spans, program)
    for stage in found:
        share = stage.time_ns / 1e6 / traced_ms
        record["stages"].append({
            "stage": stage.stage, "part": stage.part, "share": share,
            "ms": share * record["round_ms"],
            "waiting_ms": (stage.time_ns - stage.busy_ns) / 1e6 / traced_ms * record["round_ms"],
            "operations": stage.operations / count,
        })  # fmt: skip
    return record


def _trace(call, folder, program) -> tuple[float, list[stages.Span]]:
    """Traces calls; returns the time of the fastest, and its operations."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    best = None
    for _ in range(_TRACES):
        with tempfile.TemporaryDirectory() as place:
            with jax.profiler.trace(place, profiler_options=options):
                call_ms, _ = call()
            if best is None or call_ms < best:
                best = call_ms
                shutil.rmtree(folder / "plugins", ignore_errors=True)
                shutil.copytree(place, folder, dirs_exist_ok=True)
    path = next(folder.glob("plugins/profile/*/*.xplane.pb"), None)
    return best, [] if path is None else stages.read_spans(path, program)


def profile_cells(bench: Bench, cells: Sequence[Cell], folder: pathlib.Path) -> dict[str, dict]:
    """Profiles the first batch of every cell of a grid.

    Args:
      bench: What decodes.
      cells: The cells.
      folder: Gets a folder for each cell.

    Returns:
      The record of ``profile_rounds`` of each cell, by its label.
    """
    found = {}
    for cell in cells:
        print(f"tracing {cell.label}", flush=True)
        decoder = bench.decoder(cell)
        engine, V = decoder.engine(), bench.target.model.vocab_size
        own = draft = decoder.target_sampler
        if bench.has_own_temperature(cell):
            draft = dataclasses.replace(own, temperature=bench.draft_temperature)
        samplers = [make_sampler(config, bench.batch, V) for config in (own, draft)]
        request = make_request(
            engine.system, bench.prompts[: bench.batch], bench.max_new_tokens, *samplers,
            pad_to=bench.longest,
        )
        found[cell.label] = profile_rounds(
            engine.system, engine.params(bench.batch), engine.prefill(request),
            folder / re.sub(r"[^\w.=-]+", "_", cell.label), mesh=bench.where.mesh,
        )  # fmt: skip
    return found


def document(records: Mapping[str, dict]) -> list[str]:
    """Returns the blocks of report.md: a heading, what the columns mean, and the tables."""
    tables = [f"#{section.text(is_markdown=True)}" for section in sections(records)]
    return ["## Where a round goes", LEGEND, *tables] if tables else []


def sections(records: Mapping[str, dict]) -> list[Section]:
    """Returns a table of stages for each record of ``profile_rounds``.

    Args:
      records: The records by what was profiled.
    """
    return [_section(label, record) for label, record in records.items()]


def _section(label: str, record: dict) -> Section:
    line = lambda name, ms, share, waiting, count: (
        name, f"{ms:.3f}", f"{share:.1%}", f"{waiting:.3f}", f"{count:.1f}"
    )
    rows = [
        line(stages.name_of((s["stage"], s["part"])), s["ms"], s["share"], s["waiting_ms"],
             s["operations"])
        for s in record["stages"]
    ]  # fmt: skip
    rest = 1 - record["covered"]
    rows.append(line("begin and end of the call", rest * record["round_ms"], rest, 0, 0))
    title = (
        f"{label}: a round takes {record['round_ms']:.3f} ms; traced, "
        f"{record['traced_ms']:.3f} ({record['overhead']:.2f} times as long)"
    )
    if record["note"]:
        return Section(f"{title}; {record['note']}", _HEADER, [])
    return Section(title, _HEADER, rows, _HEADER[1:])
