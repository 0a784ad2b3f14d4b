"""Measures what speculation costs and gains, against bars, as ratios within one run.

    python -m experiments.benchmark
    python -m experiments.benchmark --parts=llama110m,zoo --workdir=runs/benchmark/mine

Parts: "llama110m" (a 110M Llama shape with random weights and synthetic acceptance), "heads"
(an EAGLE-3 head on that shape: chain and dynamic trees; tree.png), "streaming" (text after every
round of that shape), "zoo" (the trained pair, acceptance as it is), "adaptive" (adaptive K against
plain decoding and the best fixed K, over acceptance and batch), "states" (a Mamba-2 shape: what
replaying the window costs), "training" (steps at the zoo's size) and "transformers" (the zoo's pair
under assisted generation, where an interpreter has torch and transformers). The run's folder gets
benchmark.json and benchmark.md after every part.
"""

from __future__ import annotations

import datetime
import pathlib
import shlex
import sys
import time
import types

import jax
from absl import flags

from configs import benchmark as default
from experiments.benchmarks import (
    adaptive,
    heads,
    loops,
    states,
    streaming,
    synthetic,
    training,
    transformers_peer,
    zoo,
)
from experiments.common import cli, plots, report
from experiments.common.tables import table
from experiments.common.timing import HEADER, Line
from spec_jax.engine.adaptive.runner import CATCH_UP
from spec_jax.errors import ConfigError
from spec_jax.tree import DynamicTree

PARTS = (
    "llama110m", "heads", "streaming", "zoo", "adaptive", "states", "training", "transformers",
)  # fmt: skip


def run(config, workdir: str | pathlib.Path, parts=PARTS, transformers_python: str = "") -> dict:
    """Runs the parts and returns the record that benchmark.json holds.

    Args:
      config: see configs/benchmark.py.
      workdir: for benchmark.json and benchmark.md.
      parts: among ``PARTS``.
      transformers_python: the interpreter of the last part; "" for this one.

    Raises:
      SpecJaxError: a config or a model that cannot be used.
    """
    config = config.copy_and_resolve_references()
    validate(config, parts)
    workdir = pathlib.Path(workdir)
    if (workdir / "benchmark.json").exists():
        raise ConfigError(f"{workdir} holds another run; name another --workdir")
    workdir.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    record = {
        "command": shlex.join(["python", "-m", "experiments.benchmark", *sys.argv[1:]]),
        "environment": report.environment(), "config": config.to_dict(), "parts": {}, "notes": [],
        "lines": [], "is_complete": False,
    }  # fmt: skip
    lines: list[Line] = []

    def keep(part: str, measured: list[Line], details: dict) -> None:
        lines.extend(measured)
        record["parts"][part] = details
        record["lines"] = [line.to_dict() for line in lines]
        record["elapsed_s"] = round(time.monotonic() - begin, 1)
        write(workdir, record, lines)

    if "llama110m" in parts:
        keep("llama110m", *synthetic.measure("llama110m", config.llama110m, config.bars))
    if "heads" in parts:
        keep("heads", *heads.measure("heads", config.heads, config.bars))
        plots.plot_tree_sizes(workdir / "tree.png", record["parts"]["heads"])
    if "streaming" in parts:
        keep("streaming", *streaming.measure("streaming", config.streaming, config.bars))
    if "zoo" in parts:
        bars = types.SimpleNamespace(**{**config.bars.to_dict(), "verify": None})
        keep("zoo", *zoo.measure("zoo", config.zoo, bars))
    if "adaptive" in parts:
        keep("adaptive", *adaptive.measure("adaptive", config.adaptive, config.bars))
    if "states" in parts:
        keep("states", *states.measure("states", config.states, config.bars))
    if "training" in parts:
        keep("training", *training.measure("training", config.training, config.bars))
    if "transformers" in parts:
        python = transformers_python or sys.executable
        reason = transformers_peer.why_not(python)
        if reason is None:
            best = record["parts"].get("zoo", {}).get("best_k", {})  # both sides decode in float32
            k = best.get("float32", config.transformers.k)
            keep(
                "transformers",
                *transformers_peer.measure(
                    "transformers", config.zoo, config.bars, python, k, config.transformers.repeats
                ),
            )
        else:
            record["notes"].append(
                f"the comparison with transformers was left out ({reason}); name an interpreter "
                "that has torch and transformers: --transformers_python=PATH"
            )
    record["is_complete"] = True
    write(workdir, record, lines)
    print(table(HEADER, [line.cells() for line in lines]))
    print("".join(f"\nnote: {note}" for note in _notes(record)))
    print(f"\n{workdir / 'benchmark.md'} written after {time.monotonic() - begin:.0f} s")
    return record


