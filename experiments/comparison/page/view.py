"""From a report to what the page's sections show: plain values and plots.

Every section is None where the report has no data for it. Of an entry of ``results`` only
``method``, ``k``, ``temperature`` and ``speedup`` must be there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.comparison.page import charts
from experiments.comparison.page.charts import Look, Point, Series
from spec_jax.show.plots import wilson

Result = Mapping[str, Any]
Looks = Mapping[str, Look]


def number(value: float | None) -> float:
    """A value of a report as a float; NaN for null."""
    return math.nan if value is None else float(value)


def text(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """Formats a number; a dash where there is none."""
    return "–" if math.isnan(number(value)) else f"{value:{form}}{unit}"


def bounds(result: Result) -> tuple[float, float]:
    """The interval of a speed-up, NaN where it has none."""
    low, high = result.get("speedup_interval") or (None, None)
    return number(low), number(high)


def shape(result: Result) -> str:
    """K or the tree of a result, as text."""
    if result["method"] == "plain":
        return "–"
    return f"tree {result['tree']}" if result.get("tree") else f"K={result['k']}"


def name(result: Result) -> str:
    """Method and shape of a result and, above temperature 0, its rule."""
    if result["method"] == "plain":
        return "plain"
    rule = f", {result['rule']}" if result["temperature"] > 0 and result.get("rule") else ""
    return f"{result['method']}, {shape(result)}{rule}"


def speedup_text(result: Result) -> str:
    """A speed-up with its interval, in words that need no picture."""
    low, high = bounds(result)
    said = text(result["speedup"], ".2f", "×")
    return said if math.isnan(low) else f"{said} ({low:.2f} to {high:.2f})"


def _batch(result: Result) -> int:
    return result.get("batch") or 1


def smallest_batch(results: Sequence[Result]) -> list[Result]:
    """The results of the smallest batch, which all sections but the curve over batches show."""
    smallest = min(map(_batch, results), default=1)
    return [r for r in results if _batch(r) == smallest]


def _drafted(results: Sequence[Result]) -> list[Result]:
    return [r for r in results if r["method"] != "plain"]


def _temperatures(results: Sequence[Result]) -> list[float]:
    return list(dict.fromkeys(r["temperature"] for r in results))


def temperature_name(temperature: float) -> str:
    """Names a temperature as the page's plots and tables do."""
    kind = "Greedy" if temperature == 0 else "Sampled"
    return f"{kind}, temperature {temperature:g}"


def top_of(results: Sequence[Result], default: float = 1.0) -> float:
    """The end of the axis of speed-ups: intervals that are wider than the figure are cut off."""
    found = [default]
    for r in results:
        value, (_, high) = number(r["speedup"]), bounds(r)
        found += [value, min(high, 1.6 * value), number(r.get("predicted_speedup"))]
    return max(x for x in found if math.isfinite(x))


def best_of(results: Sequence[Result]) -> Result | None:
    """The fastest result whose output is plain decoding's, or has its distribution."""
    known = [r for r in _drafted(results) if math.isfinite(number(r["speedup"]))]
    return max(
        (r for r in known if r.get("is_lossless", True)), key=lambda r: r["speedup"], default=None
    )


def headline(results: Sequence[Result]) -> dict[str, Any] | None:
    """The best method, or the closest one if nothing beat plain decoding, and its figures."""
    shown = smallest_batch(results)
    best = best_of(shown)
    if best is None:
        return None
    low, high = bounds(best)
    top = 1.1 * max(2.0, top_of([best]))
    verdict = "one pair, no interval"
    if not math.isnan(low):
        verdict = "faster than plain decoding" if low > 1 else "not significantly different"
        verdict = "slower than plain decoding" if high < 1 else verdict
    greedy = [r for r in _drafted(results) if r.get("identical_to_plain") is not None]
    rows = sum(r.get("rows", 0) for r in greedy)
    same = sum(r.get("identical_rows") or 0 for r in greedy)
    return {
        "name": name(best),
        "temperature": temperature_name(best["temperature"]),
        "is_faster": best["speedup"] > 1,
        "speedup": text(best["speedup"], ".2f"),
        "interval": speedup_text(best),
        "bounds": None if math.isnan(low) else f"{low:.2f} to {high:.2f}",
        "verdict": verdict,
        "tau": text(best.get("tau")),
        "tokens_per_s": text(best.get("tokens_per_s"), ",.0f"),
        "plain_tokens_per_s": text(best.get("plain_tokens_per_s"), ",.0f"),
        "compared": len(greedy),
        "rows": rows,
        "same": same,
        "bar": charts.interval(
            best["speedup"],
            low,
            high,
            top,
            predicted=number(best.get("predicted_speedup")),
            title=speedup_text(best),
            width=280,
        ),
    }


