"""The benchmark's part "cpu_layout": target passes in every layout of the weights, on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.shapes import DTYPES, listed, random_model
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax.evaluation.bench import in_dtype
from spec_jax.evaluation.passes import ITERATIONS, pass_timer
from spec_jax.evaluation.timing import interleave, measure_all, spread
from spec_jax.loading import LoadedModel, load_model
from spec_jax.models import cpu_layout
from spec_jax.models.cpu_layout import LARGE, MAX_ROWS, InPanels, Panels
from spec_jax.models.families import family_of
from spec_jax.models.params import Params
from spec_jax.progress import Progress
from spec_jax.show.tables import Section

RANDOM = "llama110m"  # the target with random weights
WIDTHS = {  # ``Panels.widths`` of each layout
    "whole, apart": (),
    "whole, joined": (0,),
    "panels of 16, joined": (16,),
    "panels of 32, joined": (32, 16),
    "panels of 64, joined": (64, 32, 16),
}
TWO_ROWS = ", two rows"  # ends the names of layouts in which one token is padded to two rows
WORTH = 1.05  # times as fast as the table's choice must be what is recommended in its place
OWN = "the table's own"  # what the table chooses, where it is none of these

Times = Mapping[str, np.ndarray]  # milliseconds of every repeat, by layout
_WEIGHTS_READ = 1 << 29  # in one timed call, so that a dispatch does not count


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    c = config.cpu_layout
    cli.require_positive(config, "slots", "cpu_layout")
    dtypes, rows = cli.listed(c.dtypes), f"integers from 1 to {MAX_ROWS}"
    is_listed = c.tokens and 1 <= min(c.tokens) and max(c.tokens) <= MAX_ROWS
    cli.require_each(
        config,
        (cli.listed(c.targets), "cpu_layout.targets", f"names or directories, or {RANDOM}"),
        (dtypes and {*dtypes} <= {*DTYPES}, "cpu_layout.dtypes", f"some of {', '.join(DTYPES)}"),
        (is_listed, "cpu_layout.tokens", f"{rows}; with more nothing is laid out"),
        (c.repeats >= 3, "cpu_layout.repeats", "3 or more, whose quartiles tell the noise"),
        (max(c.tokens, default=0) < c.slots, "cpu_layout.slots", "more than the tokens of a pass"),
    )


def lay_out(params: Params, name: str, dtype: str) -> Params:
    """Returns whole weights of a dtype, each matrix of them in the layout of this name."""
    widths, min_rows = widths_of(name)
    rows = (1, MAX_ROWS)
    table = [Panels((0, 0), dtype, rows, size, widths, min_rows) for size in (False, True)]
    return cpu_layout.in_panels(params, 1, table)


def pad(params: Params, min_rows: int) -> Params:
    """Returns the same arrays, for which one token is padded to ``min_rows`` rows."""
    change = lambda x: x.replace(min_rows=min_rows) if _is_in_panels(x) else x
    return jax.tree.map(change, params, is_leaf=_is_in_panels)


def _is_in_panels(x):
    return isinstance(x, InPanels)


def present(
    params: Params, dtype: str, tokens: int, table: Sequence[Panels] = cpu_layout.TABLE
) -> str:
    """Returns the layout that a table chooses; ``OWN`` if none of those compared is the same.

    Args:
      params: The weights, whole.
      dtype: Of the weights.
      tokens: Of a pass.
      table: By default the one that decoding uses.
    """

    def form(make):
        like = jax.eval_shape(make, params)
        return jax.tree.map(lambda x: x.shape, like if tokens == 1 else pad(like, 1))

    ours = form(lambda p: cpu_layout.in_panels(p, tokens, table))
    same = (n for n in names(tokens) if form(lambda p: lay_out(p, n, dtype)) == ours)
    return next(same, OWN)


def sizes(params: Params, dtype: str) -> list[bool]:
    """Returns the values of ``Panels.is_large`` that the matrices of whole weights have."""
    like = jax.eval_shape(lambda p: lay_out(p, "whole, joined", dtype), params)
    matrices = filter(_is_in_panels, jax.tree.leaves(like, is_leaf=_is_in_panels))
    return sorted({matrix.w.size > LARGE for matrix in matrices})


def measure_passes(
    title: str, model: LoadedModel, dtype: str, choices: Mapping[int, str], config: ConfigDict
) -> tuple[dict[int, Times], dict[int, Times]]:
    """Times passes in every layout, and again what then seems faster than the table's choice.

    Args:
      title: For the progress.
      model: The target, its weights in the dtype.
      dtype: Of the weights.
      choices: What the table chooses, by tokens a pass.
      config: The part's section.

    Returns:
      The times of every layout by tokens a pass; and, where another layout than the table's choice
      is fastest, new times of these two. The fastest of many is in part the luckiest.
    """
    whole = model.cpu_layout.prepare(None)
    made = functools.cache(lambda name: lay_out(whole, name, dtype))
    passes = max(1, min(ITERATIONS, _WEIGHTS_READ // model.num_params))

    def timer(n, name):
        if name == OWN:
            params = model.cpu_layout.prepare(n)
        else:  # layouts that differ in padding alone share their arrays
            params = pad(made(name.removesuffix(TWO_ROWS)), widths_of(name)[1])
        return pass_timer(model.model, params, n, config.slots, 1, passes)

    # The layouts that are compared follow each other, so that drift meets them alike.
    cells = [(n, name) for n in choices for name in dict.fromkeys([*names(n), choices[n]])]
    makers = {cell: functools.partial(timer, *cell) for cell in cells}
    timers, times = measure_all(f"CPU layouts, {title}", makers, config.repeats)
    times = {n: {name: times[m, name] for m, name in cells if m == n} for n in choices}
    seeming = {n: recommend(times[n], choice) for n, choice in choices.items()}
    pairs = {n: (choices[n], name) for n, name in seeming.items() if name != choices[n]}
    if not pairs:
        return times, {}
    cells = [(n, name) for n, pair in pairs.items() for name in pair]
    with Progress(config.repeats, f"CPU layouts, {title}, again") as bar:
        again = interleave({cell: timers[cell] for cell in cells}, config.repeats, bar.step)
    return times, {n: {name: again[n, name] for name in pair} for n, pair in pairs.items()}


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times every layout of every target and dtype, and says what the table should have here."""
    config = config.cpu_layout
    lines, record, notes, sections = [], {}, [], []
    for name in cli.listed(config.targets):
        is_random = name == RANDOM
        model = random_model(name, config.shape, config.seed) if is_random else load_model(name)
        if not cpu_layout.is_on_one_cpu(model.params):
            return Result([], {}, ["layouts of the weights apply to a CPU only; none was measured"])
        if not family_of(model.config).has_panels:
            notes.append(f"the family of {name} has one layout; it was not measured")
            continue
        for dtype in cli.listed(config.dtypes):
            title, cast = f"{name} in {dtype}", in_dtype(model, dtype)
            whole = cast.cpu_layout.prepare(None)
            choices = {n: present(whole, dtype, n) for n in config.tokens}
            times, again = measure_passes(title, cast, dtype, choices, config)
            lines += case_lines(title, times, choices)
            sections.append(section(title, times, choices))
            notes.append(advice(title, dtype, again, choices, sizes(whole, dtype)))
            record[title] = {
                str(n): {
                    "choice": choices[n],
                    "times_ms": listed(times[n]),
                    "again_ms": listed(again.get(n, {})),
                }
                for n in choices
            }
    return Result(lines, record, notes, sections)


