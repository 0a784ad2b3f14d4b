"""Writes report.html, which needs nothing but itself."""

from __future__ import annotations

import functools
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from experiments.comparison.page import answers as packing
from experiments.comparison.page import charts
from experiments.comparison.report import best_cells, by_batch, conditions, curve, first_batch
from experiments.run import report as reports
from experiments.run.plots import CYCLE, TITLE
from spec_jax.evaluation.results import CategoryResult, CellResult
from spec_jax.evaluation.summary import (
    MEANINGS,
    comparable,
    counted_sections,
    identical_text,
    interval_text,
    number,
)
from spec_jax.intervals import Interval
from spec_jax.show.page import COLORS, MEANING

_FOLDER = pathlib.Path(__file__).parent
_INKS = {  # colours of matplotlib's files, and those of the page's theme in their place
    "#000000": "currentColor",
    "fill: #ffffff": "fill: none",
    **dict.fromkeys(("#737373", "#b0b0b0"), "var(--soft)"),
    **{color.lower(): f"var(--m{i})" for i, color in enumerate(CYCLE, 1) if color != "#000000"},
}


def write_page(
    path: pathlib.Path,
    report: Mapping[str, Any],
    results: Sequence[CellResult] = (),
    answers: Iterable[Mapping[str, Any]] = (),
) -> None:
    """Writes the page of a run; a section appears if its data exists.

    Args:
      path: The file, report.html. The plots are SVG files beside it, see ``comparison.plots``.
      report: What report.json holds.
      results: What was measured of each cell.
      answers: Lines of answers.jsonl, see ``answers``; some of them are shown token by token.
    """
    plots = {file.stem: file.read_text(encoding="utf-8") for file in path.parent.glob("*.svg")}
    reports.write_text(path, render(report, results, answers, plots))


