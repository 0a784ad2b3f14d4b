"""Published pairs: the file is sound, and all are reported."""

import pytest
from support import published
from support.published import GROUPS

ROWS, FILE = published.load()


def test_every_pair_has_a_source_and_could_have_happened():
    for run in FILE["runs"]:
        named = {run["source"], *(run[key] for key in ("tau_from", "baseline_from") if key in run)}
        assert named <= set(FILE["sources"]), run
    for row in ROWS:
        if row.tau is not None:
            most = 1 + (row.num_draft if row.tree is None else row.tree.depth)
            assert 1 <= row.tau <= most, row
            # Nothing gains more than the tokens that it emits: such a pair is misprinted.
            assert row.speedup <= row.tau * 1.001, row
    assert {row.group for row in ROWS} == set(GROUPS)
    assert all(count > 0 and of and why for count, of, why in FILE["left_out"])


def test_means_of_table_1_are_those_that_the_paper_prints():
    # EAGLE-3, arXiv 2503.01840, table 1, column "Mean": speed-up and tau.
    means = {
        ("vicuna-13b", "eagle-3", 0): (5.51, 6.62),
        ("vicuna-13b", "eagle-1", 1): (2.44, 3.45),
        ("llama-3.1-8b", "eagle-2", 1): (2.80, 3.62),
        ("llama-3.1-70b", "eagle-2", 0): (2.85, 3.78),
        ("llama-3.1-70b", "eagle-3", 1): (3.95, 5.66),
    }
    for key, mean in means.items():
        found = [
            (r.speedup, r.tau)
            for r in ROWS
            if (r.target, r.method, r.temperature) == key and r.source == "eagle-3, table 1"
        ][:5]
        average = [sum(column) / 5 for column in zip(*found)]
        assert average == pytest.approx(mean, abs=0.011), key


def test_every_pair_is_listed():
    *groups, errors = [section.table for section in published.sections(ROWS)]
    assert sum(len(group.rows) for group in groups) == len(ROWS)
    assert [row[1] for row in errors.rows] == [str(len(group.rows)) for group in groups[:3]]
