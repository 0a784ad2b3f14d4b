r"""Trains a model by GRPO, with rollouts that decode speculatively.

    python -m experiments.rl --workdir=runs/rl
    python -m experiments.rl --workdir=DIR --config.drafter=zoo/eagle3 \
        --config.compare_every=5
    python -m experiments.rl --workdir=DIR --config.target=PATH \
        --config.prompts=questions.jsonl --config.reward=my_rewards:brief

A reward is a function of prompt and output, module:function. With the strategy
match the tokens are those of plain decoding, so drafts change the time of a
step and not what is learned. A work directory with a checkpoint is resumed bit
for bit. SIGTERM or Ctrl-C saves a checkpoint and ends the run. A run leaves
config.json, environment.json, inputs.json, report.json, report.md, report.html
(reward, KL, tau, rollout tokens a second and share of a step by step),
metrics.jsonl, checkpoints/, rl.png and export/, a Hugging Face directory.
"""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from configs import rl
from experiments.grpo.experiment import FREE, RlExperiment, validate
from experiments.run import cli
from experiments.training import run


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, float] | None:
    """Runs or resumes the experiment.

    Args:
      config: See ``configs/rl.py``.
      workdir: The run's folder.

    Returns:
      The final figures; None if SIGTERM or Ctrl-C ended the run.

    Raises:
      ConfigError: A value does not fit, or the work directory is that of another experiment.
      TrainingError: A reward or a loss is not a finite number, a row has a fault, or a checkpoint
        cannot be saved or read.
    """
    validate(config)
    return run.train(RlExperiment, "rl", config, workdir, FREE)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        rl, "Folder of checkpoints, metrics and the trained model; resumed if it has any."
    )
    cli.run(lambda: run.main(train, _CONFIG.value, _WORKDIR.value))
