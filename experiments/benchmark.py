"""Measures what speculation costs and gains, as ratios within one run.

    python -m experiments.benchmark
    python -m experiments.benchmark --parts=llama110m --workdir=runs/bench/mine
    python -m experiments.benchmark --peers --config.transformers.python=PATH
    python -m experiments.benchmark --config=configs/benchmark_gpu.py

The parts:
  llama110m     a 110M Llama shape with random weights and synthetic acceptance
  training      training steps at the zoo's size
  peers         transformers' assisted generation and prompt lookup on the zoo's
                models; needs torch and transformers. --peers runs it alone, or
                after the parts of --parts

With configs/benchmark_gpu.py the parts are those of
experiments/benchmarks/gpu.py, on one GPU.

Some ratios have a bar. The run's folder gets config.json, environment.json, and
after every part report.json and report.md. A part that cannot be measured is
left out with a note, and the others go on. To compare the zoo's drafts with
their real acceptance, at every K and in both dtypes, use experiments.evaluate
with --config=configs/evaluate_dtypes.py; --profile shows where the time of
their rounds goes.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence

import jax
from absl import flags
from ml_collections import ConfigDict

from configs import benchmark as default
from experiments.benchmarks import gpu, llama110m, peers, training
from experiments.benchmarks.table import Line, table_of
from experiments.run import cli, report
from spec_jax.errors import ConfigError, SpecJaxError
from spec_jax.show.tables import Section

# Each has ``check(config)``, which raises ConfigError if a value of its section is out of range,
# and ``measure(config, records) -> Result``, given the records of the parts before it by name.
PARTS = {"llama110m": llama110m, "training": training, "peers": peers}

_ABOUT = (
    "Medians of interleaved repeats, with their quartiles; ratios are taken repeat by repeat. "
    "Greedy, float32, batch 1, without prefill, unless a line says otherwise."
)


def run(
    config: ConfigDict,
    workdir: str | pathlib.Path | None = None,
    parts: Sequence[str] | None = None,
) -> dict:
    """Runs parts and returns the record that report.json holds.

    Args:
      config: See ``configs/benchmark.py`` and ``configs/benchmark_gpu.py``.
      workdir: The run's folder; by default runs/benchmark/TIME.
      parts: Names of ``PARTS``, or of ``gpu.parts``; by default all.

    Raises:
      SpecJaxError: The config cannot be used, or no part could be measured. If only some parts
        fail, they are left out with a note and listed in the record's "left_out".
    """
    config = config.copy_and_resolve_references()
    if "tiny" in config:
        known = gpu.parts(config)
    else:
        known = PARTS
        cli.check_keys(config, default.get_config())
    parts = [*known] if parts is None else parts
    if not parts or set(parts) - set(known):
        raise ConfigError(f"parts are {', '.join(parts)!r}; expected some of {', '.join(known)}")
    for part in known.values():
        part.check(config)
    folder = cli.open_workdir("benchmark", workdir)
    begin = time.monotonic()
    lines: list[Line] = []
    sections: list[Section] = []
    record = report.begin("benchmark", folder, config.to_dict())
    record |= {"parts": {}, "left_out": {}, "notes": [], "lines": [], "is_complete": False}

    def measure(name: str) -> None:
        result = known[name].measure(config, record["parts"])
        lines.extend(dataclasses.replace(line, part=name) for line in result.lines)
        record["lines"] = [line.to_dict() for line in lines]
        record["notes"] += result.notes
        record["parts"][name] = result.record
        sections.extend(result.sections)

    errors: list[SpecJaxError] = []
    try:
        for name in (name for name in known if name in parts):
            try:
                measure(name)
            except SpecJaxError as error:  # the other parts go on
                errors.append(error)
                record["left_out"][name] = str(error)
                record["notes"].append(f"{name} is left out: {error}")
            record["elapsed_s"] = round(time.monotonic() - begin, 1)
            write(folder, record, lines, sections)
        record["is_complete"] = len(errors) < len(set(parts))
    finally:  # whatever ends the run, what was measured is shown
        write(folder, record, lines, sections)
        report.show(_sections(record, lines, sections))
        print(f"\n{folder / 'report.md'} written after {time.monotonic() - begin:.0f} s")
    if not record["is_complete"]:
        raise errors[0]
    return record


def _sections(record: dict, lines: Sequence[Line], sections: Sequence[Section]) -> list[Section]:
    is_gpu = "tiny" in record["config"]
    notes = [*record["notes"], *report.load_note(record["environment"])]
    if not is_gpu and tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
        notes.append(f"the bars are for jax 0.12; on {jax.__version__} the figures are reported")
    parts = [Section("", (gpu.ABOUT if is_gpu else _ABOUT,), table_of(lines)), *sections]
    return parts + [Section("Notes", notes)] * bool(notes)


def write(
    folder: pathlib.Path, record: dict, lines: Sequence[Line], sections: Sequence[Section] = ()
) -> None:
    """Writes report.json and report.md."""
    report.finish(folder, record, "Benchmark", _sections(record, lines, sections))


def chosen(parts: Sequence[str] | None, has_peers: bool) -> Sequence[str] | None:
    """Returns the parts that the flags ask for; None for all."""
    return [*(parts or ()), "peers"] if has_peers else parts


def main() -> None:
    cli.enable_compilation_cache()
    run(_CONFIG.value, _WORKDIR.value, chosen(_PARTS.value, _HAS_PEERS.value))


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        default, "Folder of this run's files, a new one; by default runs/benchmark/TIME."
    )
    _PARTS = flags.DEFINE_list(
        "parts", None, f"Parts to run, of {', '.join(PARTS)}; by default all."
    )
    _HAS_PEERS = flags.DEFINE_bool(
        "peers", False, "Run the part peers: alone, or after the parts that --parts names."
    )
    cli.run(main)
