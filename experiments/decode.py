"""Decodes with and without speculation and compares: the same text, how fast, and why.

    python -m experiments.decode
    python -m experiments.decode --config.target=PATH --config.draft=PATH --config.ks=2,4,8
    python -m experiments.decode --config.head=PATH --config.trees=3x2x1,59:6:10

Shows one prompt live, then times every method, K and temperature beside plain decoding. Each
run leaves a folder (--workdir): config.json, environment.json, report.json (written from the
first measured row on), report.md, speedup.png and acceptance.png. Compiled programs are kept
under $XDG_CACHE_HOME or ~/.cache, in spec_jax, so a second run starts fast.
"""

from __future__ import annotations

import pathlib
import sys
import time

import jax
from ml_collections import ConfigDict

from configs import decode_default
from experiments.common import cli, costs, plots, report
from experiments.common.grid import Bench, Cell, make_cells
from experiments.common.progress import run_all
from experiments.common.prompts import Prompt, PromptEncoder, fit, load_prompts
from spec_jax.config import STRATEGIES, SamplerConfig, build
from spec_jax.drafters.common.head import Head
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError
from spec_jax.loading import (
    DTYPES,
    LoadedHead,
    LoadedModel,
    load_head,
    load_model,
    load_mtp,
    random_head,
)
from spec_jax.progress import Progress

