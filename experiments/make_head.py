r"""Makes a draft head for a target from the target alone, in the time that is given.

    python -m experiments.make_head --workdir=runs/head
    python -m experiments.make_head --workdir=DIR --config.target=PATH \
        --config.minutes=60

The target writes text (experiments.regenerate), a head is trained on it
(experiments.train_head), compared with plain decoding on prompts that were held
out (experiments.evaluate), and exported. Before it starts the command measures
how fast the machine is, and says what it will do. If it is stopped, the same
command goes on; what is planned stays in plan.json, so that the result is the
same. A run leaves text/, head/, evaluation/, for_vllm/ and report.md.
"""

from __future__ import annotations

import json
import math
import pathlib
import shutil
import time
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from configs import make_head_default
from experiments import evaluate, regenerate, train_head
from experiments.run import cli, report
from experiments.training import recipe
from experiments.training.head import HeadExperiment
from experiments.training.run import seconds_per_step
from spec_jax import processes, zoo
from spec_jax.config.checks import MAX_INT, check_name
from spec_jax.data.records import read_rows
from spec_jax.data.user_turns import Opening
from spec_jax.drafters import registry
from spec_jax.errors import ConfigError
from spec_jax.intervals import Interval
from spec_jax.loading import LoadedModel, find_directory, load_draft, load_model
from spec_jax.models.files import write_text
from spec_jax.show.tables import Section, Table

_ROWS = {True: 32, False: 512}  # decoded together, on a CPU and off it
_BATCH = {True: 4, False: 32}
_LENGTH = {True: 258, False: 1026}
_EVALUATION = 0.15  # of the time, with the export
_MARGIN = 0.1  # of the time that is left, for what takes longer than it did when it was measured
_LEAST = 64  # prompts of the text


def resolve(config: ConfigDict) -> ConfigDict:
    """Checks a config and returns it with all that does not depend on the time.

    Raises:
      ConfigError: A key is unknown or missing, or a value is out of range.
    """
    cli.check_keys(config, make_head_default.get_config())
    config = config.copy_and_resolve_references()
    is_cpu = jax.default_backend() == "cpu"
    for name, usual in (("rows", _ROWS), ("batch", _BATCH), ("length", _LENGTH)):
        if config[name] is None:
            config[name] = usual[is_cpu]
    if config.prompt_source is None:
        is_zoo = config.target == make_head_default.get_config().target
        source = "library" if is_zoo else "self"
        config.prompt_source = "file" if config.prompts else source
    cli.require_positive(config, "k max_new_tokens rows batch length num_questions")
    cli.require_each(
        config,
        (0 < config.minutes < math.inf, "minutes", "a number above 0"),
        (0 < config.epochs < math.inf, "epochs", "a number above 0"),
        (0 <= config.seed <= MAX_INT, "seed", f"0 to {MAX_INT}"),
        ((config.draft_vocab_size or 0) >= 0, "draft_vocab_size", "0 or more, or none"),
        (config.num_prompts is None or config.num_prompts >= _LEAST, "num_prompts", f"{_LEAST} up"),
        (config.steps is None or config.steps >= 1, "steps", "1 or more"),
    )
    check_name("objective", config.objective, registry.objectives())
    regenerate.resolve(recipe.text_config(config, _LEAST))
    return config


def split_text(config: ConfigDict, folder: pathlib.Path, target: LoadedModel) -> dict[str, int]:
    """Writes training.jsonl and questions.jsonl: the responses by index, and prompts held out.

    Returns:
      How many "questions", "responses" and "tokens" there are; the latter two of the training.

    Raises:
      ConfigError: The responses are empty.
    """
    lines = (folder / "text" / "responses.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: row["index"])
    if sum(len(row["response_ids"]) > 1 for row in rows) * 2 < len(rows):
        raise ConfigError(
            f"most of the {len(rows)} responses of {target.name} end with their first token, so "
            "there is nothing to learn: check its chat template and its stop tokens, or give "
            "prompts of the form that it was trained on, --config.prompts=FILE"
        )
    opening = Opening.of(target.tokenizer, target.stop_tokens)
    written = {}
    if config.prompt_source == "self":
        prompts = [row for row, _ in read_rows(folder / "text" / regenerate.PROMPTS)]
        # A text is asked without the line ends at its end.
        written = {x["index"]: x for x in prompts if not x.get("prompt", "").endswith("\n")}
    questions = {}
    for row in rows[:: max(1, len(rows) // (4 * config.num_questions))]:
        question = written.get(row["index"]) or found_question(row, opening, target)
        if question and len(questions) < config.num_questions:
            questions[row["index"]] = question
    if not questions:
        raise ConfigError(
            "no prompt is one turn of a user, so none can be held out to evaluate the head on: "
            "give other prompts, --config.prompts=FILE, or let the target write them"
        )
    kept = [row for row in rows if row["index"] not in questions]
    for name, found in (("questions", questions.values()), ("training", kept)):
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in found))
    tokens = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in kept)
    return {"questions": len(questions), "responses": len(kept), "tokens": tokens}


