"""The page of a run in a browser: tables sort and filter, tokens are chosen, texts are inert."""

import json
import re

import pytest
from support.browser import Browser, dump, needs_browser
from support.report_entries import HOSTILE, answer, plain, report_of, result

from experiments.comparison import plots
from experiments.comparison.page.page import write_page
from experiments.comparison.report import sections
from spec_jax.evaluation.results import NONE

BEGIN = "window.errors = []; window.onerror = (...said) => { errors.push(String(said)); };"
END = """
const all = (query) => [...document.querySelectorAll(query)];
const texts = (query) => all(query).map((e) => e.textContent);
const shown = () => all("#every-method tbody tr").filter((row) => !row.hidden)
  .map((row) => row.children[8].textContent);
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown",
  { key, bubbles: true, cancelable: true }));
const found = { begin: shown() };
const sort = all("#every-method thead button").find((b) => b.textContent === "speed-up");
sort.click(); found.down = shown(); found.sorted = sort.closest("th").getAttribute("aria-sort");
sort.click(); found.up = shown();
all("[data-column]")[1].click(); found.cold = shown();
const question = document.getElementById("tv-question");
found.groups = all("#tv-question optgroup").map((group) => group.label);
found.cells = texts("#tv-cells b");
found.tokens = texts("#tv-text .t");
found.rejected = texts("#tv-text del");
found.starts = texts("#tv-text .t.start").length;
found.legend = texts("#tv-legend > span").length;
all("#tv-colour button")[1].click(); found.odds = texts("#tv-legend > span").pop();
all("#tv-colour button")[0].click();
found.squares = all("#tv-cells [aria-checked=true] .sq").length;
const text = document.getElementById("tv-text"), card = document.getElementById("tv-card");
press(text, "Home"); press(text, "ArrowRight"); press(text, "ArrowRight");
found.card = card.textContent; found.isCardShown = !card.hidden;
found.active = texts("#tv-text .t.on")[0];
found.round = texts("#tv-text .t.same");
press(text, "Escape"); found.isCardHidden = card.hidden;
press(all("#tv-cells [aria-checked=true]")[0], "ArrowDown");
found.next = texts("#tv-cells [aria-checked=true] b");
all("#tv-turn button")[1].click(); found.second = texts("#tv-text .t");
question.value = "1"; question.dispatchEvent(new Event("change"));
found.hostile = texts("#tv-text .t"); found.prompt = texts("#tv-prompt")[0];
const box = document.querySelector("#every-method .wide");
const state = () => [box.classList.contains("cut"), box.classList.contains("ended"),
  getComputedStyle(box, "::before").content, getComputedStyle(box).maskImage !== "none"];
const resize = (width) => {
  box.style.width = width; window.dispatchEvent(new Event("resize")); return state();
};
found.phone = resize("350px"); box.scrollLeft = 1e6; box.dispatchEvent(new Event("scroll"));
found.scrolled = state(); found.desktop = resize("3000px");
found.errors = errors; found.images = all("img").length; found.scripts = all("script").length;
document.body.replaceChildren(Object.assign(document.createElement("pre"),
  { textContent: JSON.stringify(found) }));
"""


