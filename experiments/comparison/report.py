"""The report of a comparison: its tables, its sentences, and report.md."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.comparison.setup import Setup
from experiments.run import report
from experiments.run.lines import fill
from spec_jax.evaluation import profile
from spec_jax.evaluation.costs import Costs
from spec_jax.evaluation.prompts import PromptEncoder
from spec_jax.evaluation.results import CellResult
from spec_jax.evaluation.summary import (
    COLUMNS,
    conclusions,
    counted_sections,
    interval_text,
    length_notes,
    number,
    results_table,
)
from spec_jax.show.summary import count_text
from spec_jax.show.tables import Entry, Section, Table

if TYPE_CHECKING:
    from spec_jax.testing import RowAudit

_ROUND_PARTS = ("verify", "draft", "rest")
_FEW = 8  # prompts, below which a warning stands beside the figures


def start(setup: Setup) -> dict[str, Any]:
    """Returns the part of a report that is known before anything is measured."""
    config = setup.config
    target = setup.target
    asked = setup.questions.chosen
    models = {"target": report.facts(target, config.dtype)}
    models |= {name: report.facts(draft, config.dtype) for name, draft in setup.loaded.items()}
    turns = sum(question.num_turns for question in asked)
    more = f" with {turns} turns" if turns > len(asked) else ""
    is_templated = any(map(PromptEncoder(target).is_templated, asked))
    by = ", by the chat template" if is_templated else ""
    return {
        "models": models,
        "own": setup.custom,
        "mesh": setup.devices.facts(target, [*setup.loaded.values()], max(config.batches)),
        "prompts": {
            "description": f"{len(asked)} {setup.questions.source}{more}{by}, at most "
            f"{config.max_new_tokens} new tokens each",
            "names": [question.name for question in asked],
            "categories": [question.category for question in asked],
        },
        "notes": list(setup.notes),
    }


def describe_costs(costs: Costs) -> list[str]:
    """Returns sentences on what passes cost: of the target, of later drafts, of a round's first."""

    unsure = costs.insignificant

    def said(name, ms, k, of=""):
        mark = " (not significant)" if int(k) in unsure.get(name, ()) else ""
        return f"{ms / costs.plain_ms:.2f} with {name}{of}{mark}"

    first = []
    whole = []  # of drafters whose passes are timed together
    for name, times in costs.first_ms.items():
        texts = [said(name, ms, k, f" at K = {k}") for k, ms in times.items()]
        (first if name in costs.draft_ms else whole).extend(texts)
    verify = costs.verify_ms.items()
    sentences = {
        "verifying": [f"{w} tokens takes {ms / costs.plain_ms:.2f}" for w, ms in verify if w > 1],
        "each further draft adds": [said(name, ms, 0) for name, ms in costs.draft_ms.items()],
        "the first draft of a round adds": first,
        "drafting a block adds": whole,
    }
    plain = f"a target pass of one token takes {costs.plain_ms:.2f} ms"
    parts = [f"{what} {', '.join(texts)}" for what, texts in sentences.items() if texts]
    return [plain, *(f"relative to it, {part}" for part in parts)]


def describe_difference(result: CellResult, difference: RowAudit) -> str:
    """Returns a sentence on where a row diverges from plain decoding, and what explains it."""
    return (
        f"{_place(result)}: row {difference.row} diverges from plain decoding (the first output) "
        f"at token {difference.at}; the verdict is {difference.verdict}: "
        f"{'; '.join(difference.evidence)}"
    )


def _place(result: CellResult) -> str:
    of = f" batch {result.batch}" if result.batch > 1 else ""
    return f"{result.cell.title} {result.cell.shape} T={result.cell.temperature:g}{of}"


def warnings(rep: Mapping[str, Any], results: Sequence[CellResult]) -> list[str]:
    """Returns what may bend the figures, and so stands beside them: load, few prompts, loops."""
    lines = report.load_note(rep["environment"])
    if results and results[0].rows < _FEW:
        lines.append(
            f"{results[0].rows} prompts are few: intervals are wide, and others may be faster or "
            "slower"
        )
    share = max((r.looping_share for r in results if r.cell.is_plain), default=0)
    if share > 0.01:
        lines.append(
            f"up to {share:.0%} of plain decoding's tokens repeat in loops, which are easy to draft"
        )
    return lines


