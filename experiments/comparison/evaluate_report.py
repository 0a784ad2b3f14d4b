"""The report of ``experiments.evaluate``: its tables, its sentences, and report.md."""

from __future__ import annotations

import functools
import math
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.comparison import auditing, decode_report
from experiments.comparison.decode_report import conclusions, interval_text, results_table
from experiments.comparison.evaluate_setup import Setup
from experiments.run import report
from experiments.run.memory import device_peaks, peak_bytes
from experiments.run.tables import Section
from spec_jax.config import GREEDY_BELOW
from spec_jax.evaluation import own
from spec_jax.intervals import Interval

Result = Mapping[str, Any]


def start(setup: Setup) -> dict[str, Any]:
    """Returns the part of a report that is known before anything is measured."""
    config, target = setup.config, setup.target
    models = {"target": report.facts(target, config.dtype)}
    models |= {name: report.facts(draft, config.dtype) for name, draft in setup.drafts.items()}
    asked = setup.questions.chosen
    turns = sum(question.num_turns for question in asked)
    more = f" with {turns} turns" if turns > len(asked) else ""
    return {
        "title": "Evaluation",
        "models": models,
        "own": setup.own.facts(),
        "mesh": setup.where.facts(target, [*setup.drafts.values()], max(config.batches)),
        "prompts": {
            "description": f"{len(asked)} {setup.questions.source}{more}, at most "
            f"{config.max_new_tokens} new tokens each",
            "names": [question.name for question in asked],
            "categories": [question.category for question in asked],
        },
        "notes": list(setup.notes),
        "costs": {},
        "results": [],
        "is_complete": False,
    }


def notes(rep: Mapping[str, Any], setup: Setup, num_cut: int) -> list[str]:
    """Returns what a reader must know beside the numbers."""
    found = decode_report.notes({**rep, "costs": None})
    for batch, costs in rep["costs"].items():
        said = decode_report.describe_costs(costs)
        found += [f"batch {batch}: {text}" for text in said]
    if num_cut:
        found.append(
            f"{num_cut} prompts have {setup.room} tokens, which is all that they may: longer ones "
            "lost their beginning, a chat template's too"
        )
    if rep["own"]:
        found.append(
            "a drafter of one's own has no predicted speed-up, and only heads under the package's "
            "own greedy rule are teacher-forced"
        )
    return found


def _by_batch(results: Sequence[Result]) -> dict[int, list[Result]]:
    found: dict[int, list[Result]] = {}
    for r in results:
        found.setdefault(r["batch"], []).append(r)
    return found


def first_batch(results: Sequence[Result]) -> list[Result]:
    """The results of the first batch size, which all tables but the curve show."""
    return next(iter(_by_batch(results).values()), [])


def _interval(value: float | None, bounds: Sequence[float] | None, form: str = ".2f") -> str:
    if value is None or value != value:
        return "–"
    low, high = bounds or (math.nan, math.nan)
    text = f"{value:{form}}"
    return f"{text} ({low:{form}}–{high:{form}})" if low < high else text


def _name(r: Result) -> str:
    shape = f"tree {r['tree']}" if r.get("tree") else f"K={r['k']}"
    several = "" if r["temperature"] < GREEDY_BELOW else f" {r['rule']}"
    return "plain" if r["method"] == "plain" else f"{r['method']} {shape}{several}"


def sections(rep: Mapping[str, Any]) -> list[Section]:
    """Returns the tables after the first one."""
    shown = first_batch(rep["results"])
    found = [_acceptance(shown)]
    for temperature in dict.fromkeys(r["temperature"] for r in shown):
        group = [r for r in shown if r["temperature"] == temperature]
        if group[0]["categories"]:
            found += _categories(group, temperature)
    if len(_by_batch(rep["results"])) > 1:
        found.append(_curve(rep["results"]))
    return [*found, _rounds(shown)]


def _acceptance(shown: Sequence[Result]) -> Section:
    rows, widest = [], max((len(r["acceptance_by_position"]) for r in shown), default=0)
    for r in (r for r in shown if r["method"] != "plain"):
        accepted = [
            _interval(value, bounds)
            for value, bounds in zip(r["acceptance_by_position"], r["accept_intervals"])
        ]
        rows.append([
            _name(r), f"{r['temperature']:g}", _interval(r["tau"], r["tau_interval"]), *accepted,
            *[""] * (widest - len(accepted)), f"{r['looping_share']:.0%}",
        ])  # fmt: skip
    header = ["method", "T", "tau", *(f"accepted at {i}" for i in range(1, widest + 1)), "looping"]
    return Section("Tokens a pass", header, rows, ("T", "looping"))


