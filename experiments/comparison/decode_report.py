"""The report of ``experiments.decode``: its table, its sentences, and report.md."""

from __future__ import annotations

import functools
import pathlib
import textwrap
from collections.abc import Sequence

from experiments.comparison import auditing, profiling
from experiments.comparison.decode_measure import is_told_apart
from experiments.comparison.decode_setup import SOURCES, Setup
from experiments.run.report import (
    PACKAGES,
    describe_machine,
    describe_model,
    facts,
    load_note,
    mesh_lines,
)
from experiments.run.tables import table
from spec_jax.config import GREEDY_BELOW
from spec_jax.evaluation import own
from spec_jax.evaluation.prompts import PromptEncoder, cut_note

_COLUMNS = (
    "method", "K", "T", "rule", "tau", "accepted at 1, 2, 3 …", "tok/s", "plain tok/s", "speed-up",
    "95 % interval", "predicted", "identical",
)  # fmt: skip
_NUMBERS = ("K", "T", "tok/s", "plain tok/s", "tau", "speed-up", "predicted")


def start(setup: Setup) -> dict:
    """Returns the part of a report that is known before anything is measured."""
    config, bench = setup.config, setup.bench
    lengths = [len(ids) for ids in bench.prompts]
    shortest, s = min(lengths), "s" * (len(lengths) > 1)
    of = f"row{s} of {config.data}" if config.data else f"held-out library function{s}"
    span = f"{max(lengths)}" if len(set(lengths)) == 1 else f"{shortest} to {max(lengths)}"
    is_templated = any(map(PromptEncoder(bench.target).is_templated, setup.prompts))
    by = ", by the chat template" if is_templated else ""
    models, notes = {"target": facts(bench.target, config.dtype)}, list(setup.notes)
    for method, draft in bench.drafts.items():
        models[SOURCES.get(method, method)] = facts(draft, config.dtype)
    if config.trees and not bench.drafts:
        notes.append("trees are for standalone, eagle and mtp; none of them is given")
    if "standalone" in config.methods and not config.draft:
        notes.append("no draft is given (--config.draft=PATH), so standalone is left out")
    notes += cut_note(setup.num_cut, bench.prompts)
    return {
        "config": config.to_dict(),
        "models": models,
        "own": bench.own.facts(),
        "mesh": bench.where.facts(bench.target, [*bench.drafts.values()], bench.batch),
        "prompts": {
            "description": f"{len(lengths)} {of}{by}, {span} tokens, "
            f"{config.max_new_tokens} new tokens each, batch {config.batch}",
            "names": [prompt.name for prompt in setup.prompts],
            "lengths": lengths,
            "num_cut": setup.num_cut,
        },
        "notes": notes,
        "costs": None,
        "results": [],
        "is_complete": False,
    }


def _row(result: dict) -> list[str]:
    is_plain = result["method"] == "plain"
    is_known = lambda value: value is not None and value == value  # NaN is not equal to itself
    number = lambda value, form, unit="": f"{value:{form}}{unit}" if is_known(value) else "–"
    rates = (number(rate, ".2f").replace("0.", ".", 1) for rate in result["acceptance_by_position"])
    identical = {True: "yes", False: "no", None: "–"}[result["identical_to_plain"]]
    if identical == "no":
        ties = ", near ties" if _has_near_ties_alone(result) else ""
        identical = f"no ({result['identical_rows']}/{result['rows']} rows{ties})"
    elif not result["is_lossless"]:
        identical = "– (lossy)"
    return [
        f"{result['method']} {result['tree']}" if result.get("tree") else result["method"],
        "–" if is_plain else str(result["k"]),
        f"{result['temperature']:g}",
        "–" if is_plain else result["rule"],
        number(result["tau"], ".2f"),
        " ".join(rates) or "–",
        number(result["tokens_per_s"], ".0f"),
        "–" if is_plain else number(result["plain_tokens_per_s"], ".0f"),
        number(result["speedup"], ".2f", "x"),
        "–" if is_plain else interval_text(result),
        "–" if is_plain else number(result["predicted_speedup"], ".2f", "x"),
        identical,
    ]


