"""The experiment of ``experiments.train_head``: target, data, head, and the loop's functions."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import train_head_default
from experiments.run import cli
from experiments.training import head_choice, head_data, head_setup, training_text
from spec_jax import processes
from spec_jax.config import SpeculativeConfig
from spec_jax.data.batches import window_batches
from spec_jax.drafters import registry
from spec_jax.engine.assemble import make_drafter
from spec_jax.errors import ConfigError
from spec_jax.evaluation import head_eval
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.loading import LoadedModel, load_model
from spec_jax.sharding import replicate
from spec_jax.train.objective import Batch, chain_rates, target_view
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.placement import Placement
from spec_jax.train.step import TrainState, cast, train_step
from spec_jax.train.view_cache import ViewCache


def validate(config: ConfigDict) -> None:
    """Raises ConfigError if a key is unknown or a value cannot be trained with."""
    cli.check_keys(config, train_head_default.get_config())
    check = lambda ok, name, expected: cli.require(ok, config, name, expected)
    cli.require_positive(config, "steps batch log_every")
    cli.require_positive(config, "accumulate", "optimizer")
    cli.require_positive(
        config, "num_draft num_prompts prompt_tokens max_new_tokens batch windows", "eval"
    )
    training_text.validate(config)
    check(config.eval.every >= 0, "eval.every", "0 (only at the end) or more")
    check(config.length >= 3, "length", "at least 3, a pair and what follows it")
    is_fit = 1 <= config.loss.num_steps <= config.length - 2
    check(is_fit, "loss.num_steps", f"1 to {config.length - 2}")
    known = registry.objectives()
    check(config.objective in known, "objective", f"one of {', '.join(known)}")
    _, training = known[config.objective]
    layouts = training.layouts
    is_known = config.export_layout in ("", *layouts)
    check(is_known, "export_layout", f"one of {', '.join(layouts)}, or ''")
    check(config.export_from in ("best", "last"), "export_from", "best or last")
    check(config.dtype in ("float32", "bfloat16"), "dtype", "float32 or bfloat16")


class Experiment:
    """Target, data, head, and the functions that the training loop calls.

    Args:
      config: See ``configs/train_head_default.py``.
      workdir: The run's folder, for packed documents.

    Raises:
      ConfigError: A value that does not fit the target or the data.
    """

    def __init__(self, config: ConfigDict, workdir: pathlib.Path):
        self.config = config
        self.placement = Placement.of(config.mesh, config.is_fully_sharded)
        self.placement.check_batch("batch", config.batch)
        mesh, rules = self.placement.mesh, self.placement.rules
        self.target: LoadedModel = load_model(config.target, config.dtype, mesh=mesh, rules=rules)
        if config.length > self.target.max_length:
            raise ConfigError(
                f"length is {config.length}; the target holds {self.target.max_length} tokens"
            )
        self.texts, self.held_out = head_data.load(config, self.target, workdir / "data")
        training_text.check_held_out(self.held_out, config.length, config.data)
        self._eval_windows = self.held_out.num_windows(config.length)
        shares = [config.data.text_share, config.data.responses_share][: len(self.texts)]
        self._batches = window_batches(
            self.texts, shares, seed=config.seed, batch=config.batch, length=config.length
        )
        used = [text for text, share in zip(self.texts, shares) if share > 0]
        self.spec = head_setup.make_head(config, self.target, self.texts, used, self.placement)
        updates = max(config.steps // config.optimizer.accumulate, 1)
        self.optimizer = make_optimizer(**config.optimizer, steps=updates)
        self.frozen = self.target.params
        self._key = jax.random.key(config.seed)
        taps = self.spec.config.taps
        view = functools.partial(target_view, config=self.target.config, taps=taps)
        self._view = self.placement.jit(view)
        self._views = None
        if config.data.view_cache:
            if processes.count() > 1:
                raise ConfigError(
                    f"data.view_cache is {config.data.view_cache}, but there are "
                    f"{processes.count()} processes, none of which holds a whole view: leave it out"
                )
            max_bytes = int(config.data.view_cache_gb * 1e9)
            self._views = ViewCache(
                config.data.view_cache, max_bytes, self.frozen, self.target.config, taps
            )
        step = functools.partial(
            train_step, objective=self.spec.objective, optimizer=self.optimizer,
            dtype=None if config.dtype == "float32" else config.dtype,
        )  # fmt: skip
        self._make = lambda *args: TrainState.create(self.spec.init(*args), self.optimizer)
        self._where = mesh and self.placement.state_shardings(
            self.spec.shardings(mesh, rules), self._make, self._key, self.frozen, self.spec.given
        )
        self._step = self.placement.jit_step(step, self._where)
        self._objective = self.placement.jit(lambda *args: replicate(self.spec.measure(*args)))
        head = self.spec.loaded({})
        options = config.eval
        self._prompts = training_text.prompts(
            self.held_out, config.data, [self.target, head], path=options.prompts,
            num_prompts=options.num_prompts, prompt_tokens=options.prompt_tokens,
            max_new_tokens=options.max_new_tokens,
        )  # fmt: skip
        setting = [self._prompts, options.num_draft, options.max_new_tokens]
        self.evaluations = head_choice.Evaluations(workdir, setting)
        drafts = SpeculativeConfig(head.method, config.eval.num_draft)
        make_drafter(drafts, self.target.model, head)  # refuses more drafts than there can be

    @property
    def num_prompts(self) -> int:
        """The number of prompts that tau is measured on; fewer than asked for if text is short."""
        return len(self._prompts)

    def fingerprint(self) -> dict:
        """Returns checksums of the training data; a resumed run must have the same."""
        return training_text.fingerprint(self.texts)

    def usage(self) -> list[dict]:
        """Returns what of each text is used, and what is left out and why."""
        usage = functools.partial(training_text.usage, length=self.config.length)
        return [usage(text) for text in (*self.texts, self.held_out)]

    def init_state(self) -> TrainState:
        """Returns new parameters, the same for the same seed."""
        key = jax.random.fold_in(self._key, 1 << 30)
        return self.placement.create(self._make, self._where, key, self.frozen, self.spec.given)

    def batch_at(self, step: int) -> Batch:
        """Returns the batch of a step, a function of the seed and the step."""
        found = self._batches[step]
        return self._with_view(found["tokens"], found["mask"], step)

    def _with_view(self, tokens, mask, step: int) -> Batch:
        key = jax.random.fold_in(self._key, step)
        compute = lambda tokens: self._view(self.frozen, self.placement.place(tokens))
        view = compute(tokens) if self._views is None else self._views.view(tokens, compute)
        return self.placement.place(Batch(tokens, mask, key, view))

    def describe_batch(self, step: int) -> str:
        """Returns a text that names the windows of a step."""
        found = [f"{self.texts[t].name}, {i}" for t, i in self._batches[step]["window"].tolist()]
        return f"windows of {self.config.length} tokens: {'; '.join(found)}"

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        """Trains one step."""
        return self._step(state, batch, self.frozen)

    def evaluate(self, state: TrainState) -> dict:
        """Returns teacher-forced figures on held-out windows, and tau by real decoding."""
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
        rows, stats = head_eval.decode(
            self.target, self.spec.loaded(params), self._prompts, num_draft=options.num_draft,
            max_new_tokens=options.max_new_tokens, batch=options.batch,
            where=MeshOptions(self.placement.mesh),
        )  # fmt: skip
        self.evaluations.append(int(state.step), [row.stats for row in rows])
        held_out = {f"held_out_{name}": value for name, value in figures.items()}
        return held_out | head_eval.acceptance_figures(stats)


