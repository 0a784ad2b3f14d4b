"""The page of a run: sections appear with their data, figures are the report's, texts are inert."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from support.report_entries import HOSTILE, answer, category, plain, result

from experiments.comparison import plots
from experiments.comparison.page import answers as packing
from experiments.comparison.page.page import render, write_page
from spec_jax.evaluation.results import NONE, KindResult, RoundTime
from spec_jax.intervals import Interval
from spec_jax.show.page import COLORS, MEANING
from spec_jax.testing import RowAudit


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, and texts outside of scripts."""

    VOID = {"meta", "img", "br", "input", "hr", "link"}

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.texts, self._open, self._row = [], [], [], [], None
        self.rows = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, tag

    def handle_data(self, data):
        if self._open[-1:] == ["script"]:
            self.scripts[-1] += data
            return
        self.texts.append(data)
        if {"td", "th"} & set(self._open) and "title" not in self._open:
            self.rows[-1][-1] += data

    @property
    def sections(self):
        return [a["id"] for tag, a in self.elements if tag == "section"]

    def row(self, *begin):
        """The cells of the first row that begins so."""
        rows = [[cell.strip() for cell in row] for row in self.rows]
        return next(row for row in rows if tuple(row[: len(begin)]) == begin)


ONE = [plain(), result()]
SECTIONS = {  # what each section needs beside results of one cell
    "headline": {},
    "methods": {},
    "predicted": {},
    "over-k": {"plots": {"speedup": "<svg></svg>"}},
    "acceptance": {"plots": {"acceptance": "<svg></svg>"}},
    "categories": {"results": [result(categories={"qa": category()})]},
    "batches": {"results": [result(batch=1), result(batch=4)]},
    "tokens": {"answers": [answer()]},
}


def page_of(results=(), answers=(), plots=None, **report):
    return Page(render(report, results, answers, plots))


def drawn(folder, results):
    """The plots of results, as texts by name."""
    folder.mkdir()
    plots.plot_speedup(folder / "speedup.png", results, {})
    plots.plot_acceptance(folder / "acceptance.png", results)
    plots.plot_predicted(folder / "predicted.png", results)
    plots.plot_batches(folder / "batches.png", results)
    return {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}


def test_a_section_appears_if_its_data_does():
    usual = {"headline", "methods", "predicted", "conditions"}
    assert set(page_of(ONE).sections) == usual
    for name, needed in SECTIONS.items():
        assert set(page_of(**{"results": ONE} | needed).sections) == usual | {name}
    assert set(page_of([result(predicted_speedup=None)]).sections) == usual - {"predicted"}
    assert page_of().sections == ["conditions"]
    assert set(page_of([plain()]).sections) == {"methods", "conditions"}


def test_links_within_the_page_lead_somewhere():
    found = page_of(ONE, [answer()], {"speedup": "<svg></svg>"})
    ids = {a.get("id") for _, a in found.elements}
    links = [a["href"] for tag, a in found.elements if tag == "a"]
    assert links and all(link[0] == "#" and link[1:] in ids for link in links)


def test_figures_are_the_reports():
    slow = dict(tau=NONE._replace(value=3.333), speedup=NONE._replace(value=0.5))
    found = page_of([plain(), result(), result("mtp", 5, tree="2x2", **slow)])
    row = found.row("eagle-3", "K=3", "1.43×", "1.21 to 1.65", "1.57×", "2.77")
    assert row[7:] == ["733", "yes"]
    assert found.row("mtp", "tree 2x2", "0.50×")[5] == "3.33"
    texts = "".join(found.texts)
    assert "1.43×" in texts and "eagle-3 K=3" in texts and "of 32 outputs" in texts
    assert found.row("eagle-3 K=3", "0")[2:] == ["1.43×", "1.57×", "0.91"]


def test_figures_that_are_not_finite_are_dashes():
    found = page_of([result(speedup=NONE, tau=NONE)], config={"x": math.nan})
    row = found.row("eagle-3", "K=3")
    assert row[2:4] == ["–", "–"] and row[5] == "–"
    assert "headline" not in found.sections


