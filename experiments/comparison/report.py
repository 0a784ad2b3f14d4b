"""The report of a comparison: its tables, its sentences, and report.md."""

from __future__ import annotations

import functools
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.comparison.setup import Setup
from experiments.run import report
from spec_jax.evaluation import profile
from spec_jax.evaluation.costs import Costs
from spec_jax.evaluation.prompts import PromptEncoder
from spec_jax.evaluation.results import CellResult
from spec_jax.evaluation.summary import (
    MEANINGS,
    conclusions,
    counted_sections,
    interval_text,
    length_notes,
    number,
    results_table,
)
from spec_jax.show.tables import Section, table

if TYPE_CHECKING:
    from spec_jax.testing import RowAudit

_FILL = functools.partial(textwrap.fill, width=100, break_on_hyphens=False)
_HANGING = {"subsequent_indent": " " * 18}  # of the meanings of columns
_AUDIT = (
    "method",
    "K",
    "T",
    "rows",
    "identical",
    "not examined",
    "rounding",
    "bug",
    "farthest from float32",
)
_AUDIT_MEANING = (
    "Audit: rows that differ from plain decoding, explained by rounding or by nothing but a bug; "
    "not examined: rows of which only the tokens were compared; "
    "farthest from float32: how far the logits that any of their tokens was chosen from lie from a "
    "pass in float32, over how far rounding alone moves them (more than 3 is a bug)."
)
_MORE = {  # columns of the other tables
    "accepted at i": "acceptance at position i, given that all earlier drafts were accepted",
    "looping": "share of the tokens that repeat in loops",
    "round": "mean time of a round: verify, a pass of K + 1 tokens; draft, what its K draft passes "
    "add to it in a loop of both; and the rest; of plain decoding, a token",
    "pass / target's": "a draft pass after the first of a round over a target pass of one token; "
    "? = not significant",
}


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
        "costs": {},
        "results": [],
        "is_complete": False,
    }


def describe_costs(costs: Costs) -> list[str]:
    """Returns sentences on what passes cost: of the target, of later drafts, of a round's first."""

    def share(ms):
        return f"{ms / costs.plain_ms:.2f}"

    unsure = costs.insignificant or {}

    def mark(name, k):
        return " (not significant)" if k in unsure.get(name, ()) else ""

    verify = [f"{w} tokens takes {share(ms)}" for w, ms in costs.verify_ms.items() if w > 1]
    later = [f"{share(ms)} with {name}{mark(name, 0)}" for name, ms in costs.draft_ms.items()]
    of_round = {
        (name, k): f"{share(ms)} with {name} at K = {k}{mark(name, int(k))}"
        for name, times in (costs.first_ms or {}).items()
        for k, ms in times.items()
    }
    first = [text for (name, _), text in of_round.items() if name in costs.draft_ms]
    whole = [text for (name, _), text in of_round.items() if name not in costs.draft_ms]
    sentences = {
        "verifying": verify,
        "each further draft adds": later,
        "the first draft of a round adds": first,
        "drafting a block adds": whole,
    }
    plain = f"a target pass of one token takes {costs.plain_ms:.2f} ms"
    parts = [f"{what} {', '.join(found)}" for what, found in sentences.items() if found]
    return [plain, *(f"relative to it, {part}" for part in parts)]


def describe_difference(result: CellResult, difference: RowAudit, dtype: str) -> str:
    """Returns a sentence on where a row diverges from plain decoding, and whether by rounding."""
    text = (
        f"{_place(result)}: row {difference.row} diverges from plain decoding at token "
        f"{difference.at}"
    )
    if difference.deviations:
        evidence = "; ".join(difference.evidence)
        return f"{text}; the audit's verdict is {difference.verdict}: {evidence}"
    plain, ours = ("none" if t is None else f"id {t}" for t in difference.tokens)
    text += f" (plain decoding takes {plain}, this row {ours})"
    if difference.gap is None:
        return f"{text}, where one of the two ends: no near tie"
    kind = "within" if difference.is_near_tie else "NOT within"
    return (
        f"{text}; the two tokens' logits in float32 are {difference.gap:.1e} apart, {kind} "
        f"the rounding of {result.cell.dtype or dtype} there (up to {difference.rounding:.1e} each)"
    )


