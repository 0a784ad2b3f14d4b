"""The benchmark's part "peers": other systems on the zoo's models and prompts, beside ours.

Each side is a process of its own, see ``worker_lines``. All have the same weights, prompts, K,
dtype and cores, and decode one prompt after the other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.shapes import DTYPES
from experiments.benchmarks.table import Line, Result, listed
from experiments.benchmarks.worker_lines import RefusedError, Worker, WorkerError
from experiments.run import cli
from spec_jax.data import questions, sources
from spec_jax.evaluation.prompts import fit
from spec_jax.evaluation.timing import measure_all
from spec_jax.loading import LoadedModel, load_model
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.show.tables import Section, Table

OURS = "spec_jax"
THEIRS = "transformers"
_NAMES = {"lookup": "prompt lookup", "assisted": "assisted generation"}
_PEERS = {"plain": "plain", "ngram": "lookup", "standalone": "assisted", "head": "assisted"}
_BARRED = ("standalone", "head")  # the methods that are held against assisted generation
_NUMBERS = ("K", "tokens/s", "x own plain", "tau", "x peer", "first run, s", "peak memory, MB")
_ABOUT = (
    "transformers' assisted generation takes any two models of the Hugging Face hub, on PyTorch, "
    "and compiles nothing. Python launches its passes, which takes as long whatever the model: "
    "much beside a pass of millions of parameters, little beside one of billions. The ratios are "
    "those of these small models",
    "transformers' prompt lookup needs no draft; it is for outputs that repeat their prompt, such "
    "as summaries and edits",
    "spec_jax compiles a loop for every method, K and shape before it decodes: see the first run, "
    "and the memory, which includes the compiler's",
    "tau counts transformers' passes from the first one on, which reads the prompt and verifies "
    "drafts at once; of spec_jax it counts the rounds after the prompt",
)  # what each was built for, and how the figures are to be read
_NGRAM_MAX = 3  # the longest suffix that is looked up, on both sides
_REST_S = 0.3  # the other process' idle threads spin for a while before they sleep
_REMEDY = (
    "install the extra parity, or name an interpreter that has torch and transformers: "
    "--config.transformers.python=PATH"
)


class PeerCell(NamedTuple):
    """What is timed.

    Attributes:
      side: ``OURS`` or ``THEIRS``.
      method: The method, see the workers.
      k: K; 0 for plain decoding, None for the peer's own choice.
      head: The name of the head that drafts, if one does.
    """

    side: str
    method: str
    k: int | None = 0
    head: str = ""

    @property
    def plain(self) -> PeerCell:
        """Plain decoding of the same side."""
        return PeerCell(self.side, "plain")

    @property
    def peer(self) -> PeerCell | None:
        """What transformers does in its place; None for transformers itself."""
        return PeerCell(THEIRS, _PEERS[self.method], self.k) if self.side == OURS else None

    @property
    def k_text(self) -> str:
        return {0: "", None: "its own"}.get(self.k, str(self.k))

    @property
    def name(self) -> str:
        """The method in words, or the head's name."""
        return self.head or _NAMES.get(self.method, self.method)

    @property
    def label(self) -> str:
        """Side, name and K."""
        return f"{self.side} {self.name}" + (f", K={self.k_text}" if self.k_text else "")


class Measured(NamedTuple):
    """What was found in one dtype.

    Attributes:
      ms: f64[repeats] by cell, milliseconds a token, prefill included.
      timers: What ran, by cell.
      peak_bytes: The largest memory of each side's process; None where it is not known.
      facts: Versions, and the peer's threads.
    """

    ms: Mapping[PeerCell, np.ndarray]
    timers: Mapping[PeerCell, Timer]
    peak_bytes: Mapping[str, int | None]
    facts: Mapping[str, Any]

    def ratio(self, cell: PeerCell, other: PeerCell | None) -> np.ndarray | None:
        """Returns tokens a second of a cell over those of another, by repeat; None without it."""
        return self.ms[other] / self.ms[cell] if other in self.ms else None

    def same_rows(self, cell: PeerCell, other: PeerCell | None) -> int | None:
        """Returns how many rows of two cells have the same tokens; None without the other."""
        if other not in self.timers:
            return None
        ours = self.timers[cell].tokens
        others = self.timers[other].tokens
        return sum(a == b for a, b in zip(ours, others, strict=True))

    @property
    def rows(self) -> int:
        """The number of prompts."""
        return len(next(iter(self.timers.values())).tokens)


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    c = config.peers
    cli.require_positive(config, "num_prompts max_prompt_tokens new_tokens repeats", "peers")
    sources.check(c.data)
    cli.require(c.ks and min(c.ks) >= 1, config, "peers.ks", "integers of 1 or more")
    is_known = bool(c.dtypes) and set(cli.listed(config.peers.dtypes)) <= set(DTYPES)
    cli.require(is_known, config, "peers.dtypes", f"names among {', '.join(DTYPES)}")


