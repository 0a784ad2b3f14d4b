"""Writes report.html, which needs nothing but itself."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import jinja2
from markupsafe import Markup

from experiments.comparison.page import answers as packing
from experiments.comparison.report import conditions, first_batch
from experiments.run import report as reports
from spec_jax.evaluation.results import CellResult
from spec_jax.evaluation.summary import best_of, largest, number, speed_bar, verdict
from spec_jax.show.page import COLORS, MEANING
from spec_jax.show.tables import Entry, Section

_SVG = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", _SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
_FOLDER = pathlib.Path(__file__).parent


def write_page(
    path: pathlib.Path,
    report: Mapping[str, Any],
    results: Sequence[CellResult],
    sections: Sequence[Section],
    answers: Iterable[Mapping[str, Any]] = (),
    title: str = "",
) -> None:
    """Writes the page of a run.

    Args:
      path: The file, report.html. The plots are SVG files beside it, see ``comparison.plots``.
      report: What report.json holds.
      results: What was measured of each cell.
      sections: Of ``comparison.report.sections``.
      answers: Lines of answers.jsonl, see ``answers``; some of them are shown token by token.
      title: The heading; by default that of a comparison.
    """
    packed = packing.select(answers)
    (target,) = reports.names_of([report["models"]["target"]["name"]])
    scripts = ("report.js", "tokens.js") if packed else ("report.js",)
    terms = conditions(report) | reports.about_machine(report["environment"])
    text = _template().render(
        title=title or f"Speculative decoding of {target}, compared with plain decoding",
        report=reports.plain(report),
        headline=headline(results),
        sections=sections,
        conditions=Section("Conditions", terms=terms),
        tokens=packed,
        panels=lambda name: _panels((path.parent / name).with_suffix(".svg")),
        colors={  # #RRGGBB as the channels of CSS's rgb()
            kind: " ".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
            for kind, color in COLORS.items()
        },
        meaning=MEANING,
        css=Markup(_read("report.css")),
        js=Markup("".join(map(_read, scripts))),
    )
    # A text may hold half a character.
    reports.write_text(path, text.encode("utf-8", "replace").decode("utf-8"))


@functools.cache
def _template() -> jinja2.Template:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    env.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    env.filters["fixed"] = number
    env.filters["slug"] = lambda title: re.sub(r"\W+", "-", title.lower()).strip("-")
    env.filters["entry"] = lambda cell: Entry(cell) if isinstance(cell, str) else cell
    return env.get_template("report.html.jinja")


def _panels(path: pathlib.Path) -> list[Markup]:
    """Returns the panels of a plot, see ``experiments.run.plots.panels``, as pictures.

    The first one has the shapes that all refer to, and points say what they are.
    """
    picture = ElementTree.parse(path).getroot()
    found = []
    for panel in picture.iterfind(f".//{_SVG}g"):
        if not panel.get("id", "").startswith("panel "):
            continue
        _, *place, label = panel.get("id").split(" ", 5)
        left, top, width, height = map(float, place)
        for part in panel.iter():
            name = part.attrib.pop("id", "")
            if name.startswith("point "):
                title = ElementTree.Element(f"{_SVG}title")
                title.text = name.removeprefix("point ")
                part.insert(0, title)
            elif re.fullmatch("[mp][0-9a-f]{10}", name):  # what others refer to
                part.set("id", name)
        box = f"{left - 4:.1f} {top - 4:.1f} {width + 8:.1f} {height + 8:.1f}"
        look = {"viewBox": box, "width": f"{width + 8:.1f}pt", "role": "img", "aria-label": label}
        shown = ElementTree.Element(f"{_SVG}svg", look)
        shown.append(panel)
        found.append(shown)
    for shapes in picture.findall(f"{_SVG}defs")[1:]:
        found[0].append(shapes)
    return [Markup(ElementTree.tostring(shown, "unicode")) for shown in found]


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def headline(results: Sequence[CellResult]) -> dict[str, Any] | None:
    """The best method and its figures, and what their interval says."""
    shown = first_batch(results)
    best = best_of(shown)
    if best is None:
        return None
    found = verdict(best)
    if best.speedup.low < best.speedup.high:
        found += f", 95 % interval {best.speedup.low:.2f} to {best.speedup.high:.2f}"
    compared = [r for r in shown if not r.cell.is_plain and r.identical_rows is not None]
    kind = "Greedy" if best.cell.temperature == 0 else "Sampled"
    return {
        "result": best,
        "temperature": f"{kind}, temperature {best.cell.temperature:g}",
        "is_faster": best.speedup.low > 1,
        "is_slower": best.speedup.high < 1,
        "verdict": found[:1].upper() + found[1:],
        "compared": len(compared),
        "rows": sum(r.rows for r in compared),
        "same": sum(r.identical_rows for r in compared),
        "bar": speed_bar(best, 1.1 * largest([best], 2.0)),
    }
