"""Trains a draft head for a target, and measures it by real speculative decoding.

    python -m experiments.train_head --workdir=runs/eagle3
    python -m experiments.train_head --config=configs/train_zoo_eagle1.py --workdir=runs/eagle1
    python -m experiments.train_head --config.target=PATH --config.data.text=PREFIX --workdir=DIR

A work directory that holds a checkpoint is resumed, bit for bit; SIGTERM saves and ends. A run
leaves config.json, metrics.jsonl, tensorboard/, checkpoints/ (the newest, and the best by tau),
training.png and export/, a head that spec_jax and other engines load.
"""

from __future__ import annotations

import functools
import json
import pathlib
import zlib
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from configs import train_head_default
from experiments.common import cli, head_data, head_eval, head_setup, plots
from experiments.common.prompts import fit, load_prompts
from spec_jax.data.batches import window_batches
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, TrainingError
from spec_jax.loading import LoadedModel, load_model
from spec_jax.models import checkpoint
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Log, read_metrics
from spec_jax.train.loop import train_loop
from spec_jax.train.objective import Batch, chain_rates, target_view
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.step import TrainState, cast, train_step
from spec_jax.train.view_cache import ViewCache

_FREE = ("log_every", "checkpoint_every_s", "export_layout", "export_dtype", "export_from", "eval")
_FREE_DATA = ("view_cache", "view_cache_gb")


