r"""Trains a small language model on the standard library's source or texts, or distils one.

    python -m experiments.train_lm --config=configs/train_zoo_target.py --workdir=runs/zoo_target
    python -m experiments.train_lm --config=configs/train_zoo_draft.py --workdir=runs/draft \
        --config.teacher=PATH --config.data.text=chats.jsonl

A work directory with a checkpoint is resumed, bit for bit; SIGTERM or Ctrl-C saves a checkpoint
and ends the run. With ``config.teacher`` (a zoo name or a Hugging Face directory) the loss is the
KL divergence to that model, whose tokenizer is used. A run leaves config.json, environment.json,
report.json (with what was read of the data, what was left out and why), report.md, metrics.jsonl,
checkpoints/ and export/, a Hugging Face directory.
"""

from __future__ import annotations

import json
import pathlib

from absl import logging
from ml_collections import ConfigDict

from configs import train_zoo_target
from experiments.run import cli, report
from experiments.training import training_report, training_text
from experiments.training.lm_experiment import Experiment, check_resume, validate
from spec_jax.errors import ConfigError
from spec_jax.models import checkpoint
from spec_jax.models.params import num_params
from spec_jax.show.summary import count_text
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Log
from spec_jax.train.loop import train_loop


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, float] | None:
    """Runs or resumes the experiment.

    Args:
      config: See ``configs/train_zoo_target.py``.
      workdir: The run's folder.

    Returns:
      The final held-out figures; None if SIGTERM or Ctrl-C ended the run.

    Raises:
      ConfigError: A value that does not fit, or a work directory of another experiment.
      TrainingError: A loss that is not finite, or a checkpoint that cannot be saved or read.
    """
    validate(config)
    workdir = cli.make_workdir("train_lm", workdir).absolute()
    resolved = json.loads(config.to_json())
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        path, last = workdir / "config.json", checkpoints.last_step
        saved = None if last is None else cli.read_saved(path)
        if saved is not None:
            check_resume(saved, resolved | {"data_seen": saved.get("data_seen")}, last)
        experiment = Experiment(config, workdir)
        resolved["data_seen"] = experiment.fingerprint()
        if saved is not None:
            check_resume(saved, resolved, last)
        state = checkpoints.restore(experiment.init_state())
        first = int(state.step)
        head = report.begin("train_lm", workdir, resolved) | {"data": experiment.usage()}
        used = ["\n".join(training_text.usage_lines(found)) for found in head["data"]]
        training_report.write(workdir, "A language model", head, used)
        with Log(workdir, first, config.steps) as log:
            for found in used:
                log.say(found)
            log.say(
                f"{num_params(experiment.model_config) / 1e6:.2f}M parameters, "
                f"{count_text(len(experiment.text.tokens))} training tokens, from step "
                f"{first} of {config.steps}"
            )
            state, is_done = train_loop(
                state,
                step_fn=experiment.step,
                batch_at=experiment.batch_at,
                num_steps=config.steps,
                checkpoints=checkpoints,
                log=log,
                tokens_per_step=lambda batch: batch.shape[0] * (batch.shape[1] - 1),
                log_every=config.log_every,
                evaluate=experiment.evaluate,
                eval_every=config.eval_every,
                checkpoint_every_s=config.checkpoint_every_s,
            )
            if not is_done:
                log.say(f"to go on: {cli.command('train_lm')}")
                return None
            final = experiment.final_figures(state)
            log.write(config.steps, **{f"final_{k}": v for k, v in final.items()})
    checkpoint.save_pretrained(
        workdir / "export", state.params, experiment.model_config, experiment.tokenizer,
        dtype="bfloat16",
    )  # fmt: skip
    training_report.write(workdir, "A language model", head, used, final)
    print(f"exported to {workdir / 'export'}")
    return final


def main() -> None:
    if not _WORKDIR.value:
        raise ConfigError("--workdir is not given; expected the folder to train or resume in")
    logging.set_verbosity(logging.WARNING)  # orbax logs every step of a save
    train(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        train_zoo_target,
        "Folder of checkpoints, metrics and the exported model; resumed if it has any.",
    )  # fmt: skip
    cli.run(main)
