"""How a comparison is measured: turns, groups of questions, and where a run goes on."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.comparison.answers import (
    Group,
    Probabilities,
    checked,
    key_of,
    pack,
    restore,
    text_of,
    turn_of,
)
from experiments.comparison.setup import Setup
from experiments.run import inputs, report
from experiments.run.cli import INPUTS, check_inputs, check_same, inputs_of, read_saved
from experiments.run.journal import DATED, Journal
from spec_jax import processes
from spec_jax.data.questions import Question
from spec_jax.errors import ConfigError, PromptError
from spec_jax.evaluation import costs
from spec_jax.evaluation.bench import Bench
from spec_jax.evaluation.cells import Cell
from spec_jax.evaluation.compare import CellRun, compile_all, run_interleaved
from spec_jax.evaluation.prompts import PromptEncoder, check_same_prompts, cut
from spec_jax.progress import Progress

ANSWERS = "answers.jsonl"
STATE = "state.jsonl"
_OF_TIMES = ("cpu_model", "cores", "devices", "spec_jax", "python", "jax", "jaxlib")
_FREE = ("has_audit", "has_teacher_forced")  # computed from answers, also from those of a file
_MAX_EXAMINED = 4  # rows of a cell that diverge from plain decoding, since each compiles a pass
_GOES_ON = "delete this line and all after it, and the run goes on from there"


class Stage(NamedTuple):
    """One temperature and one batch size, at which all cells take turns.

    Attributes:
      bench: What decodes.
      runs: What each cell has done, plain decoding first.
      groups: Which questions are measured together.
      prompts: The indices of each question's prompts.
    """

    bench: Bench
    runs: list[CellRun]
    groups: list[Group]
    prompts: list[list[int]]

    @property
    def plain(self) -> CellRun:
        """What plain decoding has done."""
        return self.runs[0]

    @property
    def cells(self) -> list[Cell]:
        """The cells, plain decoding first."""
        return [run.cell for run in self.runs]

    @property
    def place(self) -> tuple[float, int]:
        """Temperature and batch size."""
        return self.plain.cell.temperature, self.bench.batch

    def is_done(self, group: Group) -> bool:
        """Whether the group has been measured."""
        return group.batches[-1] in self.plain.runs


class Evaluation:
    """A run: it restores what earlier sessions have saved, and measures the rest.

    Args:
      setup: What is decoded.
      folder: The run's folder, with what an earlier session has saved.

    Attributes:
      costs: The costs of passes by batch size and dtype.

    Raises:
      ConfigError: The folder holds a run of another config, or with other questions or cells.
    """

    def __init__(self, setup: Setup, folder: pathlib.Path):
        self.setup = setup
        self.notes = []
        self._answers = Journal(folder / ANSWERS)
        self._state = Journal(folder / STATE)
        self._lines: list[Mapping[str, Any]] = []
        self._history: dict[tuple[float, int], str] = {}
        self.costs: dict[tuple[int, str | None], costs.Costs] = {}
        self._machines: list[Mapping[str, Any]] = []
        self._left_out: dict[tuple[float, int], str] = {}  # why a stage cannot be measured
        self._state.read(self._take, f"what an earlier session has saved; {_GOES_ON}")
        self._answers.read(lambda line: self._lines.append(checked(line)), f"an answer; {_GOES_ON}")
        if processes.from_writer(bool(self._lines or self._history)) and processes.count() > 1:
            raise ConfigError(
                f"{folder} holds a run, which several processes cannot continue; name another "
                "--workdir"
            )
        sizes = itertools.accumulate((q.num_turns for q in setup.questions.chosen), initial=0)
        self._places = [[*range(a, b)] for a, b in itertools.pairwise(sizes)]
        self._ask = PromptEncoder(setup.target)
        self.num_cut = 0

    def _take(self, line: Mapping[str, Any]) -> None:
        if "costs" in line:
            found = line["costs"]
            verify = {int(width): ms for width, ms in found["verify_ms"].items()}
            place = line["batch"], line.get("dtype")
            self.costs[place] = costs.Costs(**{**found, "verify_ms": verify})
        elif "machine" in line:
            self._machines.append(line)
        elif "left_out" in line:
            self._left_out[line["temperature"], line["batch"]] = line["left_out"]
        else:
            self._history[line["temperature"], line["prompt"]] = line["answer"]

    @property
    def num_saved(self) -> int:
        """The answers of earlier sessions."""
        return len(self._lines)

    def run(
        self, show_live: Callable[[Bench, Sequence[Cell], Question], None] | None = None
    ) -> list[Stage]:
        """Measures what is left; returns all stages but those that cannot be measured.

        Args:
          show_live: Called before a new run with what decodes, the cells and a question.

        Raises:
          ConfigError: What was saved is of another run, or damaged; or no stage can be measured.
        """
        with self._answers, self._state:
            stages = [stage for stage in self._stages() if stage.place not in self._left_out]
            self._restore(stages)
            self._add_machine(report.environment())
            if show_live is not None and stages and not self._lines:
                first = stages[0]
                show_live(first.bench, first.cells, self.setup.questions.chosen[0])
            waiting = [(s, [g for g in s.groups if not s.is_done(g)]) for s in stages]
            repeats = self.setup.config.repeats
            total = repeats * sum(len(g.batches) for s in stages for g in s.groups)
            num_left = repeats * sum(len(g.batches) for _, left in waiting for g in left)
            if num_left:
                with Progress(total, "measuring", num_done=total - num_left, every_s=2.0) as bar:
                    for stage, left in waiting:
                        if left and self._prepare(stage):
                            self._measure(stage, left, bar)
                        elif left:
                            stages.remove(stage)
            why = [*self._left_out.values()]
            if not stages:
                raise ConfigError(f"nothing can be measured: {'; '.join(why)}")
            self.notes += why
            return stages

    def _add_machine(self, environment: Mapping[str, Any]) -> None:
        """Saves what times depend on, if it is new, and warns where a session has changed it."""
        machine = {name: environment[name] for name in _OF_TIMES}
        if not self._machines or self._machines[-1]["machine"] != machine:
            self._machines.append({"machine": machine, "answers": len(self._lines)})
            self._state.append(self._machines[-1:])
        self.notes += notes_of_machines(self._machines)
        for note in self.notes:
            print(f"warning: {note}", flush=True)

    def _stages(self) -> list[Stage]:
        """Answers the turns that others follow, and lays out every stage."""
        stages = []
        for temperature, cells in self.setup.cells.items():
            prompts = self._prompts(temperature)
            for batch in self.setup.config.batches:
                is_spread = self.setup.config.order == "spread"
                groups, layout = pack(self._places, batch, is_spread=is_spread)
                bench = self.setup.bench(prompts, batch, layout)
                most = None if bench.has_audit else _MAX_EXAMINED
                runs = [CellRun(bench, cell, most) for cell in cells]
                stages.append(Stage(bench, runs, groups, self._places))
        self.num_cut = sum(len(p) == self.setup.room for p in stages[0].bench.prompts)
        return stages

    def _prompts(self, temperature: float) -> list[list[int]]:
        """Returns the ids of all prompts; plain decoding has answered the turns before each."""
        asked = self.setup.questions.chosen
        setup = self.setup
        answers = {p: text for (t, p), text in self._history.items() if t == temperature}
        prompts: list[list[int]] = [[] for places in self._places for _ in places]
        last = max(question.num_turns for question in asked)
        for turn in range(last):
            waiting = []
            for question, places in zip(asked, self._places):
                if turn < len(places):
                    before = [answers[place] for place in places[:turn]]
                    prompts[places[turn]] = cut(
                        self._ask(question, before), setup.room, setup.target.config.bos_token_id
                    )
                    if turn + 1 < len(places) and places[turn] not in answers:
                        waiting.append(places[turn])
            if waiting:
                answers |= self._answer(temperature, prompts, waiting)
        check_same_prompts(prompts)
        return prompts

    def _answer(
        self, temperature: float, prompts: list[list[int]], waiting: Sequence[int]
    ) -> dict[int, str]:
        """Lets plain decoding answer prompts that another turn follows, and saves the answers."""
        batch = self.setup.config.batches[0]
        layout = [waiting[i : i + batch] for i in range(0, len(waiting), batch)]
        bench = self.setup.bench(prompts, batch, layout)
        plain = self.setup.cells[temperature][0]
        found = {}
        with Progress(len(layout), f"first turns, T={temperature:g}", every_s=2.0) as bar:
            for index, chosen in enumerate(layout):
                rows = dict(zip(bench.chosen(index), bench.run(plain, index).rows))
                texts = {i: rows[i].text or "" for i in chosen}
                self._state.append(
                    [
                        {"temperature": temperature, "prompt": i, "answer": text}
                        for i, text in texts.items()
                    ]
                )
                found |= texts
                bar.step(f"{len(found)} answers")
        return found

    def _restore(self, stages: Sequence[Stage]) -> None:
        """Puts what was saved into the stages, and cuts off a group that is not whole."""
        at = 0
        for stage, group in [(s, group) for s in stages for group in s.groups]:
            asked = [self.setup.questions.chosen[q] for q in group.questions]
            pairs = [(question, cell) for question in asked for cell in stage.cells]
            part = self._lines[at : at + len(pairs)]
            for number, (line, (question, cell)) in enumerate(zip(part, pairs), at + 1):
                key = key_of(cell, stage.bench.batch, question.name)
                key["number of turns"] = question.num_turns
                said = line | {"number of turns": len(line["turns"])}
                for name, value in key.items():
                    if said.get(name) != value:
                        raise ConfigError(
                            f"{self._answers.path}, line {number}: the {name} is "
                            f"{said.get(name)!r}, and this run has {value!r} there; expected the "
                            "models and questions that it was begun with, or an empty directory"
                        )
            if len(part) < len(pairs):
                break
            self._put(stage, group, part)
            at += len(pairs)
        if at < len(self._lines):
            self._answers.truncate(at)
        self._lines = self._lines[:at]

    def _put(self, stage: Stage, group: Group, lines: Sequence[Mapping[str, Any]]) -> None:
        """Puts the lines of a group into the cells' runs, which need no more of the outputs."""
        for number, run in enumerate(stage.runs):
            turns: dict[int, Mapping[str, Any]] = {}
            for q, line in zip(group.questions, lines[number :: len(stage.runs)]):
                turns |= zip(stage.prompts[q], line["turns"], strict=True)
            for prompt, turn in turns.items():
                if turn["prompt"] != text_of(self.setup.target, stage.bench.prompts[prompt]):
                    raise ConfigError(
                        f"{self._answers.path} answers another prompt than this run has: "
                        f"{turn['prompt'][:60]!r}; expected the questions and the tokenizer that "
                        f"it was begun with, or an empty directory; {DATED}"
                    )
            for index in group.batches:
                restore(run, index, turns)

    def _prepare(self, stage: Stage) -> bool:
        """Compiles a stage and measures the costs of its passes; whether it can be measured."""
        temperature, batch = stage.place
        try:
            for dtype in dict.fromkeys(cell.dtype for cell in stage.cells):
                cells = [cell for cell in stage.cells if cell.dtype == dtype]
                has_costs = (batch, dtype) not in self.costs
                found = compile_all(stage.bench, cells, has_costs=has_costs)
                if found is not None:
                    self.costs[batch, dtype] = found
                    line = {"batch": batch, "dtype": dtype, "costs": found._asdict()}
                    self._state.append([line])
        except PromptError as error:
            if batch == 1 or stage.plain.runs:
                raise
            why = f"batch {batch}, T={temperature:g}: {error}"
            self._state.append([{"temperature": temperature, "batch": batch, "left_out": why}])
            self._left_out[stage.place] = why
            return False
        return True

    def _measure(self, stage: Stage, groups: Sequence[Group], bar: Progress) -> None:
        repeats = self.setup.config.repeats
        first = self.setup.config.batches[0]
        probs = Probabilities(stage.bench) if stage.bench.batch == first else None
        shown = self._shown()
        where = f"T={stage.cells[0].temperature:g}, {stage.bench.batch} at a time"
        for group in groups:
            order = itertools.product(range(repeats), group.batches)
            for _, index in run_interleaved(stage.runs, order):
                bar.step(f"{where}, batch {index + 1} of {len(stage.bench.layout)}")
            bar.now(
                "probabilities of the tokens that the page shows" if probs else "saving answers"
            )
            lines = [
                self._line(stage, run, group, q, probs if q in shown else None)
                for q in group.questions
                for run in stage.runs
            ]
            self._answers.append(lines)
            self._put(stage, group, lines)

    def _shown(self) -> set[int]:
        """The first questions of each category, whose tokens get their probabilities."""
        found: dict[str, list[int]] = {}
        for number, question in enumerate(self.setup.questions.chosen):
            found.setdefault(question.category, []).append(number)
        return {q for some in found.values() for q in some[: self.setup.config.num_shown]}

    def _line(
        self, stage: Stage, run: CellRun, group: Group, q: int, probs: Probabilities | None
    ) -> dict[str, Any]:
        question = self.setup.questions.chosen[q]
        bench = stage.bench
        batch_of = {i: index for index in group.batches for i in bench.layout[index]}
        turns = [turn_of(run, i, batch_of[i], probs) for i in stage.prompts[q]]
        key = key_of(run.cell, bench.batch, question.name)
        return {**key, "category": question.category, "turns": turns}


