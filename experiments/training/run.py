"""What every training experiment does: it begins or resumes a run, trains, and reports."""

from __future__ import annotations

import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from absl import logging
from ml_collections import ConfigDict

from experiments.run import cli, report
from experiments.training import text as texts
from experiments.training.choice import EVALUATIONS
from spec_jax.data.batches import Corpus
from spec_jax.errors import ConfigError
from spec_jax.progress import Notice
from spec_jax.show.tables import Section, Table
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Log, read_metrics
from spec_jax.train.loop import train_loop
from spec_jax.train.optimizer import decay_begin, set_end
from spec_jax.train.step import TrainState

_TRIAL_STEPS = 4  # of which the first compiles
_TRIAL_S = 2.0


class Exported(NamedTuple):
    """What a finished run has exported.

    Attributes:
      figures: Its figures by name.
      summary: A sentence on it; empty if the figures say all.
      plots: Files of the run's folder that the report shows.
      record: Further entries of report.json.
    """

    figures: dict[str, float]
    summary: str = ""
    plots: Sequence[str] = ()
    record: Mapping[str, Any] = {}


class Experiment(Protocol):
    """What a run trains.

    Attributes:
      title: The heading of the report.
      trained: The texts whose checksums a resumed run must share.
      windows: Every text that is read, with the tokens of its windows.
      summary: What is trained on what, for the log.
      loop: Further arguments of ``train_loop``, which differ between experiments.
    """

    title: str
    trained: Sequence[Corpus]
    windows: Sequence[tuple[Corpus, int]]
    summary: str
    loop: Mapping[str, Any]

    def init_state(self) -> TrainState:
        """Returns new parameters, the same for the same seed."""

    def begin(self, state: TrainState) -> TrainState:
        """Returns the state before the first step from new parameters, the same for a seed."""

    def batch_at(self, step: int) -> Any:
        """Returns the batch of a step, a function of the seed and the step."""

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict]:
        """Trains one step."""

    def evaluate(self, state: TrainState) -> dict:
        """Returns held-out figures."""

    def export(
        self, folder: pathlib.Path, state: TrainState, saved: Checkpoints, log: Log
    ) -> Exported:
        """Exports a state of the finished run.

        Args:
          folder: The folder of the run; the export is its ``export``.
          state: The last state.
          saved: The checkpoints of the run.
          log: Gets further figures.
        """


def train(
    make: Callable[[ConfigDict, pathlib.Path], Experiment],
    name: str,
    config: ConfigDict,
    workdir: str | pathlib.Path,
    free: Sequence[str],
    hidden: Sequence[str] = (),
) -> dict[str, float] | None:
    """Runs or resumes an experiment.

    Args:
      make: Makes the experiment from the config and the run's folder.
      name: The module of the main.
      config: The experiment's config, which was validated.
      workdir: The run's folder.
      free: Keys that may change, and whose files may, before a run goes on; and ``steps`` may until
        the schedule depends on it.
      hidden: Keys of ``config.data`` that are not part of the saved config.

    Returns:
      The figures of the export; None if SIGTERM or Ctrl-C ended the run.

    Raises:
      ConfigError: The work directory holds another experiment.
      TrainingError: A loss that is not finite, or a checkpoint that cannot be saved or read.
    """
    begin_s = time.monotonic()
    free = free if config.get("minutes") else (*free, "steps")
    folder = cli.make_workdir(name, workdir).absolute()
    resolved = json.loads(config.to_json())
    for key in hidden:
        del resolved["data"][key]
    with Checkpoints(folder / "checkpoints") as checkpoints:
        last = checkpoints.last_step or 0
        # A run that has no checkpoint yet may have its best state, and evaluations.
        is_begun = last or checkpoints.best or (folder / EVALUATIONS).exists()
        saved = cli.read_saved(folder / "config.json") if is_begun else None
        sums = {}
        if saved is not None:  # before the data is read, which may take long
            cli.check_same(saved, resolved | {"data_seen": saved.get("data_seen")}, free)
            _check_steps(saved, resolved, last)
            sums = cli.inputs_of(resolved, free)
            cli.check_inputs(folder, sums, is_loaded=False)
        with Notice("loading models and reading text", is_line=True):
            experiment = make(config, folder)
        sums = cli.inputs_of(resolved, free, sums)  # now a model of the hub is in its cache
        resolved["data_seen"] = texts.fingerprint(experiment.trained)
        if saved is not None:
            sums = cli.check_inputs(folder, sums)
            cli.check_same(saved, resolved, free)
        state = checkpoints.restore(experiment.init_state())
        first = int(state.step)
        if not first:
            state = experiment.begin(state)
        usage = [texts.usage(corpus, length) for corpus, length in experiment.windows]
        entries = report.begin(name, folder, resolved) | {"data": usage}
        report.write_json(folder / cli.INPUTS, sums)
        used = ["\n".join(texts.usage_lines(one)) for one in usage]
        _write_report(folder, experiment.title, entries, used)
        num_steps = config.steps
        if minutes := config.get("minutes"):
            num_steps = int(state.opt_state.end)
            if not num_steps:  # a new run
                left_s = begin_s + 60 * minutes - time.monotonic()
                num_steps = steps_within(experiment, left_s, config.steps)
                state = state.replace(opt_state=set_end(state.opt_state, num_steps))
        with Log(folder, first, num_steps) as log:
            for line in used:
                log.say(line)
            log.say(f"{experiment.summary}, from step {first} of {num_steps}")
            state, is_done = train_loop(
                state,
                step_fn=experiment.step,
                batch_at=experiment.batch_at,
                num_steps=num_steps,
                checkpoints=checkpoints,
                log=log,
                log_every=config.log_every,
                checkpoint_every_s=config.checkpoint_every_s,
                **{"evaluate": experiment.evaluate, **experiment.loop},
            )
            if not is_done:
                log.say(f"to go on: {cli.command(name)}")
                return None
            log.now("exporting")
            exported = experiment.export(folder, state, checkpoints, log)
    _write_report(folder, experiment.title, entries, used, exported)
    summary = [exported.summary] if exported.summary else []
    print("; ".join([*summary, f"exported to {folder / 'export'}"]))
    return exported.figures


