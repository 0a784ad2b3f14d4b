r"""Trains or distils a small language model.

    python -m experiments.train_lm --workdir=runs/zoo_target \
        --config=configs/train_zoo_target.py
    python -m experiments.train_lm --workdir=runs/draft \
        --config=configs/train_zoo_draft.py \
        --config.teacher=PATH --config.data.text=chats.jsonl

The text is the standard library's source, or yours. A work directory with a
checkpoint is resumed bit for bit. SIGTERM or Ctrl-C saves a checkpoint and ends
the run. With config.teacher (a zoo name or a Hugging Face directory) the loss
is the KL divergence to that model, and its tokenizer is used. A run leaves
config.json, environment.json, inputs.json, report.json (with the data that was
read, the data that was left out, and why), report.md, metrics.jsonl,
checkpoints/ and export/, a Hugging Face directory.
"""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from configs import train_zoo_target
from experiments.run import cli
from experiments.training import run
from experiments.training.lm import FREE, LmExperiment, validate


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, float] | None:
    """Runs or resumes the experiment.

    Args:
      config: See ``configs/train_zoo_target.py``.
      workdir: The run's folder.

    Returns:
      The final held-out figures; None if SIGTERM or Ctrl-C ended the run.

    Raises:
      ConfigError: A value does not fit, or the work directory is that of another experiment.
      TrainingError: A loss is not finite, or a checkpoint cannot be saved or read.
    """
    validate(config)
    return run.train(LmExperiment, "train_lm", config, workdir, FREE)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        train_zoo_target,
        "Folder of checkpoints, metrics and the exported model; resumed if it has any.",
    )
    cli.run(lambda: run.main(train, _CONFIG.value, _WORKDIR.value))
