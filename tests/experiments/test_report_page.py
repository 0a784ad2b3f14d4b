"""The page of a run: it shows the report's figures, texts are inert, and it loads nothing."""

import dataclasses
import json
import math
import re

import pytest
from support.html_page import Page
from support.report_entries import HOSTILE, answer, category, plain, report_of, result

from experiments.comparison import plots
from experiments.comparison.page import answers as packing
from experiments.comparison.page.page import write_page
from experiments.comparison.report import audit_summary, conclude, sections
from spec_jax.evaluation.places import PlaceResult
from spec_jax.evaluation.results import NONE, KindResult, RoundTime
from spec_jax.intervals import Interval
from spec_jax.show.page import COLORS, MEANING
from spec_jax.show.tables import Section
from spec_jax.testing import RowAudit

ONE = [plain(), result()]


def written(folder, results=(), answers=(), figures=(), **report):
    """The page of a run, and its sections."""
    report = report_of(**report)
    parts = sections(report, results, {}, figures)
    write_page(folder / "report.html", report, results, parts, answers)
    return (folder / "report.html").read_text(encoding="utf-8"), parts


def everything():
    """Results of two temperatures and batch sizes, of which one has all that is shown."""
    kinds = {"word": KindResult(8, 6, Interval(0.75, 0.5, 0.9))}
    places = {"a sibling": PlaceResult(5, *[NONE._replace(value=0.5)] * 4)}
    full = dict(categories={"g": category(2.104, 0.912, 0.8, 1.1, questions=80)}, kinds=kinds)
    full |= dict(places=places, difference=(NONE._replace(value=0.25),), compared_with="the first")
    slow = dict(tau=NONE._replace(value=3.0), speedup=NONE._replace(value=0.5))
    slow |= dict(round_time=RoundTime(2.15, 1.5, 0.75, 0.2), identical_rows=15)
    slow |= dict(differences=(RowAudit(0, "rounding"),))
    lossy = dict(speedup=NONE._replace(value=9.0), tau=NONE, is_lossless=False)
    categories = {"g": category(1.0, 1.0, questions=80)}
    return [
        plain(round_time=RoundTime(1.25), categories=categories),
        result(**full, teacher_forced=(0.8, 0.7, math.nan)),
        result("mtp", 5, tree="2x2", categories=categories, **slow),
        result("lossy", identical_rows=None, categories=categories, **lossy),
        result(k=2, batch=4, temperature=0.5, rule="residual", speedup=Interval(1, 0.9, 1.2)),
    ]


def test_bars_end_within_their_cell_and_every_plot_stands_in_one_section():
    """Also where the parts, timed apart, take longer than the round; and where no row is greedy."""
    shown = [result(round_time=RoundTime(2.0, 1.6, 1.0, 0.2), temperature=1.0, rule="residual")]
    shown[0] = dataclasses.replace(shown[0], categories={"g": category()})
    report = {"config": {"repeats": 2}, "notes": []}
    figures = ("acceptance.png", "categories.png")
    parts = sections(report, shown, {}, figures)
    cells = [cell for part in parts if part.table for row in part.table.rows for cell in row]
    ends = [end for cell in cells for *_, end in getattr(cell, "bar", ())]
    assert len(ends) >= 3 and max(ends) <= 1
    assert shown[0].round_time.rest_ms == 0
    assert any("The machine was busy: the passes of" in " ".join(part.text) for part in parts)
    assert [part.figure for part in parts if part.figure] == [*figures]
    alone = [plain(categories={"g": category()})]
    assert "categories.png" not in [p.figure for p in sections(report, alone, {}, figures)]