def _categories(group: Sequence[Result], temperature: float) -> list[Section]:
    """Returns speed-ups and tau by category, a column for each method."""
    cells, names = [r for r in group if r["method"] != "plain"], list(group[0]["categories"])

    def section(what: str, key: str, of: Callable[[Result], str]) -> Section:
        rows = [
            [name, str(group[0]["categories"][name]["questions"]),
             *(of(r["categories"][name]) for r in cells)]
            for name in names
        ]  # fmt: skip
        whole = ["all", str(len_questions(group)), *map(of, cells)]
        title = f"{what} by category, temperature {temperature:g}"
        return Section(title, ["category", "questions", *map(_name, cells)], [*rows, whole],
                       ("questions",))  # fmt: skip

    len_questions = lambda group: sum(
        group[0]["categories"][name]["questions"] for name in _groups(group[0]["categories"])
    )
    found = [section("Tau", "tau", lambda r: _interval(r["tau"], r["tau_interval"]))]
    if "speedup" in group[0]["categories"][names[0]]:
        speed = lambda r: _interval(r["speedup"], r["speedup_interval"])
        found.insert(0, section("Speed-up", "speedup", speed))
    return found


def _groups(categories: Mapping[str, Any]) -> list[str]:
    """The categories without those that are part of another one."""
    return [name for name, part in categories.items() if part["group"] == name]


def _curve(results: Sequence[Result]) -> Section:
    by_batch = _by_batch(results)
    rows = []
    for first in (r for r in next(iter(by_batch.values())) if r["method"] != "plain"):
        same = [
            next((r for r in group if r["label"] == first["label"]), None)
            for group in by_batch.values()
        ]
        values = [r and f"{r['speedup']:.2f}x ({interval_text(r)})" or "–" for r in same]
        rows.append([_name(first), f"{first['temperature']:g}", *values, pays_at(same)])
    header = ["method", "T", *(f"batch {b}" for b in by_batch), "pays"]
    return Section("Speed-up by batch size", header, rows, ("T",))


def pays_at(results: Sequence[Result | None]) -> str:
    """Says at which batch sizes, in their order, the speed-up is told from 1."""
    known = [r for r in results if r is not None]
    paying = [r["batch"] for r in known if (r["speedup_interval"] or [math.nan])[0] > 1]
    if not paying:
        return "nowhere"
    return "everywhere" if len(paying) == len(known) else f"at {', '.join(map(str, paying))}"


def _rounds(shown: Sequence[Result]) -> Section:
    rows = []
    number = lambda x, form: "–" if x is None or x != x else f"{x:{form}}"
    untold = lambda r: "" if r.get("is_draft_cost_told", True) else " ?"
    for r in shown:
        parts = r.get("round_parts_ms") or {}
        predicted = r.get("predicted_speedup")
        ratio = None if not predicted or r["method"] == "plain" else r["speedup"] / predicted
        rows.append([
            _name(r), f"{r['temperature']:g}", number(r.get("round_ms"), ".3f"),
            *(number(parts.get(name), ".3f") for name in ("verify", "draft", "rest")),
            number(r.get("draft_cost"), ".3f") + untold(r),
            number(predicted, ".2f"), number(ratio, ".2f"),
        ])  # fmt: skip
    header = ["method", "T", "round, ms", "verify", "draft", "rest", "pass / target's", "predicted",
              "measured / predicted"]  # fmt: skip
    return Section("Where a round's time goes", header, rows, header[1:])


def legend(rep: Mapping[str, Any]) -> list[str]:
    """Returns what the tables' columns mean, as a list in Markdown."""
    shown = first_batch(rep["results"])
    asked, batch = len(rep["prompts"]["names"]), shown[0]["batch"]
    return [
        f"- The first table is of batch {batch}. Plain decoding takes turns with every row of its "
        f"temperature; the median of {rep['config']['repeats']} counts.",
        f"- Intervals are of 95 %, over the {asked} questions (Student's t of the jackknife); ? "
        "where a speed-up is not significant: its interval includes 1. Those of larger batches "
        "are over batches, of a single batch over its repeats.",
        "- **tok/s** and **speed-up** are of decoding: neither prefill nor compilation counts.",
        "- **tau**: mean acceptance length, tokens emitted per target pass, the target's own "
        "included; **accepted at i**: of the drafts whose predecessors were all accepted, the "
        "share that was accepted at position i (of a tree, level i); **looping**: share of the "
        "tokens that repeat in loops.",
        "- **round**: mean time of a round, which is **verify**, a pass of K + 1 tokens, "
        "**draft**, what its K draft passes add to it in a loop of both, and the **rest**; of "
        "plain decoding, a token. **pass / target's**: a draft pass after the first of a round "
        "over a target pass of one token, ? where it is not told from 0. **predicted**: speed-up "
        "from acceptance and these passes, without the rest; of several rows, times the share of "
        "them that runs in a round, over plain decoding's: a batch goes on until its last row "
        "ends.",
    ]


