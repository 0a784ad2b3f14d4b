r"""Plans a deployment: whether it fits, what a round moves, and which K pays.

    python -m experiments.plan --config.target=llama-3.1-8b \
        --config.topology=v5e:2x4
    python -m experiments.plan --config.batch=8,32,128 --config.num_draft=1,3,5
    python -m experiments.plan --config.draft=eagle3 --config.tree=3,2,1
    python -m experiments.plan \
        --config.acceptance=runs/decode/TIME/report.json:2
    python -m experiments.plan --config.program=train \
        --config.is_fully_sharded --config.length=1024
    python -m experiments.plan --config.program=prefill --config.slots=32768 \
        --config.batch=1

The library's program for decoding, prefill or a training step is compiled ahead
of time for the devices, without having them and without weights. Its memory,
collectives, cache copies and HBM bytes are counted from the compiled text.
Speeds are predicted from the chip's published peaks and from an acceptance,
which is given or read from a report that measured it. So they are floors of
time, not measurements. --config.prompt_tokens=1024 also says how a queue's time
is divided between prefill and decoding. Of a training step that is not
compiled, only weights, gradients and the optimizer's state are counted. A run
leaves config.json, environment.json, report.json, report.md and plan.png. A run
that was stopped continues with the same --workdir.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from configs import plan as default
from experiments.planning import plan_cells, plan_report
from experiments.planning.plan_inputs import Acceptance, find_draft
from experiments.run import cli, memory, report
from spec_jax import planning as plan
from spec_jax.config import SamplerConfig, SpeculativeConfig, TreeConfig
from spec_jax.drafters.registry import kind_of_draft
from spec_jax.errors import ConfigError
from spec_jax.evaluation.cells import tree_options
from spec_jax.planning import choose
from spec_jax.planning.chips import Topology
from spec_jax.planning.gpus import GPUS
from spec_jax.planning.presets import find_config
from spec_jax.planning.roofline import Setting
from spec_jax.progress import Progress
from spec_jax.show.tables import Section

# Without a TPU, its library looks for one in the cloud, locks itself and writes pages of warnings.
# jax's plugin for GPUs looks for one, too.
_WITHOUT_DEVICES = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def numbers(config: ConfigDict, name: str) -> list[int]:
    """Returns the values of a key that lists numbers with commas between them.

    Raises:
      ConfigError: a value is not a positive integer.
    """
    try:
        values = [int(value) for value in str(config[name]).split(",")]
    except ValueError:
        values = []
    is_fit = bool(values) and min(values) > 0
    cli.require(is_fit, config, name, "positive integers with commas between them")
    return values


def shapes(config: ConfigDict, draft: Any) -> list[tuple[int, TreeConfig | None]]:
    """Returns the shapes of drafts to plan: K, and the tree of K nodes or None for a chain.

    Raises:
      ConfigError: K or the tree is invalid.
    """
    if config.tree:
        cli.require(draft is not None, config, "tree", "none without a draft")
        method = kind_of_draft(draft).name
        found = SpeculativeConfig(method, **tree_options(config.tree.replace(",", "x")))
        return [(found.num_speculative_tokens, found.tree)]
    Ks = sorted(set(numbers(config, "num_draft"))) if draft is not None else []
    cli.require(all(k <= 64 for k in Ks), config, "num_draft", "at most 64")
    return [(k, None) for k in Ks]


def subjects(config: ConfigDict) -> Callable[[str], tuple[Any, Any, Any]]:
    """Returns a function of a platform to target, draft and head.

    Layers lie as on that platform. None without a draft, or where the draft is not a head.
    """

    @functools.cache
    def of(platform):
        target = find_config(config.target, platform)
        draft = find_draft(config.draft, target, config.draft_vocab_size, platform)
        is_head = draft is not None and kind_of_draft(draft).head is not None
        return target, draft, draft if is_head else None

    return of


def places(config: ConfigDict, *names: str) -> Iterator[tuple]:
    """Yields every topology with every combination of the numbers of these keys."""
    topologies = map(Topology.parse, config.topology.split(","))
    return itertools.product(topologies, *(numbers(config, name) for name in names))


def check_mesh(topology: Topology, mesh: str) -> str:
    """Returns a mesh; raises ConfigError unless it has as many devices as the topology."""
    has = topology.num_devices
    asked = Setting(mesh=mesh).num_devices
    if has != asked:
        raise ConfigError(
            f"mesh {mesh} has {asked} devices; {topology.name} has {has}: expected sizes "
            f"whose product is {has}"
        )
    return mesh


def training_jobs(config: ConfigDict, _) -> Iterator[tuple[Topology, plan.TrainJob]]:
    """Yields every combination of training steps to plan."""
    found = subjects(config)
    cli.require_positive(config, "num_steps")
    names = "dtype is_fully_sharded num_steps is_remat has_document_masks".split()
    options = {name: config[name] for name in names}
    for topology, batch, length in places(config, "batch", "length"):
        mesh = check_mesh(topology, config.mesh or f"data:{topology.num_devices}")
        target, _, head = found(topology.platform)
        sizes = dict(target=target, head=head, batch=batch, length=length, mesh=mesh)
        yield topology, plan.TrainJob(**sizes, **options)


def prefill_jobs(config: ConfigDict, _) -> Iterator[tuple[Topology, plan.PrefillJob]]:
    """Yields every combination of prompts to plan; each prompt fills all slots of the cache."""
    found = subjects(config)
    what = "for prefill, which is planned by compiling alone"
    cli.require(config.is_compiled, config, "is_compiled", f"True {what}")
    for topology, batch, slots, chunk in places(config, "batch", "slots", "prefill_chunk"):
        known = f"TPUs, {', '.join(GPUS)} {what}"
        cli.require(bool(topology.compilers), config, "topology", known)
        target, _, head = found(topology.platform)
        cli.require(chunk <= slots, config, "prefill_chunk", f"at most the {slots} slots")
        job = plan.PrefillJob(
            target=target,
            draft=head,
            num_draft=0 if head is None else 1,
            batch=batch,
            slots=slots,
            mesh=check_mesh(topology, config.mesh or f"data:1,tensor:{topology.num_devices}"),
            dtype=config.dtype,
            is_draft_replicated=config.is_draft_replicated and head is not None,
            prefill_chunk=chunk,
        )
        yield topology, job


def decode_jobs(config: ConfigDict, acceptance: Acceptance) -> Iterator[tuple[Topology, plan.Job]]:
    """Yields every combination to plan, plain decoding before its drafts."""
    not_sharded = "False to decode: weights are split over the axis tensor alone"
    cli.require(not config.is_fully_sharded, config, "is_fully_sharded", not_sharded)
    found = subjects(config)
    drafted = shapes(config, found("")[1])
    largest = max((k for k, tree in drafted if tree is None), default=0)
    if acceptance.tree and (not config.tree or acceptance.tree != config.tree.replace(",", "x")):
        raise ConfigError(
            f"acceptance is of the tree {acceptance.tree}, by level; expected "
            f"--config.tree={acceptance.tree}, or a row of a chain"
        )
    tokens = acceptance.tokens(largest)
    for topology, batch, slots in places(config, "batch", "slots"):
        target, draft, _ = found(topology.platform)
        job = plan.Job(
            target=target,
            draft=draft,
            batch=batch,
            slots=slots,
            dtype=config.dtype,
            mesh=config.mesh or f"data:1,tensor:{topology.num_devices}",
            sampler=SamplerConfig(temperature=config.temperature, top_k=config.top_k),
            is_draft_replicated=config.is_draft_replicated,
        )
        if not config.mesh:
            options = choose.options(target, draft, tokens, topology, job.setting)
            if not options:
                raise ConfigError(
                    f"no mesh of {topology.name}'s {topology.num_devices} devices divides the "
                    f"heads of {config.target}; expected fewer devices, or name a --config.mesh"
                )
            job = dataclasses.replace(job, mesh=options[0].setting.mesh)
        check_mesh(topology, job.mesh)
        cli.require(
            not config.prompt_tokens or config.prompt_tokens + config.new_tokens <= slots,
            config,
            "prompt_tokens",
            f"at most what {slots} slots leave beside {config.new_tokens} new tokens",
        )
        for k, tree in ((0, None), *drafted):
            yield topology, dataclasses.replace(job, num_draft=k, tree=tree)


_PROGRAMS = {"decode": decode_jobs, "prefill": prefill_jobs, "train": training_jobs}


def check_compilers(topologies: list[Topology]) -> None:
    """Raises ConfigError if programs for one of the topologies cannot be compiled here."""
    for topology in topologies:
        if topology.missing_compiler is not None:
            raise ConfigError(
                f"{topology.missing_compiler}, or ask for the analytic floors alone: "
                "--config.is_compiled=False"
            )
    for name, value in _WITHOUT_DEVICES.items():
        os.environ.setdefault(name, value)


def run(config: ConfigDict, workdir: str | None = None) -> dict:
    """Runs the experiment and returns its report.

    Args:
      config: See ``configs/plan.py``.
      workdir: The run's folder; by default runs/plan/TIME. Cells that it holds are read.

    Raises:
      SpecJaxError: The config cannot be planned.
    """
    cli.check_keys(config, default.get_config())
    acceptance = Acceptance.of(str(config.acceptance))
    cli.require(config.program in _PROGRAMS, config, "program", "decode, prefill or train")
    todo = list(_PROGRAMS[config.program](config, acceptance))
    is_decoding = config.program == "decode"
    expected = "0 or more" if is_decoding else "0 but to decode"
    is_fit = config.prompt_tokens >= 0 if is_decoding else config.prompt_tokens == 0
    cli.require(is_fit, config, "prompt_tokens", expected)
    cli.require_positive(config, "new_tokens")
    if config.is_compiled:
        check_compilers([topology for topology, _ in todo])
    folder = cli.make_workdir("plan", workdir)
    head = report.begin("plan", folder, config.to_dict())
    describe = functools.cache(plan_cells.describe)
    cells = []
    with Progress(len(todo), "planning") as bar:
        for topology, job in todo:
            bar.now(plan_report.name(plan_cells.place_of(topology, job)))
            find = functools.partial(plan_cells.plan_cell, folder / "cells", topology)
            options = config, describe if config.is_compiled else None
            cell = find(job, *options)
            if is_decoding and cell["compiled"]:
                filling = plan.PrefillJob.before(job)
                cell = plan_cells.with_prefill(topology, cell, find(filling, *options))
            cell |= plan_cells.predict(topology, job, cell, acceptance)
            if is_decoding and config.prompt_tokens:
                cell |= plan_cells.in_queue(topology, job, cell, config)
            cells.append(cell)
            bar.step(plan_report.line(cells[-1]))
            jax.clear_caches()
    result = head | {
        "cells": cells,
        "acceptance": acceptance._asdict(),
        "best": plan_report.best(cells),
        "peak_memory_bytes": memory.peak_bytes(),
    }
    sections = plan_report.sections(result)
    sections += [Section("Speed-up by batch", figure="plan.png")] * is_decoding
    report.finish(folder, result, "Plan", sections)
    report.show(sections)
    if is_decoding:
        plan_report.plot(folder / "plan.png", cells)
    print(f"{folder / 'report.md'}{' and plan.png' if is_decoding else ''} written")
    return result


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    run(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        default, "Folder of this run; by default runs/plan/TIME. One with cells is continued."
    )
    cli.run(main)