def validate(config: ConfigDict) -> None:
    """Raises ConfigError on an unknown key or a value that cannot be trained with."""
    cli.check_keys(config, train_head_default.get_config())

    def check(ok: bool, name: str, value: Any, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{name} is {value!r}; expected {expected}")

    for name in ("steps", "batch", "log_every"):
        check(config[name] >= 1, name, config[name], "a positive integer")
    accumulate = config.optimizer.accumulate
    check(accumulate >= 1, "optimizer.accumulate", accumulate, "a positive integer")
    for name in ("num_draft", "num_prompts", "max_new_tokens", "batch", "windows"):
        check(config.eval[name] >= 1, f"eval.{name}", config.eval[name], "a positive integer")
    check(config.eval.every >= 0, "eval.every", config.eval.every, "0 (the end alone) or more")
    check(config.length >= 3, "length", config.length, "at least 3, a pair and what follows it")
    steps = config.loss.num_steps
    check(1 <= steps <= config.length - 2, "loss.num_steps", steps, f"1 to {config.length - 2}")
    known = head_setup.OBJECTIVES
    check(config.objective in known, "objective", config.objective, f"one of {', '.join(known)}")
    layouts = head_setup.LAYOUTS[config.objective]
    is_known = config.export_layout in ("", *layouts)
    check(is_known, "export_layout", config.export_layout, f"one of {', '.join(layouts)}, or ''")
    is_known = config.export_from in ("best", "last")
    check(is_known, "export_from", config.export_from, "best or last")
    check(config.dtype in ("float32", "bfloat16"), "dtype", config.dtype, "float32 or bfloat16")


class Experiment:
    """What a config means: target, data, head, and the functions that the loop calls."""

    def __init__(self, config: ConfigDict, workdir: pathlib.Path):
        self.config = config
        self.target: LoadedModel = load_model(config.target, config.dtype)
        if config.length > self.target.max_length:
            raise ConfigError(
                f"length is {config.length}; the target holds {self.target.max_length} tokens"
            )
        self.texts, self.held_out = head_data.load(config, self.target, workdir / "data")
        self._eval_windows = len(self.held_out.tokens) // config.length
        if self._eval_windows == 0:
            raise ConfigError(
                f"{self.held_out.name} has {len(self.held_out.tokens)} tokens; expected at least "
                f"{config.length}, a window: hold out more, or shorten the windows"
            )
        shares = [config.data.text_share, config.data.responses_share][: len(self.texts)]
        self._batches = window_batches(
            self.texts, shares, seed=config.seed, batch=config.batch, length=config.length
        )
        used = [text for text, share in zip(self.texts, shares) if share > 0]
        self.spec = head_setup.make_head(config, self.target, self.texts, used)
        updates = max(config.steps // config.optimizer.accumulate, 1)
        self.optimizer = make_optimizer(**config.optimizer, steps=updates)
        self.frozen = self.target.params
        self._key = jax.random.key(config.seed)
        taps = self.spec.config.taps
        self._view = jax.jit(functools.partial(target_view, config=self.target.config, taps=taps))
        self._views = None
        if config.data.view_cache:
            most = int(config.data.view_cache_gb * 1e9)
            self._views = ViewCache(
                config.data.view_cache, most, self.frozen, self.target.config, taps
            )
        step = functools.partial(
            train_step, objective=self.spec.objective, optimizer=self.optimizer,
            dtype=None if config.dtype == "float32" else config.dtype,
        )  # fmt: skip
        self._step = jax.jit(step, donate_argnums=0)
        self._objective = jax.jit(self.spec.measure)
        prompts = load_prompts(config.eval.prompts, config.eval.num_prompts, seed=0)
        head = self.spec.loaded({})
        self._prompts, _ = fit(prompts, [self.target, head], config.eval.max_new_tokens, None)
        if isinstance(head.config, MtpConfig):
            head.config.check_num_draft(config.eval.num_draft)

    def fingerprint(self) -> dict:
        """Of what a run trains on, beside its config: a resumed run must see the same."""
        crc = lambda x: 0 if x is None else zlib.crc32(np.ascontiguousarray(x))
        of = lambda text: [text.name, len(text.tokens), crc(text.tokens), crc(text.mask)]
        return {"data": [of(text) for text in self.texts]}

    def init_state(self) -> TrainState:
        """Fresh parameters, the same for the same seed."""
        params = self.spec.init(jax.random.fold_in(self._key, 1 << 30))
        return TrainState.create(params, self.optimizer)

    def batch_at(self, step: int) -> Batch:
        """The batch of a step, a function of the seed and the step."""
        found = self._batches[step]
        return self._with_view(found["tokens"], found["mask"], step)

    def _with_view(self, tokens, mask, step: int) -> Batch:
        key = jax.random.fold_in(self._key, step)
        compute = functools.partial(self._view, self.frozen)
        view = compute(tokens) if self._views is None else self._views.view(tokens, compute)
        return Batch(tokens, mask, key, view)

    def describe_batch(self, step: int) -> str:
        """Which windows a step's batch holds."""
        found = [f"{self.texts[t].name}, {i}" for t, i in self._batches[step]["window"].tolist()]
        return f"windows of {self.config.length} tokens: {'; '.join(found)}"

    def step(self, state: TrainState, batch: Batch):
        return self._step(state, batch, self.frozen)

    def evaluate(self, state: TrainState) -> dict:
        """Teacher-forced figures on held-out windows, and tau by real decoding."""
        options = self.config.eval
        params = cast(state.params, self.config.dtype)
        sums: dict[str, Any] = {}
        count = min(options.windows, self._eval_windows)
        size = min(self.config.batch, count)
        for begin in range(0, count - size + 1, size):
            rows = [self.held_out.window(i, self.config.length) for i in range(begin, begin + size)]
            tokens, mask = (np.stack([row[name] for row in rows]) for name in ("tokens", "mask"))
            batch = self._with_view(tokens, mask, 0)
            loss, figures = self._objective(params, batch, self.frozen)
            found = jax.device_get({"loss": loss, **figures})
            sums = jax.tree.map(np.add, sums, found) if sums else found
        n = max(count // size, 1)
        figures = chain_rates(jax.tree.map(lambda x: x / n, sums))
        _, stats = head_eval.decode(
            self.target, self.spec.loaded(params), self._prompts, num_draft=options.num_draft,
            max_new_tokens=options.max_new_tokens, batch=options.batch,
        )  # fmt: skip
        held_out = {f"held_out_{name}": value for name, value in figures.items()}
        return held_out | head_eval.acceptance_figures(stats)


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, float] | None:
    """Runs or resumes the experiment; returns what is exported, None where SIGTERM ended it.

    Raises:
      ConfigError: a value that cannot be, or a work directory of another experiment.
      TrainingError: a loss that is not finite, or a checkpoint that cannot be kept or read.
    """
    validate(config)
    workdir = pathlib.Path(workdir).absolute()
    resolved = json.loads(config.to_json())
    for name in _FREE_DATA:
        del resolved["data"][name]
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        path = workdir / "config.json"
        saved = json.loads(path.read_text()) if checkpoints.last_step is not None else None
        if saved is not None:
            cli.check_same(saved, resolved | {"data_seen": saved.get("data_seen")}, _FREE)
        experiment = Experiment(config, workdir)
        resolved["data_seen"] = experiment.fingerprint()
        if saved is not None:
            cli.check_same(saved, resolved, _FREE)
        state = checkpoints.restore(experiment.init_state())
        first = int(state.step)
        checkpoint.write_json(path, resolved)
        tokens = sum(len(text.tokens) for text in experiment.texts)
        with Log(workdir, first, config.steps) as log:
            log.say(
                f"{experiment.spec.num_params / 1e6:.2f}M parameters, {tokens / 1e6:.2f}M "
                f"training tokens, from step {first} of {config.steps}"
            )
            state, is_done = train_loop(
                state,
                step_fn=experiment.step,
                batch_at=experiment.batch_at,
                num_steps=config.steps,
                checkpoints=checkpoints,
                log=log,
                tokens_per_step=lambda batch: batch.tokens.size,
                log_every=config.log_every,
                summarise=chain_rates,
                evaluate=experiment.evaluate,
                eval_every=config.eval.every,
                best_by="tau",
                checkpoint_every_s=config.checkpoint_every_s,
                describe_batch=experiment.describe_batch,
            )
        if not is_done:
            return None
        kept, (step, tau) = state, checkpoints.best
        is_last = config.export_from == "last"
        if not is_last:
            try:
                kept = checkpoints.restore_best(state)
            except TrainingError as error:
                print(f"{error}; the last state is exported in its place")
                is_last = True
    metrics = read_metrics(workdir / "metrics.jsonl")
    if is_last:
        step = int(state.step)
        of_step = [row["tau"] for row in metrics if "tau" in row and row["step"] == step]
        tau = of_step[-1] if of_step else float("nan")
    plots.plot_training(workdir / "training.png", metrics)
    experiment.spec.export(workdir / "export", kept.params, experiment.target, config)
    print(f"tau {tau:.2f} at step {step}; exported to {workdir / 'export'}")
    return {"tau": tau, "step": step}


def main() -> None:
    if not _WORKDIR.value:
        raise ConfigError("--workdir is not given; expected the folder to train or resume in")
    logging.set_verbosity(logging.WARNING)  # orbax tells every step of a save
    cli.enable_compilation_cache()
    train(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        train_head_default,
        "Folder of checkpoints, metrics and the exported head; resumed if it has any.",
    )  # fmt: skip
    cli.run(main)