def test_plots_show_every_figure_in_the_colours_of_the_page(tmp_path):
    results = [plain(), result(k=2), result(k=3, tree="3"), result(k=2, batch=4)]
    texts = drawn(tmp_path / "plots", results)
    assert texts == drawn(tmp_path / "again", results)  # a run's page is reproducible
    text = render({}, results, (), texts)
    found = Page(text)
    pictures = [a["aria-label"] for tag, a in found.elements if tag == "svg" and "aria-label" in a]
    assert len(pictures) == 4
    for picture in pictures:
        assert "eagle-3 K=2" in picture or "eagle-3 tree 3" in picture
    assert sum("eagle-3 K=2: 1.43 (1.21 to 1.65)" in picture for picture in pictures) == 2
    for said in ("eagle-3 K=2, batch 4: 1.43 (1.21 to 1.65)", "eagle-3 tree 3, position 1: 0.80"):
        assert any(said in picture for picture in pictures) and said in "".join(found.texts)
    drawings = text[text.index("<main>") :]
    assert "var(--m1)" in drawings and "currentColor" in drawings
    assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r"(#|url\(#)[mp][0-9a-f]{10}", "", drawings))
    assert "metadata" not in drawings and "http" not in re.sub(r'xmlns[:\w]*="[^"]*"', "", drawings)


def test_a_column_appears_if_its_values_differ():
    few = page_of([plain(), result()]).rows[0]
    more = page_of([result(), result(temperature=0.5, rule="residual", batch=4)])
    added = {cell.strip() for cell in more.rows[0]} - {cell.strip() for cell in few}
    assert added == {"T", "batch", "rule"}
    row = more.row("eagle-3", "K=3", "0.5", "4", "1.43×")
    assert row[-2:] == ["residual", "yes"]


def test_the_best_method_is_a_lossless_one():
    lossy = result("lossy", speedup=NONE._replace(value=9.0), is_lossless=False)
    found = page_of([plain(), result(), lossy])
    assert "eagle-3 K=3" in "".join(found.texts[: found.texts.index("Every method")])


def test_where_nothing_is_faster_the_page_says_so_and_marks_no_row():
    marked = lambda page: [a for _, a in page.elements if a.get("class") == "best"]
    slow = result("ngram", speedup=Interval(0.62, 0.6, 0.64))
    found = page_of([plain(), slow, result("mtp", speedup=Interval(0.5, 0.4, 0.6))])
    texts = " ".join(" ".join(found.texts).split())
    assert "Nothing beat plain decoding closest: ngram K=3, 0.62× " in texts
    assert "Fastest" not in texts and "slower than plain decoding" in texts
    assert marked(found) == []
    assert (
        marked(page_of([plain(), result(speedup=Interval(1.4, 0.9, 1.9))])) == []
    )  # not significant
    found = page_of([plain(), slow, result()])
    assert "Fastest" in "".join(found.texts) and len(marked(found)) == 1


def test_categories_and_batches_show_each_figure():
    categories = {"qa": category(2.104, 0.912, 0.8, 1.1, questions=80), "math": category(3.5, 2.0)}
    found = page_of([plain(), result(categories=categories)])
    assert found.row("qa 80") == ["qa 80", "0.91×2.10"] and found.row("math 8")[1] == "2.00×3.50"
    assert found.row("all")[1] == "1.43×2.77"  # 2.765 as Python rounds it
    speeds = {1: (1.4, 1.6), 4: (1.1, 1.3), 8: (0.9, 1.2), 16: (0.7, 0.9)}
    found = page_of([result(batch=b, speedup=Interval(1, *s)) for b, s in speeds.items()])
    row = found.row("eagle-3 K=3", "0", "1.00x (1.40 to 1.60)")
    assert row[4:] == ["1.00x (0.90 to 1.20 ?)", "1.00x (0.70 to 0.90)", "at 1, 4"]


def test_acceptance_by_kind_of_token_has_a_table_if_it_was_counted():
    kinds = {
        "word": KindResult(8, 6, Interval(0.75, 0.5, 0.9)),
        "space": KindResult(4, 1, Interval(0.25, 0.1, 0.4)),
    }
    page = page_of([plain(), result(kinds=kinds)])
    assert "counted" in page.sections and "counted" not in page_of([plain(), result()]).sections
    assert page.row("method", "T", "word", "space")
    row = ["eagle-3 K=3", "0", "0.75 (0.50 to 0.90)", "0.25 (0.10 to 0.40)"]
    assert page.row("eagle-3 K=3", "0", row[2]) == row


