"""The table of a comparison, what its columns mean, and its conclusions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from spec_jax.evaluation.results import CellResult
from spec_jax.show.tables import Entry, Section, Table

COLUMNS = {
    "method": "what drafts; trees are named by the children of each depth, as 3x2x1, or by "
    "nodes:levels:children",
    "K": "drafted tokens per round",
    "T": "sampling temperature of target and draft; 0 is greedy",
    "batch": "prompts decoded together",
    "rule": "the acceptance rule",
    "tau": "mean acceptance length: tokens emitted per target pass, the target's own token "
    "included",
    "accepted at 1, 2, 3 …": "acceptance at each position, given that all earlier drafts were "
    "accepted; of a tree, by level",
    "tok/s": "decoded tokens per second, without prefill and compilation",
    "plain tok/s": "those of plain decoding, which takes turns with all other rows of its "
    "temperature",
    "speed-up": "tok/s over plain tok/s",
    "95 % interval": "of the speed-up, Student's t of the jackknife over prompts; ? = not "
    "significant: the interval includes 1",
    "predicted": "speed-up of chains that acceptance and the costs of passes predict",
    "identical": "whether every token equals plain decoding's; – where the rule samples other "
    "tokens of the same distribution; near ties: rounding explains every row that diverges",
}
_NUMBERS = ("K", "T", "batch", "tok/s", "plain tok/s", "tau", "speed-up", "predicted")


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """Formats a number; a dash where there is none.

    Args:
      value: The number, or None or NaN.
      form: As of ``format``.
      unit: Follows the number.
    """
    return "–" if value is None or math.isnan(value) else f"{value:{form}}{unit}"


def interval_text(result: CellResult) -> str:
    """Formats the interval of a speed-up; with a question mark where it includes 1."""
    speedup = result.speedup
    if not speedup.low < speedup.high:
        return "–" if math.isnan(speedup.value) else "one pair ?"
    return f"{speedup.low:.2f} to {speedup.high:.2f}{'' if speedup.excludes_1 else ' ?'}"


def identical_text(result: CellResult) -> str:
    """Says whether every token equals plain decoding's, as the column "identical" does."""
    if result.is_identical is False:
        ties = ", near ties" if result.has_near_ties_alone else ""
        return f"no ({result.identical_rows}/{result.rows} rows{ties})"
    if not result.is_lossless:
        return "– (lossy)"
    return "yes" if result.is_identical else "–"


def speed_bar(result: CellResult, end: float) -> list[tuple[str, float, float]]:
    """Returns the bar of a speed-up, see ``Entry``: its interval, 1, the prediction, the figure.

    Args:
      result: What was measured.
      end: Where the line ends; what lies beyond is cut off.
    """
    value, low, high = result.speedup
    look = "faster" if low > 1 else "slower" if high < 1 else "unsure"
    predicted = result.predicted_speedup or math.nan
    pieces = (
        ("one", 1.0, 1.0),
        (look, low, high),
        ("tick", predicted, predicted),
        (f"{look} dot", value, value),
    )
    return [
        (name, *(min(max(x, 0.0), end) / end for x in ends))
        for name, *ends in pieces
        if all(map(math.isfinite, ends))
    ]


def largest(results: Sequence[CellResult], least: float = 1.2) -> float:
    """Returns the end of an axis of speed-ups; intervals that are much wider are cut off."""
    ends = [least]
    for r in results:
        value = r.speedup.value
        ends += [value, min(r.speedup.high, 1.6 * value), r.predicted_speedup or 0.0]
    return max(x for x in ends if math.isfinite(x))