SHOWN = (  # of each table a row
    "mtp 2x2|5|0|1|greedy|3.00|.80 .71 –|733|512|0.50x|one pair ?|1.57x|no (15/16 rows, near ties)",
    "lossy|3|0|1|greedy|–|.80 .71 –|733|512|9.00x|one pair ?|1.57x|– (lossy)",
    "eagle-3 K=3|0|2.77|0.80|0.71|–|0%",
    "eagle-3 K=3|0|0.75 (0.50 to 0.90)",
    "eagle-3 K=3|0|a sibling|5|0.50|0.50|0.50|0.50",
    "g|80|0.91 (0.80 to 1.10)|1.00|1.00",
    "all|80|2.77|3.00|–",  # 2.765 as Python rounds it
    "eagle-3 K=3|0|1.43x (1.21 to 1.65)|–|everywhere",
    "mtp tree 2x2|0|2.150|1.500|0.750|0.000|–|0.50|1.57|0.32",
    "mtp 2x2|5|0|16|15|15|1|0|–",
)


def test_page_markdown_and_screen_show_every_figure_of_a_run(tmp_path):
    """The same sections in the three: each table's rows, the plots, and the colours."""
    results = everything()
    figures = ("speedup.png", "acceptance.png")
    plots.plot_speedup(tmp_path / figures[0], results, {})
    plots.plot_acceptance(tmp_path / figures[1], results)
    entries = dict(audit=audit_summary(results), notes=["a note"], conclusions=conclude(results))
    entries |= dict(
        warnings=["a busy machine"], command="python -m x", config={"repeats": 2, "x": math.nan}
    )
    text, parts = written(tmp_path, results, [answer()], figures, **entries)
    found = Page(text)
    tables = [part.table for part in parts if part.table]
    rows = ["|".join(cell.strip() for cell in row) for row in found.rows]
    every = [row for table in tables for row in (table.header, *table.rows)]
    assert rows == ["|".join(map(str, row)) for row in every]
    assert {*SHOWN} <= {*rows}
    markdown = "\n".join(part.markdown() for part in parts)
    screen = "\n".join(part.console() for part in parts)
    for cell in (str(cell) for table in tables for row in table.rows[:4] for cell in row):
        assert cell in markdown and cell in screen
    assert all(f"![{name}]({name})" in markdown for name in figures)
    best = found.text[: found.text.rindex("Every method")]
    assert "eagle-3 K=3" in best, "the fastest lossless one"
    assert found.text.count("Beware: a busy machine") == 1
    for said in ("a note", "python -m x", "less the first: tau 0.250", "at most 0.0100 apart"):
        assert said in found.text
    pictures = [a["aria-label"] for tag, a in found.elements if a.get("role") == "img"]
    assert pictures == ["greedy, temperature 0", "sampled, temperature 0.5"] * len(figures)
    assert "eagle-3 K=3: 1.43 (1.21 to 1.65)" in found.texts, "shown over the point"
    ids = {a.get("id") for _, a in found.elements}
    links = [a["href"] for tag, a in found.elements if tag == "a"]
    assert links and all(link[0] == "#" and link[1:] in ids for link in links)
    for kind, color in COLORS.items():
        channels = " ".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
        assert f"--{kind}: {channels};" in text
    assert json.loads(found.scripts[1]) == MEANING


def test_a_section_or_a_column_appears_if_its_data_does(tmp_path):
    titles = lambda results: [part.title for part in written(tmp_path, results)[1]]
    usual = ["Every method", "Tokens per target pass"]
    assert titles(ONE) == usual and titles([]) == [] and titles([plain()]) == usual[:1]
    header = written(tmp_path, ONE)[1][0].table.header
    assert "batch" not in header and "T" in header


def test_only_a_row_that_is_surely_faster_is_marked(tmp_path):
    def count(*results):
        elements = Page(written(tmp_path, [plain(), *results])[0]).elements
        return sum("best" in a.get("class", "").split() for _, a in elements)

    slow = result("ngram", speedup=Interval(0.62, 0.6, 0.64))
    unsure = result(speedup=Interval(1.4, 0.9, 1.9))
    assert (count(slow), count(unsure), count(slow, result())) == (0, 0, 1)


