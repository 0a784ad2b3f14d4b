"""``experiments.compare``: what changed between two evaluations, and what is not compared."""

import json
import math

import numpy as np
import pytest
from support.report_entries import plain, result

from experiments import compare
from spec_jax.intervals import Interval


def saved(folder, results, **config):
    """The folder of a run with these results."""
    folder.mkdir()
    report = {"config": {"seed": 0, "ks": [3]} | config, "prompts": {"names": ["q"]}}
    report["results"] = [r.to_dict() for r in results]
    (folder / "report.json").write_text(json.dumps(report))
    return str(folder)


def test_cells_of_one_setting_are_compared_and_others_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    fast = dict(speedup=Interval(1.75, 1.5, 2.0))
    before = saved(tmp_path / "a", [plain(), result(speedup=Interval(1.25, 1.0, 1.5)), result("m")])
    after = saved(tmp_path / "b", [plain(), result(**fast), result("m", 5), result("new")], ks=[5])
    assert compare.main([before, after, f"--workdir={tmp_path / 'c'}"]) == 0
    out = capsys.readouterr().out
    half = math.hypot(0.25, 0.25)
    assert f"1.25  1.75  +0.50 ({0.5 - half:+.2f} to {0.5 + half:+.2f}) *" in out
    for name in ("only in A: m K=3", "the other has m K=5", "only in B: m K=5", "only in B: new"):
        assert name in out
    report = json.loads((tmp_path / "c" / "report.json").read_text())
    assert [one["method"] for one in report["changes"]] == ["eagle-3"]
    assert (tmp_path / "c" / "changes.png").exists()


def test_runs_of_other_settings_are_not_compared(tmp_path, capsys):
    runs = [saved(tmp_path / name, [result()], seed=i) for i, name in enumerate("ab")]
    assert compare.main([*runs, f"--workdir={tmp_path / 'c'}"]) == 0
    out = capsys.readouterr().out
    assert "nothing is compared: seed is 0 in A and 1 in B" in out and "B less A" not in out
    (tmp_path / "a" / "report.json").write_text("{}")
    assert compare.main([*runs, f"--workdir={tmp_path / 'd'}"]) == 2
    assert "holds no evaluation" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [(20, 30), (8, 200)])
def test_the_interval_of_a_change_covers_the_truth(sizes):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((4000, n)) for n in sizes)
    found = [
        [Interval(m, m - w, m + w) for m, w in zip(x.mean(axis=1), 1.96 * x.std(axis=1) / n**0.5)]
        for x, n in zip((a, b), sizes)
    ]
    changes = (compare.change(x, y) for x, y in zip(*found))
    assert 0.90 <= np.mean([x.low <= 0 <= x.high for x in changes]) <= 0.97
