"""The benchmark's part "peers": other systems on the zoo's models and prompts, beside ours.

Each side is a process of its own, see ``worker_lines``. All have the same weights, prompts, K,
dtype and cores, and decode one prompt after the other.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.peers_report import (
    OURS,
    THEIRS,
    Cell,
    Measured,
    about,
    lines_of,
    record_of,
    sections_of,
)
from experiments.benchmarks.shapes import DTYPES
from experiments.benchmarks.table import Result
from experiments.benchmarks.worker_lines import RefusedError, Worker, WorkerError
from experiments.run import cli
from spec_jax.data import questions, sources
from spec_jax.evaluation.prompts import cut_note, fit
from spec_jax.evaluation.timing import measure_all
from spec_jax.loading import LoadedModel, load_model
from spec_jax.models.checkpoint import save_pretrained

_NGRAM_MAX = 3  # the longest suffix that is looked up, on both sides
_REST_S = 0.3  # the other process' idle threads spin for a while before they sleep
_REMEDY = (
    "install the extra parity, or name an interpreter that has torch and transformers: "
    "--config.transformers.python=PATH"
)


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    c = config.peers
    cli.require_positive(config, "num_prompts max_prompt_tokens new_tokens repeats", "peers")
    sources.check(c.data)
    cli.require(c.ks and min(c.ks) >= 1, config, "peers.ks", "integers of 1 or more")
    is_known = bool(c.dtypes) and set(dtypes(config)) <= set(DTYPES)
    cli.require(is_known, config, "peers.dtypes", f"names among {', '.join(DTYPES)}")


def dtypes(config: ConfigDict) -> list[str]:
    """Returns the names of ``peers.dtypes``; on the command line they come as one text."""
    return [name.strip() for entry in config.peers.dtypes for name in entry.split(",")]


def cells(ks: Sequence[int], has_head: bool) -> list[Cell]:
    """Returns everything that is timed, of both sides."""
    ours = ("ngram", "standalone", *(["head"] if has_head else []))
    return [
        Cell(OURS, "plain"),
        Cell(THEIRS, "plain"),
        Cell(THEIRS, "assisted", None),
        *(Cell(OURS, method, k) for k in ks for method in ours),
        *(Cell(THEIRS, method, k) for k in ks for method in ("lookup", "assisted")),
    ]


class Command(NamedTuple):
    """The command line of a worker, and its environment."""

    arguments: list[str]
    environment: dict[str, str]


def commands(config: ConfigDict) -> dict[str, Command]:
    """Returns how the worker of each side is started."""
    python = config.transformers.python
    theirs = dict(os.environ)
    if python:  # this interpreter's path would make another one import the wrong packages
        theirs.pop("PYTHONPATH", None)
    theirs |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    line = lambda python, name: [python, "-m", f"experiments.benchmarks.{name}_worker"]
    return {
        OURS: Command(line(sys.executable, OURS), dict(os.environ)),
        THEIRS: Command(line(python or sys.executable, THEIRS), theirs),
    }


def load_prompts(
    config: ConfigDict, models: Sequence[LoadedModel]
) -> tuple[list[list[int]], list[str]]:
    """Returns prompts as ids, random ones without a tokenizer, and notes on what was left out.

    Args:
      config: The section "peers".
      models: The target and the draft.
    """
    if models[0].tokenizer is None:
        shape = (config.num_prompts, config.max_prompt_tokens)
        return np.random.default_rng(0).integers(
            models[0].model.vocab_size, size=shape
        ).tolist(), []
    found, _, notes = questions.load(config.data, config.num_prompts)
    ids, num_cut = fit(found, models, config.new_tokens, config.max_prompt_tokens)
    return ids, [*notes, *cut_note(num_cut, ids)]


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Compares tokens a second, prefill included."""
    target, draft = load_model(config.peers.target), load_model(config.peers.draft)
    prompts, notes = load_prompts(config.peers, [target, draft])
    head, found = config.peers.head, {}
    with tempfile.TemporaryDirectory() as folder:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        setup = {"head": _absolute(head), "threads": cores}
        for name, model in (("target", target), ("draft", draft)):
            setup[name] = str(pathlib.Path(folder) / name)
            save_pretrained(setup[name], model.params, model.config)
        for dtype in dtypes(config):
            try:
                found[dtype] = _measure_dtype(config, setup | {"dtype": dtype}, prompts, notes)
            except _LeftOut as error:
                notes.append(str(error))
                if error.is_final:
                    break
    if not found:
        return Result([], {}, notes)
    return Result(
        lines_of(found, head, config.bars.peers),
        record_of(found, head),
        [*notes, *about(found)],
        sections_of(found, head),
    )


