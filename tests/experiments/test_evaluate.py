"""The experiment that evaluates: figures, their intervals and differences, and what it refuses."""

import json
import math
import pathlib
import re
import shutil
from typing import NamedTuple

import jax
import numpy as np
import pytest
from support.files import experiment_files
from support.mtp_modules import write_with_modules
from support.pairs import tiny_pair
from support.runs import check_run_files, killed_at
from support.tiny_models import GLM4_MOE, LLAMA

from configs import (
    decode_default,
    decode_specbench,
    evaluate_dtypes,
    evaluate_specbench,
    evaluate_zoo,
)
from experiments import evaluate
from experiments.comparison.setup import Setup, resolve
from spec_jax.data import python_source
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError
from spec_jax.evaluation.bench import Run
from spec_jax.evaluation.compare import CellRun
from spec_jax.evaluation.prompts import fitting
from spec_jax.evaluation.results import Counts
from spec_jax.loading import load_model, random_head


class Row(NamedTuple):
    """What is counted of an output."""

    stats: Stats


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The target as its own draft, a head, and pieces of text to continue."""
    folder = tmp_path_factory.mktemp("evaluate")
    shape = experiment_files(folder, LLAMA)
    head = random_head(EagleConfig.of_target(shape, 1), jax.random.key(1))
    head.save(folder / "head", load_model(folder / "target"), format="EAGLE-1")
    config = evaluate_zoo.get_config()
    config.target = str(folder / "target")
    config.drafts = f"{folder / 'head'}, {folder / 'target'}"
    config.data = str(folder / "prompts.jsonl")
    config.update({"num_prompts": 3, "max_new_tokens": 8, "ks": (2,), "batches": (2,)})
    return config


@pytest.mark.exhaustive
def test_a_head_is_compared_with_the_best_and_with_its_teacher_forced_acceptance(
    config, tmp_path, capsys
):
    """In a chain and in trees; the other draft is the target itself, which is always right."""
    config = config.copy_and_resolve_references()
    config.trees = "2x1, 5:2:3"
    report = evaluate.evaluate(config, str(tmp_path / "run"))
    cells = {(r["method"].rpartition("/")[2], r["tree"]): r for r in report["results"]}
    head, same = cells["head", None], cells["target", None]
    assert [*cells] == [
        ("plain", None),
        *((name, tree) for name in ("head", "target") for tree in (None, "2x1", "5:2:3")),
    ]
    assert [cells["head", tree]["k"] for tree in (None, "2x1", "5:2:3")] == [2, 4, 5]
    for r in cells.values():
        assert r["identical_to_plain"]
        is_tree = r["tree"] is not None
        assert (r["predicted_speedup"] == r["predicted_speedup"]) is not is_tree  # NaN
        if not is_tree:  # more than a round where the machine is busy
            assert sum(r["round_parts_ms"].values()) >= 0.999 * r["round_ms"]
    assert same["compared_with"] == head["label"]
    assert same["difference"][0].value == pytest.approx(same["tau"] - head["tau"])
    assert 1 <= head["tau"] < same["tau"] and head["draft_cost"] > 0
    gaps = np.subtract(head["teacher_forced"], head["acceptance_by_position"])
    assert np.nanmax(np.abs(gaps)) < 0.01
    low, high = same["tau_interval"]
    assert 2 < low <= same["tau"] <= high <= 3
    np.testing.assert_allclose(same["acceptance_by_position"], 1)
    saved = check_run_files(tmp_path / "run", "evaluate")
    assert saved["results"][1]["rounds"] == head["rounds"] and same["draft_cost"] > 0
    out = capsys.readouterr().out
    assert "mean acceptance length" in out and "head 2x1" in out
    text = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert re.search(r"with all models\*\*: [\d,]+ MiB", text)


def test_batch_sizes_are_sorted_and_hold_no_more_rows_than_there_are_prompts(config):
    other = config.copy_and_resolve_references()
    other.batches = (16, 1, 16)
    assert resolve(other).batches == (1, 16)
    assert fitting((1, 4, 16), 16) == ((1, 4, 16), [])
    batches, (note, _) = fitting((1, 4, 16, 64), 9)
    assert batches == (1, 4, 9) and "batches of 16 are of 9, since there are 9 prompts" in note
    other.update({"drafts": "ngram", "batches": (2, 8)})
    setup = Setup.of(other)
    assert setup.config.batches == (2, 3) and "batches of 8 are of 3" in setup.notes[-1]


def test_every_config_resolves(config):
    assert resolve(evaluate_dtypes.get_config()).dtype == "float32,bfloat16"
    for module in (evaluate_zoo, evaluate_specbench, decode_default, decode_specbench):
        other = module.get_config()
        other.target = config.target
        assert resolve(other).drafts == "ngram"  # the zoo's drafts are for the zoo's target


def test_a_target_drafts_with_the_modules_of_its_directory_unless_drafts_are_named(tmp_path):
    write_with_modules(tmp_path, GLM4_MOE)
    other = evaluate_zoo.get_config()
    other.target = str(tmp_path)
    assert resolve(other).drafts == f"{tmp_path},ngram"
    other.drafts = "suffix"
    assert resolve(other).drafts == "suffix"


def test_a_target_without_a_tokenizer_is_refused_before_anything_is_made(config, tmp_path):
    shutil.copytree(config.target, tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").unlink()
    other = config.copy_and_resolve_references()
    other.update({"target": str(tmp_path / "target"), "drafts": "ngram", "data": "pieces"})
    with pytest.raises(ConfigError, match="has no tokenizer.*expected tokenizer.json"):
        Setup.of(other)


def test_the_turns_of_a_question_count_together():
    turn = lambda rounds: Stats(
        emitted=2 * rounds + 1,
        first=1,
        accepted=rounds,
        bonus=rounds,
        rounds=rounds,
        reached_at=(rounds,),
        accepted_at=(rounds,),
        drafted_at=(rounds,),
    )
    counts = Counts.of([[Row(turn(3)), Row(turn(4))], [Row(turn(5))]])
    assert counts.rounds.tolist() == [7, 5] and counts.tokens.tolist() == [14, 10]
    assert counts.accepted.tolist() == [[7], [5]]
    assert counts.less(counts)[0] == (0, 0, 0)  # the same questions on both sides


def test_rows_that_end_early_leave_a_batch_less_busy():
    of = lambda *rounds: Run(0.0, 1.0, [Row(Stats(rounds=n)) for n in rounds])

    def busy_share(*runs):
        run = CellRun(None, None)
        run.runs = dict(enumerate(runs))
        return run.busy_share

    assert busy_share(of(7), of(3)) == 1  # batches of one row
    assert math.isnan(busy_share(of(0)))  # prefill's token was a stop token
    assert busy_share(of(8, 4), of(2, 2)) == 16 / 20  # 12 of 16 rows and rounds, 4 of 4


# What depends on the clock, or on what else the machine does.
TIMES = re.compile(
    r"(.*_s|.*_ms|speedup.*|predicted_speedup|.*tokens_per_s|.*peak_bytes|costs|command|"
    r"(is_)?draft_cost(_significant)?|conclusions|warnings|notes|environment)$"
)


def questions(folder: pathlib.Path, text: str) -> pathlib.Path:
    """Twenty questions of three categories; those of "writing" have two turns; a line is broken."""
    names = ("writing", "coding", "qa")
    rows = []
    for i in range(20):
        turns = [text[9 * i : 9 * i + 12], text[5 * i : 5 * i + 7]][: 2 if i % 3 == 0 else 1]
        rows.append(json.dumps(dict(question_id=i, category=names[i % 3], turns=turns)))
    path = folder / "questions.jsonl"
    path.write_text("\n".join([*rows[:7], '{"turns": ', *rows[7:]]) + "\n", encoding="utf-8")
    return path


def config_of(pair: pathlib.Path, data: pathlib.Path):
    """The config of a run on a tiny pair, with a draft that is not there."""
    config = evaluate_zoo.get_config()
    drafts = f"ngram,{pair / 'draft'},{pair / 'gone'}"
    config.update(target=str(pair / "target"), drafts=drafts, data=str(data), num_prompts=0)
    config.update(max_new_tokens=6, ks=(2,), batches=(1, 4), temperatures=(0.0, 1.0))
    config.update(rules=("match",), num_shown=1, has_acceptance_by_kind=True)
    return config


def timeless(value):
    """A report without what depends on the clock."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not TIMES.match(k)}
    return [timeless(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    """A tiny pair, twenty questions, and folder and report of an undisturbed run."""
    folder = tmp_path_factory.mktemp("twenty")
    pair = tiny_pair(folder)
    data = questions(folder, python_source.documents("held_out")[0][1])
    rep = evaluate.evaluate(config_of(pair, data), folder / "run")
    return pair, data, folder / "run", rep


def lines(folder):
    return (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.exhaustive
def test_twenty_questions_end_to_end(twenty):
    pair, data, folder, rep = twenty
    saved = check_run_files(folder, "evaluate")
    cells = [(r["temperature"], r["batch"], r["method"]) for r in saved["results"]]
    assert cells == [(t, b, m) for t in (0, 1) for b in (1, 4) for m in ("plain", "ngram", "draft")]
    for r in saved["results"]:
        assert r["identical_to_plain"] and r["rows"] == 27  # questions, and seven second turns
        parts = r["categories"]
        assert list(parts) == ["multi-turn conversation", "writing", "coding", "qa"]
        assert [part["questions"] for part in parts.values()] == [7, 7, 7, 6]
        assert ("speedup" in parts["qa"]) is (r["batch"] == 1)
        if r["method"] != "plain":
            low, high = r["speedup_interval"]
            assert 0 <= low <= r["speedup"] <= high
        assert r["busy_share"] == 1 if r["batch"] == 1 else r["busy_share"] <= 1
    assert f"left out: {data}:8: not JSON" in "".join(saved["notes"])
    assert "gone is left out" in "".join(saved["notes"])
    assert {path.suffix for path in folder.glob("batches.*")} == {".png", ".pdf", ".svg"}
    found = list(map(json.loads, lines(folder)))
    assert len(found) == 20 * 3 * 4
    for line in found:
        for turn in line["turns"]:
            count = len(turn["tokens"])
            assert len(turn["pieces"]) == len(turn["kinds"]) == len(turn["rejected"]) == count
            assert len(turn["decode_s"]) == 2 and min(turn["decode_s"]) > 0
            if turn["probs"]:
                assert line["batch"] == 1 and len(turn["probs"]) == count
                for prob, best in zip(turn["probs"], turn["alternatives"]):
                    assert len(best) == 3 and best[0][1] >= prob - 1e-5
                    assert line["temperature"] > 0 or best[0][1] == pytest.approx(prob, abs=1e-5)
    shown = [(line["question"], line["cell"]) for line in found if line["turns"][0]["probs"]]
    assert len(shown) == 3 * 3 * 2  # a question of each category, three cells, two temperatures
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "Acceptance by kind of token" in text and "| identifier" in text


@pytest.mark.exhaustive
def test_later_turns_follow_what_plain_decoding_has_answered(twenty):
    found = [line for line in map(json.loads, lines(twenty[2])) if len(line["turns"]) == 2]
    assert len(found) == 7 * 3 * 4
    for line in found:
        same = lambda other: all(other[n] == line[n] for n in ("temperature", "question", "batch"))
        (plain,) = (other for other in found if same(other) and other["method"] == "plain")
        answer = "".join(plain["turns"][0]["pieces"])
        assert line["turns"][1]["prompt"].startswith(line["turns"][0]["prompt"] + "\n\n" + answer)
        assert line["turns"][1]["prompt"] == plain["turns"][1]["prompt"]


@pytest.mark.exhaustive
@pytest.mark.landing
def test_killed_in_the_middle_it_ends_with_the_same_report(twenty, tmp_path):
    pair, data, folder, rep = twenty
    config, run = config_of(pair, data), tmp_path / "run"
    with killed_at("answers.jsonl", 14):
        evaluate.evaluate(config, run)
    before = lines(run)
    assert 14 <= len(before) < 240
    with open(run / "answers.jsonl", "a") as file:
        file.write(lines(folder)[len(before)][:40])  # what a process killed in mid-line leaves
    resumed = evaluate.evaluate(config, run)
    after = lines(run)
    whole = len(before) // 3 * 3  # a group that is not whole is measured again
    assert len(after) == 240 and after[: whole - 12] == before[: whole - 12]
    report_of = lambda at: timeless(json.loads((at / "report.json").read_text(encoding="utf-8")))
    assert report_of(run) == report_of(folder) and len(resumed["results"]) == 12
    assert resumed["is_complete"]
    again = evaluate.evaluate(config, run)  # nothing is left to do, so that times are the same, too
    assert lines(run) == after
    speedups = lambda rep: [r["speedup"] for r in rep["results"]]
    np.testing.assert_allclose(speedups(again), speedups(resumed), rtol=1e-2)  # rounded in lines
    assert "went on elsewhere" not in "".join(again["notes"])
    state = (run / "state.jsonl").read_text(encoding="utf-8")
    (run / "state.jsonl").write_text(state.replace('"jax": "', '"jax": "0.'), encoding="utf-8")
    elsewhere = evaluate.evaluate(config, run)
    version = jax.__version__
    assert f"after 240 answers, from jax 0.{version} to {version}" in "".join(elsewhere["notes"])