def notes_of_machines(machines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence if sessions of a run had other machines or versions; else none.

    Args:
      machines: The values that differ between sessions by name ("machine"), and the answers that
        were saved before ("answers"), in the order of the sessions.
    """
    said = []
    for before, after in itertools.pairwise(machines):
        names = [name for name, x in after["machine"].items() if before["machine"][name] != x]
        changes = (f"{n} {before['machine'][n]} to {after['machine'][n]}" for n in names)
        said.append(f"after {after['answers']} answers, from {', '.join(changes)}")
    if not said:
        return []
    return [
        f"the run went on elsewhere ({'; '.join(said)}): times and intervals mix these, though "
        "each answer took turns with plain decoding on one of them; for figures of one machine, "
        "run it again in a new --workdir"
    ]


def check_folder(folder: pathlib.Path, config: Mapping[str, Any]) -> inputs.Sums:
    """Checks that a folder holds nothing, or a run with this config and these inputs.

    Args:
      folder: The run's folder.
      config: The resolved config, as JSON values.

    Returns:
      The checksums of the inputs that inputs.json is to hold.

    Raises:
      ConfigError: It holds another run.
    """
    sums = inputs_of(config)
    if not processes.is_writer():
        return sums
    saved = folder / "config.json"
    is_begun = any((folder / name).exists() for name in (INPUTS, ANSWERS, STATE))
    if not is_begun and (folder / "report.json").exists():
        raise ConfigError(f"{folder} holds the report of another run; name another --workdir")
    # Another experiment that is not finished reads its config.json when it goes on.
    if is_begun or saved.exists():
        check_same(read_saved(saved), config, _FREE)
    return check_inputs(folder, sums) if is_begun else sums
