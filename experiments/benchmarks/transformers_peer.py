"""The benchmark's part "transformers": the zoo's pair under transformers' assisted generation."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from experiments.benchmarks.rounds import Pair
from experiments.benchmarks.shapes import listed
from experiments.benchmarks.zoo import load_pair
from experiments.common import cli
from experiments.common.timing import Line, Result, measure_all
from spec_jax.config import SpeculativeConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.models.checkpoint import save_pretrained

_REST_S = 0.3  # the other process' idle threads spin for a while before they sleep


def why_not(python: str) -> str | None:
    """Returns why an interpreter cannot be used, or None if it can."""
    code = "import torch, transformers"
    try:
        found = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, env=_environment(), timeout=300
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} cannot be run: {error}"
    if found.returncode:
        return (found.stderr.strip().splitlines() or ["it failed"])[-1]
    return None


def _environment() -> dict[str, str]:
    # This interpreter's path would make another one import the wrong packages.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


class Worker:
    """A process of another interpreter that has loaded the pair from ``folder``."""

    def __init__(self, python: str, folder: pathlib.Path, threads: int):
        self._process = subprocess.Popen(
            [python, "-m", "experiments.benchmarks.transformers_worker"], cwd=cli.ROOT,
            env=_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        setup = {"target": str(folder / "target"), "draft": str(folder / "draft")}
        self.versions = self.ask(setup | {"threads": threads})

    def ask(self, request: dict) -> dict:
        """Sends one request and waits for its answer.

        Raises:
          ConfigError: The process ended; its stderr says why.
        """
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ConfigError(f"the transformers process ended with exit code {code}; see above")
        return json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    cli.require_positive(config, "k repeats", "transformers")


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Compares tokens per second, with prefill, one prompt at a time.

    Both sides decode in float32; K is the best of the part "zoo" in float32 if that part has run.
    """
    repeats, python = config.transformers.repeats, config.transformers.python or sys.executable
    reason = why_not(python)
    if reason is not None:
        return Result([], {}, [
            f"the comparison with transformers was left out ({reason}); name an interpreter that "
            "has torch and transformers: --config.transformers.python=PATH"
        ])  # fmt: skip
    k = records.get("zoo", {}).get("best_k", {}).get("float32", config.transformers.k)
    (pair, prompts), new_tokens = load_pair(config.zoo), config.zoo.new_tokens
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("target", pair.target), ("draft", pair.draft)):
            save_pretrained(pathlib.Path(folder) / name, model.params, model.config)
        with Worker(python, pathlib.Path(folder), cores) as worker:
            timers, times = measure_all("transformers", {
                "ours": lambda: _Ours(pair, prompts, k, new_tokens),
                "assisted": lambda: _Theirs(worker, prompts, k, new_tokens),
                "plain": lambda: _Theirs(worker, prompts, 0, new_tokens),
            }, repeats)  # fmt: skip
    same = sum(a == b for a, b in zip(timers["ours"].tokens, timers["assisted"].tokens))
    versions = ", ".join(f"{n} {worker.versions[n]}" for n in ("transformers", "torch", "python"))
    lines = [
        Line(
            f"tokens/s, spec_jax / assisted generation, K={k}", times["assisted"] / times["ours"],
            bar=config.bars.transformers, is_upper=False,
            note=f"{versions}, {worker.versions['threads']} threads; {same} of {len(prompts)} "
            "rows identical",
        ),
        Line(f"spec_jax, K={k}", 1e3 / times["ours"], "tok/s", note="prefill included"),
        Line(f"transformers assisted, K={k}", 1e3 / times["assisted"], "tok/s"),
        Line("transformers plain", 1e3 / times["plain"], "tok/s"),
    ]  # fmt: skip
    return Result(lines, {
        "versions": worker.versions, "k": k, "identical_rows": same, "rows": len(prompts),
        "times_ms": listed(times),
    })  # fmt: skip


class _Ours:
    """Times ``SpeculativeDecoder.generate`` of each prompt, in milliseconds per token."""

    def __init__(self, pair: Pair, prompts: Sequence[Sequence[int]], k: int, new_tokens: int):
        config = SpeculativeConfig(num_speculative_tokens=k)
        self._decoder = SpeculativeDecoder(pair.target, pair.draft, config)
        self._prompts, self._new_tokens = prompts, new_tokens
        self()

    def __call__(self) -> float:
        longest = max(map(len, self._prompts))
        begin = time.perf_counter()
        rows = [
            self._decoder.generate(ids, self._new_tokens, pad_to=longest) for ids in self._prompts
        ]
        seconds = time.perf_counter() - begin
        self.tokens = [list(row.tokens) for row in rows]
        return seconds * 1e3 / sum(map(len, self.tokens))


class _Theirs:
    """Times the same prompts in the worker, in milliseconds per token."""

    def __init__(self, worker: Worker, prompts, k: int, new_tokens: int):
        self._worker = worker
        self._request = {"prompts": prompts, "k": k, "max_new_tokens": new_tokens}
        self()

    def __call__(self) -> float:
        answer = self._worker.ask(self._request)
        time.sleep(_REST_S)
        self.tokens = answer["tokens"]
        return answer["seconds"] * 1e3 / sum(map(len, self.tokens))