def notes(
    rep: Mapping[str, Any],
    results: Sequence[CellResult],
    costs: Mapping[tuple[int, str | None], Costs],
    setup: Setup,
    num_cut: int,
) -> list[str]:
    """Returns what a reader must know beside the numbers, after ``rep["notes"]``.

    Args:
      rep: The report so far.
      results: What was measured of each cell.
      costs: The costs of passes by batch size and dtype.
      setup: What was decoded.
      num_cut: The number of prompts that lost their beginning.
    """
    lines = [*rep["notes"]]
    if narrow := [name for name in setup.config.dtype.split(",") if name != "float32"]:
        lines.append(
            f"in {' and '.join(narrow)} some outputs diverge from plain decoding where the top two "
            "logits nearly tie, because passes of several tokens round in another order"
        )
    for r in results:
        faults = {k: n for k, n in r.finish_reasons.items() if k.startswith(("nan", "invalid"))}
        ended = r.finish_reasons.get("stop_token", 0)
        if ended and r.cell.is_plain:
            lines.append(f"{ended} of {r.rows} rows end at a stop token, T={r.cell.temperature:g}")
        if faults:
            lines.append(f"{_place(r)}: rows stopped early: {faults}")
        lines += [describe_difference(r, difference) for difference in r.differences]
        if count := r.num_unexamined:
            why = "whether rounding explains it is only examined at temperature 0"
            if r.cell.is_greedy:
                why = "--config.has_audit=True with this --workdir examines them, too"
            more = "more " * bool(r.differences)
            lines.append(
                f"{_place(r)}: {count} {more}of {r.rows} rows diverge from plain decoding; {why}"
            )
    lines += length_notes(results)
    for (batch, kind), found in costs.items():
        of = f"batch {batch}{f', {kind}' if kind else ''}: " * (len(costs) > 1)
        lines += [of + line for line in describe_costs(found)]
    if setup.config.baseline == "fastest":
        lines.append("speed-ups are over the fastest plain decoding of all dtypes")
    if num_cut:
        lines.append(
            f"{num_cut} prompts were truncated to the maximum of {setup.room} tokens: they lost "
            "their beginning, a chat template's too"
        )
    if rep["own"]:
        lines.append(
            "custom drafters have no predicted speed-up, and only heads under the package's own "
            "greedy rule are teacher-forced"
        )
    return lines


def by_batch(results: Sequence[CellResult]) -> dict[int, list[CellResult]]:
    """Returns the results of each batch size."""
    groups: dict[int, list[CellResult]] = {}
    for r in results:
        groups.setdefault(r.batch, []).append(r)
    return groups


def first_batch(results: Sequence[CellResult]) -> list[CellResult]:
    """The results of the first batch size, which all tables but the curve show."""
    return next(iter(by_batch(results).values()), [])


def best_cells(results: Sequence[CellResult]) -> list[CellResult]:
    """The fastest result of each draft at each temperature, of the first batch size."""
    best: dict[tuple[float, str], CellResult] = {}
    for r in (r for r in first_batch(results) if not r.cell.is_plain):
        key = r.cell.temperature, r.cell.title
        if key not in best or r.speedup.value > best[key].speedup.value:
            best[key] = r
    return list(best.values())


