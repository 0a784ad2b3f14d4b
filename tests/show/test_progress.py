"""Progress is shown where it is visible, in place, and nowhere else."""

import contextlib
import os
import sys
import types

import numpy as np
import pytest

from experiments.regenerate import share_done
from spec_jax import progress, testing
from spec_jax.engine import stream as watch
from spec_jax.engine.decoder import SpeculativeDecoder


@pytest.fixture
def cell(monkeypatch):
    """A notebook's cell: the list of what its display showed, one entry an update."""
    shown = []
    handle = types.SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))

    def display(data, raw, display_id):
        assert display_id is True
        handle.update(data, raw)
        return handle

    shell = types.SimpleNamespace(kernel=object())
    for name, members in {
        "IPython": {"get_ipython": lambda: shell},
        "IPython.display": {"display": display},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return shown


@pytest.fixture(scope="module")
def decoder():
    return SpeculativeDecoder(testing.mock_model(7))


def test_a_pipe_gets_no_progress_unless_it_asks(decoder, capsys, monkeypatch):
    monkeypatch.setattr(watch, "_DELAY_S", 0.0)
    monkeypatch.setattr(watch, "_EVERY_S", 0.0)
    decoder.generate([[1, 2], [3]], 40)
    assert capsys.readouterr() == ("", "")
    decoder.generate([[1, 2], [3]], 40, has_progress=True)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0] == "tokens 0/80: 2 rows running"
    assert lines[-1] == "tokens 80/80: 0 rows running"
    done = [int(line.split()[1].split("/")[0]) for line in lines]
    assert done == sorted(done) == [0, 66, 80], "prefill's token and 32 rounds, then the rest"


def test_a_notebook_shows_a_long_call_in_place_and_clears_it(decoder, cell, monkeypatch, capsys):
    assert progress.in_notebook()
    monkeypatch.setattr(watch, "_DELAY_S", 1e9)
    decoder.generate([1, 2], 40)  # compiles, which is said where it takes long
    del cell[:]
    decoder.generate([1, 2], 40)
    assert cell == [], "a short call shows nothing"
    monkeypatch.setattr(watch, "_DELAY_S", 0.0)
    decoder.generate([1, 2], 40)
    assert any("tokens" in text and "/40" in text for text in cell) and cell[-1].strip() == ""
    del cell[:]
    decoder.generate([1, 2], 40, has_progress=False)
    assert cell == [] and capsys.readouterr() == ("", "")


def test_bars_within_bars_have_outputs_of_their_own(cell):
    with progress.Progress(2, "outer") as outer, progress.Progress(4, "inner") as inner:
        inner.now("inside")
        outer.now("outside")
    assert not any("\x1b" in text or "\n" in text for text in cell)
    assert any("inner" in text and "inside" in text for text in cell)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="pseudo-terminals are Unix's")
