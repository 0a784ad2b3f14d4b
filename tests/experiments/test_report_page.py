"""The page of a run: it shows the report's figures, texts are inert, and it loads nothing."""

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


ONE = [plain(), result()]


def page_of(results=(), answers=(), plots=None, **report):
    return Page(render(report, results, answers, plots))


def test_the_page_shows_every_figure_of_a_run(tmp_path):
    """Of a run with everything: each table's rows, the plots' figures, and the colours."""
    kinds = {"word": KindResult(8, 6, Interval(0.75, 0.5, 0.9))}
    slow = dict(tau=NONE._replace(value=3.0), speedup=NONE._replace(value=0.5))
    slow |= dict(identical_rows=15, differences=(RowAudit(0, "rounding"),))
    lossy = dict(speedup=NONE._replace(value=9.0), tau=NONE, is_lossless=False)
    results = [
        plain(round_time=RoundTime(1.25)),
        result(categories={"qa": category(2.104, 0.912, 0.8, 1.1, questions=80)}, kinds=kinds),
        result("mtp", 5, tree="2x2", round_time=RoundTime(2.15, 1.5, 0.75, -0.1, 0.2), **slow),
        result("lossy", identical_rows=None, **lossy),
        result(k=2, batch=4, temperature=0.5, rule="residual", speedup=Interval(1, 0.9, 1.2)),
    ]
    plots.plot_speedup(tmp_path / "speedup.png", results, {})
    plots.plot_acceptance(tmp_path / "acceptance.png", results)
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    text = render({"config": {"x": math.nan}}, results, [answer()], drawn)
    found = Page(text)
    assert found.sections == [
        *("headline", "methods", "over-k", "categories", "acceptance", "counted", "batches"),
        *("predicted", "tokens", "conditions"),
    ]
    assert ["|".join(cell.strip() for cell in row) for row in found.rows] == [
        "method|K or tree|T|batch|speed-up|95\xa0% interval|predicted|tau|accepted at 1, 2 …|tok/s|"
        "rule|identical",
        "plain|–|0|1|1.00×||–|1.00|–|733|–|–",
        "eagle-3|K=3|0|1|1.43×|1.21 to 1.65|1.57×|2.77||733|greedy|yes",
        "mtp|tree 2x2|0|1|0.50×|one pair ?|1.57×|3.00||733|greedy|no (15/16 rows, near ties)",
        "lossy|K=3|0|1|9.00×|one pair ?|1.57×|–||733|greedy|– (lossy)",
        "eagle-3|K=2|0.5|4|1.00×|0.90 to 1.20 ?|1.57×|2.77||733|residual|yes",
        "category|eagle-3 K=3",
        "qa 80|0.91×2.10",
        "all|1.43×2.77",  # 2.765 as Python rounds it
        "method|T|word",
        "eagle-3 K=3|0|0.75 (0.50 to 0.90)",
        "method|T|batch 1|batch 4|pays",
        "eagle-3 K=3|0|1.43x (1.21 to 1.65)|–|everywhere",
        "mtp tree 2x2|0|0.50x (one pair ?)|–|nowhere",
        "lossy K=3|0|9.00x (one pair ?)|–|nowhere",
        "cell|T|measured|predicted|measured / predicted|a round, ms|rest of a round, ms|"
        "rest of plain, ms",
        "eagle-3 K=3|0|1.43×|1.57×|0.91|–|–|–",
        "mtp tree 2x2|0|0.50×|1.57×|0.32||-0.100|0.200",
        "lossy K=3|0|9.00×|1.57×|5.74|–|–|–",
    ]
    texts = "".join(found.texts)
    assert "verify 1.50 ms, draft 0.75 ms, rest 0.00 ms" in texts
    assert "plain decoding takes 3.75 ms for as many tokens" in texts
    assert "eagle-3 K=3" in texts[: texts.index("Every method")], "the fastest lossless one"
    pictures = [a["aria-label"] for tag, a in found.elements if tag == "svg" and "aria-label" in a]
    assert any("eagle-3 K=3: 1.43 (1.21 to 1.65)" in picture for picture in pictures)
    ids = {a.get("id") for _, a in found.elements}
    links = [a["href"] for tag, a in found.elements if tag == "a"]
    assert links and all(link[0] == "#" and link[1:] in ids for link in links)
    drawings = re.sub(r"(#|url\(#)[mp][0-9a-f]{10}", "", text[text.index("<main>") :])
    assert not re.search(r"#[0-9a-f]{6}\b", drawings), "colours are the page's, light and dark"
    for kind, color in COLORS.items():
        channels = " ".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
        assert f"--{kind}: {channels};" in text
    assert json.loads(found.scripts[1]) == MEANING


def test_a_section_or_a_column_appears_if_its_data_does():
    usual = {"headline", "methods", "predicted", "conditions"}
    assert set(page_of(ONE).sections) == usual and page_of().sections == ["conditions"]
    assert set(page_of([result(predicted_speedup=None)]).sections) == usual - {"predicted"}
    assert set(page_of([plain()]).sections) == {"methods", "conditions"}
    assert not {"T", "batch", "rule"} & {cell.strip() for cell in page_of(ONE).rows[0]}


def test_where_nothing_is_faster_the_page_says_so_and_marks_no_row():
    marked = lambda page: [a for _, a in page.elements if a.get("class") == "best"]
    slow = result("ngram", speedup=Interval(0.62, 0.6, 0.64))
    found = page_of([plain(), slow])
    assert "Nothing beat plain decoding" in "".join(found.texts) and marked(found) == []
    unsure = result(speedup=Interval(1.4, 0.9, 1.9))
    assert marked(page_of([plain(), unsure])) == []
    assert len(marked(page_of([plain(), slow, result()]))) == 1


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
    assert json.loads(found.scripts[0]) == json.loads(json.dumps(packing.select([line])))


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