def sections(
    rep: Mapping[str, Any],
    results: Sequence[CellResult],
    profiles: Mapping[str, profile.RoundProfile],
    figures: Collection[str],
) -> list[Section]:
    """Returns the report: what was measured, by section, and the notes.

    Args:
      rep: What report.json holds.
      results: What was measured of each cell.
      profiles: Where the time of rounds goes, by cell.
      figures: The names of the plots.
    """
    shown = first_batch(results)
    parts = [_methods(results, rep["config"]["repeats"])] if results else []
    if "speedup.png" in figures:
        text = (
            "Points are measured, with their 95 % intervals; lines are predicted from acceptance "
            "and the costs of passes. Hollow points are trees."
        )
        parts.append(Section("Speed-up over K", [text], figure="speedup.png"))
    parts += [_acceptance(shown), *counted_sections(shown)]
    groups = (
        [r for r in shown if r.cell.temperature == temperature]
        for temperature in dict.fromkeys(r.cell.temperature for r in shown)
    )
    categories = [part for group in groups for part in _categories(group)]
    if categories:  # one plot of all temperatures
        categories[0] = categories[0]._replace(figure="categories.png")
    parts += categories
    if len(by_batch(results)) > 1:
        parts.append(_curve(results))
    parts += [_rounds(shown), *_differences(shown)]
    parts += [_audit(rep["audit"])] if rep.get("audit") else []
    parts += [*profile.sections(profiles), Section("Notes", rep["notes"], is_brief=True)]
    drawn = [s if s.figure in figures else s._replace(figure="") for s in parts]
    return [s for s in drawn if s.figure or (s.table.rows if s.table else s.text)]


def _methods(results: Sequence[CellResult], repeats: int) -> Section:
    text = "Each row took turns with plain decoding on the same prompts."
    found = results_table(results)
    terms = {name: COLUMNS[name] for name in found.header if name not in ("rule", "batch")}
    terms["tok/s"] += f"; the median of {repeats} turns counts"
    return Section("Every method", [text], found, terms, is_brief=True)


def _acceptance(shown: Sequence[CellResult]) -> Section:
    widest = max((len(r.acceptance) for r in shown), default=0)
    rows = []
    for r in (r for r in shown if not r.cell.is_plain):
        accepted = [f"{x:.2f}" for x in r.acceptance] + [""] * (widest - len(r.acceptance))
        start = [r.cell.name, f"{r.cell.temperature:g}", f"{r.tau:.2f}"]
        rows.append([*start, *accepted, f"{r.looping_share:.0%}"])
    header = ["method", "T", "tau", *(f"accepted at {i}" for i in range(1, widest + 1)), "looping"]
    terms = {
        "accepted at i": "acceptance at position i, given that all earlier drafts were accepted; "
        "of a tree, by level",
        "looping": "share of the tokens that repeat in loops",
    }
    found = Table(header, rows, ("T", "looping"))
    text = (
        "Bars are 95 % intervals, crosses what the rule is expected to accept, where it is known."
    )
    return Section("Tokens per target pass", [text], found, terms, "acceptance.png")


def _categories(group: Sequence[CellResult]) -> list[Section]:
    """Returns speed-ups and tau by category at one temperature, a column for each method."""
    drafted = [r for r in group if not r.cell.is_plain]
    known = group[0].categories
    if not (known and drafted):
        return []
    total = sum(part.questions for name, part in known.items() if part.group == name)

    def section(what: str, entry: Callable[[Any], str | Entry]) -> Section:
        rows = [
            [name, str(part.questions), *(entry(r.categories[name]) for r in drafted)]
            for name, part in known.items()
        ]
        rows.append(["all", str(total), *map(entry, drafted)])
        title = f"{what} by category, temperature {group[0].cell.temperature:g}"
        header = ["category", "questions", *(r.cell.name for r in drafted)]
        return Section(title, table=Table(header, rows, ("questions",)))

    def speedup(part):
        return Entry(f"{part.speedup:.2f}", shade=shade(part.speedup.value))

    tau = section("Tau", lambda part: f"{part.tau:.2f}")
    if next(iter(known.values())).speedup is None:
        return [tau]
    return [section("Speed-up", speedup), tau]


def shade(speedup: float) -> float | None:
    """Returns the background of a speed-up, see ``Entry``: the farther from 1 the stronger."""
    if not math.isfinite(speedup) or speedup <= 0:
        return None
    return max(-1.0, min(1.0, math.log2(speedup) / math.log2(2.5)))


