"""The experiment of ``experiments.train_lm``: data, model, loss, and the loop's functions."""

from __future__ import annotations

import functools
import math
import pathlib

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import train_zoo_target
from experiments.run import cli
from experiments.training import lm_data, training_text
from spec_jax.data import tokens
from spec_jax.drafters.standalone import objective
from spec_jax.errors import ConfigError
from spec_jax.evaluation import head_eval
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.loading import LoadedModel, load_model
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import placement
from spec_jax.sharding import replicate
from spec_jax.train.optimizer import decay_begin, make_optimizer
from spec_jax.train.placement import Placement
from spec_jax.train.step import TrainState, train_step

_FREE = (
    "steps", "log_every", "eval_every", "eval_windows", "eval_prompts", "eval_new_tokens",
    "eval_prompt_tokens", "eval_num_draft", "checkpoint_every_s", "mesh", "is_fully_sharded",
)  # fmt: skip


def validate(config: ConfigDict) -> None:
    """Raises ConfigError if a key is unknown or a value cannot be trained with."""
    cli.check_keys(config, train_zoo_target.get_config())
    cli.require_positive(
        config,
        "steps batch length long_batch long_length eval_batch eval_length log_every eval_every",
    )
    training_text.validate(config)
    for name in ("long_share", "own_share", "optimizer.decay_share"):
        share = config.optimizer.decay_share if "." in name else config[name]
        cli.require(0.0 <= share <= 1.0, config, name, "a number in [0, 1]")
    longest = max(config.length, config.long_length, config.eval_length)
    if longest > config.model.max_position_embeddings:
        raise ConfigError(
            f"windows of {longest} tokens exceed max_position_embeddings "
            f"{config.model.max_position_embeddings}"
        )


def load_teacher(config: ConfigDict, placement: Placement) -> LoadedModel | None:
    """Loads the model to distil from, or returns None.

    Raises:
      ConfigError: The teacher has no tokenizer.
      WeightsError: No such model.
    """
    if not config.teacher:
        return None
    teacher = load_model(config.teacher, mesh=placement.mesh, rules=placement.rules)
    if teacher.tokenizer is None:
        raise ConfigError(f"the teacher {config.teacher} has no tokenizer; expected tokenizer.json")
    return teacher


def make_loss(config: ConfigDict, model_config: ModelConfig, teacher: LoadedModel | None):
    """Returns the loss, ``(params, batch, teacher's params) -> (loss, figures)``."""
    if teacher is None:
        return functools.partial(objective.lm_loss, config=model_config)
    return functools.partial(
        objective.distill_loss, config=model_config, teacher_config=teacher.config,
        ce_weight=config.ce_weight, divergence=config.divergence,
    )  # fmt: skip


def check_resume(saved: dict, config: dict, step: int) -> None:
    """Checks that a run can be resumed; ``steps`` may change until the decay begins.

    Args:
      saved: The config of the run so far.
      config: The config to resume with.
      step: The step of the last checkpoint.

    Raises:
      ConfigError: It is another experiment, or too late to change ``steps``.
    """
    cli.check_same(saved, config, _FREE)
    if saved["steps"] != config["steps"]:
        begin = min(
            min(decay_begin(c["steps"], c["optimizer"]["decay_share"]) for c in (saved, config)),
            min(c["steps"] - round(c["steps"] * c["long_share"]) for c in (saved, config)),
        )
        if step > begin:
            raise ConfigError(
                f"steps was {saved['steps']} and is now {config['steps']}, but the run is at step "
                f"{step}; it can change only up to step {begin}, before the schedule depends on it"
            )


