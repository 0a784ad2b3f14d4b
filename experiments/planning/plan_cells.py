"""One cell of a plan: a job on a topology, compiled once and kept, and its predicted speed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
from ml_collections import ConfigDict

import spec_jax
from experiments.planning.plan_inputs import Acceptance
from experiments.run import report
from spec_jax import planning as plan
from spec_jax.meshes import make_mesh
from spec_jax.planning import roofline
from spec_jax.planning.chips import Topology

_VERSION = 8  # of what a cell holds


def place_of(topology: Topology, job: plan.Job | plan.TrainJob) -> dict:
    """Returns what a cell has that tells it from the other cells of a plan."""
    is_decoding = job.program == "decode"
    return {
        "program": job.program,
        "topology": topology.name,
        "mesh": job.mesh,
        "batch": job.batch,
        "slots": job.length if job.program == "train" else job.slots,
        "k": job.num_draft if is_decoding else 0,
        "tree": tree_name(job) if is_decoding else "",
    }


def tree_name(job: plan.Job) -> str:
    """Returns the name of a job's tree, as ``grid.tree_options`` reads it; "" of a chain."""
    if job.tree is None:
        return ""
    if job.tree.children is not None:
        return "x".join(map(str, job.tree.children))
    tree = job.tree_shape
    return f"{tree.num_nodes}:{tree.depth}:{tree.top_k}"


