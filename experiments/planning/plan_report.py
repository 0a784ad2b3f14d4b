"""The table and the plot of a plan."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments.run.plots import panels, whole_numbers
from spec_jax.show.tables import Section, Table

# Columns of speed-ups: what is assumed for each pass in ms, beside its floor.
_SPEEDUPS = {"speed-up": 0.0, "at 0.3 ms": 0.3, "at 1 ms": 1.0}
_HEADER = (
    "topology",
    "mesh",
    "B",
    "S",
    "K",
    "fits",
    "GB",
    "cache GB",
    "temp GB",
    "copies",
    "collectives",
    "coll. MB",
    "HBM GB",
    "of count",
    "floor ms",
    "tok/s",
    *_SPEEDUPS,
    "CPU s",
)


def _group(cell: dict) -> tuple:
    return cell["topology"], cell["mesh"], cell["batch"], cell["slots"]


def speedup(cell: dict, cells: Sequence[dict], overhead_ms: float = 0.0) -> float | None:
    """Returns the predicted speed over plain decoding's at the same place; None without one.

    Args:
      cell: What is compared.
      cells: All of the plan.
      overhead_ms: Assumed for each pass of a round, beside its floor.
    """
    if cell["tok_s"] is None:
        return None
    plain = next(c for c in cells if _group(c) == _group(cell) and c["k"] == 0)

    gain = cell["tok_s"] / plain["tok_s"]
    if overhead_ms:

        def times(c):
            return 1 + overhead_ms / 1e3 * c["analytic"]["passes"] / c["floor_s"]

        gain *= times(plain) / times(cell)
    return gain


def best(cells: Sequence[dict]) -> list[dict]:
    """Returns the K with the highest predicted speed of every place, among those that fit.

    A place where a speed is not predicted has none.
    """
    found = []
    unknown = {_group(c) for c in cells if c["tok_s"] is None}
    for group in dict.fromkeys(_group(c) for c in cells if _group(c) not in unknown):
        fitting = [c for c in cells if _group(c) == group and c["fits"]]
        names = dict(zip(("topology", "mesh", "batch", "slots"), group))
        if not fitting:
            found.append(names | {"k": None, "tok_s": 0.0, "speedup": 0.0})
            continue
        one = max(fitting, key=lambda c: c["tok_s"])
        said = {"k": one["k"], "tok_s": one["tok_s"], "speedup": speedup(one, cells)}
        found.append(names | said)
    return found


def name(cell: dict) -> str:
    """Returns a name for messages, of what ``plan_cells.place_of`` returns or a cell."""
    plain = {"decode": "plain", "train": "training"}
    what = f"K={cell['k']}" if cell["k"] else plain.get(cell["program"], cell["program"])
    what += f" tree {cell['tree']}" if cell["tree"] else ""
    return f"{cell['topology']} {cell['mesh']} B={cell['batch']} S={cell['slots']} {what}"


def _by_kind(cell: dict) -> str:
    kinds = cell["compiled"]["counted"]["collectives"].items()
    return ", ".join(f"{n} {kind} of {size / 1e6:,.1f} MB" for kind, (n, size) in kinds)


def _written(counted: dict) -> str:
    """What is said of weights that a round writes again; "" if it writes none."""
    said = []
    for name, what in (("rewrites", "of weights again"), ("gathers", "of chosen experts")):
        copies = [(times, size) for _, times, size, place in counted[name] if place == "round"]
        if copies:
            size = sum(times * size for times, size in copies)
            said.append(f"{sum(n for n, _ in copies)} times {what}, {size / 1e9:,.2f} GB")
    return f"a round writes {' and '.join(said)}" if said else ""


def _prefill(needs: dict) -> str:
    rows = f"{needs['rows']} prompt" + "s" * (needs["rows"] > 1)
    return (
        f"prefill of {rows} takes {needs['temporaries'] / 1e9:.2f} GB of temporaries, "
        f"{needs['total'] / 1e9:.2f} GB with all else"
    )


def _queue(found: dict, config: dict) -> str:
    return (
        f"prompts of {config['prompt_tokens']:,} tokens and {found['new_tokens']:,} new ones: "
        f"prefill takes {found['prefill_share']:.0%} of a queue's time, at most "
        f"{found['tok_s']:,.0f} tokens a second"
    )


def _state(needs: dict) -> str:
    parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in needs.items())
    return f"{sum(needs.values()) / 1e9:.2f} GB before activations ({parts})"


def _is_known(cell: dict) -> bool:
    """Whether all that a program needs is counted, or all but its temporaries."""
    return bool(cell["compiled"] or cell["analytic"])


def line(cell: dict) -> str:
    """Returns one line on a cell."""
    fit = "fits" if _is_known(cell) else "fits if activations do"
    fit = fit if cell["fits"] else f"lacks {cell['shortfall'] / 1e9:.2f} GB a device"
    speed = "" if cell["tok_s"] is None else f", at most {cell['tok_s']:,.0f} tokens a second"
    return f"{name(cell)}: {fit}{speed}"


def _row(cell: dict, cells: Sequence[dict]) -> list[str]:
    """Returns what each column shows; "-" for what is not known."""

    def gb(x):
        return f"{x / 1e9:.2f}"

    compiled = cell["compiled"]
    analytic = cell["analytic"]
    fits = "yes" if _is_known(cell) else "perhaps"
    row = dict.fromkeys(_HEADER, "-") | {
        "topology": cell["topology"],
        "mesh": cell["mesh"],
        "B": str(cell["batch"]),
        "S": str(cell["slots"]),
        "K": f"{cell['k']} ({cell['tree']})" if cell["tree"] else str(cell["k"]),
        "fits": fits if cell["fits"] else f"lacks {gb(cell['shortfall'])}",
    }
    total = 0 if _is_known(cell) else sum(cell["state"].values())
    if analytic:
        total = analytic["params"] + analytic["cache"]
        row["cache GB"] = gb(analytic["cache"])
        row["collectives"] = str(analytic["collectives"])
        row["HBM GB"] = gb(analytic["hbm_bytes"])
        row["floor ms"] = f"{cell['floor_s'] * 1e3:.2f}"
    if compiled:
        total = compiled["needs"]["total"]
        row["CPU s"] = f"{compiled['cpu_s']:.0f}"
    if compiled and (counted := compiled["counted"]):
        kinds = counted["collectives"].values()
        row["temp GB"] = gb(compiled["needs"]["temporaries"])
        row["copies"] = str(len(counted["copies"]))
        row["collectives"] = str(sum(n for n, _ in kinds))
        row["coll. MB"] = f"{sum(size for _, size in kinds) / 1e6:.1f}"
        row["HBM GB"] = gb(counted["hbm_bytes"])
        if analytic:
            row["of count"] = f"{counted['hbm_bytes'] / analytic['hbm_bytes']:.3f}"
    row["GB"] = gb(max(total, cell.get("prefill", {}).get("total", 0)))
    if cell["tok_s"] is not None:
        row["tok/s"] = f"{cell['tok_s']:,.0f}"
        row |= {name: f"{speedup(cell, cells, ms):.2f}" for name, ms in _SPEEDUPS.items()}
    return [*row.values()]


def sections(result: dict) -> list[Section]:
    """Returns the table, the best K of every place, and what the figures are."""
    cells = result["cells"]
    config = result["config"]
    about = (
        f"{config['target']}, draft {config['draft'] or 'none'}, {config['dtype']}, acceptance "
        f"{result['acceptance']['source']}"
    )
    meaning = (
        "Bytes are of one device, collectives and HBM bytes of one round, copies those of a "
        'cache. In "of count" a program\'s HBM bytes are divided by the counted ones: the rest '
        "is what kernels write for others to read. Times are floors at the chip's published "
        "peaks: no measurement, and no program reaches them. GB is the larger of decoding and of "
        "prefill beside it, where that was compiled. The columns at 0.3 and 1 ms are speed-ups if "
        "every pass takes so much more than its floor (launches, the host, latency of links); "
        "docs/scale.md says what fits published figures. A queue's figures are floors too: "
        "prefill and rounds take turns, and a draft's own prefill is left out."
    )
    if config["program"] == "train":
        head = cells[0]["draft"]
        what = f"the {head} head of {config['target']}" if head else config["target"]
        about = f"One training step of {what}"
        about += ", fully sharded" if config["is_fully_sharded"] else ""
        meaning = (
            "Bytes are of one device, collectives and HBM bytes of one step. S is the length of a "
            "window. No floor of a step's time is modelled. Where nothing is compiled, GB is what "
            "stands before activations and logits, which need more."
        )
    elif config["program"] == "prefill":
        about = f"Prefill of {config['target']}, in chunks of {config['prefill_chunk']} tokens"
        meaning = (
            "Bytes are of one device, collectives and HBM bytes of one chunk of the prompts. S is "
            "the length of a prompt and of its cache. No floor of the time is modelled."
        )
    rows = [_row(cell, cells) for cell in cells]
    numbers = _HEADER[2:5] + _HEADER[6:]
    counted = [cell for cell in cells if cell["compiled"] and cell["compiled"]["counted"]]
    parts = {
        "Collectives": [f"{name(cell)}: {kinds}" for cell in counted if (kinds := _by_kind(cell))],
        "Weights written": [
            f"{name(cell)}: {said}"
            for cell in counted
            if (said := _written(cell["compiled"]["counted"]))
        ],
        "Prefill": [f"{name(c)}: {_prefill(c['prefill'])}" for c in cells if "prefill" in c],
        "Queue": [f"{name(c)}: {_queue(c['queue'], config)}" for c in cells if "queue" in c],
        "State": [f"{name(c)}: {_state(c['state'])}" for c in cells if "state" in c],
        "Best K": [_best_line(one) for one in result["best"]],
    }
    notes = [meaning]
    if any(cell["tree"] and cell["tok_s"] is None for cell in cells):
        notes.append(
            "A tree's speed is not predicted: acceptance by position is that of a chain, and "
            "none of this tree's was measured. Its floor and its counts stand above."
        )
    peak = result["peak_memory_bytes"]
    known = "not known, since this system does not tell it"
    known = known if peak is None else f"{peak / 1e9:.2f} GB"
    notes.append(f"Peak memory of the planner: {known}.")
    return [
        Section("", [about], Table(_HEADER, rows, numbers)),
        *(Section(title, lines) for title, lines in parts.items() if lines),
        Section("What the figures are", notes),
    ]


def _best_line(one: dict) -> str:
    where = f"{one['topology']} {one['mesh']} B={one['batch']} S={one['slots']}"
    if one["k"] is None:
        return f"{where}: nothing fits"
    speed = f"at most {one['tok_s']:,.0f} tokens/s"
    if one["k"] == 0:
        return f"{where}: speculation does not pay: plain decoding, {speed}"
    return f"{where}: best K = {one['k']}: {one['speedup']:.2f} times plain, {speed}"


def plot(path: pathlib.Path, cells: Sequence[dict]) -> None:
    """Draws the predicted speed-up over the batch, one panel for each topology and context.

    Above the dotted line speculation pays. Open marks do not fit. Trees without a prediction are
    left out.
    """
    cells = [c for c in cells if c["tok_s"] is not None]
    places = list(dict.fromkeys((c["topology"], c["slots"]) for c in cells))
    size = (1.2 + 4.3 * len(places), 4.6)
    with panels(path, len(places), size, sharey=True) as axes:
        for axis, (topology, slots) in zip(axes, places):
            here = [c for c in cells if (c["topology"], c["slots"]) == (topology, slots)]
            axis.axhline(1, color="0.45", linewidth=1, linestyle=":", label="plain decoding")
            for k in sorted({c["k"] for c in here} - {0}):
                points = [(c["batch"], speedup(c, cells), c["fits"]) for c in here if c["k"] == k]
                points.sort()
                (drawn,) = axis.plot([p[0] for p in points], [p[1] for p in points], label=f"K={k}")
                for batch, value, fits in points:
                    fill = drawn.get_color() if fits else "none"
                    axis.plot(batch, value, "o", color=drawn.get_color(), markerfacecolor=fill)
            axis.set(title=f"{topology}, S={slots}", xlabel="rows (batch)")
            whole_numbers(axis, {c["batch"] for c in here})
        axes[0].set_ylabel("predicted speed-up, a ratio of floors")