def interval_text(result: dict) -> str:
    """Formats the interval of a speed-up; with a question mark where it includes 1."""
    low, high = result["speedup_interval"]
    if not low < high:
        return "one pair ?" if result["speedup"] == result["speedup"] else "–"  # NaN: no tokens
    return f"{low:.2f} to {high:.2f}{'' if is_told_apart(result) else ' ?'}"


def _num_unexamined(result: dict) -> int:
    """Rows that part from plain decoding, and whose logits there were not computed once more."""
    if result["identical_to_plain"] is not False:
        return 0
    return result["rows"] - result["identical_rows"] - len(result["differences"])


def _has_near_ties_alone(result: dict) -> bool:
    is_whole = not _num_unexamined(result)
    return is_whole and all(d["is_near_tie"] for d in result["differences"])


def results_table(results: Sequence[dict], *, is_markdown: bool = False) -> str:
    """Formats the results; as text, with one blank line between temperatures."""
    rows = []
    for before, result in zip([None, *results], results):
        if before and not is_markdown and result["temperature"] != before["temperature"]:
            rows.append([""] * len(_COLUMNS))
        rows.append(_row(result))
    return table(_COLUMNS, rows, numbers=_NUMBERS, is_markdown=is_markdown)


def _shape(result: dict) -> str:
    return f"tree {result['tree']}" if result.get("tree") else f"K={result['k']}"


def legend(report: dict) -> list[tuple[str, str]]:
    """Returns what each column means, as ``(column, meaning)``."""
    count = max((r["num_pairs"] for r in report["results"]), default=1)
    pairs = "one pair of runs" if count == 1 else f"{count} pairs of runs"
    trees = "trees are named by the children of each depth, as 3x2x1, or by nodes:levels:children"
    return [
        *([("method", trees)] if any(r.get("tree") for r in report["results"]) else []),
        ("K, T", "drafted tokens per round; sampling temperature"),
        ("tau", "mean acceptance length: tokens emitted per target pass, the target's own token "
         "included"),
        ("accepted", "share of the drafts at position 1, 2, 3 … that the rule accepted, of those "
         "whose predecessors were all accepted; of a tree, by level"),
        ("tok/s", "decoded tokens per second, without prefill and compilation; plain tok/s: those "
         "of plain decoding, which takes turns with all other rows of its temperature"),
        ("speed-up", f"tok/s over plain tok/s, with its 95 % interval over {pairs}; ? where it is "
         "not significant: the interval includes 1"),
        ("predicted", "speed-up of chains that acceptance and the costs of passes predict"
         + ", for the rows that still run" * (report["config"]["batch"] > 1)),
        ("identical", "whether every token equals plain decoding's; – where the rule samples other "
         "tokens of the same distribution; near ties: rounding explains every row that parts"),
    ]  # fmt: skip


def describe_costs(costs: dict | None) -> list[str]:
    """Returns a sentence on what passes cost."""
    if not costs:
        return []
    ratio = lambda ms: f"{ms / costs['plain_ms']:.2f}"
    untold = costs.get("untold") or {}
    mark = lambda name, k: " (not told from 0)" if k in untold.get(name, ()) else ""
    passes = [
        *(f"a verify pass of {w} tokens {ratio(ms)}" for w, ms in costs["verify_ms"].items()
          if int(w) > 1),
        *(f"a draft pass of {name} adds {ratio(ms)}{mark(name, 0)}"
          for name, ms in costs["draft_ms"].items()),
        *(f"the first draft pass of {name} in a round of {k} adds {ratio(ms)}{mark(name, int(k))}"
          for name, times in (costs.get("first_ms") or {}).items() for k, ms in times.items()),
    ]  # fmt: skip
    times = f"; relative to it, {', '.join(passes)}" if passes else ""
    return [f"a plain pass of one token takes {costs['plain_ms']:.2f} ms{times}"]