_METHODS = ("plain", "ngram", "standalone", "eagle", "mtp", "suffix")
_SOURCES = {"standalone": "draft", "eagle": "head", "mtp": "mtp"}  # the config's key of each
_RULES = tuple(s for s in STRATEGIES if s not in ("greedy", "synthetic"))
# Heads with random weights, by method and name: as exact as trained ones, and of no use.
RANDOM_HEADS = {
    "eagle": {
        "random-eagle-1": lambda target: EagleConfig.of_target(target, 1),
        "random-eagle-3": lambda target: EagleConfig.of_target(target, 3, target.vocab_size // 2),
    },
    "mtp": {"random": MtpConfig.of_target},
}


def resolve(config: ConfigDict) -> ConfigDict:
    """Checks a config; returns it with every value in its final form.

    Raises:
      ConfigError: an unknown or missing key, or a value that cannot be.
    """
    cli.check_keys(config, decode_default.get_config())
    config = config.copy_and_resolve_references()

    def check(ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{name} is {config[name]!r}; expected {expected}")

    is_number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
    is_finite = lambda x: is_number(x) and 0 <= x < float("inf")
    known = {
        "methods": _METHODS, "standalone_rules": _RULES, "ngram_rules": _RULES,
        "head_rules": _RULES,
    }  # fmt: skip
    for name in known:
        config[name] = tuple(x.strip() for entry in config[name] for x in str(entry).split(","))
    for name, names in known.items():
        check(set(config[name]) <= set(names), name, f"names among {', '.join(names)}")
    for name in (*known, "ks", "temperatures"):
        check(len(config[name]) > 0, name, "one or more")
    check(all(type(k) is int and k >= 1 for k in config.ks), "ks", "integers of 1 or more")
    check(all(map(is_finite, config.temperatures)), "temperatures", "numbers of 0 or more")
    config.temperatures = tuple(map(float, config.temperatures))
    for name in ("num_prompts", "batch", "repeats"):
        check(config[name] >= 1, name, "1 or more")
    is_whole = config.num_prompts % config.batch == 0
    check(is_whole, "num_prompts", f"a multiple of batch {config.batch}")
    check(config.max_new_tokens >= 2, "max_new_tokens", "2 or more (prefill makes the first)")
    check((config.max_prompt_tokens or 1) >= 1, "max_prompt_tokens", "1 or more, or none")
    check(config.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
    check(config.target != "", "target", "a zoo name or a directory: --config.target=PATH")
    usual = decode_default.get_config()
    is_other = config.target != usual.target  # the zoo's drafts are for the zoo's target
    for name in _SOURCES.values():
        if config[name].lower() == "none" or (is_other and config[name] == usual[name]):
            config[name] = ""
    return config


def load_drafts(config, target: LoadedModel) -> dict[str, LoadedModel | LoadedHead]:
    """What drafts, by label: those of ``config.methods`` that are given.

    The label is the method, of several heads with their version: "eagle-1", "eagle-3".

    Raises:
      SpecJaxError: one that cannot be used.
    """
    drafts = {}
    for method, key in _SOURCES.items():
        names = [name.strip() for name in config[key].split(",") if name.strip()]
        if method not in config.methods or not names:
            continue
        if method == "standalone":
            if len(names) > 1:
                raise ConfigError(f"draft is {config[key]!r}; expected one model")
            drafts[method] = load_model(names[0], config.dtype, scan_layers=config.scan_layers)
            continue
        loaded = [_load_head(method, name, config, target) for name in names]
        for head in loaded:
            label = method
            if len(loaded) > 1:
                version = head.config.version if method == "eagle" else 1 + len(drafts)
                label = f"{method}-{version}"
                label += "" if label not in drafts else f"-{len(drafts)}"
            drafts[label] = head
    return drafts


def _load_head(method: str, name: str, config, target: LoadedModel) -> LoadedHead:
    if name in RANDOM_HEADS[method]:
        shape = RANDOM_HEADS[method][name](target.config)
        return random_head(shape, jax.random.key(config.seed), config.dtype)
    return (load_head if method == "eagle" else load_mtp)(name, target, config.dtype)


def start_report(config, target: LoadedModel, prompts, bench: Bench, num_cut: int):
    """The part of a report that is known before anything is measured."""
    of = f"rows of {config.prompts}" if config.prompts else "held-out library functions"
    lengths = [len(ids) for ids in bench.prompts]
    is_templated = any(map(PromptEncoder(target).is_templated, prompts))
    by = ", by the chat template" if is_templated else ""
    models, notes = {"target": report.model_facts(target, config.dtype)}, []
    for method, draft in bench.drafts.items():
        facts = report.model_facts if method == "standalone" else report.head_facts
        models[_SOURCES.get(method, method)] = facts(draft, config.dtype)
        notes += [f"{method}: {note}" for note in getattr(draft, "notes", ())]
    if config.trees and not bench.drafts:
        notes.append("trees are for standalone, eagle and mtp; none of them is given")
    if "standalone" in config.methods and "standalone" not in bench.drafts:
        notes.append("no draft is given (--config.draft=PATH), so standalone is left out")
    if num_cut:
        notes.append(
            f"{num_cut} of {len(lengths)} prompts were too long: their last {bench.longest} tokens "
            "are used"
        )
    return {
        "command": cli.command("decode"),
        "config": config.to_dict(),
        "environment": report.environment(),
        "models": models,
        "prompts": {
            "description": f"{len(lengths)} {of}{by}, {min(lengths)} to {max(lengths)} tokens, "
            f"{config.max_new_tokens} new tokens each, batch {config.batch}",
            "names": [prompt.name for prompt in prompts],
            "lengths": lengths,
            "num_cut": num_cut,
        },
        "notes": notes,
        "costs": None,
        "results": [],
        "is_complete": False,
    }


def show_live(bench: Bench, cell: Cell, prompt: Prompt) -> None:
    """Prints a prompt, dimmed on a terminal, and its continuation as it is decoded."""
    is_terminal = sys.stdout.isatty()
    print(f"\n── {prompt.name}, live by {cell.label} ".ljust(80, "─"))
    print(f"\033[2m{prompt.text}\033[0m" if is_terminal else prompt.text, end="", flush=True)
    send = lambda row, piece: print(piece, end="", flush=True) if row == 0 else None
    stats = bench.run(cell, 0, on_token=send).rows[0].stats
    print(
        f"\n{'─' * 79}\n{stats.emitted} tokens, {stats.first} by prefill and the rest in "
        f"{stats.rounds} target passes; {stats.accepted} of {stats.drafted} drafts accepted\n"
    )


def compile_all(bench: Bench, cells: list[Cell]) -> dict:
    """Compiles every program of the run; returns the timers of the passes."""
    timers, slots, batch = {}, cost_slots(bench, cells), bench.batch

    def add_pass(role: str, model: LoadedModel, width: int) -> None:
        params = model.decoding_params(width * batch)
        timers[role, width] = costs.pass_timer(model.model, params, width, slots, batch)

    def add_head(method: str, head: Head, params) -> None:
        timers[method, 1] = costs.head_timer(head, params, slots, batch)

    tasks = {cell.label: lambda c=cell: bench.compile(c) for cell in cells}
    chains = [cell for cell in cells if not cell.tree]
    passes = [("target", bench.target, width) for width in sorted({c.k + 1 for c in chains})]
    if "standalone" in bench.drafts:
        passes.append(("standalone", bench.drafts["standalone"], 1))
    for one in passes:
        tasks[f"{one[0]} pass of width {one[2]}"] = lambda one=one: add_pass(*one)
    for cell in {cell.method: cell for cell in chains}.values():
        decoder = bench.decoder(cell)
        if not isinstance(decoder.draft, LoadedHead):
            continue
        head = decoder.draft.head(decoder.system().target)
        if head is not None:
            one = (cell.method, head, decoder.params(batch)["draft"])
            tasks[f"{cell.method} pass"] = lambda one=one: add_head(*one)
    run_all(tasks, "compiling")
    return timers


def cost_slots(bench: Bench, cells: list[Cell]) -> int:
    """Cache slots of the timed passes: as many as decoding chains has."""
    widest = max(cell.k for cell in cells if not cell.tree)
    most = bench.longest + bench.max_new_tokens + widest + 1
    return -(-most // 128) * 128


def measure(rep: dict, bench: Bench, cells: list[Cell], repeats: int, folder: pathlib.Path):
    """Fills ``rep["results"]`` and saves the report after each row; returns the costs."""
    timers = compile_all(bench, cells)
    with Progress(len(cells) + 1, "measuring") as bar:
        bar.now("passes")
        found = costs.Costs.measure(timers, slots=cost_slots(bench, cells), batch=bench.batch)
        rep["costs"] = found._asdict()
        bar.step("passes")
        for cell in cells:
            bar.now(cell.label)
            row = bench.measure(cell, repeats)
            row["predicted_speedup"] = costs.predict(found, row)
            rep["results"].append(row)
            bench.refresh_plain(rep["results"], cell.temperature)
            report.write_json(folder / "report.json", rep)
            bar.step(f"{cell.label}: {row['speedup']:.2f}x")
    return found


def decode(config: ConfigDict, workdir: str | None = None) -> dict:
    """Runs the experiment; returns its report.

    Raises:
      SpecJaxError: a config, a model or a prompt that cannot be used.
    """
    begin = time.monotonic()
    config = resolve(config)
    target = load_model(config.target, config.dtype, scan_layers=config.scan_layers)
    drafts = load_drafts(config, target)
    labels = {m: [label for label in drafts if label.split("-")[0] == m] for m in _SOURCES}
    methods = [label for m in config.methods for label in labels.get(m, [m])]
    if not methods:
        keys = ", ".join(f"--config.{_SOURCES[m]}=PATH" for m in config.methods)
        raise ConfigError(f"methods are {config.methods}, and nothing drafts for them: {keys}")
    prompts = load_prompts(config.prompts, config.num_prompts, config.seed)
    models = [target, *drafts.values()]
    ids, num_cut = fit(prompts, models, config.max_new_tokens, config.max_prompt_tokens)
    sampler = build(SamplerConfig, {**config.sampler.to_dict(), "seed": config.seed})
    bench = Bench(
        target, drafts, ids, sampler, config.max_new_tokens, config.batch,
        config.draft_temperature, {"ngram_max": config.ngram_max, "ngram_min": config.ngram_min},
        config.has_expected,
    )
    rules = {"standalone": config.standalone_rules}
    rules |= dict.fromkeys(("ngram", "suffix"), config.ngram_rules)
    rules |= {label: config.head_rules for m in ("eagle", "mtp") for label in labels[m]}
    trees = [tree.strip() for tree in config.trees.split(",") if tree.strip()]
    cells = make_cells(methods, config.ks, config.temperatures, rules, trees)
    for cell in cells:
        bench.decoder(cell)  # what cannot be is refused here, before anything is compiled

    folder = cli.open_workdir("decode", workdir)
    rep = start_report(config, target, prompts, bench, num_cut)
    report.write_json(folder / "config.json", rep["config"])
    report.write_json(folder / "environment.json", rep["environment"])
    report.print_head(rep, folder)
    if config.has_stream:
        first = [c for c in cells if c.temperature == cells[0].temperature]
        same = [c for c in first if c.method == first[-1].method]
        show_live(bench, same[len(same) // 2], prompts[0])

    found = measure(rep, bench, cells, config.repeats, folder)
    rep["notes"] = report.notes(rep)
    rep["conclusions"] = report.conclusions(rep["results"])
    plots.plot_speedup(folder / "speedup.png", rep["results"], found)
    plots.plot_acceptance(folder / "acceptance.png", rep["results"])
    rep |= {"is_complete": True, "elapsed_s": round(time.monotonic() - begin, 1)}
    report.write_json(folder / "report.json", rep)
    report.write_markdown(folder, rep, ["speedup.png", "acceptance.png"])
    report.print_results(rep, folder)
    return rep


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        decode_default, "Folder of this run, a new one; by default runs/decode/TIME."
    )

    def main() -> None:
        cli.enable_compilation_cache()
        decode(_CONFIG.value, _WORKDIR.value)

    cli.run(main)