@pytest.mark.exhaustive
@needs_browser
def test_a_browser_sorts_and_filters_and_shows_tokens(tmp_path):
    speeds = (1.25, 0.5, 9.75)
    results = [
        plain(),
        *(result(k=k, speedup=NONE._replace(value=s)) for k, s in enumerate(speeds, 1)),
        plain(1.0),
        result(temperature=1.0, speedup=NONE._replace(value=2.0)),
    ]
    # What a browser cannot keep in a page: half a character, and zero.
    pieces = [text.replace("\x00", "") for text in HOSTILE if text != "\ud83d"]
    first = answer()["turns"][0]
    turns = [first, answer(pieces=("second", "turn"))["turns"][0]]
    lines = [
        answer(turns=turns),
        answer(turns=turns, cell="mtp K=3 T=0", method="mtp"),
        answer("q2", pieces=pieces, category="<b>", turn={"prompt": HOSTILE[0]}),
    ]
    path = tmp_path / "report.html"
    report = report_of()
    write_page(path, report, results, sections(report, results, {}, ()), lines)
    text = path.read_text(encoding="utf-8").replace("<body>", f"<body><script>{BEGIN}</script>")
    path.write_text(text.replace("</body>", f"<script>{END}</script></body>"), encoding="utf-8")
    dumped = dump(path.as_uri(), tmp_path / "home")
    said = re.search(r"<pre>(.*)</pre>", dumped, re.DOTALL)[1]
    for name, char in (("lt", "<"), ("gt", ">"), ("nbsp", "\xa0"), ("amp", "&")):
        said = said.replace(f"&{name};", char)
    found = json.loads(said)

    # A table in a phone's width says that there is more, and fades at the edge.
    more, back = '"scroll sideways for more columns →"', '"← scroll back"'
    assert found["phone"] == [True, False, more, True]
    assert found["scrolled"] == [True, True, back, False]
    assert found["desktop"][0] is False and found["desktop"][2] == "none"
    assert found["errors"] == [] and found["images"] == 0 and found["scripts"] == 5
    assert found["begin"] == ["1.00x", "1.25x", "0.50x", "9.75x", "1.00x", "2.00x"]
    assert found["down"] == ["9.75x", "2.00x", "1.25x", "1.00x", "1.00x", "0.50x"]
    assert found["up"] == found["down"][::-1] and found["sorted"] == "descending"
    assert found["cold"] == ["0.50x", "1.00x", "1.25x", "9.75x"]
    assert found["groups"] == ["writing", "<b>"]
    assert found["cells"] == ["eagle-3 K=3", "mtp K=3"]
    assert found["tokens"] == ["def", " f", "(", "x"] and found["rejected"] == ["·bad"]
    # Two rounds: one accepts a draft of two and corrects the other, one accepts a draft.
    assert found["starts"] == 2 and found["squares"] == 5
    assert found["legend"] == 5 and found["odds"].startswith("100 %50 %10 %< 0.1 %")
    assert found["isCardShown"] and found["active"] == "(" and found["isCardHidden"]
    assert "corrected" in found["card"] and "token 3, id 2; pass 1" in found["card"]
    assert "in place of ·bad" in found["card"] and "50 %" in found["card"]
    assert found["round"] == [" f", "("]
    assert found["next"] == ["mtp K=3"] and found["second"] == ["second", "turn"]
    assert found["hostile"] == [piece or "▯" for piece in expected(pieces)]
    assert found["prompt"] == HOSTILE[0]


def expected(pieces):
    """The pieces as they are shown: long ones lose their middle."""
    return [
        p[:200] + " … 49,600 characters left out … " + p[-200:] if len(p) > 400 else p
        for p in pieces
    ]


CONTRASTS = """(() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = (color) => {
    pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((x) =>
      (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, text = texts.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest("svg, script")) continue;
    const chain = [];
    for (let part = element; part; part = part.parentElement) chain.unshift(part);
    let back = paint("white");
    for (const part of chain) back = paint(getComputedStyle(part).backgroundColor);
    const front = paint(getComputedStyle(element).color);
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    found.push([Math.round(ratio * 100) / 100, text.slice(0, 40)]);
  }
  return found;
})()"""
CONTROLS = "a[href], button, select, summary, [tabindex='0']"


@pytest.mark.exhaustive
@needs_browser
def test_a_page_fits_asks_for_nothing_is_read_and_is_used_by_keyboard(tmp_path):
    """In a desktop's and in a phone's width, in light and in dark."""
    names = [f"a-drafter-of-many-letters-{i}" for i in range(5)]
    results = [plain(), *map(result, names), plain(1.0), result(temperature=1.0)]
    command = f"python -m experiments.decode {'--config.x=y ' * 20}"
    report = report_of(notes=["a note"], warnings=["a warning"], command=command)
    plots.plot_acceptance(tmp_path / "acceptance.png", results)
    path = tmp_path / "report.html"
    shown = sections(report, results, {}, ["acceptance.png"])
    write_page(path, report, results, shown, [answer(), answer("q2", temperature=1.0)])
    browser = Browser(tmp_path / "home")
    try:
        for width in (1280, 400):
            for scheme in ("light", "dark"):
                browser.open(path.as_uri(), width, scheme)
                wide = browser.ask("document.documentElement.scrollWidth")
                assert wide <= width, f"{wide} pixels in a window of {width}"
                assert {*browser.requests} == {path.as_uri()}
                contrasts = browser.ask(CONTRASTS)
                browser.ask("document.querySelectorAll('#tv-colour button')[1].click()")
                contrasts += browser.ask(CONTRASTS)
                assert len(contrasts) > 200
                assert [pair for pair in contrasts if pair[0] < 4.5] == []
        visible = f"[...document.querySelectorAll({CONTROLS!r})].filter((e) => e.checkVisibility())"
        browser.ask(f"window.controls = {visible}; window.reached = new Set(); 0")
        for _ in range(browser.ask("controls.length")):
            browser.press("Tab")
            browser.ask("reached.add(document.activeElement); 0")
        missed = browser.ask("controls.filter((e) => !reached.has(e)).map((e) => e.outerHTML)")
        assert missed == []
    finally:
        browser.close()
