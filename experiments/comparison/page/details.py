"""The page's tables by category, and of predicted beside measured speed-ups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from experiments.comparison.page import charts
from experiments.comparison.page.view import (
    Looks,
    Result,
    bounds,
    name,
    number,
    panels,
    point_of,
    smallest_batch,
    temperature_name,
    text,
    top_of,
)


def _best_cells(results: Sequence[Result]) -> list[Result]:
    """The fastest cell of each method."""
    found: dict[str, Result] = {}
    for r in results:
        before = found.get(r["method"])
        if before is None or number(r["speedup"]) > number(before["speedup"]):
            found[r["method"]] = r
    return list(found.values())


def shade(speedup: float) -> str:
    """The background of a cell of the heat map: stronger the farther a speed-up is from 1."""
    if not math.isfinite(speedup) or speedup <= 0:
        return "transparent"
    far = min(1.0, abs(math.log2(speedup)) / math.log2(2.5))
    kind = "faster" if speedup >= 1 else "slower"
    return f"rgb(var(--{kind}-rgb) / {0.06 + 0.54 * far:.2f})"


def by_category(results: Sequence[Result], looks: Looks) -> list[dict[str, Any]] | None:
    """A heat map for each temperature: categories × the best cell of each method."""
    shown = [r for r in smallest_batch(results) if r.get("categories") and r["method"] != "plain"]
    maps = []
    for temperature in dict.fromkeys(r["temperature"] for r in shown):
        cells = _best_cells([r for r in shown if r["temperature"] == temperature])
        categories = dict.fromkeys(c for r in cells for c in r["categories"])
        rows = [
            {
                "category": c,
                "cells": [_heat(r, r["categories"].get(c)) for r in cells],
                "questions": max(
                    (number(r["categories"].get(c, {}).get("questions")) for r in cells),
                    default=math.nan,
                ),
            }
            for c in categories
        ]
        total = {"category": "all", "cells": [_heat(r, r) for r in cells]}
        heads = [{"name": name(r), "look": looks[r["method"]]} for r in cells]
        maps.append(
            {"title": temperature_name(temperature), "heads": heads, "rows": rows, "total": total}
        )
    return maps or None


def _heat(result: Result, found: Mapping[str, Any] | None) -> dict[str, Any]:
    if not found:
        return {"speedup": "–", "tau": "–", "shade": "transparent", "title": "not measured"}
    low, high = bounds(found)
    interval = "" if math.isnan(low) else f", 95 % {low:.2f} to {high:.2f}"
    said = f"{name(result)}: {text(found.get('speedup'))}×{interval}, tau {text(found.get('tau'))}"
    return {
        "speedup": text(found.get("speedup"), ".2f", "×"),
        "tau": text(found.get("tau")),
        "shade": shade(number(found.get("speedup"))),
        "title": said,
    }


def predicted(results: Sequence[Result], looks: Looks) -> dict[str, Any] | None:
    """Plots and rows of measured over predicted speed-ups, and where the difference went."""
    shown = [
        r
        for r in smallest_batch(results)
        if r["method"] != "plain" and math.isfinite(number(r.get("predicted_speedup")))
    ]
    if not shown:
        return None
    top, step = charts.nice_top(top_of(shown, 1.2))
    ticks = [i * step for i in range(int(top / step + 1.5))]

    def draw(of: list[Result], title: str) -> Markup:
        series = [
            charts.Series(
                charts.PLAIN,
                [charts.Point(x, x, math.nan, math.nan, "") for x in (0, top)],
                is_dashed=True,
                has_marks=False,
            )
        ]
        for r in of:
            point = point_of(number(r["predicted_speedup"]), r)
            series.append(charts.Series(looks[r["method"]], [point], is_hollow=bool(r.get("tree"))))
        return charts.plot(
            series,
            title=f"{title}: measured over predicted speed-up",
            x_ticks=ticks,
            top=top,
            x_label="predicted speed-up",
            y_label="measured speed-up",
            step=step,
            reference=1,
        )

    plain_ms = {
        r["temperature"]: number(r.get("round_ms"))
        for r in smallest_batch(results)
        if r["method"] == "plain"
    }
    even_ms = lambda r: number(r.get("tau")) * plain_ms.get(r["temperature"], math.nan)
    ends = [x for r in shown for x in (sum(_stages(r).values()), even_ms(r)) if math.isfinite(x)]
    parts = list(dict.fromkeys(part for r in shown for part in r.get("difference_ms") or ()))
    rows = [
        {
            "name": name(r),
            "temperature": r["temperature"],
            "look": looks[r["method"]],
            "measured": r["speedup"],
            "predicted": r["predicted_speedup"],
            "ratio": number(r["speedup"]) / number(r["predicted_speedup"]),
            "round": _round(r, even_ms(r), max(ends)),
            "parts": [(r.get("difference_ms") or {}).get(part) for part in parts],
        }
        for r in shown
    ]
    stages = list(dict.fromkeys(stage for r in shown for stage in _stages(r)))
    return {"rows": rows, "parts": parts, "stages": stages, "panels": panels(shown, draw)}


def _stages(result: Result) -> dict[str, float]:
    """The parts of a round in milliseconds; what the clock says is below zero counts as zero."""
    return {n: max(number(ms), 0.0) for n, ms in (result.get("round_parts_ms") or {}).items()}


def _round(result: Result, even: float, top: float) -> Markup | None:
    """A round's parts as a bar, with a tick where plain decoding has emitted as many tokens."""
    if not (stages := _stages(result)):
        return None
    said = ", ".join(f"{stage} {ms:.2f} ms" for stage, ms in stages.items())
    if math.isfinite(even):
        said += f"; plain decoding takes {even:.2f} ms for as many tokens"
    return charts.stacked(list(stages.values()), even, 1.02 * top, said)
