r"""Trains a draft head, and evaluates it by real speculative decoding.

    python -m experiments.train_head --workdir=runs/eagle3
    python -m experiments.train_head --workdir=runs/eagle1 \
        --config=configs/train_zoo_eagle1.py
    python -m experiments.train_head --workdir=DIR --config.target=PATH \
        --config.data.text=PREFIX

A work directory with a checkpoint is resumed bit for bit. SIGTERM or Ctrl-C
saves a checkpoint and ends the run. A run leaves config.json, environment.json,
inputs.json, report.json (with the data that was read, the data that was left
out, and why), report.md, metrics.jsonl, tensorboard/, evaluations.jsonl (the
figures of each prompt at each evaluation), checkpoints/ (the newest, and the
one with the highest tau), training.png and export/, a head that spec_jax and
other engines load.
"""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from configs import train_head_default
from experiments.run import cli
from experiments.training import run
from experiments.training.head import HeadExperiment, validate

_FREE = ("log_every", "checkpoint_every_s", "export_format", "export_dtype", "export_from")
_FREE += ("export_with_target",)
_FREE += ("eval", "mesh", "is_fully_sharded")
_FREE_DATA = ("view_cache", "view_cache_gb")


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, float] | None:
    """Runs or resumes the experiment.

    Args:
      config: See ``configs/train_head_default.py``.
      workdir: The run's folder.

    Returns:
      Tau and step of the exported state; None if SIGTERM or Ctrl-C ended the run.

    Raises:
      ConfigError: A value does not fit, or the work directory is that of another experiment.
      TrainingError: A loss is not finite, or a checkpoint cannot be saved or read.
    """
    validate(config)
    return run.train(HeadExperiment, "train_head", config, workdir, _FREE, _FREE_DATA)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        train_head_default,
        "Folder of checkpoints, metrics and the exported head; resumed if it has any.",
    )
    cli.run(lambda: run.main(train, _CONFIG.value, _WORKDIR.value))