def names(tokens: int) -> list[str]:
    """Returns the layouts that are compared for passes of so many tokens."""
    padded = [name + TWO_ROWS for name, widths in WIDTHS.items() if widths and tokens == 1]
    return [*WIDTHS, *padded]


def widths_of(name: str) -> tuple[tuple[int, ...], int]:
    """Returns ``Panels.widths`` and ``Panels.min_rows`` of a layout."""
    return WIDTHS[name.removesuffix(TWO_ROWS)], 2 if name.endswith(TWO_ROWS) else 1


def fastest(times: Times) -> str:
    """Returns the layout with the smallest median."""
    return min(times, key=lambda name: float(np.median(times[name])))


def recommend(times: Times, choice: str) -> str:
    """Returns the fastest layout, or the table's choice if noise alone may part the two.

    Ratios of the two, repeat by repeat, tell: noise may, if their quartiles contain 1. A median
    below ``WORTH`` is left alone as well.

    Args:
      times: Of passes of one number of tokens.
      choice: The table's.
    """
    best = fastest(times)
    median, low, _ = spread(times[choice] / times[best])
    return best if low > 1 and median >= WORTH else choice


def lines_for(
    wanted: Mapping[int, str | None],
    dtype: str,
    is_large: bool,
    table: Sequence[Panels] = cpu_layout.TABLE,
) -> list[Panels]:
    """Returns the lines that a table should have for one dtype and size of matrices.

    Args:
      wanted: A layout by tokens a pass, which holds up to the next number that was measured; None
        for what the table has, which also stays before the first number and after the last.
      dtype: Of the weights.
      is_large: See ``Panels``.
      table: The table as it is.
    """
    lines: list[Panels] = []
    for rows in range(1, MAX_ROWS + 1):
        measured = max((n for n in wanted if n <= rows <= max(wanted)), default=None)
        if measured is None or wanted[measured] is None:
            line = cpu_layout.find(rows, LARGE + is_large, dtype, table)
            if line is None:
                continue
            widths, min_rows = line.widths, line.min_rows
        else:
            widths, min_rows = widths_of(wanted[measured])
        line = Panels(jax.__version_info__[:2], dtype, (rows, rows), is_large, widths, min_rows)
        if lines and _continues(lines[-1], line):
            lines[-1] = lines[-1]._replace(rows=(lines[-1].rows[0], rows))
        else:
            lines.append(line)
    return lines


