"""The parts of the benchmark of one GPU, each in a process of its own, with a limit.

What crashes, runs out of memory or takes too long ends a step or a part. Figures that were measured
before stay, and the other parts go on. ``Part`` starts the process of a part and asks for its
steps, which are methods of ``Steps``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from configs import benchmark, benchmark_gpu
from experiments.benchmarks import llama110m, peers, training
from experiments.benchmarks.shapes import random_weights
from experiments.benchmarks.table import Line, Result
from experiments.benchmarks.worker_lines import Answers, RefusedError, Worker, WorkerError, serve
from experiments.run import cli
from experiments.run.memory import device_peaks
from spec_jax import decoding, zoo
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.decoding.loop import feed, prefill_target
from spec_jax.drafters import registry
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import make_request, padded_width
from spec_jax.errors import ConfigError
from spec_jax.evaluation.passes import drafting_step, round_timer, steps_timer
from spec_jax.evaluation.timing import Timer, loop_timer
from spec_jax.loading import LoadedModel, load_draft, load_model
from spec_jax.planning import roofline
from spec_jax.planning.chips import CHIPS
from spec_jax.planning.presets import find_config
from spec_jax.planning.programs import without_weights
from spec_jax.sampling import make_sampler

ABOUT = (
    "Medians and quartiles of repeats, beside the floor at the device's published peaks "
    "(spec_jax.planning.roofline). Greedy, bfloat16, random weights and synthetic acceptance, "
    "layers apart, unless the line says otherwise; the zoo in float32."
)
_TINY = dict(target="zoo/draft", slots=128, rounds=4, batches=(2,), prompts=(50, 20, 9), texts=2)
_TINY |= dict(new_tokens=8, length=16, matrix=64)
_TINY |= dict(heads={"eagle3": {"draft_vocab_size": 64}, "dflash": {"num_layers": 2}})
_CHIPS = {  # by the names of devices
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
_PROCESS = (sys.executable, "-m", "experiments.benchmarks.gpu")
_LEAST_S = 15  # a part is not begun with less
_DTYPE = "bfloat16"
_LONGEST = 128  # tokens of a prompt of which text is decoded
_FILLED = 64  # tokens of a row when its rounds begin; a pass attends over all slots anyway
_CARD = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"


class Part(NamedTuple):
    """A part of the benchmark.

    Attributes:
      name: Its name.
      limit_s: After so many seconds it is cut off.
      steps: The name of a method of ``Steps``, and its arguments, for each step.
      end: When the time of all parts is over, by ``time.monotonic()``.
    """

    name: str
    limit_s: float
    steps: list[tuple]
    end: float

    def check(self, config: ConfigDict) -> None:
        """Raises ConfigError if a value is out of range, or there is no GPU of known figures."""
        cli.require_positive(config, "seconds repeats")
        device = jax.devices()[0]
        if device.platform != "gpu" and not config.tiny:
            raise ConfigError(
                f"the device is {device.device_kind!r}; expected a GPU (or --config.tiny=True)"
            )
        if config.chip not in CHIPS:
            raise ConfigError(
                f"no published figures of {config.chip or device.device_kind!r} are known; name "
                f"those to compare with, --config.chip=: {', '.join(CHIPS)}"
            )

    def measure(self, config: ConfigDict, records: Mapping[str, dict]) -> Result:
        """Runs the steps, and prints each figure as it comes.

        Raises:
          ConfigError: No time is left, or no step had a figure.
        """
        begin = time.monotonic()
        limit_s = min(self.limit_s, self.end - begin)
        if limit_s < _LEAST_S:
            raise ConfigError(f"of {config.seconds} s none are left")
        lines = []
        notes = []
        record = {}
        setup = {"part": self.name, "config": config.to_dict()}

        def note(what, error):
            notes.append(f"{self.name}, {what}: {' '.join(str(error).split()):.300}")
            print(notes[-1], flush=True)

        try:
            with Worker(_PROCESS, setup, cwd=cli.ROOT, limit_s=limit_s) as worker:
                record |= worker.facts
                for step in self.steps:
                    try:
                        answer = worker.ask({"step": step})
                    except RefusedError as error:
                        note(" ".join(map(str, step)), error)
                        continue
                    record["peak_gb"] = answer["peak_gb"]
                    for line in answer["lines"]:
                        lines.append(Line(**line))
                        print(self.name, *lines[-1].cells()[1:], sep=" | ", flush=True)
        except (WorkerError, RefusedError) as error:
            note(f"ended after {time.monotonic() - begin:.0f} s", error)
        record["seconds"] = time.monotonic() - begin
        if not lines:
            raise ConfigError("; ".join(notes))
        return Result(lines, record, notes)


def parts(config: ConfigDict) -> dict[str, Part]:
    """Fills in what the config leaves open; returns all parts by name, whose time begins now.

    The memory of the device is left to their processes: jax reserves none of it.

    Raises:
      ConfigError: The config has other keys than ``configs/benchmark_gpu.py``.
    """
    cli.check_keys(config, benchmark_gpu.get_config())
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if config.tiny:
        config.sizes.update(_TINY)
    kind = jax.devices()[0].device_kind
    config.chip = config.chip or _CHIPS.get(kind, "h100" if config.tiny else "")
    heads = ("eagle3", "dflash")
    rounds = [("round", method, 1) for method in ("plain", *heads)]
    many = [("round", method, B) for B in config.sizes.batches for method in ("plain", "eagle3")]
    steps = {
        "device": (60, [("copy",), ("product",)]),
        "zoo": (90, [("equal", "highest"), ("equal", "default")]),
        "small": (70, [("text", "plain"), ("text", "ngram"), ("prefill",)]),
        "apart": (180, [*rounds, ("read",), ("prefill",), *(("passes", head) for head in heads)]),
        "stacked": (80, rounds),
        "training": (80, [("train",)]),
        "batched": (120, many),
    }
    end = time.monotonic() + config.seconds
    return {name: Part(name, *each, end) for name, each in steps.items()}


def random(role: str, config: Any) -> Any:
    """Returns a model or a head with random weights."""
    like = without_weights(role, config, _DTYPE)
    return dataclasses.replace(like, params=random_weights(like.params))


def prefilled(decoder: SpeculativeDecoder, batch: int, slots: int) -> decoding.DecodeState:
    """Returns the state of rows whose prompts the target has not been fed.

    Its cache and states are zeros: no time depends on them, and the target's pass over prompts need
    not be compiled.
    """
    system = decoder.system()
    params = decoder.params()
    sampler = make_sampler(SamplerConfig(), batch, system.target.vocab_size)
    new = slots - _FILLED - system.lookahead_slots
    prompts = [[1] * _FILLED] * batch
    *arrays, _, _ = make_request(system, prompts, new, sampler, sampler, slots=slots)
    run = functools.partial(prefill_target, target=system.target, slots=slots)
    shapes = jax.eval_shape(run, params["target"], *arrays[:2])
    cache, *rest = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    fed = (cache.commit(arrays[1]), *rest)
    return decoding.prefill(params, *arrays, system=system, slots=slots, fed=fed)


class Steps:
    """What the process of a part is asked for: each method returns arguments of lines.

    Attributes:
      part: The part's name.
      config: Of the benchmark.
    """

    def __init__(self, part: str, config: ConfigDict):
        self.part = part
        self.config = config
        self.sizes = config.sizes
        self.chip = CHIPS[config.chip]
        self.plain_ms: dict[int, float] = {}  # of a round, by rows

    @functools.cached_property
    def target(self) -> LoadedModel:
        """The part's target: SmolLM2 if it is installed, or random weights."""
        if self.part == "zoo":
            return load_model("zoo/target")
        name = self.sizes.target
        if self.part == "small" and not self.config.tiny:
            if zoo.path(zoo.SMOLLM2):
                return load_model(zoo.SMOLLM2, _DTYPE, scan_layers=False)
            name = "smollm2-135m"
        shape = dataclasses.replace(find_config(name), scan_layers=self.part == "stacked")
        return random(f"random {name}", shape)

    @functools.cache  # noqa: B019, steps live as long as their process
    def decoder(self, method: str) -> SpeculativeDecoder:
        """Returns the decoder of a method, of which a part of the drafts is accepted."""
        if method == "plain":
            return SpeculativeDecoder(self.target)
        new = registry.objectives()[method][1].new
        draft = random("draft", new(self.target.config, **self.sizes.heads[method]))
        K = self.config.num_draft[method]
        accepted = {"synthetic_conditional_rates": (self.config.conditional_rate,) * K}
        accepted["rejection_sampling_strategy"] = "synthetic"
        spec = SpeculativeConfig(draft.method, K, **accepted)
        return SpeculativeDecoder(self.target, draft, spec)

    def line(self, what: str, timer: Timer, floor_s: float, note: str = "") -> dict[str, Any]:
        """Returns a line of milliseconds, beside their floor in seconds."""
        values = [timer() for _ in range(self.config.repeats)]
        return dict(what=what, values=values, unit="ms", predicted=floor_s * 1e3, note=note)

    def setting(self, batch: int) -> roofline.Setting:
        return roofline.Setting(batch, self.sizes.slots, dtype=_DTYPE)

    def floors(self, method: str, batch: int) -> list[float]:
        """Returns the floors of a round's passes in seconds, the target's first."""
        decoder = self.decoder(method)
        draft = decoder.draft and decoder.draft.config
        given = self.target.config, draft, decoder.num_draft, self.setting(batch)
        passes = roofline.round_work(*given).passes
        return [one.count * one.work.floor_s(self.chip) for one in passes]

    def copy(self) -> list[dict]:
        x = jnp.ones((16, self.sizes.matrix, self.sizes.matrix), _DTYPE)
        timer = loop_timer(lambda _: [jnp.copy(x) for _ in range(4)], None, 4)
        what = f"copy of {x.nbytes / 1e9:.3g} GB"
        return [self.line(what, timer, 2 * x.nbytes / self.chip.hbm_bytes_s)]

    def product(self) -> list[dict]:
        n = self.sizes.matrix
        x = jax.random.normal(jax.random.key(0), (n, n), _DTYPE)
        timer = loop_timer(lambda _: [jnp.matmul(x, x) for _ in range(20)], None, 20)
        return [self.line(f"product of {n:,} x {n:,}", timer, 2 * n**3 / self.chip.flops_s)]

    def decode(self, method: str, batch: int) -> tuple[list, list[float], float]:
        """Decodes texts; returns the tokens of each, tokens a second of each repeat, and tau."""
        count = self.sizes.texts
        new = self.sizes.new_tokens
        asked = dict(data="", num_prompts=count, max_prompt_tokens=_LONGEST, new_tokens=new)
        prompts, _ = peers.load_prompts(ConfigDict(asked), self.target)
        draft = load_draft("zoo/eagle3", self.target) if method == "eagle3" else None
        K = self.config.num_draft.get(method)
        spec = K and SpeculativeConfig(draft.method if draft else method, K)
        decoder = SpeculativeDecoder(self.target, draft, spec)
        rates = []
        for _ in range(self.config.repeats + 1):  # the first one compiles
            decoder.reset_stats()
            rows = []
            for i in range(0, count, batch):
                some = prompts[i : i + batch]
                rows += decoder.generate(some, new, stop_tokens=(), pad_to=_LONGEST)
            rates.append(decoder.stats.tokens_per_s)
        return [list(row.tokens) for row in rows], rates[1:], decoder.stats.tau

    def equal(self, precision: str) -> list[dict]:
        """Compares rows with drafts and without, at a precision of float32 products."""
        jax.config.update("jax_default_matmul_precision", precision)
        plain = None
        lines = []
        for method in ("plain", "eagle3", "ngram"):
            rows, rates, tau = self.decode(method, self.sizes.texts)
            plain = plain or rows
            equal = sum(row == other for row, other in zip(rows, plain))
            what = f"{method}, {precision} precision: rows equal to plain"
            note = f"{np.median(rates):.0f} tokens/s, tau {tau:.2f}"
            lines.append(dict(what=what, values=[equal], unit="", predicted=len(rows), note=note))
        return lines

    def text(self, method: str) -> list[dict]:
        """Decodes one text after the other."""
        rows, rates, tau = self.decode(method, 1)
        given = ("ngram", self.config.num_draft.ngram) if method == "ngram" else (None, 0)
        setting = self.setting(1)
        floor = roofline.predict(self.target.config, *given, tau, self.chip, setting).tok_s
        what = f"{self.target.name}, {method}"
        note = f"tau {tau:.2f}"
        return [dict(what=what, values=rates, unit="tok/s", predicted=floor, note=note)]

    def round(self, method: str, batch: int) -> list[dict]:
        """Times rounds, and compares their speed with plain decoding's."""
        begin = time.perf_counter()
        decoder = self.decoder(method)
        state = prefilled(decoder, batch, self.sizes.slots)
        timer = llama110m.GenerateTimer(decoder, state, self.sizes.rounds)
        first_s = time.perf_counter() - begin
        tau = timer.stats.tau
        name = f"{method}, B={batch}"
        floor_s = sum(self.floors(method, batch))
        note = f"K={decoder.num_draft}, tau {tau:.2f}, compiled and first run in {first_s:.0f} s"
        lines = [self.line(f"{name}: a round", timer, floor_s, note)]
        ms = np.median(lines[0]["values"])
        if method == "plain":
            self.plain_ms[batch] = ms
        elif batch in self.plain_ms:
            speed = tau * self.plain_ms[batch] / ms
            predicted = tau * sum(self.floors("plain", batch)) / floor_s
            what = f"{name}: speed over plain decoding"
            lines.append(dict(what=what, values=[speed], predicted=predicted))
        return lines

    def passes(self, method: str) -> list[dict]:
        """Times the parts of a round of one row."""
        decoder = self.decoder(method)
        slots = self.sizes.slots
        rounds = self.sizes.rounds
        own_s, *draft_s = self.floors(method, 1)
        step = drafting_step(decoder.system(), decoder.params(1)["draft"], slots, 1)
        timer = steps_timer([step], 1, rounds)
        lines = [self.line(f"{method}, of a round: the drafter", timer, sum(draft_s))]
        timer = round_timer(self.target, None, decoder.num_draft, 0, slots, 1, rounds)
        return [*lines, self.line(f"{method}, of a round: the target's pass", timer, own_s)]

    def read(self) -> list[dict]:
        """Times one read of the weights that a pass reads."""
        params = self.target.params
        weights = {n: w for n, w in params.items() if n != "embed" or "head" not in params}
        count = sum(w.nbytes for w in jax.tree.leaves(weights))
        what = f"one read of the weights, {count / 1e9:.2f} GB"
        return [self.line(what, llama110m.read_timer(count), count / self.chip.hbm_bytes_s)]

    def prefill(self) -> list[dict]:
        """Feeds prompts of unequal length, as decoding does and in one pass."""
        decoder = self.decoder("plain")
        slots = self.sizes.slots
        system = decoder.system()
        params = decoder.params()["target"]
        lengths = np.asarray(self.sizes.prompts, np.int32)
        longest = int(lengths.max())
        width = padded_width(int(lengths.max()))
        given = params, np.ones((len(lengths), width), np.int32), lengths
        whole = functools.partial(prefill_target, target=system.target, slots=slots)
        setting = self.setting(len(lengths))
        chunk = system.prefill_chunk
        lines = []
        for run, fed, size in (
            (lambda _: feed(*given, system, slots), longest, chunk),
            (lambda _: whole(*given), width, width),
        ):
            work = roofline.prefill_work(self.target.config, fed, setting, size)
            what = f"prompts of {', '.join(map(str, lengths))} tokens in passes of {size}"
            lines.append(self.line(what, loop_timer(run, None, 1), work.floor_s(self.chip)))
        return lines

    def train(self) -> list[dict]:
        """Times a training step of an EAGLE-3 head; its floor is that of its arithmetic."""
        config = benchmark.get_config().training
        config.update(num_steps=7, batch=1, length=self.sizes.length, dtype=_DTYPE)
        config.update(self.sizes.heads.eagle3)
        config.optimizer.name = "adamw"
        case = training.eagle3_case(self.target, config)
        what = f"a training step of EAGLE-3, {case.tokens} tokens"
        timer = loop_timer(case.run, case.state, 1)
        return [self.line(what, timer, case.flops / self.chip.flops_s)]


def load(setup: dict) -> tuple[dict, Answers]:
    """Returns what is known of the card, and what answers requests."""
    cli.enable_compilation_cache()
    steps = Steps(setup["part"], ConfigDict(setup["config"]))

    def answer(request: dict) -> dict:
        name, *args = request["step"]
        lines = getattr(steps, name)(*args)
        return {"lines": lines, "peak_gb": max(device_peaks().values(), default=0) / 1e9}

    smi = ["nvidia-smi", f"--query-gpu={_CARD}", "--format=csv,noheader"]
    if not shutil.which(smi[0]):
        return {}, answer
    return {"card": subprocess.run(smi, capture_output=True, text=True).stdout.strip()}, answer


if __name__ == "__main__":
    serve(load)