def _row(result: CellResult, is_best: bool, end: float) -> dict[str, str | Entry]:
    cell = result.cell
    look = {True: "good", False: "bad", None: ""}[result.is_identical]
    if not result.is_lossless or look == "bad" and result.has_near_ties_alone:
        look = "warn"
    rates = (number(x.value).replace("0.", ".", 1) for x in result.acceptance)
    row = {
        "method": f"{cell.title} {cell.tree}" if cell.tree else cell.title,
        "K": str(cell.k),
        "T": f"{cell.temperature:g}",
        "batch": str(result.batch),
        "rule": cell.rule,
        "tau": number(result.tau.value),
        "accepted at 1, 2, 3 …": " ".join(rates) or "–",
        "tok/s": number(result.tokens_per_s, ".0f"),
        "plain tok/s": number(result.plain_tokens_per_s, ".0f"),
        "speed-up": Entry(number(result.speedup.value, ".2f", "x"), "strong"),
        "95 % interval": Entry(interval_text(result), bar=speed_bar(result, end)),
        "predicted": number(result.predicted_speedup, ".2f", "x"),
        "identical": Entry(identical_text(result), look),
    }
    if cell.is_plain:
        row |= dict.fromkeys(("K", "rule", "plain tok/s", "95 % interval", "predicted"), "–")
    return row | {"method": Entry(row["method"], "best" * is_best or "plain" * cell.is_plain)}


def results_table(results: Sequence[CellResult]) -> Table:
    """Returns the table of all cells; a page marks the fastest if it is significantly faster."""
    best = best_of(results)
    end = largest(results)
    rows = [_row(r, r is best and r.speedup.low > 1, end) for r in results]
    temperatures = {r.cell.temperature for r in results}
    batches = {r.batch for r in results}
    header = [name for name in COLUMNS if name != "batch" or len(batches) > 1]
    filters = {"T": ""} if len(temperatures) > 1 else {}
    filters |= {"batch": str(results[0].batch)} if len(batches) > 1 else {}
    return Table(header, [[row[name] for name in header] for row in rows], _NUMBERS, "T", filters)


def counted_sections(results: Sequence[CellResult]) -> list[Section]:
    """Returns the tables of acceptance by kind of token and by place, if they were counted."""
    kinds = next(([*r.kinds] for r in results if r.kinds), [])
    by_kind = []
    by_place = []
    for r in results:
        start = [r.cell.name, f"{r.cell.temperature:g}"]
        if r.kinds:
            by_kind.append([*start, *(f"{r.kinds[kind].acceptance:.2f}" for kind in kinds)])
        for place, found in r.places.items():
            rates = (f"{x:.2f}" for x in found[1:])
            by_place.append([*start, place, str(found.reached), *rates])
    places = ["after", "reached", "first child", "any child", "bound", "any / bound"]
    sections = [
        Section(
            "Acceptance by kind of token, of the drafts that were reached",
            table=Table(["method", "T", *kinds], by_kind, ("T",)),
        ),
        Section(
            "Acceptance by place: what follows each accepted token that has drafts after it",
            table=Table(["method", "T", *places], by_place, ("T", "reached")),
        ),
    ]
    return [section for section in sections if section.table.rows]


def length_notes(results: Sequence[CellResult]) -> list[str]:
    """Returns a sentence on each result with rounds past the maximum length of its draft."""
    counts = [(r, r.stats.undrafted_rounds) for r in results]
    return [
        f"{r.cell.label}, batch {r.batch}: {count} of {r.stats.rounds} rounds were without drafts, "
        "past the draft's maximum length"
        for r, count in counts
        if count
    ]


def comparable(results: Sequence[CellResult]) -> list[CellResult]:
    """Returns drafts with a speed-up whose output is plain decoding's, or has its distribution."""
    drafted = (r for r in results if r.is_lossless and not r.cell.is_plain)
    return [r for r in drafted if not math.isnan(r.speedup.value)]


def best_of(results: Sequence[CellResult]) -> CellResult | None:
    """Returns the fastest lossless draft; those that are significantly faster come first.

    Of several dtypes, each with a plain decoding of its own, the fastest of these counts.
    """

    def rank(r: CellResult) -> tuple[bool, float]:
        share = r.plain_tokens_per_s / _fastest_plain(r, results)
        return r.speedup.low * share > 1, r.speedup.value * share

    return max(comparable(results), key=rank, default=None)