def _heads(rep: Mapping[str, Any]) -> list[str]:
    """Differences to the first drafter, and teacher-forced beside real decoding."""
    shown, compared, forced = first_batch(rep["results"]), [], []
    for r in shown:
        name = f"{_name(r)}, T={r['temperature']:g}"
        if "difference" in r:
            tau, *accept = (Interval(*x) for x in r["difference"])
            parts = ", ".join(f"at {i} {x}" for i, x in enumerate(accept, 1))
            compared.append(f"- {name}, less {r['compared_with']}: tau {tau}; accepted {parts}")
        if "teacher_forced" in r:
            gaps = np.abs(np.subtract(r["teacher_forced"], r["acceptance_by_position"]))
            forced.append(f"- {name}: at most {np.nanmax(gaps):.4f} apart, by position")
    text = []
    if compared:
        text += ["", "## Differences, question by question", "", *compared]
    if forced:
        text += ["", "## Teacher-forced", "", "The unrolling that trains a head compared with its "
                 "real drafting, from the same round starts:", "", *forced]  # fmt: skip
    return text


def markdown(rep: Mapping[str, Any], plots: Sequence[str]) -> str:
    """Returns report.md: conclusions, tables, plots, conditions."""
    shown = first_batch(rep["results"])
    blocks = [f"- {line}" for line in rep["conclusions"]]
    blocks += ["", results_table(shown, is_markdown=True), "", *legend(rep)]
    for section in sections(rep):
        blocks += ["", section.text(is_markdown=True)]
    blocks += [*_heads(rep), *auditing.document(rep.get("audit"))]
    if rep["notes"]:
        blocks += ["", "## Notes", "", *(f"- {line}" for line in rep["notes"])]
    blocks += [line for name in plots for line in ("", f"![{name}]({name})")]
    about = [f"- {role}: {report.describe_model(m)}" for role, m in rep["models"].items()]
    about += [f"- {line}" for line in own.lines(rep["own"])]
    about += [f"- prompts: {rep['prompts']['description']}"]
    about += [f"- {line}" for line in report.mesh_lines(rep["mesh"])]
    if rep.get("process_peak_bytes"):
        peak = rep["process_peak_bytes"] / 2**20
        about += [f"- largest resident memory of the process, with all models: {peak:,.0f} MiB"]
    peaks = rep.get("device_peak_bytes") or {}
    about += [f"- most memory in use on {d}: {b / 2**20:,.0f} MiB" for d, b in peaks.items()]
    return report.document("Evaluation", rep, "\n".join(blocks), "## Conditions", "\n".join(about))


def finish(rep: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of a report that sum up its results."""
    results = rep["results"]
    found = []
    for batch, group in _by_batch(results).items():
        said = conclusions(group)
        found += said if batch == results[0]["batch"] else [f"Batch {batch}: {x}" for x in said]
    return {
        "conclusions": found, "process_peak_bytes": peak_bytes(),
        "device_peak_bytes": device_peaks(),
    }  # fmt: skip


def print_results(rep: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Prints the tables, what their columns mean, the notes and the conclusions."""
    fill = functools.partial(textwrap.fill, width=100, break_on_hyphens=False)
    print(f"\n{results_table(first_batch(rep['results']))}")
    for section in sections(rep):
        print(f"\n{section.text()}")
    print()
    for line in legend(rep):
        print(fill(line.replace("**", ""), subsequent_indent="  "))
    for line in _heads(rep):
        print(fill(line.removeprefix("## "), subsequent_indent="  "))
    if rep.get("audit"):
        print(f"\n{auditing.audit_table(rep['audit'])}\n{fill(auditing.MEANING)}")
    for lines in ([f"note: {note}" for note in rep["notes"]], rep["conclusions"]):
        print("\n" + "\n".join(fill(line, subsequent_indent="  ") for line in lines))
    print(f"\n{folder / 'report.md'}: the whole report, after {rep['elapsed_s']:.0f} s")
