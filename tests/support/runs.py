"""What every run of an experiment leaves in its folder."""

import contextlib
import itertools
import json
import pathlib
from collections.abc import Iterator

import pytest

from experiments.run import report
from experiments.run.journal import Journal


def check_run_files(folder: pathlib.Path, experiment: str) -> dict:
    """Asserts that the four files are there and agree, and returns the report."""
    config, environment, rep = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in report.FILES[:3]
    )
    assert rep["config"] == config and rep["environment"] == environment
    assert {"python", "jax", "spec_jax", "devices", "cores", "time"} <= set(environment)
    assert rep["command"].startswith(f"python -m experiments.{experiment}")
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# ") and f"`{rep['command']}`" in text
    assert environment["cpu_model"] in text and f"jax {environment['jax']}" in text
    assert environment["platform"] in text
    return rep


class Stopped(Exception):
    """What ends a run in ``stopped_at`` and ``killed_at``."""


@contextlib.contextmanager
def stopped_at(experiment: type, step: int) -> Iterator[None]:
    """A block in which a run of an experiment ends before the batch of a step."""
    whole = experiment.batch_at

    def batch_at(self, number):
        if number == step:
            raise Stopped
        return whole(self, number)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(experiment, "batch_at", batch_at)
        yield


@contextlib.contextmanager
def killed_at(file: str, count: int) -> Iterator[None]:
    """A block in which a run ends once it has written so many groups of lines to a file."""
    append, left = Journal.append, itertools.count(count, -1)

    def until_none_is_left(self, rows):
        if self.path.name == file and not next(left):
            raise Stopped
        append(self, rows)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Journal, "append", until_none_is_left)
        yield
