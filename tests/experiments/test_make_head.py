"""A head from a target alone: planned, resumed, refused."""

import json
import shutil

import numpy as np
import pytest
from support.files import held_out, tiny_config, tokenizer_of
from support.runs import check_run_files, killed_at, stopped_at
from support.tiny_models import random_weights

from configs import make_head_default
from experiments.comparison import session
from experiments.make_head import make_head, resolve, sentences, split_text
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
    config.update(target=str(target), max_new_tokens=16, draft_vocab_size=200, **sizes | changes)
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


KILLS = {
    "prompts": lambda: killed_at("turns.jsonl", 20),
    "text": lambda: killed_at("responses.jsonl", 20),
    "head": lambda: stopped_at(HeadExperiment, 2),
    "evaluation": lambda: killed_at(session.ANSWERS, 2),
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
    plan = dict(num_prompts=9, tokens=8000, text_s=60.0, steps=5, head_s=90.0, tau=None)
    assert "none is expected" in sentences(small(target), plan)[-1]
    assert "expected tau 1.80" in sentences(small(target), plan | {"tau": 1.8})[-1]
