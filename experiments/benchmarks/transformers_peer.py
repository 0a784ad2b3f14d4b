"""The benchmark's third part: the same zoo pair under transformers' assisted generation."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Sequence

from experiments.benchmarks.rounds import Pair
from experiments.benchmarks.zoo import load_pair
from experiments.common import cli
from experiments.common.timing import Line, interleave, spread
from spec_jax.config import SpeculativeConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.progress import Progress

_REST_S = 0.3  # idle threads of the other side spin for a while before they sleep


def why_not(python: str) -> str | None:
    """Why this interpreter cannot serve, or None if it can."""
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
    # A path made for this interpreter would lead another one to the wrong packages.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


class Worker:
    """A process of another interpreter that holds the pair exported to ``folder``."""

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
          ConfigError: the process ended; why is on its stderr.
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


def measure(part: str, config, bars, python: str, k: int, repeats: int) -> tuple[list[Line], dict]:
    """Tokens a second of both, prefill included, prompt by prompt.

    Args:
      part: its name in the table.
      config: of the zoo part: models, prompts and lengths.
      bars: ``transformers``.
      python: an interpreter with torch and transformers.
      k: drafted tokens a round, on both sides.
      repeats: interleaved.

    Returns:
      The lines, and what the record keeps beside them.
    """
    pair, prompts = load_pair(config)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with Progress(repeats + 3, part) as bar, tempfile.TemporaryDirectory() as folder:
        for name, model in (("target", pair.target), ("draft", pair.draft)):
            save_pretrained(pathlib.Path(folder) / name, model.params, model.config)
        with Worker(python, pathlib.Path(folder), cores) as worker:
            bar.step(f"transformers {worker.versions['transformers']} is up")
            ours = _Ours(pair, prompts, k, config.new_tokens)
            bar.step("compiled ours")
            theirs = _Theirs(worker, prompts, k, config.new_tokens)
            without = _Theirs(worker, prompts, 0, config.new_tokens)
            bar.step("transformers has run once")
            timers = {"ours": ours, "assisted": theirs, "plain": without}
            times = interleave(timers, repeats, bar.step)
    same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens))
    versions = ", ".join(f"{n} {worker.versions[n]}" for n in ("transformers", "torch", "python"))
    line = lambda what, values, *args, **options: Line(part, what, spread(values), *args, **options)
    lines = [
        line(
            f"tokens/s, spec_jax / assisted generation, K={k}", times["assisted"] / times["ours"],
            bar=bars.transformers, is_upper=False,
            note=f"{versions}, {worker.versions['threads']} threads; {same} of {len(prompts)} "
            "rows identical",
        ),
        line(f"spec_jax, K={k}", 1e3 / times["ours"], "tok/s", note="prefill included"),
        line(f"transformers assisted, K={k}", 1e3 / times["assisted"], "tok/s"),
        line("transformers plain", 1e3 / times["plain"], "tok/s"),
    ]  # fmt: skip
    record = {
        "versions": worker.versions, "k": k, "identical_rows": same, "rows": len(prompts),
        "times_ms": {name: values.tolist() for name, values in times.items()},
    }  # fmt: skip
    return lines, record


class _Ours:
    """``SpeculativeDecoder.generate`` of each prompt, end to end; ms a token."""

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
    """The same prompts in the worker; ms a token."""

    def __init__(self, worker: Worker, prompts, k: int, new_tokens: int):
        self._worker = worker
        self._request = {"prompts": prompts, "k": k, "max_new_tokens": new_tokens}
        self()

    def __call__(self) -> float:
        answer = self._worker.ask(self._request)
        time.sleep(_REST_S)
        self.tokens = answer["tokens"]
        return answer["seconds"] * 1e3 / sum(map(len, self.tokens))