def validate(config, parts) -> None:
    """Raises ConfigError on a part or a value that cannot be."""
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or not parts:
        raise ConfigError(f"parts are {', '.join(parts)!r}; expected some of {', '.join(PARTS)}")
    cli.check_keys(config, default.get_config())
    for section, names in {
        "llama110m": "slots prompt_tokens new_tokens plain_tokens k repeats",
        "zoo": "num_prompts max_prompt_tokens new_tokens plain_tokens repeats",
        "streaming": "prompt_tokens new_tokens k repeats",
        "heads": "slots prompt_tokens draft_vocab_size k tree_depth tree_top_k repeats",
        "states": "slots prompt_tokens k repeats",
        "adaptive": "slots prompt_tokens rounds repeats",
        "training": "lm_batch draft_vocab_size num_steps batch length repeats",
        "transformers": "k repeats",
    }.items():
        for name in names.split():
            if config[section][name] < 1:
                raise ConfigError(
                    f"{section}.{name} is {config[section][name]}; expected a positive integer"
                )
    zoo, large = config.zoo, config.llama110m
    if not zoo.ks or min(zoo.ks) < 1:
        raise ConfigError(f"zoo.ks is {zoo.ks}; expected integers of 1 or more")
    for batch in zoo.batches:
        if batch < 1 or zoo.num_prompts % batch:
            raise ConfigError(
                f"zoo.batches holds {batch}; expected divisors of num_prompts {zoo.num_prompts}"
            )
    sizes = config.heads
    if not sizes.tree_nodes or sizes.tree_depth < 2:
        raise ConfigError("heads needs tree_nodes of one size or more, and tree_depth of 2 or more")
    if sizes.draft_vocab_size > sizes.target.vocab_size:
        raise ConfigError(
            f"heads.draft_vocab_size is {sizes.draft_vocab_size}; the target has "
            f"{sizes.target.vocab_size} ids"
        )
    trees = [DynamicTree(n, sizes.tree_depth, sizes.tree_top_k) for n in sizes.tree_nodes]
    rounds = heads.ROUNDS * (max(sizes.k, sizes.tree_depth) + 1)
    need = sizes.prompt_tokens + rounds + max(max(t.num_nodes, t.num_fed) for t in trees) + 1
    if need > sizes.slots:
        raise ConfigError(f"heads.slots is {sizes.slots}; prompt and rounds need {need}")
    adaptive = config.adaptive
    buckets = adaptive.buckets
    if len(buckets) < 2 or buckets[0] != 0 or list(buckets) != sorted(set(buckets)):
        raise ConfigError(f"adaptive.buckets is {buckets}; expected ascending integers from 0 on")
    if not adaptive.rates or not all(0 <= rate <= 1 for rate in adaptive.rates):
        raise ConfigError(f"adaptive.rates is {adaptive.rates}; expected rates in [0, 1]")
    if not adaptive.batches or min(adaptive.batches) < 1:
        raise ConfigError(f"adaptive.batches is {adaptive.batches}; expected integers of 1 or more")
    need = adaptive.prompt_tokens + (adaptive.rounds + 1) * (buckets[-1] + 1) + CATCH_UP
    if need > adaptive.slots:
        raise ConfigError(f"adaptive.slots is {adaptive.slots}; prompt and rounds need {need}")
    states = config.states
    need = states.prompt_tokens + loops.ROUNDS * (states.k + 1) + states.k + 1
    if need > states.slots:
        raise ConfigError(f"states.slots is {states.slots}; prompt and rounds need {need}")
    need = large.prompt_tokens + max(large.new_tokens, large.plain_tokens) + large.k + 1
    if need > large.slots:
        raise ConfigError(f"llama110m.slots is {large.slots}; prompt and output need {need}")


def _notes(record: dict) -> list[str]:
    env = record["environment"]
    notes = list(record["notes"])
    if env["load_1min"] and env["load_1min"] > env["cores"] / 2:
        notes.append(
            f"the machine was busy at the start (load {env['load_1min']:g} on {env['cores']} "
            "cores): measure again on a quiet one"
        )
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
        notes.append(f"the bars are for jax 0.12; on {jax.__version__} the figures are reported")
    return notes


def write(workdir: pathlib.Path, record: dict, lines: list[Line]) -> None:
    """Writes benchmark.json and benchmark.md."""
    report.write_json(workdir / "benchmark.json", record)
    env = record["environment"]
    text = [
        "# Benchmark", "", f"`{record['command']}`, {env['time']}", "",
        "Medians of interleaved repeats, between their quartiles; ratios are taken repeat by "
        "repeat. Greedy, float32, batch 1, prefill left out, unless a line says otherwise.", "",
        table(HEADER, [line.cells() for line in lines], is_markdown=True), "",
        *(f"- {note}" for note in _notes(record)),
        f"- machine: {report.describe_machine(env)}",
        *(f"- {name} {env[name]}" for name in ("python", "jax", "jaxlib", "spec_jax")), "",
    ]  # fmt: skip
    (workdir / "benchmark.md").write_text("\n".join(text), encoding="utf-8")


def main() -> int:
    cli.enable_compilation_cache()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    run(
        _CONFIG.value, _WORKDIR.value or f"runs/benchmark/{stamp}", tuple(_PARTS.value),
        _TRANSFORMERS_PYTHON.value,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        default, "Folder of this run's files, a new one; by default runs/benchmark/TIME."
    )
    _PARTS = flags.DEFINE_list("parts", list(PARTS), "Parts to run.")
    _TRANSFORMERS_PYTHON = flags.DEFINE_string(
        "transformers_python", "",
        "Interpreter with torch and transformers for that part. Default: this one.",
    )
    cli.run(main)
