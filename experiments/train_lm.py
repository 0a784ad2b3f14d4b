"""Trains a small language model on the standard library's source, or distils one.

    python -m experiments.train_lm --config=configs/train_zoo_target.py --workdir=runs/zoo_target

A work directory that holds a checkpoint is resumed, bit for bit. With ``config.teacher``
(a zoo name or a Hugging Face directory) the loss is the KL divergence to that model, and
its tokenizer is used. A run leaves config.json, metrics.jsonl, checkpoints/ and export/, a
Hugging Face directory.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib

import jax
from absl import logging
from ml_collections import ConfigDict

from configs import train_zoo_target
from experiments.common import cli, head_eval, lm_data
from experiments.common.prompts import fit, load_prompts
from spec_jax.data import tokens
from spec_jax.drafters.standalone import objective
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel, load_model
from spec_jax.models import checkpoint, transformer
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import num_params
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Log
from spec_jax.train.loop import train_loop
from spec_jax.train.optimizer import decay_begin, make_optimizer
from spec_jax.train.step import TrainState, train_step


def validate(config: ConfigDict) -> None:
    """Raises ConfigError on an unknown key or a value that cannot be trained with."""
    cli.check_keys(config, train_zoo_target.get_config())
    positive = (
        "steps batch length long_batch long_length eval_batch eval_length log_every eval_every"
    )
    for name in positive.split():
        if config[name] < 1:
            raise ConfigError(f"{name} is {config[name]}; expected a positive integer")
    shares = {n: config[n] for n in ("long_share", "tests_share", "own_share")}
    for name, value in {**shares, "decay_share": config.optimizer.decay_share}.items():
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{name} is {value}; expected a number in [0, 1]")
    longest = max(config.length, config.long_length, config.eval_length)
    if longest > config.model.max_position_embeddings:
        raise ConfigError(
            f"windows of {longest} tokens exceed max_position_embeddings "
            f"{config.model.max_position_embeddings}"
        )


def load_teacher(config: ConfigDict) -> LoadedModel | None:
    """The model to distil from, or None.

    Raises:
      ConfigError: a teacher without a tokenizer.
      WeightsError: no such model.
    """
    if not config.teacher:
        return None
    teacher = load_model(config.teacher)
    if teacher.tokenizer is None:
        raise ConfigError(f"the teacher {config.teacher} has no tokenizer; expected tokenizer.json")
    return teacher


def make_loss(config: ConfigDict, model_config: ModelConfig, teacher: LoadedModel | None):
    """The objective, ``(params, batch, teacher's params) -> (loss, figures)``."""
    if teacher is None:
        return functools.partial(objective.lm_loss, config=model_config)
    return functools.partial(
        objective.distill_loss, config=model_config, teacher_config=teacher.config,
        ce_weight=config.ce_weight, divergence=config.divergence,
    )  # fmt: skip


def evaluate(loss, text, config: ConfigDict, n_windows: int | None = None) -> dict[str, float]:
    """Means of ``loss(batch)`` over held-out windows (all of them, or the first ``n_windows``)."""
    found = tokens.windows(text, config.eval_length)[:n_windows]
    sums, count = {}, 0
    for i in range(0, len(found), config.eval_batch):
        part = found[i : i + config.eval_batch]
        value, figures = loss(part)
        for name, x in {"loss": value, **figures}.items():
            sums[name] = sums.get(name, 0.0) + float(x) * len(part)
        count += len(part)
    return {name: total / count for name, total in sums.items()}


def check_resume(saved: dict, config: dict, step: int) -> None:
    """Refuses to resume another experiment; ``steps`` may change until the decay begins."""
    free = (
        "steps", "log_every", "eval_every", "eval_windows", "eval_prompts", "eval_new_tokens",
        "eval_num_draft", "checkpoint_every_s",
    )  # fmt: skip
    cli.check_same(saved, config, free)
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


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, float] | None:
    """Runs or resumes the experiment; returns the final held-out figures, None after SIGTERM.

    Raises:
      ConfigError: a value that cannot be, or a work directory of another experiment.
      TrainingError: a loss that is not finite, or a checkpoint that cannot be kept or read.
    """
    validate(config)
    workdir = pathlib.Path(workdir).absolute()
    workdir.mkdir(parents=True, exist_ok=True)
    teacher = load_teacher(config)
    tokenizer, text, held_out, held_out_bytes = lm_data.load_text(config, teacher)
    end = tokenizer.token_id(tokens.END_OF_TEXT)
    model_config = ModelConfig(
        vocab_size=tokenizer.vocab_size, bos_token_id=end, eos_token_id=(end,), **config.model
    )
    optimizer = make_optimizer(**config.optimizer, steps=config.steps)
    loss = make_loss(config, model_config, teacher)
    own = lm_data.continuations(config, teacher, text, workdir / "continuations.npy")
    step_fn = jax.jit(
        functools.partial(train_step, objective=loss, optimizer=optimizer), donate_argnums=0
    )
    teacher_params = None if teacher is None else teacher.params
    eval_fn = jax.jit(loss)
    held_out_figures = lambda state, count=None: evaluate(
        lambda batch: eval_fn(state.params, batch, teacher_params), held_out, config, count
    )

    def drafted(state) -> dict:
        """Tau and acceptance of the draft so far, by real decoding of held-out prompts."""
        if teacher is None or not config.eval_prompts:
            return {}
        model = transformer.model(model_config, num_tokens=tokenizer.num_ids)
        draft = LoadedModel("draft", model, state.params, tokenizer, model_config)
        prompts = load_prompts("", config.eval_prompts, seed=0)
        ids, _ = fit(prompts, [teacher, draft], config.eval_new_tokens, None)
        _, stats = head_eval.decode(
            teacher, draft, ids, num_draft=config.eval_num_draft, batch=len(ids),
            max_new_tokens=config.eval_new_tokens,
        )  # fmt: skip
        return head_eval.acceptance_figures(stats)

    resolved = json.loads(config.to_json())
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        if checkpoints.last_step is not None:
            saved = json.loads((workdir / "config.json").read_text())
            check_resume(saved, resolved, checkpoints.last_step)
        params = transformer.init_params(model_config, jax.random.key(config.seed))
        state = checkpoints.restore(TrainState.create(params, optimizer))
        first = int(state.step)
        checkpoint.write_json(workdir / "config.json", resolved)
        with Log(workdir, first, config.steps) as log:
            log.say(
                f"{num_params(model_config) / 1e6:.2f}M parameters, {len(text) / 1e6:.2f}M "
                f"training tokens, {len(held_out)} held-out tokens, from step {first} of "
                f"{config.steps}"
            )
            state, is_done = train_loop(
                state,
                step_fn=lambda state, batch: step_fn(state, batch, teacher_params),
                batch_at=lambda step: lm_data.batch_for(config, text, own, step),
                num_steps=config.steps,
                checkpoints=checkpoints,
                log=log,
                tokens_per_step=lambda batch: batch.shape[0] * (batch.shape[1] - 1),
                log_every=config.log_every,
                evaluate=lambda state: {
                    f"held_out_{name}": value
                    for name, value in held_out_figures(state, config.eval_windows).items()
                } | drafted(state),
                eval_every=config.eval_every,
                checkpoint_every_s=config.checkpoint_every_s,
            )
            if not is_done:
                return None
            final = held_out_figures(state)
            bits_per_nat_token = len(held_out) / held_out_bytes / math.log(2)
            final["bits_per_byte"] = final.get("ce", final["loss"]) * bits_per_nat_token
            log.write(config.steps, **{f"final_{k}": v for k, v in final.items()})
    checkpoint.save_pretrained(
        workdir / "export", state.params, model_config, tokenizer, dtype="bfloat16"
    )
    print(f"exported to {workdir / 'export'}")
    return final


def main() -> None:
    if not _WORKDIR.value:
        raise ConfigError("--workdir is not given; expected the folder to train or resume in")
    logging.set_verbosity(logging.WARNING)  # orbax tells every step of a save
    train(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        train_zoo_target,
        "Folder of checkpoints, metrics and the exported model; resumed if it has any.",
    )  # fmt: skip
    cli.run(main)