def test_more_than_four_methods_have_a_panel_each(tmp_path):
    results = [plain(), *(result(f"m{i}") for i in range(5))]
    plots.plot_predicted(tmp_path / "predicted.png", results)
    shown = [Section("", figure="predicted.png")]
    write_page(tmp_path / "report.html", report_of(), results, shown)
    found = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    pictures = [a["aria-label"] for _, a in found.elements if a.get("role") == "img"]
    assert pictures == [f"m{i}, greedy temperature 0" for i in range(5)]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_becomes_markup(text, tmp_path):
    usual = written(tmp_path, ONE, [answer()], notes=["n"], command="c", conclusions=["s"])[0]
    options = dict(
        pieces=(text, "b", text, text),
        turn={"prompt": text, "finish": text, "rejected": [None, None, text, None]},
    )
    line = answer(question=text, category=text, cell=text, method=text, **options)
    results = [plain(), result(text, rule=text, tree=None)]
    report = {"notes": [text], "command": f"c{text}", "conclusions": [text]}
    found = Page(written(tmp_path, results, [line], **report)[0])
    tags = lambda page: [tag for tag, _ in page.elements]
    assert tags(found) == tags(Page(usual))
    assert not any(name.startswith("on") for _, a in found.elements for name in a)
    assert json.loads(found.scripts[0]) == json.loads(json.dumps(packing.select([line])))


def test_the_page_loads_nothing(tmp_path):
    target = {"repeats": 2, "target": "https://x.org/m"}
    text, _ = written(tmp_path, ONE, [answer()], config=target)
    found = Page(text)
    policy = next(a["content"] for _, a in found.elements if a.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert not any(tag in ("link", "iframe", "object") for tag, _ in found.elements)
    assert all(a["src"].startswith("data:") for _, a in found.elements if "src" in a)
    styles = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in styles and "@import" not in styles
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|innerHTML", text)


def test_questions_of_every_category_come_in_turn_within_the_budget():
    lines = [
        answer(f"{category}{i}", cell, method=cell, category=category, pieces=["word", *"abcdefgh"])
        for category in ("qa", "math", "code")
        for i in range(10)
        for cell in ("a", "b")
    ]
    whole = packing.select(lines)
    assert len(whole["questions"]) == whole["total"] == 30 and len(whole["units"]) == 60
    # Both cells decode the same text, and every question has the same prompt.
    assert len(whole["texts"]) == len(whole["prompts"]) == 1
    size = lambda found: len(json.dumps(found))
    few = packing.select(lines, budget=size(whole) // 6)
    assert size(few) < size(whole) // 4
    names = [q["id"] for q in few["questions"]]
    assert names[:4] == ["qa0", "math0", "code0", "qa1"] and len(names) < 15
    assert len(few["units"]) == 2 * len(names) and few["total"] == 30
    smallest = packing.select(lines, budget=1)
    assert len(smallest["units"]) == 1 and smallest["total"] == 30


def test_the_last_line_of_a_unit_and_the_smallest_batch_count():
    lines = [
        answer(pieces=("old", "x")),
        answer(pieces=("wide", "x"), batch=4),
        answer(pieces=("new", "x")),
        answer(pieces=("wide", "x"), batch=4),
    ]
    found = packing.select(lines)
    assert [text["pieces"][0] for text in found["texts"]] == ["new"] and len(found["units"]) == 1
    assert found["units"][0]["turns"][0]["ms"] == 11


def test_memory_holds_some_questions_of_each_category_and_long_answers_are_cut():
    bare = {"probs": None, "alternatives": None}
    lines = [answer(f"q{i}", turn=bare if i != 90 else {}) for i in range(100)]
    found = packing.select(lines)
    assert found["questions"][0]["id"] == "q90" and found["total"] == 100
    assert len(found["questions"]) == 9
    found = packing.select([answer(pieces=["x"] * 2000, turn={"prompt": "p" * 100_000})])
    turn = found["units"][0]["turns"][0]
    assert turn["total"] == 2000 and len(found["texts"][0]["pieces"]) == packing.MAX_TOKENS
    assert len(turn["kinds"]) == len(turn["offered"]) == packing.MAX_TOKENS
    assert "96,000 characters left out" in found["prompts"][0]["text"]
    assert packing.select([]) is None and packing.select([answer(turns=[])]) is None
