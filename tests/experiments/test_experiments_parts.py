"""The parts of the experiments that need no model: prompts, cells, predictions, tables."""

import ast
import dataclasses
import functools
import math
import pathlib
import re
import sys

import numpy as np
import pytest
from scipy.stats import binomtest
from support.files import write_lines
from support.report_entries import counts, sped_up

from experiments.comparison import plots as comparison_plots
from experiments.comparison import report as reports
from experiments.run import memory, report
from spec_jax.data import questions
from spec_jax.engine import stats
from spec_jax.evaluation import costs, summary
from spec_jax.evaluation.cells import Cell, make_cells
from spec_jax.intervals import Interval, jackknife, paired_speedup, shares, wilson
from spec_jax.show.tables import Table
from spec_jax.testing import RowAudit, mock_model

ROOT = pathlib.Path(__file__).resolve().parents[2]


DRAFTS = {"ngram": None, "standalone": mock_model(5)}


def test_cells_are_named_once_plain_comes_first_and_trees_stand_beside_chains():
    cells = make_cells(DRAFTS, dict.fromkeys(DRAFTS, [2, 4]), [0.0, 1.0], ["residual"] * 2)
    assert cells[0] == Cell("plain", 0, 0.0) and cells[5] == Cell("plain", 0, 1.0)
    assert len(cells) == len(set(cells)) == 10
    assert {c.rule for c in cells if c.temperature == 0 and c.k} == {"greedy"}
    cells = make_cells(DRAFTS, dict.fromkeys(DRAFTS, [2]), [1.0], trees=["3x1", "12:3:4"])
    assert cells[1:] == [
        Cell("ngram", 2, 1.0, "match"),
        Cell("standalone", 2, 1.0, "residual"),
        Cell("standalone", 6, 1.0, "residual", "3x1"),
        Cell("standalone", 12, 1.0, "residual", "12:3:4"),
    ]


def test_questions_are_spread_over_a_file(tmp_path):
    write_lines(tmp_path / "a.jsonl", ({"prompt": f"q{i}"} for i in range(4)))
    assert [q.text for q in questions.load(str(tmp_path / "a.jsonl"), 2).chosen] == ["q0", "q2"]


FAST, NEAR, SLOW = sped_up("a", 1.4, 1.6), sped_up("b", 0.9, 1.5), sped_up("c", 1.1, 1.3)
ALONE, SLOWER = sped_up("e", speedup=Interval(2.0, math.nan, math.nan)), sped_up("d", 0.5, 0.9)
TIE = RowAudit(2, "rounding", ("0.003 below the best",), 7, (5, 6), gap=0.003, rounding=0.002)
BUG = dataclasses.replace(TIE, verdict="bug", gap=0.5)
differing = lambda found: sped_up("a", 1.1, 1.2, differences=(found,), identical_rows=3)
CONCLUSIONS = [
    ([FAST, NEAR, SLOW], r"Fastest at T=0: a, K=3, .* 1.50x plain .*overlapping intervals: b K=3$"),
    ([NEAR], "at T=0, but not yet distinguishable from plain decoding with 4 prompts: b, K=3"),
    ([NEAR, sped_up("f", 0.9, 3.0), SLOW], "Fastest at T=0: c, K=3"),
    ([ALONE], "with one pair of times"),
    ([SLOWER], "Nothing beat plain decoding at T=0; closest: d"),
    ([differing(TIE)], "identical but for near ties"),
    ([differing(BUG)], "NOT identical"),
]


@pytest.mark.parametrize(("results", "words"), CONCLUSIONS, ids=[row[-1] for row in CONCLUSIONS])
def test_conclusions_say_what_was_found_and_how_sure_it_is(results, words):
    assert re.search(words, summary.conclusions(results)[0])


def test_dtypes_are_compared_by_tokens_per_second():
    in_dtype = lambda dtype, tok_s, plain_s, *bounds: dataclasses.replace(
        sped_up("g", *bounds, tokens_per_s=tok_s, plain_tokens_per_s=plain_s),
        cell=Cell("g", 3, 0.0, "greedy", None, dtype),
    )
    wide, half = in_dtype("float32", 80, 50, 1.5, 1.7), in_dtype("bfloat16", 91, 70, 1.2, 1.4)
    assert summary.best_of([wide, half]) is half, "1.3 times 70 is more than 1.6 times 50"
    first, second, last = summary.conclusions([wide, half])
    assert first.startswith("Fastest at T=0: g float32, K=3, rule greedy: 1.60x plain decoding in ")
    assert "1.30x plain decoding in bfloat16 (1.20 to 1.40)" in second and "overlap" not in second
    assert "g bfloat16, K=3: 91, 1.30x the fastest plain decoding of any dtype" in last