def conclusions(results: Sequence[dict]) -> list[str]:
    """Returns one line for each temperature: its fastest lossless method."""
    lines = []
    for temperature in dict.fromkeys(result["temperature"] for result in results):
        found = [
            r for r in results
            if r["temperature"] == temperature and r["method"] != "plain" and r["is_lossless"]
            and r["speedup"] == r["speedup"]
        ]  # fmt: skip
        if not found:
            continue
        best = max(found, key=lambda r: r["speedup"])
        begin = f"Fastest at T={temperature:g}"
        if not best["speedup"] > 1:
            begin = f"Nothing beat plain decoding at T={temperature:g}; closest"
        has_interval = best["speedup_interval"][0] < best["speedup_interval"][1]
        why = "not significant: the interval includes 1" if has_interval else "no interval"
        how = interval_text(best).replace(" ?", f", {why}")
        said = (
            f"{begin}: {best['method']}, {_shape(best)}, rule {best['rule']}: "
            f"{best['speedup']:.2f}x plain decoding ({how}), {_sameness(best)}"
        )
        close = [r for r in found if r is not best and _overlap(r, best)]
        names = ", ".join(dict.fromkeys(f"{r['method']} {_shape(r)}" for r in close))
        lines.append(said + (f"; with overlapping intervals: {names}" if close else ""))
    return lines


def _sameness(result: dict) -> str:
    if result["identical_to_plain"] is False:
        is_rounding = _has_near_ties_alone(result)
        if _num_unexamined(result):
            return f"output identical in {result['identical_rows']} of {result['rows']} rows only"
        return "output identical but for near ties" if is_rounding else "output NOT identical"
    return "identical output" if result["identical_to_plain"] else "same distribution"


def _overlap(result: dict, best: dict) -> bool:
    """Whether the intervals of two speed-ups meet, or one of them has none."""
    return not result["speedup_interval"][1] < best["speedup_interval"][0]


def _where(result: dict) -> str:
    of = f" batch {result['batch']}" if result.get("batch", 1) > 1 else ""
    return f"{result['method']} {_shape(result)} T={result['temperature']:g}{of}"


def describe_difference(result: dict, difference: dict, dtype: str) -> str:
    """Returns a sentence on where a row parts from plain decoding, and whether by rounding."""
    where = _where(result)
    said = f"{where}: row {difference['row']} parts from plain decoding at token {difference['at']}"
    if difference["deviations"]:
        evidence = "; ".join(difference["evidence"])
        return f"{said}; the audit's verdict is {difference['verdict']}: {evidence}"
    plain, own = ("none" if t is None else f"id {t}" for t in difference["tokens"])
    said += f" (plain decoding takes {plain}, this row {own})"
    if difference["gap"] is None:
        return f"{said}, where one of the two ends: no near tie"
    kind = "within" if difference["is_near_tie"] else "NOT within"
    return (
        f"{said}; the two tokens' logits in float32 are {difference['gap']:.1e} apart, {kind} "
        f"the rounding of {dtype} there (up to {difference['rounding']:.1e} each)"
    )