def found_question(row: Mapping[str, Any], opening: Opening, target: LoadedModel) -> dict | None:
    """Returns the turn that a response answers, as a line of prompts; None if it is no one turn."""
    decode = target.tokenizer.decode
    text = decode(row["prompt_ids"])
    if opening.before:
        text = decode(row["prompt_ids"], has_special=True)
        text = text.removeprefix(opening.before).removesuffix(opening.after)
    is_same = opening.prompt(text, target.tokenizer) == row["prompt_ids"]
    return opening.row(row["index"], text) if is_same and not text.endswith("\n") else None


def _num_trial(config: ConfigDict) -> int:
    """Returns how many prompts are written to measure the time of one."""
    return min(config.num_prompts or math.inf, max(_LEAST, config.rows))


def make_plan(
    config: ConfigDict, folder: pathlib.Path, target: LoadedModel, end_s: float
) -> dict[str, Any]:
    """Measures how fast the machine is, and returns what there is time for.

    The first prompts are those of the run itself, and are kept once all are written: the time of
    a part would not tell that of a prompt, so a part is written again.

    Args:
      config: See ``configs/make_head_default.py``.
      folder: The run's folder.
      target: The target.
      end_s: When everything is to have ended, by ``time.monotonic``.
    """
    num_trial = _num_trial(config)
    text = folder / "text"
    if not (text / "report.json").exists():
        shutil.rmtree(text, ignore_errors=True)
        regenerate.regenerate(recipe.text_config(config, num_trial), text)
    session = cli.read_saved(text / "report.json")["session"]
    prompt_s = max(session["run_s"], 0.1) / num_trial  # the time is rounded to that
    split = split_text(config, folder, target)
    tokens_per_prompt = split["tokens"] / num_trial
    tokens_per_step = config.batch * config.length
    head = recipe.head_config(config, folder, target, 1000)
    train_head.validate(head)
    shutil.rmtree(folder / recipe.VIEWS, ignore_errors=True)  # of a trial that was killed
    trial = HeadExperiment(head, folder / "trial")
    step_s = seconds_per_step(trial)
    stored_s = seconds_per_step(trial) if head.data.view_cache else step_s
    left_s = (end_s - time.monotonic() - _EVALUATION * 60 * config.minutes) * (1 - _MARGIN)
    steps_per_prompt = tokens_per_prompt / tokens_per_step  # of each epoch
    num_prompts = config.num_prompts
    if num_prompts is None:
        fixed_s = (config.steps or 0) * step_s
        first = min(config.epochs, 1.0)
        steps_s = steps_per_prompt * (first * step_s + (config.epochs - first) * stored_s)
        each_s = prompt_s + (0 if config.steps else steps_s)
        num_prompts = max(num_trial, int((left_s - fixed_s) / each_s))
    steps = config.steps or max(1, int(config.epochs * steps_per_prompt * num_prompts))
    num_stored = max(0, steps - int(steps_per_prompt * num_prompts))  # on windows seen before
    tokens = steps * tokens_per_step
    text_s = prompt_s * (num_prompts - num_trial)
    head_s = (steps - num_stored) * step_s + num_stored * stored_s
    spent_s = 60 * config.minutes - (end_s - time.monotonic())
    return {
        "num_prompts": num_prompts,
        "steps": steps,
        "tokens": round(num_prompts * tokens_per_prompt),
        "tokens_trained": tokens,
        "prompt_s": prompt_s,
        "step_s": step_s,
        "stored_s": stored_s,
        "text_s": text_s,
        "head_s": head_s,
        "minutes": (spent_s + text_s + head_s) / (1 - _EVALUATION) / 60,
        "tau": recipe.expected_tau(config.target, config.objective, tokens),
    }


def sentences(config: ConfigDict, plan: Mapping[str, Any]) -> list[str]:
    """Returns sentences on what the run will do."""
    tau = plan["tau"]
    expected = "no tau has been measured for this target and so little text, so none is expected"
    if tau is not None:
        expected = f"expected tau {tau:.2f}, by the curve that was measured for this target"
    over = []
    if plan.get("minutes", 0) > config.minutes:
        over = [
            f"this needs about {plan['minutes']:.1f} minutes in all, more than the "
            f"{config.minutes:g} that are given: at least {_num_trial(config)} prompts are "
            "written, and num_prompts and steps hold where they are set"
        ]
    return [
        f"text: {plan['num_prompts']} prompts ({config.prompt_source}), about "
        f"{plan['tokens']:,} tokens, {plan['text_s'] / 60:.1f} minutes more",
        f"head: {config.objective}, K = {config.k}, {plan['steps']} steps of "
        f"{config.batch * config.length:,} tokens, {plan['head_s'] / 60:.1f} minutes",
        *over,
        expected,
    ]