class Experiment:
    """Data, model, loss, and the functions that the training loop calls."""

    def __init__(self, config: ConfigDict, workdir: pathlib.Path):
        self.placement = Placement.of(config.mesh, config.is_fully_sharded)
        self.placement.check_batch("batch", config.batch)
        if round(config.steps * config.long_share):
            self.placement.check_batch("long_batch", config.long_batch)
        mesh, rules = self.placement.mesh, self.placement.rules
        self.config, self.teacher = config, load_teacher(config, self.placement)
        self.tokenizer, self.text, self.held_out = lm_data.load_text(
            config, self.teacher, workdir / "data"
        )
        training_text.check_held_out(
            self.held_out, config.eval_length + 1, config.data, "eval_length"
        )
        end = tokens.separator_id(self.tokenizer)
        self.model_config = ModelConfig(
            vocab_size=self.tokenizer.vocab_size, bos_token_id=end, eos_token_id=(end,),
            **config.model,
        )  # fmt: skip
        self.optimizer = make_optimizer(**config.optimizer, steps=config.steps)
        loss = make_loss(config, self.model_config, self.teacher)
        self.own = lm_data.continuations(
            config, self.teacher, self.text, workdir / "continuations.npy"
        )
        self._batches = lm_data.batches(config, self.text, self.own)
        step = functools.partial(train_step, objective=loss, optimizer=self.optimizer)
        self._where = mesh and self.placement.state_shardings(
            placement("the model", self.model_config, mesh, rules), self._make, self._key()
        )
        self._step = self.placement.jit_step(step, self._where)
        self._loss = self.placement.jit(lambda *args: replicate(loss(*args)))
        self._teacher_params = None if self.teacher is None else self.teacher.params

    def init_state(self) -> TrainState:
        """Returns new parameters, the same for the same seed."""
        return self.placement.create(self._make, self._where, self._key())

    def _key(self) -> jax.Array:
        return jax.random.key(self.config.seed)

    def _make(self, key: jax.Array) -> TrainState:
        params = transformer.init_params(self.model_config, key)
        return TrainState.create(params, self.optimizer)

    def step(self, state: TrainState, batch: np.ndarray) -> tuple[TrainState, dict]:
        """Trains one step."""
        return self._step(state, self.placement.place(batch), self._teacher_params)

    def batch_at(self, step: int) -> np.ndarray:
        """Returns the windows of a step."""
        return self._batches(step)

    def fingerprint(self) -> dict:
        """Returns checksums of the training data; a resumed run must have the same."""
        return training_text.fingerprint([self.text])

    def usage(self) -> list[dict]:
        """Returns what of each text is used, and what is left out and why."""
        trained = [text for text in (self.text, self.own) if text is not None]
        lengths = [self.config.length + 1] * len(trained) + [self.config.eval_length + 1]
        return list(map(training_text.usage, [*trained, self.held_out], lengths))

    def held_out_figures(self, state: TrainState, n_windows: int | None = None) -> dict:
        """Returns means over held-out windows: all of them, or the first ``n_windows``."""
        length = self.config.eval_length + 1
        count = min(self.held_out.num_windows(length), n_windows or len(self.held_out.tokens))
        sums, size = {}, self.config.eval_batch
        for i in range(0, count, size):
            rows = [self.held_out.window(j, length) for j in range(i, min(i + size, count))]
            part = self.placement.place(np.stack([row["tokens"] for row in rows]))
            value, figures = self._loss(state.params, part, self._teacher_params)
            for name, x in {"loss": value, **figures}.items():
                sums[name] = sums.get(name, 0.0) + float(x) * len(part)
        return {name: total / count for name, total in sums.items()}

    def evaluate(self, state: TrainState) -> dict:
        """Returns held-out figures; of a draft also tau and acceptance by real decoding."""
        config, teacher, mesh = self.config, self.teacher, self.placement.mesh
        figures = self.held_out_figures(state, config.eval_windows)
        figures = {f"held_out_{name}": value for name, value in figures.items()}
        if teacher is None or not config.eval_prompts:
            return figures
        model = transformer.model(self.model_config, num_tokens=self.tokenizer.num_ids)
        draft = LoadedModel("draft", model, state.params, self.tokenizer, self.model_config)
        ids = training_text.prompts(
            self.held_out, config.data, [teacher, draft], num_prompts=config.eval_prompts,
            prompt_tokens=config.eval_prompt_tokens, max_new_tokens=config.eval_new_tokens,
        )  # fmt: skip
        _, stats = head_eval.decode(
            teacher, draft, ids, num_draft=config.eval_num_draft, batch=len(ids),
            max_new_tokens=config.eval_new_tokens, where=MeshOptions(mesh),
        )  # fmt: skip
        return figures | head_eval.acceptance_figures(stats)

    def final_figures(self, state: TrainState) -> dict[str, float]:
        """Returns figures over all held-out windows, and bits per byte of the held-out text."""
        final = self.held_out_figures(state)
        ids = self.held_out.tokens.tolist()
        num_bytes = len(self.tokenizer.backend.decode(ids, skip_special_tokens=True).encode())
        bits_per_nat_token = len(ids) / num_bytes / math.log(2)
        return final | {"bits_per_byte": final.get("ce", final["loss"]) * bits_per_nat_token}
