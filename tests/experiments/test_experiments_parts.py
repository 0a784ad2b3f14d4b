"""The parts of the experiments that need no model: prompts, cells, predictions, tables."""

import gzip
import json
import math

import pytest

from experiments.common import costs, decode_report
from experiments.common.grid import Cell, make_cells
from experiments.common.prompts import load_prompts
from spec_jax.engine import stats
from spec_jax.errors import ConfigError


def test_prompts_come_from_files_of_each_kind(tmp_path):
    bench = [{"question_id": i, "category": "c", "turns": [f"q{i}", "more"]} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bench))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"task_id": "T/0", "prompt": "def f():\n"}) + "\n\n")
    (tmp_path / "c.txt").write_text("one\n\ntwo\n")
    found = lambda name, n: [prompt[:2] for prompt in load_prompts(str(tmp_path / name), n, 0)]
    assert found("a.jsonl", 2) == [("0 (c)", "q0"), ("2 (c)", "q2")]
    assert found("b.jsonl.gz", 1) == [("T/0", "def f():")]
    assert found("c.txt", 2) == [("line 1", "one"), ("line 3", "two")]
    (tmp_path / "d.json").write_text('[{"text": "one"},\n"two"]')
    assert found("d.json", 2) == [("d.json: object 1", "one"), ("d.json: object 2", "two")]
    with pytest.raises(ConfigError, match="holds 2 prompts; num_prompts asks for 3"):
        load_prompts(str(tmp_path / "c.txt"), 3, 0)
    bad = {
        "{": r"bad\.jsonl:1: not JSON", '{"a": 1}': "its keys: a", "1": "no text",
        '{"turns": "hello"}': "its keys: turns", '{"messages": []}': "no message to answer",
        '{"conversations": [{"from": "x", "value": ""}]}': "a turn is from 'x'",
        '{"messages": [{"role": "user", "content": ""}]}': "no text of the user",
    }  # fmt: skip
    for text, message in bad.items():
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_prompts(str(tmp_path / "bad.jsonl"), 1, 0)
    (tmp_path / "bad.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(str(tmp_path / "bad.gz"), 1, 0)


def test_cells_are_named_once_and_plain_comes_first():
    rules = {"ngram": ["match"], "standalone": ["residual", "residual"]}
    cells = make_cells(["ngram", "plain", "standalone"], [2, 4], [0.0, 1.0], rules)
    assert cells[0] == Cell("plain", 0, 0.0) and cells[5] == Cell("plain", 0, 1.0)
    assert len(cells) == len(set(cells)) == 10
    assert {c.rule for c in cells if c.temperature == 0 and c.k} == {"greedy"}


def test_a_prediction_counts_what_is_offered_and_what_passes_cost():
    found = costs.Costs(2.0, {"standalone": 0.5}, {1: 2.0, 5: 3.0}, slots=128, batch=1)
    assert found.verify_cost(2) == 1.25 and found.draft_cost("ngram") == 0
    assert math.isnan(found.draft_cost("mtp"))
    full = {
        "method": "standalone", "k": 4, "rounds": 10, "drafted_at": [10] * 4,
        "acceptance_by_position": [0.9, 0.8, 0.7, math.nan],
    }  # fmt: skip
    rates = full["acceptance_by_position"]
    assert costs.predict(found, full) == stats.predicted_speedup(rates, 0.25, 1.5)
    assert costs.predict(found, full, 2) == stats.predicted_speedup(rates[:2], 0.25, 1.25)
    half = {**full, "method": "ngram", "drafted_at": [5, 5, 5, 5]}
    assert costs.predict(found, half) == stats.predicted_speedup([0.45, *rates[1:]], 0.0, 1.5)


def test_cells_of_trees_stand_beside_the_chains():
    rules = {"ngram": ["match"], "standalone": ["residual"]}
    cells = make_cells(["ngram", "standalone"], [2], [1.0], rules, ["3x1", "12:3:4"])
    assert cells[1:] == [
        Cell("ngram", 2, 1.0, "match"), Cell("standalone", 2, 1.0, "residual"),
        Cell("standalone", 6, 1.0, "residual", "3x1"),
        Cell("standalone", 12, 1.0, "residual", "12:3:4"),
    ]  # fmt: skip
    assert cells[-1].label == "standalone tree 12:3:4 T=1 residual"


def test_a_table_is_aligned_and_shows_what_is_missing():
    row = {
        "method": "plain", "k": 0, "temperature": 0.0, "rule": "greedy", "tokens_per_s": 400.0,
        "tau": 1.0, "acceptance_by_position": [], "speedup": 1.0, "predicted_speedup": 1.0,
        "identical_to_plain": True, "is_lossless": True,
    }  # fmt: skip
    changed = {"method": "ngram", "k": 2, "acceptance_by_position": [0.5, math.nan]}
    other = {**row, **changed, "speedup": math.nan, "identical_to_plain": False}
    lossy = {**other, "rule": "typical-acceptance", "is_lossless": False, "speedup": 0.5}
    other |= {"identical_rows": 3, "rows": 4}
    lossy |= {"identical_to_plain": None, "temperature": 1.0}
    lines = decode_report.results_table([row, other, lossy]).splitlines()
    column = lines[0].index("identical")
    assert [line[column:] for line in lines[2:]] == ["yes", "no (3/4 rows)", "", "– (lossy)"]
    assert ".50 –" in lines[3] and "nan" not in "".join(lines)
    assert decode_report.conclusions([row, other, lossy]) == []