def _place(result: CellResult) -> str:
    of = f" batch {result.batch}" if result.batch > 1 else ""
    return f"{result.cell.title} {result.cell.shape} T={result.cell.temperature:g}{of}"


def notes(
    rep: Mapping[str, Any],
    results: Sequence[CellResult],
    costs: Mapping[tuple[int, str | None], Costs],
    setup: Setup,
    num_cut: int,
) -> list[str]:
    """Returns what a reader must know beside the numbers, after ``rep["notes"]``."""
    lines = [*rep["notes"], *report.load_note(rep["environment"])]
    dtype = setup.config.dtype
    if narrow := [name for name in dtype.split(",") if name != "float32"]:
        lines.append(
            f"in {' and '.join(narrow)} some outputs diverge from plain decoding where the top two "
            "logits nearly tie, because passes of several tokens round in another order"
        )
    plain = [r for r in results if r.cell.is_plain]
    share = max((r.looping_share for r in plain), default=0)
    if share > 0.01:
        lines.append(
            f"up to {share:.0%} of plain decoding's tokens repeat in loops, which are easy to draft"
        )
    for r in results:
        faults = {k: n for k, n in r.finish_reasons.items() if k.startswith(("nan", "invalid"))}
        ended = r.finish_reasons.get("stop_token", 0)
        if ended and r.cell.is_plain:
            lines.append(f"{ended} of {r.rows} rows end at a stop token, T={r.cell.temperature:g}")
        if faults:
            lines.append(f"{_place(r)}: rows stopped early: {faults}")
        lines += [describe_difference(r, difference, dtype) for difference in r.differences]
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


def sections(results: Sequence[CellResult]) -> list[Section]:
    """Returns the tables after the first one."""
    shown = first_batch(results)
    tables = [_acceptance(shown), *counted_sections(shown)]
    for temperature in dict.fromkeys(r.cell.temperature for r in shown):
        group = [r for r in shown if r.cell.temperature == temperature]
        if group[0].categories:
            tables += _categories(group, temperature)
    if len(by_batch(results)) > 1:
        tables.append(curve(results))
    return [*tables, _rounds(shown)]


def _acceptance(shown: Sequence[CellResult]) -> Section:
    rows = []
    widest = max((len(r.acceptance) for r in shown), default=0)
    for r in (r for r in shown if not r.cell.is_plain):
        accepted = [f"{x:.2f}" for x in r.acceptance]
        padding = [""] * (widest - len(accepted))
        rows.append(
            [
                r.cell.name,
                f"{r.cell.temperature:g}",
                f"{r.tau:.2f}",
                *accepted,
                *padding,
                f"{r.looping_share:.0%}",
            ]
        )
    header = ["method", "T", "tau", *(f"accepted at {i}" for i in range(1, widest + 1)), "looping"]
    return Section("Tokens per target pass", header, rows, ("T", "looping"))


def _categories(group: Sequence[CellResult], temperature: float) -> list[Section]:
    """Returns speed-ups and tau by category, a column for each method."""
    drafted = [r for r in group if not r.cell.is_plain]
    known = group[0].categories
    total = sum(part.questions for name, part in known.items() if part.group == name)

    def section(what: str, figure: Callable[[Any], Any]) -> Section:
        def text(of):
            return (f"{figure(of(r)):.2f}" for r in drafted)

        def line(name, count, of):
            return [name, str(count), *text(of)]

        rows = [line(n, x.questions, lambda r, n=n: r.categories[n]) for n, x in known.items()]
        rows.append(line("all", total, lambda r: r))
        title = f"{what} by category, temperature {temperature:g}"
        header = ["category", "questions", *(r.cell.name for r in drafted)]
        return Section(title, header, rows, ("questions",))

    tables = [section("Tau", lambda x: x.tau)]
    if next(iter(known.values())).speedup is not None:
        tables.insert(0, section("Speed-up", lambda x: x.speedup))
    return tables


