"""Trains a draft head for a target, and evaluates it by real speculative decoding.

    python -m experiments.train_head --workdir=runs/eagle3
    python -m experiments.train_head --config=configs/train_zoo_eagle1.py --workdir=runs/eagle1
    python -m experiments.train_head --config.target=PATH --config.data.text=PREFIX --workdir=DIR

A work directory with a checkpoint is resumed, bit for bit; SIGTERM or Ctrl-C saves a checkpoint
and ends the run. A run leaves config.json, environment.json, report.json (with what was read of the
data, what was left out and why), report.md, metrics.jsonl, tensorboard/, evaluations.jsonl (what
each prompt took at each evaluation), checkpoints/ (the newest, and the one with the highest tau),
training.png and export/, a head that spec_jax and other engines load.
"""

from __future__ import annotations

import json
import pathlib

from absl import logging
from ml_collections import ConfigDict

from configs import train_head_default
from experiments.run import cli, report
from experiments.training import head_choice, training_report, training_text
from experiments.training.head_experiment import Experiment, validate
from spec_jax.errors import ConfigError, TrainingError
from spec_jax.show.summary import count_text
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Log, read_metrics
from spec_jax.train.loop import train_loop
from spec_jax.train.objective import chain_rates

_FREE = (
    "log_every", "checkpoint_every_s", "export_layout", "export_dtype", "export_from", "eval",
    "mesh", "is_fully_sharded",
)  # fmt: skip
_FREE_DATA = ("view_cache", "view_cache_gb")


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, float] | None:
    """Runs or resumes the experiment.

    Args:
      config: See ``configs/train_head_default.py``.
      workdir: The run's folder.

    Returns:
      Tau and step of the exported state; None if SIGTERM or Ctrl-C ended the run.

    Raises:
      ConfigError: A value that does not fit, or a work directory of another experiment.
      TrainingError: A loss that is not finite, or a checkpoint that cannot be saved or read.
    """
    validate(config)
    workdir = cli.make_workdir("train_head", workdir).absolute()
    resolved = json.loads(config.to_json())
    for name in _FREE_DATA:
        del resolved["data"][name]
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        path = workdir / "config.json"
        saved = cli.read_saved(path) if checkpoints.last_step is not None else None
        if saved is not None:
            cli.check_same(saved, resolved | {"data_seen": saved.get("data_seen")}, _FREE)
        experiment = Experiment(config, workdir)
        resolved["data_seen"] = experiment.fingerprint()
        if saved is not None:
            cli.check_same(saved, resolved, _FREE)
        state = checkpoints.restore(experiment.init_state())
        first = int(state.step)
        head = report.begin("train_head", workdir, resolved)
        tokens = sum(len(text.tokens) for text in experiment.texts)
        head["data"] = experiment.usage()
        used = ["\n".join(training_text.usage_lines(found)) for found in head["data"]]
        training_report.write(workdir, "A head", head, used)
        with Log(workdir, first, config.steps) as log:
            for found in used:
                log.say(found)
            found, asked = experiment.num_prompts, config.eval.num_prompts
            few = f" of {asked}: the held-out text has no more places" if found < asked else ""
            log.say(
                f"{experiment.spec.num_params / 1e6:.2f}M parameters, "
                f"{count_text(tokens)} training tokens, from step {first} of "
                f"{config.steps}; prompts that tau is measured on: {found}{few}"
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
            print(f"to go on: {cli.command('train_head')}")
            return None
        kept, (step, tau) = state, checkpoints.best
        is_last = config.export_from == "last"
        if not is_last:
            try:
                kept = checkpoints.restore_best(state)
            except TrainingError as error:
                print(f"{error}; the last state is exported instead")
                is_last = True
    metrics = read_metrics(workdir / "metrics.jsonl")
    if is_last:
        step = int(state.step)
        of_step = [row["tau"] for row in metrics if "tau" in row and row["step"] == step]
        tau = of_step[-1] if of_step else float("nan")
    from experiments.run import plots  # needs matplotlib, slow to import

    plots.plot_training(workdir / "training.png", metrics)
    experiment.spec.export(workdir / "export", kept.params, experiment.target, config)
    final = {"tau": tau, "step": step}
    choice = experiment.evaluations.choice(step)
    said = f"tau {tau:.2f} at step {step}" if choice is None else head_choice.describe(choice)
    head["choice"] = choice
    training_report.write(workdir, "A head", head, [said, *used], final, ("training.png",))
    print(f"{said}; exported to {workdir / 'export'}")
    return final


def main() -> None:
    if not _WORKDIR.value:
        raise ConfigError("--workdir is not given; expected the folder to train or resume in")
    logging.set_verbosity(logging.WARNING)  # orbax logs every step of a save
    cli.enable_compilation_cache()
    train(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        train_head_default,
        "Folder of checkpoints, metrics and the exported head; resumed if it has any.",
    )  # fmt: skip
    cli.run(main)
