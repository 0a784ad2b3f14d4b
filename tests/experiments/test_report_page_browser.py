"""The page of a run in a browser: tables sort and filter, tokens are chosen, texts are inert."""

import json
import re
import shutil
import subprocess

import pytest
from support.report_entries import HOSTILE, answer, plain, result

from experiments.common.report_page.page import render

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
BEGIN = "window.errors = []; window.onerror = (...said) => { errors.push(String(said)); };"
END = """
const all = (query) => [...document.querySelectorAll(query)];
const texts = (query) => all(query).map((e) => e.textContent);
const shown = () => all("#methods tbody tr").filter((row) => !row.hidden)
  .map((row) => row.children[3].textContent);
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown",
  { key, bubbles: true, cancelable: true }));
const found = { begin: shown() };
const sort = all("#methods thead button").find((b) => b.textContent === "speed-up");
sort.click(); found.down = shown(); found.sorted = sort.closest("th").getAttribute("aria-sort");
sort.click(); found.up = shown();
all("[data-filter=temperature]")[1].click(); found.cold = shown();
const question = document.getElementById("tv-question");
found.groups = all("#tv-question optgroup").map((group) => group.label);
found.cells = texts("#tv-cells b");
found.tokens = texts("#tv-text .t");
found.rejected = texts("#tv-text del");
found.starts = texts("#tv-text .t.start").length;
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
found.errors = errors; found.images = all("img").length; found.scripts = all("script").length;
document.body.replaceChildren(Object.assign(document.createElement("pre"),
  { textContent: JSON.stringify(found) }));
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is there")
def test_a_browser_sorts_and_filters_and_shows_tokens(tmp_path):
    speeds = (1.25, 0.5, 9.75)
    results = [
        plain(), *(result(k=k, speedup=s) for k, s in enumerate(speeds, 1)),
        plain(1.0), result(temperature=1.0, speedup=2.0),
    ]  # fmt: skip
    # What a browser cannot keep in a page: half a character, and zero.
    pieces = [text.replace("\x00", "") for text in HOSTILE if text != "\ud83d"]
    first = answer()["turns"][0]
    turns = [first, answer(pieces=("second", "turn"))["turns"][0]]
    lines = [
        answer(turns=turns), answer(turns=turns, cell="mtp K=3 T=0", method="mtp"),
        answer("q2", pieces=pieces, category="<b>", turn={"prompt": HOSTILE[0]}),
    ]  # fmt: skip
    text = render({"results": results}, lines)
    text = text.replace("<body>", f"<body><script>{BEGIN}</script>")
    path = tmp_path / "report.html"
    path.write_text(text.replace("</body>", f"<script>{END}</script></body>"), encoding="utf-8")
    dumped = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/home",
         "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    said = re.search(r"<pre>(.*)</pre>", dumped, re.DOTALL)[1]
    for name, char in (("lt", "<"), ("gt", ">"), ("nbsp", "\xa0"), ("amp", "&")):
        said = said.replace(f"&{name};", char)
    found = json.loads(said)

    assert found["errors"] == [] and found["images"] == 0 and found["scripts"] == 5
    assert found["begin"] == ["1.00×", "1.25×", "0.50×", "9.75×", "1.00×", "2.00×"]
    assert found["down"] == ["9.75×", "2.00×", "1.25×", "1.00×", "1.00×", "0.50×"]
    assert found["up"] == found["down"][::-1] and found["sorted"] == "descending"
    assert found["cold"] == ["0.50×", "1.00×", "1.25×", "9.75×"]
    assert found["groups"] == ["writing", "<b>"]
    assert found["cells"] == ["eagle-3, K=3", "mtp, K=3"]
    assert found["tokens"] == ["def", " f", "(", "x"] and found["rejected"] == ["·bad"]
    # Two rounds: one accepts a draft of two and corrects the other, one accepts a draft.
    assert found["starts"] == 2 and found["squares"] == 5
    assert found["isCardShown"] and found["active"] == "(" and found["isCardHidden"]
    assert "corrected" in found["card"] and "token 3, id 2; pass 1" in found["card"]
    assert "in place of ·bad" in found["card"] and "50 %" in found["card"]
    assert found["round"] == [" f", "("]
    assert found["next"] == ["mtp, K=3"] and found["second"] == ["second", "turn"]
    assert found["hostile"] == [piece or "▯" for piece in expected(pieces)]
    assert found["prompt"] == HOSTILE[0]


def expected(pieces):
    """The pieces as they are shown: long ones lose their middle."""
    return [p[:200] + " … 49,600 characters left out … " + p[-200:] if len(p) > 400 else p
            for p in pieces]  # fmt: skip