def notes(report: dict) -> list[str]:
    """Returns what a reader must know beside the numbers, after ``report["notes"]``."""
    lines, results = [*report["notes"], *load_note(report["environment"])], report["results"]
    lines += describe_costs(report["costs"])
    if report["config"]["dtype"] != "float32":
        lines.append(
            f"in {report['config']['dtype']} rounding depends on how many tokens a pass feeds, so "
            "where two logits nearly tie, speculative and plain decoding may take different ones"
        )
    share = max((r["looping_share"] for r in results if r["method"] == "plain"), default=0)
    if share > 0.01:
        lines.append(
            f"up to {share:.0%} of plain decoding's tokens repeat in loops, which are easy to draft"
        )
    for r in results:
        faults = {k: n for k, n in r["finish_reasons"].items() if k.startswith(("nan", "invalid"))}
        where = _where(r)
        ended = r["finish_reasons"].get("stop_token", 0)
        if ended and r["method"] == "plain":
            lines.append(f"{ended} of {r['rows']} rows end at a stop token, T={r['temperature']:g}")
        if faults:
            lines.append(f"{where}: rows stopped early: {faults}")
        dtype = report["config"]["dtype"]
        lines += [describe_difference(r, difference, dtype) for difference in r["differences"]]
        if count := _num_unexamined(r):
            is_greedy = r["temperature"] < GREEDY_BELOW
            why = (
                "--config.has_audit=True with this --workdir examines them, too" if is_greedy
                else "whether rounding explains it is only examined at temperature 0"
            )  # fmt: skip
            more = "more " * bool(r["differences"])
            lines.append(
                f"{where}: {count} {more}of {r['rows']} rows part from plain decoding; {why}"
            )
    return lines


def markdown(report: dict, plots: Sequence[str]) -> str:
    """Returns report.md: conclusions, table, plots, conditions."""
    env, models = report["environment"], report["models"]
    read = [(role, note) for role, model in models.items() for note in model["notes"]]
    parts = [
        "# Speculative decoding compared with plain decoding", "", f"`{report['command']}`", "",
        *(f"- {line}" for line in report["conclusions"]), "",
        results_table(report["results"], is_markdown=True), "",
        *(f"- **{name}**: {meaning}" for name, meaning in legend(report)),
        *(["", "Notes:", ""] if report["notes"] else []),
        *(f"- {line}" for line in report["notes"]),
        *(line for name in plots for line in ("", f"![{name}]({name})")),
        *auditing.document(report.get("audit")),
        *(line for block in profiling.document(report.get("profile", {})) for line in ("", block)),
        "", "## Conditions", "",
        *(f"- {role}: {describe_model(model)}" for role, model in models.items()),
        *(f"- {line}" for line in own.lines(report["own"])),
        f"- prompts: {report['prompts']['description']}",
        f"- machine: {describe_machine(env)}",
        *(f"- {line}" for line in mesh_lines(report["mesh"])),
        f"- {', '.join(f'{name} {env[name]}' for name in ('spec_jax', 'python', *PACKAGES))}",
        *(["", "How the checkpoints of the heads were read:", ""] if read else []),
        *(f"- {role}: {note}" for role, note in read),
        "", "Every count and time is in report.json, the resolved config in config.json.",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def print_head(report: dict, folder: pathlib.Path) -> None:
    """Prints what is compared, and where the report will be."""
    env = report["environment"]
    print(f"spec_jax {env['spec_jax']}, jax {env['jax']}, {describe_machine(env)}")
    models = {role: describe_model(model) for role, model in report["models"].items()}
    about = {"prompts": report["prompts"]["description"], "folder": folder}
    for name, text in (models | about).items():
        print(f"{name:8} {text}", flush=True)
    for line in [*own.lines(report["own"]), *mesh_lines(report["mesh"])]:
        print(line, flush=True)


def print_results(report: dict, folder: pathlib.Path) -> None:
    """Prints the table, what its columns mean, and the conclusions."""
    fill = functools.partial(textwrap.fill, width=100, break_on_hyphens=False)
    print(f"\n{results_table(report['results'])}\n")
    for name, meaning in legend(report):
        print(fill(f"  {name:11}{meaning}", subsequent_indent=" " * 13))
    if report.get("audit"):
        print(f"\n{auditing.audit_table(report['audit'])}\n{fill(auditing.MEANING)}")
    for section in profiling.sections(report.get("profile", {})):
        print(f"\n{section.text()}")
    for lines in ([f"note: {note}" for note in report["notes"]], report["conclusions"]):
        print("\n" + "\n".join(fill(line, subsequent_indent="  ") for line in lines))
    print(f"\n{folder / 'report.md'}: the whole report, after {report['elapsed_s']:.0f} s")