def _fastest_plain(result: CellResult, results: Sequence[CellResult]) -> float:
    """Tokens per second of the fastest plain decoding at a result's temperature and batch size."""
    place = (result.cell.temperature, result.batch)
    same = (r for r in results if (r.cell.temperature, r.batch) == place)
    return max(r.plain_tokens_per_s for r in same) or 1.0


def _plain_dtype(result: CellResult, results: Sequence[CellResult]) -> str | None:
    """The dtype of the plain decoding that a speed-up is over; None if all have one dtype."""
    place = (result.cell.temperature, result.batch)
    plains = (r for r in results if r.cell.is_plain)
    same = (r for r in plains if (r.cell.temperature, r.batch) == place)
    found = (r.cell.dtype for r in same if r.tokens_per_s == result.plain_tokens_per_s)
    return next(found, result.cell.dtype)


def verdict(result: CellResult) -> str:
    """Says what the interval of a speed-up says, and no more."""
    if result.speedup.excludes_1:
        return f"{'faster' if result.speedup.low > 1 else 'slower'} than plain decoding"
    why = f"with {result.rows} prompt{'s' * (result.rows != 1)}"
    if not result.speedup.low < result.speedup.high:
        why = "with one pair of times, which has no interval"
    return f"not yet distinguishable from plain decoding {why}"


def conclusions(results: Sequence[CellResult]) -> list[str]:
    """Returns one line for each temperature: its fastest lossless draft.

    Of several dtypes there is one for each plain decoding that speed-ups are over, and then the
    draft with the most tokens per second of all.
    """
    lines = []
    known = comparable(results)
    places = [(r.cell.temperature, _plain_dtype(r, results)) for r in known]
    for temperature, dtype in dict.fromkeys(places):
        group = [r for r, place in zip(known, places) if place == (temperature, dtype)]
        best = best_of(group)
        over = f"plain decoding in {dtype}" if dtype else "plain decoding"
        begin = f"Fastest at T={temperature:g}"
        if best.speedup.high < 1:
            begin = f"Nothing beat {over} at T={temperature:g}; closest"
        elif not best.speedup.low > 1:
            begin = f"Highest at T={temperature:g}, but {verdict(best)}"
        line = (
            f"{begin}: {best.cell.title}, {best.cell.shape}, rule {best.cell.rule}: "
            f"{best.speedup.value:.2f}x {over} "
            f"({interval_text(best).removesuffix(' ?')}), {_sameness(best)}"
        )
        close = [r for r in group if r is not best and not r.speedup.high < best.speedup.low]
        names = ", ".join(dict.fromkeys(f"{r.cell.title} {r.cell.shape}" for r in close))
        lines.append(line + (f"; with overlapping intervals: {names}" if close else ""))
    counts = Counter(temperature for temperature, _ in dict.fromkeys(places))
    for temperature in (t for t, count in counts.items() if count > 1):
        group = [r for r in known if r.cell.temperature == temperature]
        first = max(group, key=lambda r: r.tokens_per_s)
        fastest = _fastest_plain(first, results)
        lines.append(
            f"Most tokens per second at T={temperature:g}: {first.cell.title}, {first.cell.shape}: "
            f"{first.tokens_per_s:.0f}, {first.tokens_per_s / fastest:.2f}x the fastest plain "
            "decoding of any dtype"
        )
    return lines


def _sameness(result: CellResult) -> str:
    if result.is_identical is False:
        if result.num_unexamined:
            return f"output identical in {result.identical_rows} of {result.rows} rows only"
        is_rounding = result.has_near_ties_alone
        return "output identical but for near ties" if is_rounding else "output NOT identical"
    return "identical output" if result.is_identical else "same distribution"