def cells(ks: Sequence[int], has_draft: bool, head: str) -> list[PeerCell]:
    """Returns everything that is timed, of both sides; ``head`` is empty if there is none."""
    ours = ["ngram"] + ["standalone"] * has_draft + ["head"] * bool(head)
    theirs = ["lookup"] + ["assisted"] * has_draft
    return [
        PeerCell(OURS, "plain"),
        PeerCell(THEIRS, "plain"),
        *([PeerCell(THEIRS, "assisted", None)] * has_draft),
        *(PeerCell(OURS, name, k, head * (name == "head")) for k in ks for name in ours),
        *(PeerCell(THEIRS, method, k) for k in ks for method in theirs),
    ]


def commands(config: ConfigDict) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Returns the command line of each side's worker, and its environment."""
    python = config.transformers.python
    theirs = dict(os.environ)
    if python:  # this interpreter's path would make another one import the wrong packages
        theirs.pop("PYTHONPATH", None)
    theirs |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

    def line(python, name):
        return [python, "-m", f"experiments.benchmarks.{name}_worker"]

    return {
        THEIRS: (line(python or sys.executable, THEIRS), theirs),
        OURS: (line(sys.executable, OURS), dict(os.environ)),
    }


def load_prompts(config: ConfigDict, target: LoadedModel) -> tuple[list[list[int]], list[str]]:
    """Returns prompts as ids, random ones without a tokenizer, and notes on what was left out.

    Args:
      config: The section "peers".
      target: The model that answers them.
    """
    if target.tokenizer is None:
        shape = (config.num_prompts, config.max_prompt_tokens)
        ids = np.random.default_rng(0).integers(target.model.vocab_size, size=shape)
        return ids.tolist(), []
    found, _, notes = questions.load(config.data, config.num_prompts)
    ids, num_cut = fit(found, target, config.new_tokens, config.max_prompt_tokens)
    if num_cut:
        last = f"their last {max(map(len, ids))} tokens are used"
        notes = [*notes, f"{num_cut} of {len(ids)} prompts were too long: {last}"]
    return ids, [*notes]


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Compares tokens a second, prefill included."""
    models = {n: load_model(config.peers[n]) for n in ("target", "draft") if config.peers[n]}
    prompts, notes = load_prompts(config.peers, models["target"])
    head = config.peers.head
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        is_path = bool(head) and pathlib.Path(head).exists()  # workers run in another directory
        setup = {"head": str(pathlib.Path(head).resolve()) if is_path else head, "threads": cores}
        setup["draft"] = ""
        for name, model in models.items():
            setup[name] = str(pathlib.Path(folder) / name)
            save_pretrained(setup[name], model.params, model.config)
        for dtype in cli.listed(config.peers.dtypes):
            workers = {}
            without = f"the comparison with {THEIRS}"
            with contextlib.ExitStack() as stack:
                try:
                    for side, (command, environment) in commands(config).items():
                        worker = Worker(
                            command, setup | {"dtype": dtype}, cwd=cli.ROOT, environment=environment
                        )
                        workers[side] = stack.enter_context(worker)
                except (WorkerError, RefusedError) as error:  # nor would it in another dtype
                    why = f"{side} does not start ({error}); {_REMEDY}"
                    notes.append(f"{without} was left out: {why}")
                    break
                try:
                    found[dtype] = _measure_dtype(config, dtype, workers, prompts, notes)
                except (WorkerError, RefusedError) as error:
                    notes.append(f"{without} in {dtype} was left out: {error}")
    if not found:
        return Result([], {}, notes)
    notes += [*_ABOUT, versions(found)]
    return Result(lines_of(found, config.bars.peers), record_of(found), notes, sections_of(found))


def _measure_dtype(
    config: ConfigDict,
    dtype: str,
    workers: Mapping[str, Worker],
    prompts: Sequence[Sequence[int]],
    notes: list[str],
) -> Measured:
    """Returns what was measured; what one method refuses is left out, and a note says so."""
    timers = {}
    for cell in cells(config.peers.ks, bool(config.peers.draft), config.peers.head):
        try:
            timers[cell] = Timer(workers[cell.side], cell, prompts, config.peers.new_tokens)
        except RefusedError as error:
            notes.append(f"{cell.label} in {dtype} was left out ({error})")
    for side in (OURS, THEIRS):
        if not any(cell.side == side for cell in timers):
            raise WorkerError(f"{side} refused everything")
    makers = {cell.label: functools.partial(timers.get, cell) for cell in timers}
    _, times = measure_all(f"peers, {dtype}", makers, config.peers.repeats)
    return Measured(
        {cell: times[cell.label] for cell in timers},
        timers,
        {side: worker.peak_bytes for side, worker in workers.items()},
        workers[OURS].facts | workers[THEIRS].facts,
    )


class Timer:
    """Times all prompts in a worker, in milliseconds per token.

    Attributes:
      tokens: The output ids of every prompt.
      tau: Tokens a target pass; None where it is not known.
      first_s: Seconds of the first run, compilation included.
    """

    def __init__(self, worker: Worker, cell: PeerCell, prompts, new_tokens: int):
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


def lines_of(found: Mapping[str, Measured], bar: float) -> list[Line]:
    """Returns the ratios of tokens a second, each with what was identical.

    Args:
      found: What was measured, by dtype.
      bar: The bar of draft models and heads over assisted generation.
    """
    lines = []
    for dtype, measured in found.items():
        for cell in measured.ms:
            if cell.peer in measured.ms:
                same = f"{measured.same_rows(cell, cell.peer)} of {measured.rows} rows identical"
                lines.append(
                    Line(
                        f"{cell.label} / {cell.peer.label}, {dtype}",
                        measured.ratio(cell, cell.peer),
                        bar=bar if cell.method in _BARRED else None,
                        is_upper=False,
                        note=f"tokens a second, prefill included; {same}",
                    )
                )
        fastest = sorted(measured.ms, key=lambda cell: np.median(measured.ms[cell]))
        ours, theirs = (next(c for c in fastest if c.side == side) for side in (OURS, THEIRS))
        lines.append(
            Line(
                f"fastest of {OURS} / fastest of {THEIRS}, {dtype}",
                measured.ratio(ours, theirs),
                is_upper=False,
                note=f"{ours.label} / {theirs.label}",
            )
        )
    return lines


_HEADER = (
    *("dtype", "system", "method", "K", "tokens/s", "x own plain", "tau", "x peer"),
    *("rows as own plain", "rows as peer", "first run, s"),
)


def sections_of(found: Mapping[str, Measured]) -> list[Section]:
    """Returns a table of the systems, and one of their processes."""

    def shown(value, form=".2f"):
        return "" if value is None else f"{value:{form}}"

    rows = []
    processes = []
    for dtype, measured in found.items():
        for cell in sorted(measured.ms, key=lambda c: (c.side, str(c.k_text), c.method)):
            plain = None if cell == cell.plain else cell.plain
            ratios = [measured.ratio(cell, other) for other in (plain, cell.peer)]
            ratios = [None if ratio is None else np.median(ratio) for ratio in ratios]
            same = [measured.same_rows(cell, other) for other in (plain, cell.peer)]
            rows.append(
                [
                    dtype,
                    cell.side,
                    cell.name,
                    cell.k_text,
                    shown(1e3 / np.median(measured.ms[cell]), ".0f"),
                    shown(ratios[0]),
                    shown(measured.timers[cell].tau),
                    shown(ratios[1]),
                    *("" if n is None else f"{n} of {measured.rows}" for n in same),
                    shown(measured.timers[cell].first_s, ".1f"),
                ]
            )
        for side, peak in measured.peak_bytes.items():
            processes.append([dtype, side, shown(peak and peak / 1e6, ".0f")])
    return [
        Section("Peers", table=Table(_HEADER, rows, _NUMBERS)),
        Section(
            "Peers' processes",
            table=Table(("dtype", "system", "peak memory, MB"), processes, _NUMBERS),
        ),
    ]


def versions(found: Mapping[str, Measured]) -> str:
    """Returns the versions of the peers, and their threads, as a sentence."""
    facts = next(iter(found.values())).facts
    known = ", ".join(f"{n} {facts[n]}" for n in ("transformers", "torch", "python"))
    return f"peers: {known}, {facts['threads']} threads"


def record_of(found: Mapping[str, Measured]) -> dict[str, Any]:
    """Returns what report.json keeps, by dtype."""
    return {
        dtype: {
            "versions": dict(measured.facts),
            "peak_bytes": dict(measured.peak_bytes),
            "rows": measured.rows,
            "times_ms": listed({cell.label: ms for cell, ms in measured.ms.items()}),
            "tau": {cell.label: timer.tau for cell, timer in measured.timers.items()},
            "first_run_s": {cell.label: timer.first_s for cell, timer in measured.timers.items()},
            "identical_rows": {
                cell.label: {
                    "own plain": measured.same_rows(cell, cell.plain),
                    "peer": measured.same_rows(cell, cell.peer),
                }
                for cell in measured.ms
            },
        }
        for dtype, measured in found.items()
    }
