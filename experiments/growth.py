"""Shows how the floor of a decode round grows with K, batch, context and up to 256 chips.

    python -m experiments.growth --workdir=DIR
    python -m experiments.growth --target=llama-3.1-70b --topology=v5p:4x4x4 --batch=64 --rate=0.7

The roofline counts everything from the target's config and an EAGLE-3 head of its width (or
another --draft); nothing is compiled or measured. --rate is the assumed probability that a draft is
accepted if those before it are. Prints one table for each quantity that grows, and for each context
the batch at which speculation stops paying. The run's folder gets config.json, environment.json,
report.json, report.md and growth.png. Cost: seconds on any machine.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import flags

from experiments.planning.plan_inputs import find_draft
from experiments.run import cli, plots, report
from spec_jax.engine.adaptive.policy import expected_tokens
from spec_jax.errors import ConfigError
from spec_jax.meshes import parse_mesh
from spec_jax.planning.chips import Chip, Topology
from spec_jax.planning.choose import options
from spec_jax.planning.presets import find_config
from spec_jax.planning.roofline import Setting, best, decode_round, first_loss, memory, predict
from spec_jax.show.tables import Section

MAX_K = 15
KS = (0, 1, 2, 3, 5, 7, 10, 15)
BATCHES = tuple(2**i for i in range(13))
CONTEXTS = tuple(512 * 4**i for i in range(5))  # to 131,072
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)


def run(
    workdir: str | pathlib.Path | None,
    target_name: str,
    draft_name: str,
    topology_name: str,
    setting: Setting,
    num_draft: int,
    rate: float,
) -> dict:
    """Counts and prints all tables; returns the content of report.json.

    Args:
      workdir: The run's folder; by default runs/growth/TIME.
      target_name: A preset or a directory, see ``presets.find_config``.
      draft_name: See ``plan_inputs.find_draft``.
      topology_name: The chips, see ``Topology.parse``.
      setting: Batch and context; its mesh is replaced by the fastest mesh that fits.
      num_draft: K in the tables in which K does not grow.
      rate: Acceptance of every position.

    Raises:
      ConfigError: a value is out of range, or the target does not fit the chips.
    """
    if not 0 < rate < 1 or not 1 <= num_draft <= MAX_K:
        raise ConfigError(
            f"rate is {rate:g} and k {num_draft}; expected a rate between 0 and 1, and 1 to {MAX_K}"
        )
    if not draft_name:
        raise ConfigError("draft is empty; expected eagle3, mtp, ngram or a model")
    target, topology = find_config(target_name), Topology.parse(topology_name)
    draft, tokens = find_draft(draft_name, target), expected_tokens([rate] * MAX_K)

    def place(topology: Topology, setting: Setting):
        return options(target, draft, tokens, topology, setting)[0]

    base = place(topology, setting)
    if base.shortfall:
        raise ConfigError(
            f"{target_name} with {draft_name} lacks {base.shortfall / 1e9:.1f} GB on every device "
            f"of {topology_name}: {base.memory.params / 1e9:.1f} GB of weights and "
            f"{base.memory.cache / 1e9:.1f} GB of caches"
        )
    folder = cli.open_workdir("growth", workdir)
    head = report.begin(
        "growth",
        folder,
        {
            "target": target_name,
            "draft": draft_name,
            "topology": topology_name,
            "batch": setting.batch,
            "context": setting.context,
            "k": num_draft,
            "rate": rate,
        },
    )
    setting, chip = base.setting, topology.chip

    def point(k: int, **changes: int) -> dict[str, Any]:
        at = dataclasses.replace(setting, **changes)
        one = decode_round(target, draft, k, at)
        found = predict(target, draft, k, tokens[k], chip, at)
        times = one.work.times_s(chip)
        return {
            "k": k,
            "batch": at.batch,
            "context": at.context,
            "plain_ms": found.plain_s * 1e3,
            "round_ms": found.round_s * 1e3,
            "hbm_gb": one.work.hbm_bytes / 1e9,
            "gflop": one.work.flops / 1e9,
            "link_mb": one.work.link_bytes / 1e6,
            "collectives": one.work.collectives,
            "bound_by": max(times, key=times.get),
            "tokens": found.tokens,
            "tok_s": found.tok_s,
            "speedup": found.speedup,
        }

    grown = {
        "k": [point(k) for k in KS],
        "batch": [point(num_draft, batch=b) for b in BATCHES if b >= setting.batch],
        "context": [point(num_draft, context=c) for c in CONTEXTS],
    }
    said = f"{target_name} with {draft_name} on {topology_name}, {setting.mesh}, rate {rate:g}"
    by = lambda name: "by K" if name == "k" else f"K {num_draft}, by {name}"
    sections = [_points(f"{said}: {by(name)}", name, points) for name, points in grown.items()]
    chips = []
    for shape in chip.shapes:
        option = place(Topology.parse(f"{chip.name}:{shape}"), setting)
        chips.append(
            {
                "topology": option.topology.name,
                "chips": option.topology.num_chips,
                "mesh": option.setting.mesh,
                "gb_a_device": option.memory.total / 1e9,
                "shortfall_gb": option.shortfall / 1e9,
                "k": option.prediction.num_draft,
                "plain_ms": option.prediction.plain_s * 1e3,
                "speedup": option.prediction.speedup,
                "row_tok_s": option.row_tok_s,
                "chip_tok_s": option.chip_tok_s,
            }
        )
    title = f"{said}: batch {setting.batch}, by chips (mesh and K are the fastest that fit)"
    sections.append(_chips(title, chips))
    frontier = []
    for context in CONTEXTS:
        at = lambda n, context=context: dataclasses.replace(setting, context=context, batch=n)
        sizes = (parse_mesh(setting.mesh)["data"] * size for size in BATCHES)
        sizes = [n for n in sizes if not memory(target, draft, at(n)).shortfall(chip)]
        stops = {rate: _stops(target, draft, rate, chip, at, sizes) for rate in RATES}
        frontier.append({"context": context, "fits_to": max(sizes, default=0), "stops_at": stops})
    title = f"{said}: the first batch at which no K pays, of the powers of two that fit"
    sections.append(_frontier(title, frontier))
    print("\n" + "\n\n".join(section.text() for section in sections))
    record = head | {
        "target": target_name,
        "draft": draft_name,
        "topology": topology_name,
        "rate": rate,
        "setting": dataclasses.asdict(setting),
        "grown": grown,
        "chips": chips,
        "frontier": frontier,
    }
    blocks = (section.text(is_markdown=True) for section in sections)
    report.finish(folder, record, report.document("The floor of a round", record, *blocks))
    plots.plot_growth(folder / "growth.png", grown, chips)
    print(f"{folder / 'growth.png'} written")
    return record


def _stops(
    target: Any,
    draft: Any,
    rate: float,
    chip: Chip,
    at: Callable[[int], Setting],
    sizes: Sequence[int],
) -> int | None:
    tokens = expected_tokens([rate] * MAX_K)
    return first_loss(sizes, lambda batch: best(target, draft, tokens, chip, at(batch)).speedup)


def _points(title: str, name: str, points: Sequence[dict]) -> Section:
    header = (
        "K" if name == "k" else name,
        "plain ms",
        "round ms",
        "HBM GB",
        "GFLOP",
        "links MB",
        "collectives",
        "bound by",
        "tokens",
        "tok/s",
        "speed-up",
    )
    cells = [
        (
            f"{p[name]:,}",
            f"{p['plain_ms']:.2f}",
            f"{p['round_ms']:.2f}",
            f"{p['hbm_gb']:.2f}",
            f"{p['gflop']:,.0f}",
            f"{p['link_mb']:.1f}",
            str(p["collectives"]),
            p["bound_by"],
            f"{p['tokens']:.2f}",
            f"{p['tok_s']:,.0f}",
            f"{p['speedup']:.2f}",
        )
        for p in points
    ]
    return Section(title, header, cells, tuple(h for h in header if h != "bound by"))


def _chips(title: str, chips: Sequence[dict]) -> Section:
    header = (
        "topology",
        "chips",
        "mesh",
        "GB a device",
        "lacks GB",
        "plain ms",
        "K",
        "speed-up",
        "tok/s a row",
        "tok/s a chip",
    )
    cells = [
        (
            c["topology"],
            str(c["chips"]),
            c["mesh"],
            f"{c['gb_a_device']:.1f}",
            f"{c['shortfall_gb']:.1f}" if c["shortfall_gb"] else "–",
            f"{c['plain_ms']:.2f}",
            str(c["k"]),
            f"{c['speedup']:.2f}",
            f"{c['row_tok_s']:,.0f}",
            f"{c['chip_tok_s']:,.0f}",
        )
        for c in chips
    ]
    return Section(title, header, cells, [h for h in header if h not in ("topology", "mesh")])


def _frontier(title: str, frontier: Sequence[dict]) -> Section:
    cells = [
        (
            f"{f['context']:,}",
            f"{f['fits_to']:,}",
            *(f"{stop:,}" if stop else "–" for stop in f["stops_at"].values()),
        )
        for f in frontier
    ]
    header = ("context", "fits to", *(f"rate {r:g}" for r in RATES))
    return Section(title, header, cells, header)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # shapes alone are looked at
    setting = Setting(batch=_BATCH.value, context=_CONTEXT.value)
    run(
        _WORKDIR.value, _TARGET.value, _DRAFT.value, _TOPOLOGY.value, setting, _K.value, _RATE.value
    )


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string(
        "workdir", None, "Folder of this run; by default runs/growth/TIME."
    )
    _TARGET = flags.DEFINE_string("target", "llama-3.1-8b", "A preset, or a model's directory.")
    _DRAFT = flags.DEFINE_string("draft", "eagle3", "eagle3, mtp, ngram, a preset or a directory.")
    _TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x4", "Chips, such as v5p:4x4x4 or h100:8.")
    _BATCH = flags.DEFINE_integer("batch", 8, "Rows over all devices.")
    _CONTEXT = flags.DEFINE_integer("context", 2048, "Tokens of a row that attention reads.")
    _K = flags.DEFINE_integer("k", 5, "Drafted tokens a round, where K does not grow.")
    _RATE = flags.DEFINE_float("rate", 0.75, "Assumed acceptance of every position.")
    cli.run(main)