def _identical(result: Result) -> tuple[str, str]:
    """What the column "identical" says, and its class."""
    if result["method"] == "plain":
        return "–", ""
    if not result.get("is_lossless", True):
        return "lossy rule", "warn"
    same = result.get("identical_to_plain")
    if same is None:
        return "same distribution", ""
    if same:
        return "yes", "good"
    missing = result.get("rows", 0) - (result.get("identical_rows") or 0)
    ties = result.get("differences") or []
    is_rounding = len(ties) == missing and all(d.get("is_near_tie") for d in ties)
    said = f"{result.get('identical_rows')} of {result.get('rows')} rows"
    return (f"{said}, near ties", "warn") if is_rounding else (said, "bad")


def methods_table(results: Sequence[Result], looks: Looks) -> dict[str, Any] | None:
    """Rows of the table of all cells, each cell with its value to sort by."""
    if not results:
        return None
    top = top_of(results, 1.2)
    batches = list(dict.fromkeys(map(_batch, results)))
    rows = []
    for r in results:
        low, high = bounds(r)
        said, kind = _identical(r)
        is_plain = r["method"] == "plain"
        values = list(r.get("acceptance_by_position") or ())
        rows.append(
            {
                "method": r["method"],
                "look": looks[r["method"]],
                "shape": shape(r),
                "k": r["k"],
                "temperature": r["temperature"],
                "batch": _batch(r),
                "rule": "–" if is_plain else r.get("rule") or "–",
                "is_plain": is_plain,
                "tau": r.get("tau"),
                "tau_text": text(r.get("tau")),
                "first_rate": number(values[0]) if values else math.nan,
                "rates": charts.rates(values) if values else "–",
                "tokens_per_s": r.get("tokens_per_s"),
                "tokens_per_s_text": text(r.get("tokens_per_s"), ",.0f"),
                "speedup": r["speedup"],
                "speedup_text": text(r["speedup"], ".2f", "×"),
                "interval": "" if math.isnan(low) else f"{low:.2f} to {high:.2f}",
                "bar": ""
                if is_plain
                else charts.interval(
                    number(r["speedup"]),
                    low,
                    high,
                    top,
                    predicted=number(r.get("predicted_speedup")),
                    title=speedup_text(r),
                ),
                "predicted": r.get("predicted_speedup"),
                "predicted_text": "–" if is_plain else text(r.get("predicted_speedup"), ".2f", "×"),
                "identical": said,
                "identical_kind": kind,
            }
        )
    best = best_of(results)
    return {
        "rows": rows,
        "temperatures": _temperatures(results),
        "batches": batches,
        "has_rules": len({row["rule"] for row in rows} - {"–"}) > 1,
        "best": results.index(best) if best is not None and bounds(best)[0] > 1 else -1,
    }


def panels(
    results: Sequence[Result], draw: Callable[[list[Result], str], Any]
) -> list[dict[str, Any]]:
    """Returns a panel for each temperature with drafted results.

    Args:
      results: Of all temperatures.
      draw: Makes the plot of the drafted results of one, with its title, or None; it may add
        sentences.
    """
    found = []
    for temperature in _temperatures(results):
        of = [r for r in _drafted(results) if r["temperature"] == temperature]
        title = temperature_name(temperature)
        if of and (drawn := draw(of, title)) is not None:
            plot, said = drawn if isinstance(drawn, tuple) else (drawn, [])
            found.append({"title": title, "plot": plot, "said": said})
    return found


def _grouped(results: Sequence[Result]) -> list[tuple[str, bool, list[Result]]]:
    """Method, whether they are trees, and the results of each rule, in the order of K."""
    found: dict[tuple, list[Result]] = {}
    for r in sorted(results, key=lambda r: r["k"]):
        found.setdefault((r["method"], bool(r.get("tree")), r.get("rule")), []).append(r)
    return [(method, is_tree, rows) for (method, is_tree, _), rows in found.items()]


def _beside(i: int, count: int) -> float:
    """How far a series is drawn beside its place, of the axis, so that bars do not hide others."""
    return 0.014 * (i - (count - 1) / 2)


def point_of(x: float, r: Result) -> Point:
    """A result's speed-up with its interval, at x."""
    return Point(x, number(r["speedup"]), *bounds(r), title=f"{name(r)}: {speedup_text(r)}")