def curve(results: Sequence[CellResult]) -> Section:
    """Returns the speed-up of each cell by batch size, and where it pays."""
    groups = by_batch(results)
    rows = []
    for first in (r for r in first_batch(results) if not r.cell.is_plain):
        same = [next((r for r in g if r.cell == first.cell), None) for g in groups.values()]
        values = [r and f"{r.speedup.value:.2f}x ({interval_text(r)})" or "–" for r in same]
        rows.append([first.cell.name, f"{first.cell.temperature:g}", *values, pays_at(same)])
    header = ["method", "T", *(f"batch {b}" for b in groups), "pays"]
    return Section("Speed-up by batch size", header, rows, ("T",))


def pays_at(results: Sequence[CellResult | None]) -> str:
    """Says at which batch sizes, in their order, the speed-up is significantly above 1."""
    known = [r for r in results if r is not None]
    paying = [r.batch for r in known if r.speedup.low > 1]
    if not paying:
        return "nowhere"
    return "everywhere" if len(paying) == len(known) else f"at {', '.join(map(str, paying))}"


def _rounds(shown: Sequence[CellResult]) -> Section:
    rows = []
    for r in (r for r in shown if r.round_time is not None):
        time = r.round_time
        predicted = r.predicted_speedup
        ratio = None if not predicted or r.cell.is_plain else r.speedup.value / predicted
        mark = "" if time.is_draft_cost_significant else " ?"
        parts = (time.round_ms, time.verify_ms, time.draft_ms, time.rest_ms)
        rows.append(
            [
                r.cell.name,
                f"{r.cell.temperature:g}",
                *(number(ms, ".3f") for ms in parts),
                number(time.draft_cost, ".3f") + mark,
                number(predicted),
                number(ratio),
            ]
        )
    header = [
        "method",
        "T",
        "round, ms",
        "verify",
        "draft",
        "rest",
        "pass / target's",
        "predicted",
        "measured / predicted",
    ]
    return Section("Where a round's time goes", header, rows, header[1:])