def test_tables_mark_what_is_missing_unsure_or_not_identical():
    texts = [summary.interval_text(one) for one in (FAST, NEAR, ALONE, SLOWER)]
    assert texts == ["1.40 to 1.60", "0.90 to 1.50 ?", "one pair ?", "0.50 to 0.90"]
    missing = sped_up("ngram", k=2, stats=counts([2, 0], [1, 0]), identical_rows=3)
    text = summary.results_table([FAST, missing]).text()
    assert "no (3/4 rows)" in text and ".50 –" in text and "nan" not in text
    for found in (TIE, BUG):
        said = f"at token 7; the verdict is {found.verdict}: 0.003 below the best"
        assert reports.describe_difference(differing(found), found).endswith(said)


def test_a_table_that_is_wider_than_the_terminal_goes_on_below(monkeypatch):
    found = summary.results_table([sped_up("a", 1.4, 1.6), sped_up("b" * 20, 1.1, 1.3)])
    whole, narrow = found.text().splitlines(), found.text(width=60)
    assert max(map(len, whole)) > 100 and max(map(len, narrow.splitlines())) <= 60
    parts = [part.splitlines() for part in narrow.split("\n\n")]
    assert {len(part) for part in parts} == {len(whole)} and len(parts) > 1
    assert all(part[2].split()[:3] == ["a", "3", "0"] for part in parts)
    rows = zip(*(part[2:] for part in parts))
    for row, line in zip(rows, whole[2:]):
        assert {*line.split()} == {x for part in row for x in part.split()}


def test_a_prediction_counts_what_is_offered_and_what_passes_cost():
    """A head feeds K + 1 pairs first, a draft model two tokens; then K - 1 passes of one."""
    first = {"eagle": {3: 1.0, 5: 2.0}, "standalone": {5: 0.7}}
    found = costs.Costs(
        2.0, {"eagle": 0.4, "standalone": 0.5, "mtp": 0.3}, {1: 2.0, 6: 3.0}, 128, 1, first
    )
    round_ms = lambda method, k: found.draft_cost(method, k) * k * found.plain_ms
    assert round_ms("eagle", 3) == pytest.approx(1.0 + 2 * 0.4)
    assert round_ms("eagle", 4) == pytest.approx(1.5 + 3 * 0.4)  # between the measured Ks
    assert round_ms("standalone", 5) == pytest.approx(0.7 + 4 * 0.5)
    assert round_ms("mtp", 3) == pytest.approx(3 * 0.3)  # its first pass was not measured
    assert (found.draft_cost("eagle"), found.draft_cost("ngram")) == (0.2, 0)
    assert math.isnan(found.draft_cost("dflash")) and found.verify_cost(2) == pytest.approx(1.2)
    of = lambda method, *seen: costs.predict(found, sped_up(method, stats=counts(*seen)))
    tokens = 1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7
    expected = tokens / ((1.0 + 0.8 + 2.6) / 2.0)
    assert of("eagle", [10] * 3, [9, 8, 7]) == pytest.approx(expected)
    offered = of("ngram", [10] * 3, [9, 8, 7], [5] * 3)  # fewer drafts than K
    assert offered == pytest.approx(stats.predicted_speedup([0.45, 0.8, 0.7], 0.0, 1.3))
    assert math.isnan(costs.predict(found, sped_up(tree="2x1")))


def test_a_pass_of_a_draft_costs_what_it_adds_to_a_round_turn_by_turn():
    drift = np.asarray([1.0, 3.0, 1.5])  # of the machine, from turn to turn
    times = {
        ("target", 0): 2.0,
        ("target", 3): 2.6,
        ("target", 4): 3.0,
        ("eagle", 3, 1): 3.6,
        ("eagle", 4, 1): 4.5,
        ("eagle", 4, 4): 5.7,
        ("standalone", 4, 1): 3.7,
    }
    found = costs.Costs.of_times(
        {costs.TimedLoop(*what): ms * drift for what, ms in times.items()}, slots=128, batch=1
    )
    in_median = lambda ms: pytest.approx(1.5 * ms)
    assert found.plain_ms == in_median(2.0)
    assert found.verify_ms == {1: in_median(2.0), 4: in_median(2.6), 5: in_median(3.0)}
    assert found.first_ms == {
        "eagle": {3: in_median(1.0), 4: in_median(1.5)},
        "standalone": {4: in_median(0.7)},
    }
    assert found.draft_ms == {"eagle": in_median(0.4)}
    round_ms = found.verify_cost(4) + 4 * found.draft_cost("eagle", 4)
    assert round_ms * found.plain_ms == in_median(5.7)  # all passes of a round, as measured
    assert found.is_significant("eagle") and not found.insignificant