def make_head(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any] | None:
    """Runs or continues the experiment and returns its report.

    Args:
      config: See ``configs/make_head_default.py``.
      workdir: The run's folder.

    Returns:
      The report; None if SIGTERM or Ctrl-C ended the training.

    Raises:
      SpecJaxError: The target or a value cannot be used, the disk is full, or the work directory
        is that of another run.
    """
    begin_s = time.monotonic()
    config = resolve(config)
    folder = cli.make_workdir("make_head", workdir)
    resolved = json.loads(config.to_json())
    if (folder / "config.json").exists():
        cli.check_same(cli.read_saved(folder / "config.json"), resolved)
    if processes.count() > 1:
        raise ConfigError("make_head runs in one process; expected no --num_processes")
    head = report.begin("make_head", folder, resolved)
    target = load_model(config.target)
    cli.tokenizer_of(target)
    took = {}

    def timed(name: str, run, *args) -> Any:
        start_s = time.monotonic()
        found = run(*args)
        took[name] = round(time.monotonic() - start_s, 1)
        return found

    path = folder / "plan.json"
    if not path.exists():
        end_s = begin_s + 60 * config.minutes
        report.write_json(path, timed("plan", make_plan, config, folder, target, end_s))
    plan = cli.read_saved(path)
    print("\n".join(sentences(config, plan)), flush=True)
    written = recipe.text_config(config, plan["num_prompts"])
    text = timed("text", regenerate.regenerate, written, folder / "text")
    split = split_text(config, folder, target)
    training = recipe.head_config(config, folder, target, plan["steps"])
    if timed("head", train_head.train, training, folder / "head") is None:
        return None
    shutil.rmtree(folder / recipe.VIEWS, ignore_errors=True)
    asked = recipe.evaluation_config(config, folder)
    evaluated = timed("evaluation", evaluate.evaluate, asked, folder / "evaluation")
    lines = export(config, folder, target)
    result = head | {"plan": plan, "text": split, "took_s": took}
    result |= {"written": text.get("written"), "results": evaluated["results"], "use": lines}
    _write_page(folder, result, [*sentences(config, plan)], evaluated)
    print(f"\n{folder / 'report.md'}: all of it, and how to use the head:")
    print("\n".join(lines))
    return result


def export(config: ConfigDict, folder: pathlib.Path, target: LoadedModel) -> list[str]:
    """Exports the head for servers, and returns the lines that load it here and in those."""
    here = folder / "head" / "export"
    there = folder / "for_vllm"
    head = load_draft(here, target)
    _, training = registry.objectives()[config.objective]
    lines = [f"draft = spec_jax.load_draft({str(here)!r}, spec_jax.load_model({config.target!r}))"]
    files = find_directory(config.target)
    is_served = zoo.path(config.target) is None  # and no GGUF file or checkpoint of orbax
    is_served &= any((*files.glob("model*.safetensors"), *files.glob("pytorch_model*.bin")))
    if "speculators" in training.formats:
        options = dict(dtype="bfloat16", num_speculative_tokens=config.k)
        head.save(there, target, format="speculators", **options)
        own = {"method": config.objective, "model": str(there), "num_speculative_tokens": config.k}
        if is_served:
            lines.append(f"vllm serve {config.target} --speculative-config '{json.dumps(own)}'")
    if is_served and head.format == "SpecForge" and config.objective == "eagle3":
        lines.append(
            f"python3 -m sglang.launch_server --model {config.target} --dtype bfloat16 "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {here} "
            f"--speculative-num-steps {config.k} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {config.k + 1}"
        )
    return lines


def _write_page(folder, result, planned, evaluated) -> None:
    def interval(row, name: str) -> str:
        bounds = row[f"{name}_interval"] or (math.nan, math.nan)
        return f"{Interval(row[name], *bounds):.2f}"

    rows = [
        (row["method"], interval(row, "tau"), interval(row, "speedup"))
        for row in evaluated["results"]
        if row["k"]
    ]
    took = [(name, f"{seconds / 60:.1f}") for name, seconds in result["took_s"].items()]
    text = result["text"]
    written = [
        f"{text['responses']} responses, {text['tokens']:,} tokens with their prompts; "
        f"{text['questions']} prompts are held out"
    ]
    sections = [
        Section("What was planned", planned),
        Section("What came out", table=Table(("draft", "tau", "speed-up"), rows)),
        Section("Text", written),
        Section("Training", figure="head/training.png"),
        Section("Minutes", table=Table(("part", "minutes"), took)),
        Section("Use it", [f"`{line}`" for line in result["use"]]),
        Section("", ["evaluation/report.html has the evaluation, and text/report.md the text."]),
    ]
    report.finish(folder, result, "A head", sections)


def main() -> None:
    if not _WORKDIR.value:
        raise ConfigError("--workdir is not given; expected a new folder, or a run to continue")
    cli.enable_compilation_cache()
    make_head(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        make_head_default, "Folder of text, head, evaluation and report; continued if it has any."
    )
    cli.run(main)