def _check_steps(saved: dict, config: dict, step: int) -> None:
    """Raises ConfigError if it is too late to change ``steps``."""

    def begin(values):
        """Until which step any larger ``steps`` would give the same run."""
        steps = values["steps"]
        share = values["optimizer"].get("decay_share")
        if share is None:  # constant rates
            return math.inf
        long = steps - round(steps * values.get("long_share", 0))  # of train_lm: of short windows
        return min(decay_begin(steps, share), long)

    last = min(begin(saved), begin(config))
    if saved["steps"] != config["steps"] and step > last:
        raise ConfigError(
            f"steps was {saved['steps']} and is now {config['steps']}, but the run is at step "
            f"{step}; it can change only up to step {last}, before the schedule depends on it"
        )


def seconds_per_step(experiment: Experiment) -> float:
    """Returns how long a step takes, without compilation. The steps are not part of the run."""
    state = experiment.init_state()
    begin_s = math.inf
    step = 0
    while step < _TRIAL_STEPS or time.monotonic() - begin_s < _TRIAL_S:
        state, figures = experiment.step(state, experiment.batch_at(step))
        jax.block_until_ready(figures)
        begin_s = min(begin_s, time.monotonic())  # after the first one, which compiles
        step += 1
    return (time.monotonic() - begin_s) / (step - 1)


def steps_within(experiment: Experiment, seconds: float, most: int) -> int:
    """Returns how many steps a run has that may take so long, at most ``most``; at least one."""
    end_s = time.monotonic() + seconds
    with Notice("measuring the time of a step", is_line=True):
        each_s = seconds_per_step(experiment)
    left_s = end_s - time.monotonic()
    steps = min(max(1, int(left_s / each_s)), most)
    print(f"{each_s:.3g} s a step: {steps} steps in the {left_s:.0f} s that are left", flush=True)
    return steps


def _write_report(
    folder: pathlib.Path,
    title: str,
    entries: Mapping[str, Any],
    used: Sequence[str],
    exported: Exported | None = None,
) -> None:
    """Writes report.json and report.md; without ``exported`` the run has not ended."""
    lines = read_metrics(folder / "metrics.jsonl")
    evaluations = [line for line in lines if any(name.startswith("held_out") for name in line)]
    names = [*dict.fromkeys(n for line in evaluations for n in line if n != "cpu_s")]

    def shown(value):
        return "" if value is None else f"{value:.4g}"

    final = None
    sections = [Section("", [text]) for text in used]
    if exported is None:
        sections.append(Section("", ["The run has not ended."]))
    else:
        final = exported.figures
        figures = Table(("figure", "value"), [(name, shown(x)) for name, x in final.items()])
        summary = [exported.summary] if exported.summary else ()
        sections.insert(0, Section("Exported", summary, figures))
        entries = {**entries, **exported.record}
    if evaluations:
        rows = [[shown(line.get(name)) for name in names] for line in evaluations]
        sections.append(Section("Evaluations", table=Table(names, rows, names)))
    plots = exported.plots if exported else ()
    sections += [Section("", figure=name) for name in plots]
    sections.append(Section("", ["Every logged figure is in metrics.jsonl."]))
    rep = {**entries, "final": final, "evaluations": evaluations, "is_complete": final is not None}
    rep["cpu_s"] = max((line["cpu_s"] for line in lines), default=None)
    report.finish(folder, rep, title, sections)


def main(train: Callable[[ConfigDict, str], object], config: ConfigDict, workdir: str) -> None:
    """Runs a main of training with its flags.

    Raises:
      ConfigError: No work directory is given.
    """
    if not workdir:
        raise ConfigError("--workdir is not given; expected the folder to train or resume in")
    logging.set_verbosity(logging.WARNING)  # orbax logs every step of a save
    cli.enable_compilation_cache()
    train(config, workdir)