def legend(results: Sequence[CellResult], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what each column means, as ``(column, meaning)``."""
    repeats = f"; the median of {config['repeats']} turns counts"
    meanings = {**MEANINGS, "tok/s": MEANINGS["tok/s"] + repeats}
    shown = ["K", "T", "tau", "accepted at 1, 2, 3 …", "tok/s", "plain tok/s", "95 % interval"]
    if any(r.cell.tree for r in results):
        shown = ["method", *shown]
    return [(name, meanings[name]) for name in [*shown, "predicted", "identical"]]


def audit_summary(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Returns what the audits of each greedy result found, for report.json."""
    return [
        {
            "method": r.cell.method,
            "k": r.cell.k,
            "tree": r.cell.tree,
            "temperature": r.cell.temperature,
            "dtype": r.cell.dtype,
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


def audit_table(found: Sequence[Mapping[str, Any]], *, is_markdown: bool = False) -> str:
    """Formats what ``audit_summary`` has returned."""
    several = len({one["batch"] for one in found}) > 1
    names = "k temperature rows identical not_examined rounding bug".split()
    rows = []
    for one in found:
        parts = filter(None, (one["method"], one["dtype"], one["tree"]))
        of = f", batch {one['batch']}" if several else ""
        counts = (f"{one[name]:g}" for name in names)
        rows.append([" ".join(parts) + of, *counts, number(one["farthest"])])
    return table(_AUDIT, rows, numbers=_AUDIT[1:], is_markdown=is_markdown)


def _differences(results: Sequence[CellResult]) -> dict[str, list[str]]:
    """By heading, differences to the first draft, and teacher-forced beside real decoding."""
    compared = []
    forced = []
    for r in first_batch(results):
        name = f"{r.cell.name}, T={r.cell.temperature:g}"
        if r.difference:
            tau, *accept = r.difference
            parts = ", ".join(f"at {i} {x}" for i, x in enumerate(accept, 1))
            compared.append(f"- {name}, less {r.compared_with}: tau {tau}; accepted {parts}")
        if r.teacher_forced:
            gaps = np.abs(np.subtract(r.teacher_forced, [x.value for x in r.acceptance]))
            forced.append(f"- {name}: at most {np.nanmax(gaps):.4f} apart, by position")
    headings = {
        "## Differences, question by question": compared,
        "## Teacher-forced: the unrolling that trains a head beside its real drafting": forced,
    }
    return {heading: lines for heading, lines in headings.items() if lines}


def conditions(rep: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values of what a run was made of."""
    models = rep.get("models") or {}
    prompts = rep.get("prompts")

    def draft(role, model):
        return "draft" if role == model["name"] else f"draft {role}"

    facts = [
        ("target" if role == "target" else draft(role, model), report.describe_model(model))
        for role, model in models.items()
    ]
    facts += [(f"{role}, as read", x) for role, model in models.items() for x in model["notes"]]
    own = rep.get("own") or {}
    facts += [(f"{k} {x['name']}", f"{x['given']}, {x['is']}") for k, x in own.items()]
    facts += [("prompts", prompts["description"])] if prompts else []
    facts += [("mesh", line) for line in report.mesh_lines(rep.get("mesh"))]
    peaks = {"memory of the process, with all models": rep.get("process_peak_bytes")}
    peaks |= {f"memory of {d}": n for d, n in (rep.get("device_peak_bytes") or {}).items()}
    return facts + [(f"largest {k}", f"{n / 2**20:,.0f} MiB") for k, n in peaks.items() if n]


def _body(
    rep: Mapping[str, Any], results: Sequence[CellResult], *, is_markdown: bool, is_short: bool
) -> list[str]:
    """Returns tables and sentences, as text for the screen or as Markdown."""
    shown = first_batch(results)
    wrap = (lambda text, **_: text) if is_markdown else _FILL
    entry = "- **{}**: {}" if is_markdown else "  {:15} {}"
    meanings = [*legend(shown, rep["config"]), *({} if is_short else _MORE).items()]
    lines = [
        wrap(entry.format(name if is_markdown else name.partition(" at 1")[0], x), **_HANGING)
        for name, x in meanings
    ]
    blocks = [results_table(shown, is_markdown=is_markdown), "\n".join(lines)]
    if not is_short:
        blocks += [section.text(is_markdown=is_markdown) for section in sections(results)]
        for heading, entries in _differences(results).items():
            entries = "\n".join(wrap(line, subsequent_indent="  ") for line in entries)
            blocks += [heading if is_markdown else heading.removeprefix("## "), entries]
    if rep.get("audit"):
        blocks += [audit_table(rep["audit"], is_markdown=is_markdown), wrap(_AUDIT_MEANING)]
    return blocks


def markdown(
    title: str,
    rep: Mapping[str, Any],
    results: Sequence[CellResult],
    profiles: Mapping[str, profile.RoundProfile],
    plots: Sequence[str],
) -> str:
    """Returns report.md: conclusions, tables, plots, conditions."""

    def listed(lines):
        return "\n".join(f"- {line}" for line in lines)

    blocks = [listed(rep["conclusions"])]
    blocks += _body(rep, results, is_markdown=True, is_short=False) + profile.document(profiles)
    blocks += ["## Notes", listed(rep["notes"])] if rep["notes"] else []
    blocks += [f"![{name}]({name})" for name in plots]
    about = listed(f"{name}: {value}" for name, value in conditions(rep))
    return report.document(title, rep, *blocks, "## Conditions", about)


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
    print(f"spec_jax {env['spec_jax']}, jax {env['jax']}, {report.describe_machine(env)}")
    for name, value in [*conditions(rep), ("folder", folder)]:
        if not name.endswith("as read"):
            print(f"{name:8} {value}", flush=True)


def print_results(
    rep: Mapping[str, Any],
    results: Sequence[CellResult],
    profiles: Mapping[str, profile.RoundProfile],
    folder: pathlib.Path,
    *,
    is_short: bool,
) -> None:
    """Prints the tables, what their columns mean, the notes and the conclusions."""
    blocks = _body(rep, results, is_markdown=False, is_short=is_short)
    blocks += [section.text() for section in profile.sections(profiles)]
    for lines in ([f"note: {note}" for note in rep["notes"]], rep["conclusions"]):
        blocks.append("\n".join(_FILL(line, subsequent_indent="  ") for line in lines))
    blocks.append(f"{folder / 'report.md'}: the whole report, after {rep['elapsed_s']:.0f} s")
    print("\n" + "\n\n".join(blocks))