def test_a_pass_whose_cost_is_not_significant_is_not_said_to_be_free():
    noise = np.asarray([0.2, -0.3, 0.1, -0.2])
    of = lambda **times: costs.Costs.of_times(
        {
            costs.TimedLoop("target", 0): np.full(4, 2.0),
            costs.TimedLoop("target", 4): np.full(4, 3.0),
            costs.TimedLoop("standalone", 4, 1): 3.0 + np.asarray(times["first"]),
            costs.TimedLoop("standalone", 4, 4): 3.0 + np.asarray(times["every"]),
        },
        slots=128,
        batch=1,
    )
    even = of(first=0.8 + 0 * noise, every=0.8 + noise)  # three passes add less than the noise
    assert even.draft_ms["standalone"] == even.first_ms["standalone"][4] == pytest.approx(0.1875)
    assert even.is_significant("standalone") and not even.insignificant
    assert 4 * even.draft_cost("standalone", 4) * 2.0 == pytest.approx(0.75)  # the median of all
    nothing = of(first=noise, every=noise - 0.1)
    assert nothing.draft_ms == {"standalone": 0.0}
    assert nothing.insignificant == {"standalone": [0, 4]}
    assert "(not significant)" in reports.describe_costs(nothing)[-1]
    halves = sped_up("standalone", k=4, stats=counts([9] * 4, [4] * 4, rounds=9))
    assert 0 < costs.predict(nothing, halves) < math.inf


def test_an_audit_is_summed_up_by_cell():
    found = RowAudit(2, "rounding", ("a tie",), 7, gap=0.1, rounding=0.1, deviations=(1.2, 1.4))
    wrong = dataclasses.replace(found, verdict="bug", deviations=(1.0, 9.0))
    ours = sped_up("a", 1.1, 1.2, differences=(found, wrong), identical_rows=2)
    sampled = dataclasses.replace(ours, identical_rows=None, differences=())
    (audit,) = reports.audit_summary([sped_up("plain", 1, 1), ours, sampled])
    names = ("rounding", "bug", "farthest", "identical", "not_examined", "rows")
    assert [audit[name] for name in names] == [1, 1, 9.0, 2, 2, 4]


def test_the_interval_of_a_speedup_is_that_of_its_pairs():
    rng = np.random.default_rng(0)
    tokens, widths = np.full(6, 31), []
    for _ in range(40):  # each pair shares the machine's speed, and has noise of its own
        machine = np.exp(0.3 * rng.standard_normal(6))
        plain, own = machine * np.exp(0.05 * rng.standard_normal((2, 6))) / [[1.0], [1.5]]
        found = paired_speedup(own, plain, tokens, tokens)
        assert found.value == pytest.approx(plain.sum() / own.sum())
        widths.append(found.high / found.low)
    assert np.median(widths) < 1.2  # the machine's drift cancels
    of_one = functools.partial(paired_speedup, np.asarray([1.0]), np.asarray([1.4]))
    one, twice = of_one([31], [31]), of_one([62], [31])  # twice the tokens in that time
    assert (one.value, twice.value) == (pytest.approx(1.4), pytest.approx(2.8))
    assert math.isnan(one.low) and math.isnan(one.high) and math.isnan(of_one([0], [31]).value)


@pytest.mark.parametrize("n", [3, 10, 80])
def test_the_interval_of_a_speedup_covers_the_truth_of_few_and_of_many_questions(n):
    """Speed-ups of questions are log-normal, and so are the tokens that they have."""
    rng, num = np.random.default_rng(n), 1000
    tokens = rng.lognormal(4.0, 0.3, (num, n))
    own = tokens * rng.lognormal(0.0, 0.4, (num, n)) / 1.5
    truth = 1.5 / np.exp(0.4**2 / 2)
    found = [paired_speedup(x, t, t, t) for x, t in zip(own, tokens)]
    covered = np.mean([x.low <= truth <= x.high for x in found])
    assert 0.93 <= covered <= 0.97  # of a 95 % interval