class _LeftOut(Exception):
    """One dtype cannot be measured; ``is_final``: no other one either."""

    def __init__(self, message: str, is_final: bool):
        super().__init__(message)
        self.is_final = is_final


def _absolute(name: str) -> str:
    """Returns a directory's full path, and anything else unchanged: workers run in another one."""
    return str(pathlib.Path(name).resolve()) if name and pathlib.Path(name).exists() else name


def _measure_dtype(config: ConfigDict, setup: dict, prompts, notes: list[str]) -> Measured:
    """Returns what was found; what one method refuses is left out, and a note says so."""
    dtype, made, timers, workers = setup["dtype"], commands(config), {}, {}
    try:
        for side in (THEIRS, OURS):
            command = made[side]
            try:
                workers[side] = Worker(
                    command.arguments, setup, cwd=cli.ROOT, environment=command.environment
                )
            except (WorkerError, RefusedError) as error:
                raise _LeftOut(
                    f"the comparison with {THEIRS} was left out: {side} does not "
                    f"start ({error}); {_REMEDY}",
                    is_final=True,
                ) from error
        for cell in cells(config.peers.ks, bool(config.peers.head)):
            try:
                timers[cell] = _Timer(workers[cell.side], cell, prompts, config.peers.new_tokens)
            except RefusedError as error:
                name = cell.label(config.peers.head)
                notes.append(f"{name} in {dtype} was left out ({error})")
        for side in (OURS, THEIRS):
            if not any(cell.side == side for cell in timers):
                raise WorkerError(f"{side} refused everything")
        label = lambda cell: cell.label(config.peers.head)
        makers = {label(cell): functools.partial(timers.get, cell) for cell in timers}
        _, times = measure_all(f"peers, {dtype}", makers, config.peers.repeats)
        of = lambda name: {cell: getattr(timer, name) for cell, timer in timers.items()}
        return Measured(
            {cell: times[label(cell)] for cell in timers},
            of("tokens"),
            of("tau"),
            of("first_s"),
            {side: worker.peak_bytes for side, worker in workers.items()},
            workers[OURS].facts | workers[THEIRS].facts,
        )
    except (WorkerError, RefusedError) as error:  # refused in a later repeat
        raise _LeftOut(
            f"the comparison with {THEIRS} in {dtype} was left out: {error}", is_final=False
        ) from error
    finally:
        for worker in workers.values():
            worker.close()


class _Timer:
    """Times all prompts in a worker, in milliseconds per token.

    Attributes:
      tokens: The output ids of every prompt.
      tau: Tokens a target pass; None where it is not known.
      first_s: Seconds of the first run, compilation included.
    """

    def __init__(self, worker: Worker, cell: Cell, prompts, new_tokens: int):
        self._worker = worker
        self._request = {
            "method": cell.method,
            "k": cell.k,
            "prompts": prompts,
            "max_new_tokens": new_tokens,
            "ngram_max": _NGRAM_MAX,
            "is_counted": False,
        }
        first = worker.ask(self._request | {"is_counted": True})
        self.tokens, self.tau, self.first_s = (first[n] for n in ("tokens", "tau", "seconds"))

    def __call__(self) -> float:
        answer = self._worker.ask(self._request)
        time.sleep(_REST_S)
        return answer["seconds"] * 1e3 / sum(map(len, answer["tokens"]))