@pytest.mark.parametrize("rows, columns", [(24, 100), (2, 10), (0, 0)])  # the last states no size
def test_a_bar_fits_a_terminal_of_any_size(monkeypatch, rows, columns):
    main, side = os.openpty()
    termios = pytest.importorskip("termios")
    termios.tcsetwinsize(side, (rows, columns))
    with os.fdopen(side, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        with progress.Progress(40, "training", num_done=20) as bar:
            bar._bar.mininterval = 0.0
            bar.begin(21)
            bar.step("loss=1.234, tok_s=12345, tau=2.5", 2)
    parts = [b""]
    with contextlib.suppress(OSError):  # how a terminal without a writer ends on Linux
        while part := os.read(main, 1 << 16):
            parts.append(part)
    os.close(main)
    text = b"".join(parts).decode("utf-8")
    lines = text.split("\r")
    assert any("23/40" in line for line in lines), lines
    assert max(map(len, lines)) <= max((columns or 80) - 1, 1) and "\n" not in text
    assert lines[-1] == "" and not lines[-2].strip(), "the bar is removed"


def test_a_text_in_a_cell_changes_as_a_line_of_a_terminal_does(cell):
    text = progress.CellText()
    for part in ("compiling a round …", " 3.2 s\n"):
        print(part, end="", file=text, flush=True)
    for part in ("\r1/9", "\r2/9", "\r   ", "\r"):
        text.write(part)
        text.flush()
    line = "compiling a round … 3.2 s"
    assert cell == [
        "compiling a round …",
        f"{line}\n",
        *(f"{line}\n{n}/9" for n in (1, 2)),
        f"{line}\n   ",
        f"{line}\n",
    ]


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    clock = types.SimpleNamespace(now_s=100.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_lines_say_how_long_is_left_and_compilation_counts_nowhere(clock, capsys):
    with progress.Progress(6, "measuring") as bar:
        for seconds, compiling_s in ((60, 50), (10, 0), (920, 900), (30, 0), (1, 0), (1, 0)):
            clock.now_s += seconds
            progress.leave_out(compiling_s / 2)  # as tracing, which compiling includes
            progress.leave_out(compiling_s)
            bar.step("a row")
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines[0] == "measuring 1/6: a row (about 50 s left)"  # all that is known
    left = [line.partition("about ")[2] for line in lines[1:]]  # 10 s a step, since the first one
    assert left == ["40 s left)", "45 s left)", "40 s left)", "15 s left)"]
    assert last == "measuring 6/6: a row"
    with progress.Progress(1000, "prompts", num_done=900, every_s=30.0) as bar:  # resumed
        clock.now_s += 40
        bar.step("one", 20)
        clock.now_s += 10  # too early for a line
        bar.step("one", 20)
    assert capsys.readouterr().err == "prompts 920/1000: one (about 3 min left)\n"
    with progress.Progress(3, "compiling", is_compiling=True) as bar:
        clock.now_s += 40
        progress.leave_out(40)
        bar.step("one")
    assert capsys.readouterr().err == "compiling 1/3: one (about 1 min left)\n"


@pytest.mark.parametrize("batch, seed", [(1, 0), (32, 0), (32, 1), (32, 2)])
def test_after_a_tenth_of_the_rows_the_time_left_is_within_a_factor_of_two(
    clock, capsys, batch, seed
):
    """Rows that are decoded together end together; the first come after compilation and prefill."""
    rng = np.random.default_rng(seed)
    waiting = [min(int(x), 192) for x in 1 + rng.exponential(250, 320)]
    running = [waiting.pop() for _ in range(batch)]
    ends, left = [], []
    rounds = 0
    clock.now_s += 20
    with progress.Progress(320, "prompts") as bar:
        clock.now_s += 240
        progress.leave_out(220)
        while running:
            clock.now_s += 0.1 * max(len(running) / 8, 1)
            rounds += len(running)
            running = [x - 1 for x in running]
            for _ in range(running.count(0)):
                running += [waiting.pop()] if waiting else []
                ends.append(clock.now_s)
                share = share_done(rounds, 192, len(ends), len(running), 320 - len(ends))
                bar.step("one", share=share)
                left.append(bar._bar.left_s)
            running = [x for x in running if x]
    assert bar.num_done == len(ends) == 320
    for end_s, left_s in zip(ends[32:300], left[32:300]):
        assert 0.5 < left_s / (ends[-1] - end_s) < 2


def test_work_that_is_silent_says_what_it_does_every_ten_seconds(clock, capsys):
    def said(seconds):
        clock.now_s += seconds
        progress._open.look()
        return capsys.readouterr().err

    with progress.Progress(6, "measuring") as bar:
        assert said(8) == ""
        assert said(2) == "measuring 0/6: running, 10 s so far\n"
        assert said(8) == ""
        bar.step("a row")
        assert capsys.readouterr().err.startswith("measuring 1/6: a row")
        bar.now("examining rows")
        assert said(12).startswith("measuring 1/6: examining rows, 12 s so far (about ")
        with progress.Notice("compiling a round", after_s=1e9) as notice:
            clock.now_s += 2
            notice._say()
            assert said(11).startswith("measuring 1/6: compiling a round …, 11 s so far")
        assert said(11).startswith("measuring 1/6: examining rows, 11 s so far")
    with progress.Notice("drawing plots", after_s=1e9, is_line=True) as notice:
        notice._say()
        assert said(12) == "drawing plots …\ndrawing plots, 12 s so far\n"
    assert said(99) == "drawing plots took 12.0 s\n"
    assert not progress._open.all