def test_an_interval_of_one_point_is_not_printed():
    texts = {
        Interval(0.5, 0.25, 0.75): "0.500 (0.250 to 0.750)",
        Interval(1.0, 1.0, 1.0): "1.000",
        jackknife(lambda x: x[..., None], np.asarray([2.0]))[0]: "2.000",
        Interval(math.nan, math.nan, math.nan): "–",
    }
    assert [*map(str, texts)] == [*texts.values()]


def test_rows_without_a_round_leave_a_plot_without_points(tmp_path):
    """Where every output ends with prefill's token, nothing has a speed-up."""
    row = sped_up("x", k=1, tree="1", stats=counts([0], [0]))
    comparison_plots.plot_speedup(tmp_path / "speedup.png", [row], {})
    comparison_plots.plot_acceptance(tmp_path / "acceptance.png", [row])
    comparison_plots.plot_predicted(tmp_path / "predicted.png", [sped_up("plain", 1, 1, k=0)])
    assert len([*tmp_path.glob("*.png")]) == 3


def test_intervals_of_rates_are_wilsons():
    counts = [(0, 3), (19, 19), (7, 11), (0, 0)]
    found = wilson([k / n if n else math.nan for k, n in counts], [n for _, n in counts])
    known = [binomtest(k, n).proportion_ci(method="wilson") for k, n in counts[:3]]
    np.testing.assert_allclose(found[:3], known, atol=1e-6)
    assert np.isnan(found[3]).all()


@pytest.mark.parametrize("n, groups", [(5, 5), (5, 1), (12, 4), (40, 8), (200, 200), (200, 20)])
def test_intervals_of_acceptance_cover_the_truth(n, groups):
    """On average over p; drafts of ``groups`` questions are accepted independently."""
    rates, num = np.linspace(0.1, 1.0, 46), 100
    rng = np.random.default_rng(n + groups)
    accepted = rng.binomial(n // groups, np.tile(rates, num), (groups, 46 * num))
    found = shares(accepted, np.full_like(accepted, n // groups))
    assert all(0 <= x.low < x.high <= 1 for x in found)
    pairs = zip(found, np.tile(rates, num))
    covered = np.mean([x.low - 1e-12 <= p <= x.high + 1e-12 for x, p in pairs])
    assert 0.92 <= covered <= 0.98


def test_intervals_of_acceptance_widen_where_questions_differ():
    """By hand: the jackknife's spread is that of 2 independent drafts, with t of 3 degrees."""
    accepted = np.asarray([[5, 4], [5, 4], [0, 4], [0, 4]])
    wide, full = shares(accepted, np.full_like(accepted, 5))
    size = 0.25 / (3 * np.var([5 / 15, 5 / 15, 10 / 15, 10 / 15]))
    expected = wilson([0.5], [size], 3.182446)[0]
    np.testing.assert_allclose([wide.low, wide.high], expected, rtol=1e-6)
    known = binomtest(16, 20).proportion_ci(method="wilson")
    np.testing.assert_allclose([full.low, full.high], known, rtol=1e-6)


def test_plots_have_names_in_place_of_paths():
    names = {
        ("zoo/eagle3", "runs/mine/export", "/a/b/head"): ["zoo/eagle3", "mine", "head"],
        ("runs/a/export", "old/a/export", "x"): ["runs/a", "old/a", "x"],
        ("zoo/eagle3", "runs/eagle3"): ["zoo/eagle3", "eagle3"],
        ("export",): ["export"],
        (): [],
    }
    assert {paths: report.names_of(paths) for paths in names} == names


def test_no_module_needs_unix_to_be_imported():
    for path in (*(ROOT / "spec_jax").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = (
                [x.name for x in node.names]
                if isinstance(node, ast.Import)
                else [getattr(node, "module", None)]
            )
            assert not {*names} & {"resource", "fcntl", "termios", "pwd", "grp", "pty"}, path


def test_memory_that_the_system_does_not_tell_is_left_out(tmp_path, monkeypatch):
    assert memory.peak_bytes() > 1e7
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    assert memory.peak_bytes() > 1e7, "elsewhere on Unix"
    monkeypatch.setitem(sys.modules, "resource", None)
    assert memory.peak_bytes() is None


def test_a_table_in_markdown_keeps_its_columns():
    found = Table(["category", "n"], [["a|b", "1"]])
    assert found.text(is_markdown=True).splitlines()[-1].startswith("| a\\|b")
    assert "a|b" in found.text()