def _continues(before: Panels, line: Panels) -> bool:
    rows = line.rows[0]
    # Padding makes no difference to a pass that has as many rows.
    pads_alike = before.min_rows == line.min_rows or rows >= max(before.min_rows, line.min_rows)
    return before.rows[1] == rows - 1 and before.widths == line.widths and pads_alike


def as_text(line: Panels) -> str:
    """Returns a line of the table as it would stand in ``spec_jax/models/cpu_layout.py``."""
    values = f'{line.since}, "{line.dtype}", {line.rows}, {line.is_large}, {line.widths}'
    return f"Panels({values}{f', min_rows={line.min_rows}' if line.min_rows > 1 else ''}),"


def advice(
    title: str,
    dtype: str,
    again: Mapping[int, Times],
    choices: Mapping[int, str],
    sizes: Sequence[bool],
) -> str:
    """Returns what to use on this machine, with lines for the table where it has something else.

    Args:
      title: The model and its dtype.
      dtype: Of its weights.
      again: Times of the table's choice and of another layout, by tokens a pass, where that seemed
        faster.
      choices: What the table chooses, by tokens a pass.
      sizes: The values of ``Panels.is_large`` that its matrices have.
    """
    wanted: dict[int, str | None] = dict.fromkeys(choices)
    better = []
    for n, times in again.items():
        name = recommend(times, choices[n])
        if name != choices[n]:
            gain = np.median(times[choices[n]] / times[name])
            better.append(f"{name} for {tokens_text(n)}, {gain:.2f} x as fast")
            wanted[n] = name
    text = f"recommended on this machine for {title}: "
    if not better:
        return f"{text}the table's choice"
    if len(better) < len(wanted):
        better.append("otherwise the table's choice")
    paragraphs = [f"{text}{'; '.join(better)}."]
    for is_large in sizes:
        which = "more than" if is_large else "at most"
        paragraphs.append(
            "  Lines to put first in TABLE of spec_jax/models/cpu_layout.py, for matrices of "
            f"{which} {LARGE:,} elements:"
        )
        lines = lines_for(wanted, dtype, is_large)
        paragraphs.append("\n".join(f"      {as_text(line)}" for line in lines))
    return "\n\n".join(paragraphs)


def tokens_text(n: int) -> str:
    """Returns a number of tokens in words."""
    return f"{n} {'token' if n == 1 else 'tokens'}"


def case_lines(title: str, times: Mapping[int, Times], choices: Mapping[int, str]) -> list[Line]:
    """Returns a line for each number of tokens: the table's choice over the fastest layout."""
    lines = []
    for n, choice in choices.items():
        best = fastest(times[n])
        note = choice if best == choice else f"{choice}; the fastest is {best}"
        what = f"{title}, {tokens_text(n)}: the table's choice / the fastest layout"
        lines.append(Line(what, times[n][choice] / times[n][best], note=note))
    return lines


def section(title: str, times: Mapping[int, Times], choices: Mapping[int, str]) -> Section:
    """Returns the table of the medians of one model in one dtype."""

    def cell(n, name):
        if name not in times[n]:
            return ""
        return f"{'*' if name == choices[n] else ''}{np.median(times[n][name]):.3g}"

    rows = dict.fromkeys(name for n in times for name in times[n])
    header = ["layout", *map(str, times)]
    return Section(
        f"{title}: ms of a pass by its tokens; * is the table's choice",
        header,
        [[name, *(cell(n, name) for n in times)] for name in rows],
        header[1:],
    )