def over_k(results: Sequence[Result], looks: Looks) -> list[dict[str, Any]] | None:
    """Plots of speed-up over K, measured and predicted; only if there are several K."""
    shown = smallest_batch(results)
    ks = sorted({r["k"] for r in _drafted(shown)})
    if len(ks) < 2:
        return None
    top, step = charts.nice_top(top_of(shown))

    def draw(of: list[Result], title: str):
        series = []
        grouped = _grouped(of)
        for i, (method, is_tree, rows) in enumerate(grouped):
            beside = _beside(i, len(grouped)) * (ks[-1] - ks[0])
            look = looks[method]
            predicted = [
                Point(r["k"], number(r.get("predicted_speedup")), math.nan, math.nan, "")
                for r in rows
            ]
            series.append(Series(look, predicted, is_dashed=True, has_marks=False))
            points = [point_of(r["k"] + beside, r) for r in rows]
            series.append(Series(look, points, is_hollow=is_tree, has_line=False))
        return charts.plot(
            series,
            title=f"{title}: speed-up over K",
            y_label="speed-up over plain decoding",
            x_label="K, drafted tokens a round",
            x_ticks=ks,
            top=top,
            step=step,
            reference=1,
        )

    return panels(shown, draw)


def over_batch(results: Sequence[Result], looks: Looks) -> list[dict[str, Any]] | None:
    """Plots of speed-up over the batch size of each method's best cell, and where it stops."""
    batches = sorted(set(map(_batch, results)))
    if len(batches) < 2:
        return None
    top, step = charts.nice_top(top_of(results))

    def draw(of: list[Result], title: str):
        series, said = [], []
        for method in dict.fromkeys(r["method"] for r in of):
            own = [r for r in of if r["method"] == method]
            cells: dict[tuple, list[Result]] = {}
            for r in sorted(own, key=_batch):
                cells.setdefault((r["k"], r.get("tree"), r.get("rule")), []).append(r)
            rows = max(cells.values(), key=lambda rows: (len(rows), number(rows[0]["speedup"])))
            if len(rows) > 1:
                series.append(Series(looks[method], [point_of(_batch(r), r) for r in rows]))
                said.append(f"{name(rows[0])}: {_stops(rows)}")
        if not series:
            return None
        plot = charts.plot(
            series,
            title=f"{title}: speed-up over the batch size",
            x_label="rows decoded together",
            y_label="speed-up over plain decoding",
            x_ticks=batches,
            top=top,
            step=step,
            reference=1,
            is_log=True,
        )
        return plot, said

    return panels(results, draw) or None


def _stops(rows: Sequence[Result]) -> str:
    """At which batch sizes the interval of the speed-up lies above 1, and at which below."""
    of = lambda kind: [str(_batch(r)) for r in rows if kind(*bounds(r))]
    faster, slower = of(lambda low, high: low > 1), of(lambda low, high: high < 1)
    said = [
        f"{name} than plain decoding at {', '.join(sizes)} row{'s' * (sizes != ['1'])}"
        for name, sizes in (("faster", faster), ("slower", slower))
        if sizes
    ]
    return "; ".join(said) or "no significant difference from plain decoding at any batch size"


def acceptance(results: Sequence[Result], looks: Looks) -> list[dict[str, Any]] | None:
    """Plots of acceptance by position, of the largest chain of each method."""
    shown = [r for r in smallest_batch(results) if r.get("acceptance_by_position")]
    width = max((len(r["acceptance_by_position"]) for r in _drafted(shown)), default=0)
    if not width:
        return None

    def draw(of: list[Result], title: str):
        series = []
        grouped = _grouped(of)
        for i, (method, is_tree, rows) in enumerate(grouped):
            last, beside = rows[-1], _beside(i, len(grouped)) * (width - 1)
            rates = [number(rate) for rate in last["acceptance_by_position"]]
            reached = last.get("reached_at") or [0] * len(rates)
            known = last.get("accept_intervals") or wilson(rates, reached)
            points = [
                Point(
                    at + beside,
                    rate,
                    number(low),
                    number(high),
                    f"{name(last)}: {text(rate)} of {count:,}",
                )
                for at, (rate, count, (low, high)) in enumerate(zip(rates, reached, known), 1)
            ]
            series.append(Series(looks[method], points, is_hollow=is_tree))
        return charts.plot(
            series,
            title=f"{title}: acceptance by position",
            x_label="position in the draft",
            y_label="share accepted, if reached",
            x_ticks=range(1, width + 1),
            top=1.0,
            step=0.2,
        )

    return panels(shown, draw)