def _curve(results: Sequence[CellResult]) -> Section:
    """Returns the speed-up of each cell by batch size, and where it pays."""
    groups = by_batch(results)
    rows = []
    for first in (r for r in first_batch(results) if not r.cell.is_plain):
        same = [next((r for r in g if r.cell == first.cell), None) for g in groups.values()]
        values = [r and f"{r.speedup.value:.2f}x ({interval_text(r)})" or "–" for r in same]
        known = [r for r in same if r is not None]
        paying = [str(r.batch) for r in known if r.speedup.low > 1]
        pays = f"at {', '.join(paying)}" if paying else "nowhere"
        if len(paying) == len(known):
            pays = "everywhere"
        rows.append([first.cell.name, f"{first.cell.temperature:g}", *values, pays])
    text = (
        "A larger batch fills the processor with rows, and a verify pass is no longer nearly free."
    )
    header = ["method", "T", *(f"batch {b}" for b in groups), "pays"]
    found = Table(header, rows, ("T",))
    return Section("Speed-up by batch size", [text], found, figure="batches.png")


def _rounds(shown: Sequence[CellResult]) -> Section:
    timed = [(r, r.round_time) for r in shown if r.round_time is not None]
    plain_ms = {r.cell.temperature: time.round_ms for r, time in timed if r.cell.is_plain}
    even_ms = [r.tau.value * plain_ms.get(r.cell.temperature, math.nan) for r, _ in timed]
    sums_ms = [
        [*itertools.accumulate((ms or 0.0 for ms in time.parts_ms.values()), initial=0.0)]
        for _, time in timed
    ]
    ends = [*(x[-1] for x in sums_ms), *(time.round_ms for _, time in timed), *even_ms]
    end = 1.02 * max((x for x in ends if math.isfinite(x)), default=1.0)
    rows = []
    for (r, time), even, sums in zip(timed, even_ms, sums_ms):
        pieces = itertools.pairwise(x / end for x in sums)
        bar = [(f"s{i}", *piece) for i, piece in enumerate(pieces)]
        bar += [("tick", even / end, even / end)] * (even <= end)
        of_parts = enumerate(time.parts_ms.values())
        parts = [Entry(number(ms, ".3f"), f"key s{i}") for i, ms in of_parts]
        ratio = r.speedup.value / r.predicted_speedup if r.predicted_speedup else None
        mark = "" if time.is_draft_cost_significant else " ?"
        of_plain = r.cell.is_plain
        rows.append(
            [
                r.cell.name,
                f"{r.cell.temperature:g}",
                Entry(number(time.round_ms, ".3f"), bar=bar if time.verify_ms else ()),
                *parts,
                number(time.draft_cost, ".3f") + mark,
                "–" if of_plain else number(r.speedup.value),
                number(r.predicted_speedup),
                number(None if of_plain else ratio),
            ]
        )
    header = ["method", "T", "round, ms", *_ROUND_PARTS, "pass / target's", "measured"]
    header += ["predicted", "measured / predicted"]
    text = (
        "Measured speed-ups are below predicted ones where a round takes longer than its passes: "
        "the prediction does not know the rest. A tick in a bar is plain decoding of as many "
        "tokens."
    )
    if busy := dict.fromkeys(r.cell.name for r, time in timed if time.is_busy):
        text += (
            f" The machine was busy: the passes of {', '.join(busy)}, which are timed apart, took "
            "longer than whole rounds, so their rest is not known and is 0 here."
        )
    terms = {
        "round, ms": "mean time of a round: verify, a pass of K + 1 tokens; draft, what its K "
        "draft passes add to it in a loop of both; and the rest; of plain decoding, a token",
        "pass / target's": "a draft pass after the first of a round over a target pass of one "
        "token; ? = not significant",
    }
    found = Table(header, rows, header[1:])
    return Section("Where a round's time goes", [text], found, terms, "predicted.png")