def render(
    report: Mapping[str, Any],
    results: Sequence[CellResult] = (),
    answers: Iterable[Mapping[str, Any]] = (),
    plots: Mapping[str, str] | None = None,
) -> str:
    """Returns the page of a run as text; see ``write_page``, ``plots`` are texts by name."""
    report, env = reports.plain(report), report.get("environment")
    packed = packing.select(answers)
    text = _template().render(
        version=(env or {}).get("spec_jax", ""),
        about=(report.get("prompts") or {}).get("description"),
        config=report.get("config"),
        title=_title(report),
        command=report.get("command"),
        conclusions=report.get("conclusions") or (),
        notes=report.get("notes") or (),
        headline=headline(results),
        methods=methods_table(results),
        categories=by_category(results),
        counted=counted_sections(results),
        curve=curve(results) if len(by_batch(results)) > 1 else None,
        predicted=predicted(results),
        plots={name: inline(text) for name, text in (plots or {}).items()},
        tokens=packed,
        conditions=[*conditions(report), *(reports.about_machine(env) if env else ())],
        colors={  # #RRGGBB as the channels of CSS's rgb()
            kind: " ".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
            for kind, color in COLORS.items()
        },
        meaning=MEANING,
        meanings=MEANINGS,
        css=Markup(_read("report.css")),
        js=Markup(_read("report.js") + (_read("tokens.js") if packed else "")),
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a text may hold half a character


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
    env.filters["number"] = lambda x: "" if x is None or math.isnan(x) else f"{x:.6g}"
    env.filters |= {"fixed": number, "interval": interval_text, "identical": identical_text}
    return env.get_template("report.html.jinja")


def inline(svg: str) -> Markup:
    """Returns a file of matplotlib's as an element of the page, in the colours of its theme.

    The points' titles are shown where the pointer is, and are the alternative text together.
    """
    of_file = r"<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;]*; "
    text = re.sub(of_file, "", svg, flags=re.DOTALL)
    for color, ink in _INKS.items():
        text = text.replace(color, ink)
    titles = re.findall(f'<g id="{TITLE}(.*?)">', text)
    text = re.sub(f'<g id="{TITLE}(.*?)">', r"<g><title>\1</title>", text)
    text = re.sub(r'<g id=".*?">', "<g>", text)  # other plots have the same ids
    begin = f'<svg role="img" aria-label="{"; ".join(titles)}"'
    return Markup(begin + text[text.index("<svg") + len("<svg") :])


def _title(report: Mapping[str, Any]) -> str:
    target = (report.get("models") or {}).get("target")
    of = f" of {reports.names_of([target['name']])[0]}" if target else ""
    return f"Speculative decoding{of}, compared with plain decoding"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _drafted(results: Sequence[CellResult]) -> list[CellResult]:
    return [r for r in results if not r.cell.is_plain]


def temperature_name(temperature: float) -> str:
    """Names a temperature as the page's tables do."""
    kind = "Greedy" if temperature == 0 else "Sampled"
    return f"{kind}, temperature {temperature:g}"


def _top(results: Sequence[CellResult], least: float) -> float:
    """The end of the axis of speed-ups: intervals that are wider than the figure are cut off."""
    ends = [least]
    for r in results:
        value = r.speedup.value
        ends += [value, min(r.speedup.high, 1.6 * value), r.predicted_speedup or 0.0]
    return max(x for x in ends if math.isfinite(x))


def headline(results: Sequence[CellResult]) -> dict[str, Any] | None:
    """The best method, or the closest one if nothing beat plain decoding, and its figures."""
    shown = first_batch(results)
    if not (known := comparable(shown)):
        return None
    best = max(known, key=lambda r: r.speedup.value)
    low, high = best.speedup.bounds
    verdict = "one pair, no interval"
    if not math.isnan(low):
        verdict = "faster than plain decoding" if low > 1 else "not significantly different"
        verdict = "slower than plain decoding" if high < 1 else verdict
    compared = [r for r in _drafted(shown) if r.identical_rows is not None]
    return {
        "result": best,
        "temperature": temperature_name(best.cell.temperature),
        "bounds": None if math.isnan(low) else f"{low:.2f} to {high:.2f}",
        "verdict": verdict,
        "compared": len(compared),
        "rows": sum(r.rows for r in compared),
        "same": sum(r.identical_rows for r in compared),
        "bar": charts.interval(
            best.speedup, 1.1 * _top([best], 2.0), best.predicted_speedup, width=280
        ),
    }


def methods_table(results: Sequence[CellResult]) -> dict[str, Any] | None:
    """The rows of the table of all cells, with their pictures."""
    if not results:
        return None
    top = _top(results, 1.2)
    best = max(comparable(results), key=lambda r: r.speedup.value, default=None)
    kinds = {True: "good", False: "bad", None: ""}
    rows = []
    for r in results:
        kind = kinds[r.is_identical] if r.is_lossless else "warn"
        rows.append(
            {
                "result": r,
                "rates": charts.rates([x.value for x in r.acceptance]) if r.acceptance else "–",
                "bar": ""
                if r.cell.is_plain
                else charts.interval(r.speedup, top, r.predicted_speedup),
                "identical_kind": "warn" if kind == "bad" and r.has_near_ties_alone else kind,
            }
        )
    return {
        "rows": rows,
        "temperatures": list(dict.fromkeys(r.cell.temperature for r in results)),
        "batches": [*by_batch(results)],
        "has_rules": len({r.cell.rule for r in _drafted(results)}) > 1,
        "best": best if best is not None and best.speedup.low > 1 else None,
    }


def shade(speedup: float) -> str:
    """The background of a cell of the heat map: stronger the farther a speed-up is from 1."""
    if not math.isfinite(speedup) or speedup <= 0:
        return "transparent"
    far = min(1.0, abs(math.log2(speedup)) / math.log2(2.5))
    kind = "faster" if speedup >= 1 else "slower"
    return f"rgb(var(--{kind}-rgb) / {0.06 + 0.54 * far:.2f})"


def by_category(results: Sequence[CellResult]) -> list[dict[str, Any]] | None:
    """A heat map for each temperature: categories × the best cell of each method."""
    best = [r for r in best_cells(results) if r.categories]
    maps = []
    for temperature in dict.fromkeys(r.cell.temperature for r in best):
        cells = [r for r in best if r.cell.temperature == temperature]
        rows = [
            {
                "category": name,
                "questions": part.questions,
                "cells": [_heat(r, r.categories[name]) for r in cells],
            }
            for name, part in cells[0].categories.items()
        ]
        maps.append(
            {
                "title": temperature_name(temperature),
                "names": [r.cell.name for r in cells],
                "rows": rows,
                "all": [_heat(r, r) for r in cells],
            }
        )
    return maps or None


def _heat(result: CellResult, part: CellResult | CategoryResult) -> dict[str, Any]:
    speedup = part.speedup or Interval(math.nan, math.nan, math.nan)
    return {
        "speedup": number(speedup.value, ".2f", "×"),
        "tau": number(part.tau.value),
        "shade": shade(speedup.value),
        "title": f"{result.cell.name}: speed-up {speedup:.2f}, tau {part.tau:.2f}",
    }


def predicted(results: Sequence[CellResult]) -> dict[str, Any] | None:
    """Rows of measured beside predicted speed-ups, and of what a round consists."""
    first = first_batch(results)
    shown = [r for r in _drafted(first) if math.isfinite(r.predicted_speedup or math.nan)]
    if not shown:
        return None
    plain_ms = {
        r.cell.temperature: r.round_time.round_ms for r in first if r.cell.is_plain and r.round_time
    }

    def even_ms(r):
        return r.tau.value * plain_ms.get(r.cell.temperature, math.nan)

    stages = [(r, _stages(r)) for r in shown]
    ends = [x for r, parts in stages for x in (sum(parts.values()), even_ms(r))]
    top = max((x for x in ends if math.isfinite(x)), default=1.0)
    rows = [
        {
            "result": r,
            "ratio": r.speedup.value / r.predicted_speedup,
            "round": _round(parts, even_ms(r), top),
            "rest": r.round_time and r.round_time.rest_ms,
            "plain_rest": r.round_time and r.round_time.plain_rest_ms,
        }
        for r, parts in stages
    ]
    return {"rows": rows, "stages": max((parts for _, parts in stages), key=len)}


def _stages(result: CellResult) -> dict[str, float]:
    """The parts of a round in milliseconds; what the clock says is below zero counts as zero."""
    if (time := result.round_time) is None or time.verify_ms is None:
        return {}
    parts = {"verify": time.verify_ms, "draft": time.draft_ms, "rest": time.rest_ms}
    return {name: max(ms, 0.0) for name, ms in parts.items()}


def _round(stages: Mapping[str, float], even: float, top: float) -> Markup | None:
    """A round's parts as a bar, with a tick where plain decoding has emitted as many tokens."""
    if not stages:
        return None
    text = ", ".join(f"{stage} {ms:.2f} ms" for stage, ms in stages.items())
    if math.isfinite(even):
        text += f"; plain decoding takes {even:.2f} ms for as many tokens"
    return charts.stacked(list(stages.values()), even, 1.02 * top, text)
