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
import resource
import time

import jax
import orbax.checkpoint as ocp
from absl import flags, logging
from ml_collections import ConfigDict

from configs import train_zoo_target
from experiments import cli, lm_data
from spec_jax.data import tokens
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel, load_model
from spec_jax.models import weights
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import num_params
from spec_jax.train import lm


def validate(config: ConfigDict) -> None:
    """Raises ConfigError on an unknown key or a value that cannot be trained with."""
    cli.check_keys(config, train_zoo_target.get_config())
    positive = (
        "steps batch length long_batch long_length eval_batch eval_length log_every eval_every"
    )
    for name in positive.split():
        if config[name] < 1:
            raise ConfigError(f"{name} is {config[name]}; expected a positive integer")
    for name in ("long_share", "decay_share", "tests_share", "own_share"):
        if not 0.0 <= config[name] <= 1.0:
            raise ConfigError(f"{name} is {config[name]}; expected a number in [0, 1]")
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
    """``(params, batch, teacher's params) -> (loss, figures)``."""
    if teacher is None:
        return functools.partial(lm.lm_loss, config=model_config)
    return functools.partial(
        lm.distill_loss, config=model_config, teacher_config=teacher.config,
        ce_weight=config.ce_weight,
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
    free = ("steps", "log_every", "eval_every", "eval_windows", "checkpoint_every_s")
    changed = [k for k in config if k not in free and saved.get(k) != config[k]]
    if changed:
        raise ConfigError(
            f"the work directory holds a run with other values of {', '.join(changed)} "
            f"({saved.get(changed[0])!r}, not {config[changed[0]]!r}); expected the same config "
            "or an empty directory"
        )
    if saved["steps"] != config["steps"]:
        begin = min(
            min(lm.decay_begin(c["steps"], c["decay_share"]) for c in (saved, config)),
            min(c["steps"] - round(c["steps"] * c["long_share"]) for c in (saved, config)),
        )
        if step > begin:
            raise ConfigError(
                f"steps was {saved['steps']} and is now {config['steps']}, but the run is at step "
                f"{step}; it can change only up to step {begin}, before the schedule depends on it"
            )


class Log:
    """Appends figures to a JSONL file and prints them.

    ``cpu_s`` counts the CPU seconds of this process and of the ones it resumes.
    """

    def __init__(self, path: pathlib.Path, first_step: int):
        self._path, self._before_s = path, 0.0
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if first_step and lines:
            self._before_s = max(json.loads(line)["cpu_s"] for line in lines)

    def write(self, step: int, **figures) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = self._before_s + used.ru_utime + used.ru_stime
        figures = {"step": step, **figures, "cpu_s": round(cpu_s, 1)}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
        show = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v)
        print(" ".join(f"{k}={show(v)}" for k, v in figures.items()), flush=True)


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, float]:
    """Runs or resumes the experiment; returns the final held-out figures.

    Raises:
      ConfigError: a value that cannot be, or a work directory of another experiment.
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
    optimizer = lm.make_optimizer(
        **config.optimizer, steps=config.steps, decay_share=config.decay_share
    )
    loss = make_loss(config, model_config, teacher)
    own = lm_data.continuations(config, teacher, text, workdir / "continuations.npy")
    state = lm.init_state(model_config, optimizer, jax.random.key(config.seed))
    step_fn = jax.jit(
        functools.partial(lm.train_step, loss=loss, optimizer=optimizer), donate_argnums=0
    )
    teacher_params = None if teacher is None else teacher.params
    eval_fn = jax.jit(loss)
    held_out_loss = lambda batch: eval_fn(state.params, batch, teacher_params)
    bits_per_nat_token = len(held_out) / held_out_bytes / math.log(2)

    resolved = json.loads(config.to_json())
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(workdir / "checkpoints", options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            check_resume(json.loads((workdir / "config.json").read_text()), resolved, first)
            state = manager.restore(first, args=ocp.args.StandardRestore(state))
        (workdir / "config.json").write_text(json.dumps(resolved, indent=2) + "\n")
        log = Log(workdir / "metrics.jsonl", first)
        print(
            f"{num_params(model_config) / 1e6:.2f}M parameters, {len(text) / 1e6:.2f}M training "
            f"tokens, {len(held_out)} held-out tokens, from step {first} of {config.steps}",
            flush=True,
        )
        saved_s = began_s = time.monotonic()
        seen = 0
        for step in range(first, config.steps):
            batch = lm_data.batch_for(config, text, own, step)
            state, metrics = step_fn(state, batch, teacher_params)
            done = step + 1
            seen += batch.shape[0] * (batch.shape[1] - 1)
            if done % config.log_every == 0 or done == config.steps:
                metrics = {k: float(v) for k, v in metrics.items()}
                wall_s = time.monotonic() - began_s
                eta_min = wall_s / (done - first) * (config.steps - done) / 60
                log.write(done, **metrics, tok_s=round(seen / wall_s), eta_min=round(eta_min, 1))
                if not math.isfinite(metrics["loss"]):
                    raise ConfigError(
                        f"the loss is {metrics['loss']} at step {done}; lower the rates"
                    )
            if done % config.eval_every == 0:
                figures = evaluate(held_out_loss, held_out, config, config.eval_windows)
                log.write(done, **{f"held_out_{k}": v for k, v in figures.items()})
            if time.monotonic() - saved_s > config.checkpoint_every_s or done == config.steps:
                manager.save(done, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
                saved_s = time.monotonic()
    final = evaluate(held_out_loss, held_out, config)
    final["bits_per_byte"] = final.get("ce", final["loss"]) * bits_per_nat_token
    log.write(config.steps, **{f"final_{k}": v for k, v in final.items()})
    weights.save_pretrained(
        workdir / "export", state.params, model_config, tokenizer, dtype="bfloat16"
    )
    print(f"exported to {workdir / 'export'}")
    return final


def main() -> None:
    if not workdir.value:
        raise ConfigError("--workdir is not given; expected the folder to train or resume in")
    logging.set_verbosity(logging.WARNING)  # orbax tells every step of a save
    train(config.value, workdir.value)


if __name__ == "__main__":
    config = cli.define_config("train_zoo_target.py", train_zoo_target.get_config)
    workdir = flags.DEFINE_string("workdir", None, "Checkpoints, metrics and the exported model.")
    cli.run(main)