def audit_summary(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Returns what the audits of each greedy result found, for report.json."""
    return [
        {
            **r.cell._asdict(),
            "rows": r.rows,
            "batch": r.batch,
            "identical": r.identical_rows,
            "not_examined": r.rows - len(r.differences),
            **{v: sum(d.verdict == v for d in r.differences) for v in ("rounding", "bug")},
            "farthest": max((x for d in r.differences for x in d.deviations), default=None),
        }
        for r in results
        if not r.cell.is_plain and r.identical_rows is not None and r.cell.is_greedy
    ]


def _audit(found: Sequence[Mapping[str, Any]]) -> Section:
    """Returns the table of what ``audit_summary`` has returned."""
    several = len({one["batch"] for one in found}) > 1
    counts = ("rows", "identical", "not_examined", "rounding", "bug")
    rows = []
    for one in found:
        parts = filter(None, (one["method"], one["dtype"], one["tree"]))
        of = f", batch {one['batch']}" if several else ""
        numbers = (f"{one[name]:g}" for name in ("k", "temperature", *counts))
        rows.append([" ".join(parts) + of, *numbers, number(one["farthest"])])
    header = ["method", "K", "T", *(name.replace("_", " ") for name in counts)]
    header.append("farthest from float32")
    text = "Rows that differ from plain decoding, explained by rounding or by nothing but a bug."
    terms = {
        "not examined": "rows of which only the tokens were compared",
        "farthest from float32": "how far the logits that any of their tokens was chosen from lie "
        "from a pass in float32, over how far rounding alone moves them (more than 3 is a bug)",
    }
    return Section("Audit", [text], Table(header, rows, header[1:]), terms, is_brief=True)


def _differences(shown: Sequence[CellResult]) -> list[Section]:
    """Returns differences to the first draft, and teacher-forced beside real decoding."""
    compared = []
    forced = []
    for r in shown:
        name = f"{r.cell.name}, T={r.cell.temperature:g}"
        if r.difference:
            tau, *accept = r.difference
            parts = ", ".join(f"at {i} {x}" for i, x in enumerate(accept, 1))
            compared.append(f"{name}, less {r.compared_with}: tau {tau}; accepted {parts}")
        if r.teacher_forced:
            gaps = np.abs(np.subtract(r.teacher_forced, [x.value for x in r.acceptance]))
            forced.append(f"{name}: at most {np.nanmax(gaps):.4f} apart, by position")
    title = "Teacher-forced: the unrolling that trains a head beside its real drafting"
    return [Section("Differences, question by question", compared), Section(title, forced)]


def conditions(rep: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a run was made of, by name."""
    facts = {}
    for role, model in rep["models"].items():
        name = "target" if role == "target" else f"draft {role}"
        shape = [f"{key} {model[key]}" for key in ("layers", "width", "vocabulary") if key in model]
        size = f"{count_text(model['parameters'])} parameters"
        label = "" if model["name"] == role else f"{model['name']}: "
        facts[name] = label + ", ".join([size, *shape, model["dtype"]])
        if model.get("source"):
            facts[f"{name}, source"] = model["source"]
        if model["notes"]:
            facts[f"{name}, as read"] = "; ".join(model["notes"])
    facts |= {f"{k} {x['name']}": f"{x['given']}, {x['is']}" for k, x in rep["own"].items()}
    facts["prompts"] = rep["prompts"]["description"]
    if mesh := rep["mesh"]:
        axes = ",".join(f"{name}:{size}" for name, size in mesh["axes"].items())
        drafts = ", drafts replicated" if mesh["is_draft_replicated"] else ""
        devices = f"{axes} of {len(mesh['devices'])} devices{drafts}"
        facts["mesh"] = "; ".join([devices, *mesh["kept_whole"]])
    peaks = {"memory of the process, with all models": rep.get("process_peak_bytes")}
    peaks |= {f"memory of {d}": n for d, n in (rep.get("device_peak_bytes") or {}).items()}
    return facts | {f"largest {k}": f"{n / 2**20:,.0f} MiB" for k, n in peaks.items() if n}


def conclude(results: Sequence[CellResult]) -> list[str]:
    """Returns the conclusions of every batch size."""
    return [
        line if batch == results[0].batch else f"Batch {batch}: {line}"
        for batch, group in by_batch(results).items()
        for line in conclusions(group)
    ]


def print_head(rep: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Prints what is compared, and where the report will be."""
    env = rep["environment"]
    print(fill(f"spec_jax {env['spec_jax']}, jax {env['jax']}, {report.describe_machine(env)}"))
    for name, value in {**conditions(rep), "folder": folder}.items():
        if not name.endswith("as read"):
            print(fill(f"{name:8} {value}", others=" " * 9), flush=True)
