"""The report of ``experiments.decode``: its table, its sentences, and report.md."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.common import cli
from experiments.common.decode_setup import SOURCES, Setup
from experiments.common.prompts import PromptEncoder
from experiments.common.report import (
    PACKAGES,
    describe_machine,
    describe_model,
    environment,
    facts,
    load_note,
)
from experiments.common.tables import table

_COLUMNS = (
    "method", "K", "T", "rule", "tok/s", "tau", "accepted at 1, 2, 3 …", "speed-up", "predicted",
    "identical",
)  # fmt: skip
_NUMBERS = ("K", "T", "tok/s", "tau", "speed-up", "predicted")


def start(setup: Setup) -> dict:
    """Returns the part of a report that is known before anything is measured."""
    config, bench = setup.config, setup.bench
    of = f"rows of {config.prompts}" if config.prompts else "held-out library functions"
    lengths = [len(ids) for ids in bench.prompts]
    is_templated = any(map(PromptEncoder(bench.target).is_templated, setup.prompts))
    by = ", by the chat template" if is_templated else ""
    models, notes = {"target": facts(bench.target, config.dtype)}, []
    for method, draft in bench.drafts.items():
        models[SOURCES.get(method, method)] = facts(draft, config.dtype)
        notes += [f"{method}: {note}" for note in getattr(draft, "notes", ())]
    if config.trees and not bench.drafts:
        notes.append("trees are for standalone, eagle and mtp; none of them is given")
    if "standalone" in config.methods and "standalone" not in bench.drafts:
        notes.append("no draft is given (--config.draft=PATH), so standalone is left out")
    if setup.num_cut:
        notes.append(
            f"{setup.num_cut} of {len(lengths)} prompts were too long: their last {bench.longest} "
            "tokens are used"
        )
    return {
        "command": cli.command("decode"),
        "config": config.to_dict(),
        "environment": environment(),
        "models": models,
        "prompts": {
            "description": f"{len(lengths)} {of}{by}, {min(lengths)} to {max(lengths)} tokens, "
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
        identical = f"no ({result['identical_rows']}/{result['rows']} rows)"
    elif not result["is_lossless"]:
        identical = "– (lossy)"
    return [
        f"{result['method']} {result['tree']}" if result.get("tree") else result["method"],
        "–" if is_plain else str(result["k"]),
        f"{result['temperature']:g}",
        "–" if is_plain else result["rule"],
        number(result["tokens_per_s"], ".0f"),
        number(result["tau"], ".2f"),
        " ".join(rates) or "–",
        number(result["speedup"], ".2f", "x"),
        "–" if is_plain else number(result["predicted_speedup"], ".2f", "x"),
        identical,
    ]


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
    """What each column means, as ``(column, meaning)``."""
    costs = report.get("costs")
    trees = "of a tree: children by depth, as 3x2x1, or nodes:levels:children of a dynamic one"
    predicted = "from acceptance and the cost of passes alone, of chains"
    if costs:
        ratio = lambda ms: f"{ms / costs['plain_ms']:.2f}"
        wide = [(int(w), ms) for w, ms in costs["verify_ms"].items() if int(w) > 1]
        predicted += f"; a plain pass takes {costs['plain_ms']:.2f} ms"
        for method, ms in costs["draft_ms"].items():
            predicted += f", one of {method}'s draft {ratio(ms)} of that"
        if wide:
            tokens = ", ".join(str(w) for w, _ in wide)
            predicted += f", one of {tokens} tokens {', '.join(ratio(ms) for _, ms in wide)}"
    return [
        ("K, T", "tokens drafted a round; temperature"),
        *([("method", trees)] if any(r.get("tree") for r in report["results"]) else []),
        ("tok/s", "tokens a second of decoding, prefill left out"),
        ("tau", "tokens emitted a target pass, the target's own included"),
        ("accepted", "share of the drafts judged at position 1, 2, 3 … that were kept; of a tree, "
         "of the levels judged"),
        ("speed-up", "against plain decoding timed in turn with this row"),
        ("predicted", predicted),
        ("identical", "every token is plain decoding's; – where the rule draws others, same law"),
    ]


def conclusions(results: Sequence[dict]) -> list[str]:
    """The fastest lossless method of each temperature, in one line each."""
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
        same = {True: "identical output", False: "output NOT identical", None: "same distribution"}
        name = f"{best['method']} {_shape(best)} ({best['rule']})"
        speed = f"{best['speedup']:.2f}x plain, {same[best['identical_to_plain']]}"
        prefix = "best" if best["speedup"] >= 1 else "nothing beats plain decoding; closest"
        lines.append(f"T={temperature:g}, {prefix}: {name}, {speed}")
    return lines


def notes(report: dict) -> list[str]:
    """What a reader must know beside the numbers, after ``report["notes"]``."""
    lines, results = [*report["notes"], *load_note(report["environment"])], report["results"]
    noise = [abs(1 - r["repeatability"]) for r in results if r.get("repeatability")]
    if noise:
        lines.append(f"plain decoding timed against itself differs by {max(noise):.0%}")
    share = max((r["looping_share"] for r in results if r["method"] == "plain"), default=0)
    if share > 0.01:
        lines.append(f"up to {share:.0%} of plain decoding's tokens lie in loops, easy to draft")
    for r in results:
        faults = {k: n for k, n in r["finish_reasons"].items() if k.startswith(("nan", "invalid"))}
        where = f"{r['method']} {_shape(r)} T={r['temperature']:g}"
        ended = r["finish_reasons"].get("stop_token", 0)
        if ended and r["method"] == "plain":
            lines.append(f"{ended} of {r['rows']} rows end at a stop token, T={r['temperature']:g}")
        if faults:
            lines.append(f"{where}: rows stopped early: {faults}")
        if r.get("smallest_gap_at_difference") is not None:
            lines.append(
                f"{where} differs from plain where the two top logits are "
                f"{r['smallest_gap_at_difference']:.1e} apart or more"
            )
    return lines


def write_markdown(folder: pathlib.Path, report: dict, plots: Sequence[str]) -> None:
    """Writes report.md: conclusion, table, plots, conditions."""
    env, models = report["environment"], report["models"]
    parts = ["# Speculative decoding beside plain decoding", "", f"`{report['command']}`", ""]
    parts += [f"- {line}" for line in conclusions(report["results"])]
    parts += ["", results_table(report["results"], is_markdown=True), ""]
    parts += [f"- **{name}**: {meaning}" for name, meaning in legend(report)]
    parts += [f"- {line}" for line in report["notes"]]
    parts += [line for name in plots for line in ("", f"![{name}]({name})")]
    parts += ["", "## Conditions", ""]
    parts += [f"- {role}: {describe_model(model)}" for role, model in models.items()]
    parts += [f"- prompts: {report['prompts']['description']}"]
    parts += [f"- machine: {describe_machine(env)}"]
    parts += [f"- {name} {env[name]}" for name in ("spec_jax", "python", *PACKAGES)]
    parts += ["", "Every count and time is in report.json, the resolved config in config.json."]
    (folder / "report.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


def print_head(report: dict, folder: pathlib.Path) -> None:
    """What is compared, and where."""
    env = report["environment"]
    print(f"spec_jax {env['spec_jax']}, jax {env['jax']}, {describe_machine(env)}")
    for role, model in report["models"].items():
        print(f"{role:9}{describe_model(model)}")
    print(f"{'prompts':9}{report['prompts']['description']}\n{'folder':9}{folder}", flush=True)


def print_results(report: dict, folder: pathlib.Path) -> None:
    """The table, what its columns mean, and what follows from it."""
    print(results_table(report["results"]) + "\n")
    for name, meaning in legend(report):
        print(f"  {name:11}{meaning}")
    for lines in ([f"note: {note}" for note in report["notes"]], report["conclusions"]):
        print("\n" + "\n".join(lines) if lines else "")
    print(f"\n{folder / 'report.md'}: the whole report, after {report['elapsed_s']:.0f} s")
