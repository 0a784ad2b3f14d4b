"""Decodes with and without speculation and compares text, speed and acceptance.

    python -m experiments.decode
    python -m experiments.decode --config.target=PATH --config.draft=PATH --config.ks=2,4,8
    python -m experiments.decode --config.head=PATH --config.trees=3x2x1,59:6:10
    python -m experiments.decode --profile

Shows one prompt live, then every method and K takes turns with plain decoding, prompt by prompt. A
run leaves a folder (--workdir) with config.json, environment.json, report.json (saved meanwhile,
too), report.md, report.html, and the plots speedup and acceptance as PNG and PDF. Compiled programs
are stored in spec_jax/ under $XDG_CACHE_HOME or ~/.cache, so that a second run starts fast. With
--profile rounds of every row of the table are traced into profile/ of the folder, and the report
says where their time goes.
"""

from __future__ import annotations

import sys
import time

from ml_collections import ConfigDict

from configs import decode_default
from experiments.comparison import answers, auditing, decode_report, profiling
from experiments.comparison.decode_measure import measure
from experiments.comparison.decode_setup import Setup
from experiments.run import cli, report
from spec_jax.data.questions import Question
from spec_jax.evaluation.grid import Bench, Cell


def show_live(bench: Bench, cell: Cell, question: Question) -> None:
    """Prints a prompt, dimmed on a terminal, and its continuation as it is decoded."""
    bench.run(cell, 0)  # compiles, which would tear the text apart
    is_terminal = sys.stdout.isatty()
    text = question.plain_text()
    print(f"\n── {question.name}, live by {cell.label} ".ljust(80, "─"))
    print(f"\033[2m{text}\033[0m" if is_terminal else text, end="", flush=True)
    send = lambda row, piece: print(piece, end="", flush=True) if row == 0 else None
    stats = bench.run(cell, 0, on_token=send).rows[0].stats
    print(
        f"\n{'─' * 79}\n{stats.emitted} tokens, {stats.first} by prefill and the rest in "
        f"{stats.rounds} target passes; {stats.accepted} of {stats.drafted} drafts accepted\n"
    )


def decode(
    config: ConfigDict, workdir: str | None = None, *, has_profile: bool = False
) -> dict:
    """Runs the experiment and returns its report.

    Args:
      config: See ``configs/decode_default.py``.
      workdir: The run's folder; by default runs/decode/TIME.
      has_profile: Whether to trace rounds of every cell too.

    Raises:
      SpecJaxError: A config, a model or a prompt that cannot be used.
    """
    begin = time.monotonic()
    if has_profile:
        profiling.check()
    setup = Setup.of(config)
    bench, cells = setup.bench, setup.cells
    folder = cli.open_workdir("decode", workdir)
    rep = decode_report.start(setup)
    rep |= report.begin("decode", folder, rep["config"])
    decode_report.print_head(rep, folder)
    if setup.config.has_stream:
        first = [c for c in cells if c.temperature == cells[0].temperature]
        same = [c for c in first if c.method == first[-1].method]
        show_live(bench, same[len(same) // 2], setup.prompts[0])

    costs = measure(rep, bench, cells, setup.config.repeats, folder)
    rep["notes"] = decode_report.notes(rep)
    if setup.config.has_audit:
        rep["audit"] = auditing.summary(rep["results"])
    if has_profile:
        rep["profile"] = profiling.profile_cells(bench, cells, folder / "profile")
    rep["conclusions"] = decode_report.conclusions(rep["results"])
    rep |= {"is_complete": True, "elapsed_s": round(time.monotonic() - begin, 1)}
    report.finish(folder, rep, decode_report.markdown(rep, ["speedup.png", "acceptance.png"]))
    from experiments.comparison.page.page import write_page  # needs jinja2, likewise
    from experiments.run import plots  # needs matplotlib, slow to import

    plots.plot_speedup(folder / "speedup.png", rep["results"], costs)
    plots.plot_acceptance(folder / "acceptance.png", rep["results"])
    shown = answers.lines_of_first(bench, cells, setup.prompts[0].name)
    write_page(folder / "report.html", rep, shown)
    decode_report.print_results(rep, folder)
    return rep


def main() -> None:
    cli.enable_compilation_cache()
    decode(_CONFIG.value, _WORKDIR.value, has_profile=_PROFILE.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        decode_default, "Folder of this run, a new one; by default runs/decode/TIME."
    )
    _PROFILE = profiling.define_flag()
    cli.run(main)