def describe(topology: Topology) -> Any:
    """Returns the devices of a topology; shows what the compiler writes only if it fails."""
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            return topology.describe().devices
        except BaseException:
            kept.seek(0)
            os.write(stderr, kept.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _compiler(topology: Topology) -> str | None:
    """Name and version of what compiles for a topology; None where it is not installed."""
    for name in topology.compilers:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return None


def plan_cell(
    folder: pathlib.Path,
    topology: Topology,
    job: plan.Job | plan.TrainJob,
    config: ConfigDict,
    devices_of: Callable[[Topology], Sequence[Any]] | None,
) -> dict:
    """Returns what a job needs and does on a topology; from the folder if it is there.

    What other versions of spec_jax, jax or the compiler have found is not used.

    Args:
      folder: Of finished cells.
      topology: The chips.
      job: What is decoded, or trained.
      config: The experiment's, of which the names of the models are kept.
      devices_of: ``(topology) -> devices`` to compile for; None compiles nothing.
    """
    is_compiled = devices_of is not None and bool(topology.compilers)
    draft = job.head if job.program == "train" else job.draft
    known = {
        "version": _VERSION,
        "topology": repr(topology),
        "job": repr(job),
        "models": [config.target, "" if draft is None else config.draft],
        "is_compiled": is_compiled,
        "spec_jax": spec_jax.__version__,
        "jax": jax.__version__,
        "compiler": _compiler(topology) if is_compiled else None,
        "flags": os.environ.get("XLA_FLAGS", "") if is_compiled else "",
    }
    path = folder / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    cell = make_cell(topology, job, config)
    if known["is_compiled"]:
        mesh = make_mesh(job.mesh, devices_of(topology))
        compiled = plan.compile_and_count(lambda: _TRACES[job.program](job, mesh))
        lacks = compiled.shortfall(topology.chip)
        cell["compiled"] = dataclasses.asdict(compiled) | {"shortfall": lacks}
    folder.mkdir(parents=True, exist_ok=True)
    report.write_json(path, known | cell)
    return json.loads(path.read_text(encoding="utf-8"))


_TRACES = {"decode": plan.trace_decode, "prefill": plan.trace_prefill, "train": plan.trace_train}


def make_cell(topology: Topology, job: plan.Job | plan.TrainJob, config: ConfigDict) -> dict:
    """Returns what is known of a job without compiling it; arguments as of ``plan_cell``."""
    chip = topology.chip
    has_draft = (job.head if job.program == "train" else job.method) is not None
    cell = place_of(topology, job) | {
        "target": config.target,
        "draft": config.draft if has_draft else "",
        "hbm_per_device": chip.per_device.hbm_bytes,
        "analytic": None,
        "compiled": None,
    }
    if job.program == "train":
        return cell | {"state": plan.train_memory(job)}
    if job.program == "decode":
        draft = job.draft if has_draft else None
        of_round = roofline.round_work(
            job.target, job.draft, job.num_draft, job.setting, job.tree_shape
        )
        static = roofline.memory(job.target, draft, job.setting)
        cell["analytic"] = {
            **dataclasses.asdict(of_round.work),
            **dataclasses.asdict(static),
            "floor_s": of_round.floor_s(chip),
            "passes": of_round.num_passes,
            "shortfall": static.shortfall(chip),
        }
    return cell


def with_prefill(topology: Topology, cell: dict, prefill: dict) -> dict:
    """Returns the cell of a decode program with what prefill of free rows needs beside its state.

    Args:
      topology: The chips.
      cell: Of the decode program, compiled.
      prefill: The cell of ``PrefillJob.before`` it.

    Returns:
      The cell with ``prefill``: rows that are fed, and of a device the program's temporaries, the
      total while it runs, and the shortfall, in bytes.
    """
    decode = cell["compiled"]["needs"]
    own = prefill["compiled"]["needs"]
    total = own["total"]
    if not prefill["compiled"]["refusal"]:  # the batch and its draft lie there meanwhile
        total += decode["arguments"] - own["arguments"]
    lacks = max(0, int(total - topology.chip.per_device.hbm_bytes))
    return cell | {
        "prefill": {
            "rows": prefill["batch"],
            "temporaries": own["temporaries"],
            "total": total,
            "shortfall": lacks,
        }
    }


def in_queue(topology: Topology, job: plan.Job, cell: dict, config: ConfigDict) -> dict:
    """Returns ``{"queue": ...}``: prefill's share of the time and tokens a second, by floors.

    Args:
      topology: The chips.
      job: What is decoded.
      cell: With what ``predict`` returns.
      config: The experiment's, with the tokens of prompts and outputs.
    """
    if cell["tokens"] is None:
        return {}
    sizes = config.prompt_tokens, config.new_tokens
    speed = cell["floor_s"], cell["tokens"]
    return {"queue": roofline.queue(job.target, *sizes, *speed, topology.chip, job.setting)}


def predict(
    topology: Topology, job: plan.Job | plan.TrainJob, cell: dict, acceptance: Acceptance
) -> dict:
    """Returns the floor of a round's time, and tokens a second at most.

    The floor is the analytic one, or what the compiled program's HBM bytes need if that is more.
    Rates of a chain say nothing about a tree, whose tokens and speed are then None. Of a
    training step and of prefill nothing is predicted.

    Args:
      topology: The chips.
      job: What is decoded, or trained.
      cell: Of ``plan_cell``.
      acceptance: Of a chain, or of the tree.
    """
    if cell["compiled"] or cell["analytic"]:
        shortfall = (cell["compiled"] or cell["analytic"])["shortfall"]
    else:
        shortfall = max(0, sum(cell["state"].values()) - int(cell["hbm_per_device"]))
    shortfall = max(shortfall, cell.get("prefill", {}).get("shortfall", 0))
    fit = {"fits": shortfall == 0, "shortfall": shortfall}
    if job.program != "decode":
        return {"floor_s": None, "tokens": None, "tok_s": None} | fit
    counted = (cell["compiled"] or {}).get("counted")
    memory_s = counted["hbm_bytes"] / topology.chip.per_device.hbm_bytes_s if counted else 0.0
    floor_s = max(cell["analytic"]["floor_s"], memory_s)
    if job.tree is None:
        tokens = acceptance.tokens(job.num_draft)[-1] if job.num_draft else 1.0
    else:
        levels = job.tree_shape.depth
        tokens = acceptance.tokens(levels)[-1] if acceptance.tree else None
    return {
        "floor_s": floor_s,
        "tokens": tokens,
        "tok_s": tokens and job.batch * tokens / floor_s,
    } | fit