def test_a_round_is_shown_beside_plain_decoding_of_as_many_tokens():
    time = RoundTime(2.15, 1.5, 0.75, -0.1, 0.2)
    tau = NONE._replace(value=3.0)
    found = page_of([plain(round_time=RoundTime(1.25)), result(tau=tau, round_time=time)])
    titles = "".join(found.texts)
    assert "verify 1.50 ms, draft 0.75 ms, rest 0.00 ms" in titles
    assert "plain decoding takes 3.75 ms for as many tokens" in titles
    assert found.row("eagle-3 K=3", "0")[-2:] == ["-0.100", "0.200"]


def test_output_that_differs_is_said():
    said = lambda **changes: page_of([result(**changes)]).row("eagle-3")[-1]
    assert said(identical_rows=15) == "no (15/16 rows)"
    tie = RowAudit(0, "rounding")
    assert said(identical_rows=15, differences=(tie,)) == "no (15/16 rows, near ties)"
    assert said(identical_rows=None) == "–" and said() == "yes"
    assert said(is_lossless=False, identical_rows=None) == "– (lossy)"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_becomes_markup(text, tmp_path):
    usual = page_of(ONE, [answer()], notes=["n"], command="c", conclusions=["s"])
    options = dict(
        pieces=(text, "b", text, text),
        turn={"prompt": text, "finish": text, "rejected": [None, None, text, None]},
    )
    line = answer(question=text, category=text, cell=text, method=text, **options)
    results = [plain(), result(text, rule=text, tree=None)]
    report = {"notes": [text], "command": f"c{text}", "conclusions": [text]}
    write_page(tmp_path / "report.html", report, results, [line])
    found = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    tags = lambda page: [tag for tag, _ in page.elements]
    assert tags(found) == tags(usual)
    assert not any(name.startswith("on") for _, a in found.elements for name in a)
    data = json.loads(found.scripts[0])
    expected = packing.select([line])
    assert data == json.loads(json.dumps(expected))
    assert data["questions"][0]["id"] == text


def test_the_page_loads_nothing():
    text = render({"config": {"target": "https://x.org/m"}}, ONE, [answer()])
    found = Page(text)
    policy = next(a["content"] for _, a in found.elements if a.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert not any(tag in ("link", "iframe", "object", "img") for tag, _ in found.elements)
    assert not any("src" in a for _, a in found.elements)
    styles = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in styles and "@import" not in styles
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|innerHTML", text)


def test_colours_and_meanings_are_those_of_notebooks():
    text = render({}, [result()], [answer()])
    for kind, color in COLORS.items():
        channels = " ".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
        assert f"--{kind}: {channels};" in text
    assert json.loads(Page(text).scripts[1]) == MEANING


def test_a_token_of_a_round_without_drafts_is_no_bonus():
    kinds = ["first", "bonus", "bonus", "accepted", "bonus"]
    assert packing._letters(kinds, [-1, 0, 1, -1, -1]) == "ftbab"


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
    assert size(few) > size(whole) // 8
    assert {u["question"] for u in few["units"]} == set(range(len(names)))
    assert len(few["units"]) == 2 * len(names) and few["total"] == 30
    smallest = packing.select(lines, budget=1)
    assert len(smallest["units"]) == 1 and smallest["total"] == 30


def test_questions_with_probabilities_come_first():
    bare = {"probs": None, "alternatives": None}
    lines = [answer(f"q{i}", turn=bare if i != 3 else {}) for i in range(5)]
    found = packing.select(lines)
    assert found["questions"][0]["id"] == "q3"
    assert [("probs" in text) for text in found["texts"]] == [True, False]


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


def test_memory_holds_some_questions_of_each_category(tmp_path):
    bare = {"probs": None, "alternatives": None}
    lines = [answer(f"q{i}", turn=bare if i != 90 else {}) for i in range(100)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = packing.select(packing.read(tmp_path / "answers.jsonl"))
    assert found["questions"][0]["id"] == "q90" and found["total"] == 100
    assert len(found["questions"]) == 9
    assert list(packing.read(tmp_path / "none.jsonl")) == []


def test_long_answers_are_cut_and_it_is_said():
    found = packing.select([answer(pieces=["x"] * 2000, turn={"prompt": "p" * 100_000})])
    turn = found["units"][0]["turns"][0]
    assert len(turn["kinds"]) == len(turn["offered"]) == packing.MAX_TOKENS
    assert turn["total"] == 2000
    assert len(found["texts"][0]["pieces"]) == packing.MAX_TOKENS
    assert "96,000 characters left out" in found["prompts"][0]["text"]
    assert packing.select([]) is None and packing.select([answer(turns=[])]) is None
