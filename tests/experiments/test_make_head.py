"""A head from a target alone: planned, resumed, refused."""

import json
import math
import shutil
import time

import numpy as np
import pytest
from ml_collections import ConfigDict
from support.files import held_out, tiny_config, tokenizer_of
from support.runs import Stopped, check_run_files, killed_at, stopped_at
from support.tiny_models import random_weights

from configs import make_head_default
from experiments.make_head import export, make_head, make_plan, resolve, sentences, split_text
from experiments.run import report
from experiments.training import recipe
from experiments.training.head import HeadExperiment
from spec_jax.data.user_turns import Opening
from spec_jax.errors import ConfigError
from spec_jax.loading import load_draft, load_model
from spec_jax.models import checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a model without a chat template."""
    folder = tmp_path_factory.mktemp("models") / "target"
    config = tiny_config(3, eos_token_id=(299,))
    checkpoint.save_pretrained(folder, random_weights(config), config, tokenizer_of(held_out(4)))
    return folder


def small(target, **changes):
    config = make_head_default.get_config()
    sizes = dict(num_prompts=64, steps=4, rows=16, batch=2, length=18, k=2, num_questions=3)
    sizes |= dict(max_new_tokens=16, draft_vocab_size=200)
    config.update(target=str(target), **sizes | changes)
    return config


@pytest.fixture(scope="module")
def run(target, tmp_path_factory):
    """Folder and report of one undisturbed run."""
    folder = tmp_path_factory.mktemp("run")
    return folder, make_head(small(target), folder)


@pytest.mark.exhaustive
def test_a_head_is_made_of_the_text_that_its_target_wrote(run, target, capsys):
    folder, result = run
    rep = check_run_files(folder, "make_head")
    assert rep["use"] == result["use"] and rep["plan"]["steps"] == 4
    assert rep["plan"]["tau"] is None and {*rep["took_s"]} == {"plan", "text", "head", "evaluation"}
    model = load_model(target)
    for name, form in (("head/export", "SpecForge"), ("for_vllm", "speculators")):
        head = load_draft(folder / name, model)
        assert head.format == form and head.config.layer.vocab_size == 200
    assert str(folder / "for_vllm") in rep["use"][1] and "load_draft(" in rep["use"][0]
    assert f"--speculative-draft-model-path {folder / 'head' / 'export'} " in rep["use"][2]
    assert len(export(small("zoo/target"), folder, model)) == 1  # no server knows its name
    drafts = {row["method"] for row in rep["results"] if row["k"]}
    assert drafts == {"head", "ngram"}
    trained = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    asked = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    indices = [row["index"] for row in trained]
    assert indices == sorted(indices) and len(asked) == 3
    assert not {row["index"] for row in asked} & {*indices}
    opening = Opening.of(model.tokenizer, model.stop_tokens)
    rows = (folder / "text" / "responses.jsonl").read_text().splitlines()
    of_index = {row["index"]: row["prompt_ids"] for row in map(json.loads, rows)}
    for row in asked:
        assert opening.prompt(row["prompt"], model.tokenizer) == of_index[row["index"]]


KILLS = {  # the text, its prompts and the evaluation have tests of kills of their own
    "text": lambda: killed_at("responses.jsonl", 20),
    "head": lambda: stopped_at(HeadExperiment, 2),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", KILLS)
def test_a_run_that_is_killed_goes_on_to_the_same_head(run, target, tmp_path, step):
    with KILLS[step]():
        make_head(small(target), tmp_path)
    result = make_head(small(target), tmp_path)
    for name in ("training.jsonl", "questions.jsonl", "head/export/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (run[0] / name).read_bytes()
    taus = [[row["tau"] for row in one["results"]] for one in (result, run[1])]
    assert taus[0] == taus[1]


def test_the_folder_of_another_target_is_refused_and_stays(target, tmp_path):
    resolved = json.loads(resolve(small(target)).to_json())
    report.begin("make_head", tmp_path, resolved)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="other values of target"):
        make_head(small(target.parent / "other"), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_target_that_writes_nothing_but_its_end_is_refused(target, tmp_path):
    row = dict(index=0, prompt_ids=[1, 2], response_ids=[299], finish_reason="stop_token")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "responses.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="end with their first token, .* --config.prompts=FILE"):
        split_text(small(target), tmp_path, load_model(target))


@pytest.mark.exhaustive
def test_a_full_disk_is_named_and_loses_nothing(run, target, tmp_path, monkeypatch):
    shutil.copytree(run[0], tmp_path / "run")
    kept = (tmp_path / "run" / "text" / "responses.jsonl").read_bytes()
    cut = kept[: kept.index(b"\n", len(kept) // 2) + 1]
    (tmp_path / "run" / "text" / "responses.jsonl").write_bytes(cut)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left on device; make room and run the same co"):
        make_head(small(target), tmp_path / "run")
    monkeypatch.undo()
    assert (tmp_path / "run" / "text" / "responses.jsonl").read_bytes().startswith(cut)


def test_tau_is_expected_only_where_a_curve_was_measured(target, monkeypatch):
    monkeypatch.setitem(recipe.CURVES, ("here", "eagle3"), ((1e5, 1.2), (1e6, 1.8)))
    assert recipe.expected_tau("there", "eagle3", 3e5) is None
    assert recipe.expected_tau("here", "eagle3", np.sqrt(1e11)) == pytest.approx(1.5)
    assert recipe.expected_tau("here", "eagle3", 1e7) == 1.8
    assert recipe.expected_tau("here", "eagle3", 9e4) is None
    plan = dict(num_prompts=9, tokens=8000, text_s=60.0, steps=5, head_s=90.0, tau=None)
    assert "none is expected" in sentences(small(target), plan)[-1]
    assert "expected tau 1.80" in sentences(small(target), plan | {"tau": 1.8})[-1]


REFUSED = [
    (dict(minutes=math.inf), "minutes is inf; expected a number above 0"),
    (dict(epochs=math.inf), "epochs is inf"),
    (dict(seed=-1), "seed is -1; expected 0 to"),
    (dict(draft_vocab_size=-3), "draft_vocab_size is -3; expected 0 or more"),
    (dict(objective="eagle4"), "objective is 'eagle4' .*; expected one of eagle1"),
    (dict(prompt_source="self", prompts="x.jsonl"), "prompts is 'x.jsonl'; expected none"),
    (dict(prompt_source="file"), "prompts is ''; expected a file"),
]


def test_prompts_of_the_target_are_learnt_from_and_begin_as_told(target, tmp_path):
    model = load_model(target)
    for source in ("self", "library"):
        config = small(target, prompt_source=source, first_words="words.txt")
        assert recipe.text_config(config, 64).turns.first_words == "words.txt"
        is_own = source == "self"
        assert recipe.head_config(config, tmp_path, model, 4).data.has_prompt_loss == is_own


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_made_is_refused_at_once(changes, message):
    with pytest.raises(ConfigError, match=message):
        resolve(small("zoo/target", **changes))


@pytest.fixture
def machine(monkeypatch):
    """Takes 0.5 s for a response of 200 tokens, 0.4 s for a step, 0.3 s once its states are stored.

    It ends where told.
    """
    ends = []

    def regenerate(config, folder):
        folder.mkdir(exist_ok=True)
        path = folder / "responses.jsonl"
        before = len(path.read_text()) if path.exists() else 0
        if "text" in ends:
            ends.remove("text")
            path.write_text("r" * (config.num_prompts - 2))
            raise Stopped
        path.write_text("r" * config.num_prompts)
        session = {"run_s": 0.5 * (config.num_prompts - before)}
        report.write_json(folder / "report.json", {"session": session})

    def seconds_per_step(trial):
        if "head" in ends:
            ends.remove("head")
            raise Stopped
        trial.append("measured")
        return 0.4 if len(trial) == 1 else 0.3

    at = "experiments.make_head."
    monkeypatch.setattr(at + "regenerate.regenerate", regenerate)
    monkeypatch.setattr(at + "seconds_per_step", seconds_per_step)
    monkeypatch.setattr(at + "split_text", lambda *_: {"tokens": 64 * 200})
    head = ConfigDict({"data": {"view_cache": "views"}})
    for name, found in (("recipe.head_config", head), ("train_head.validate", None)):
        monkeypatch.setattr(at + name, lambda *_, found=found: found)
    monkeypatch.setattr(at + "HeadExperiment", lambda *_: [])
    return ends


def planned(folder, minutes=60.0, **changes):
    config = resolve(small("zoo/target", num_prompts=None, **{"minutes": minutes, **changes}))
    plan = make_plan(config, folder, None, time.monotonic() + 60 * minutes)
    return config, plan


@pytest.mark.parametrize("steps", [None, 1000])
def test_a_plan_is_the_same_wherever_a_kill_came_and_fits_the_time(machine, tmp_path, steps):
    _, whole = planned(tmp_path, steps=steps)
    assert 50 < whole["minutes"] <= 60
    num_new = min(whole["steps"], whole["num_prompts"] * 200 // 36)  # of 2 windows of 18 tokens
    seconds = 0.4 * num_new + 0.3 * (whole["steps"] - num_new)
    assert whole["head_s"] == pytest.approx(seconds) and seconds > 300
    for number, end in enumerate(("text", "head"), 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        machine.append(end)
        with pytest.raises(Stopped):
            planned(folder, steps=steps)
        _, plan = planned(folder, steps=steps)
        assert plan["num_prompts"] == pytest.approx(whole["num_prompts"], rel=0.01)
        assert plan["prompt_s"] == whole["prompt_s"] == 0.5


def test_a_plan_that_exceeds_the_time_says_so_with_the_minutes(machine, tmp_path):
    config, plan = planned(tmp_path, 0.01, steps=2000)
    seconds = 0.4 * 355 + 0.3 * (2000 - 355)
    assert plan["num_prompts"] == 64
    assert plan["minutes"] == pytest.approx(seconds / 0.85 / 60, abs=0.1)
    said = "about 12.5 minutes in all, more than the 0.01 that are given: at least 64 prompts"
    assert said in "; ".join(sentences(config, plan))
    assert "in all" not in "; ".join(sentences(config, plan | {"minutes": 0.01}))
