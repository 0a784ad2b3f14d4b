"""How long is left, in the lines of long work where there is no terminal for a bar."""

import pytest

from spec_jax import progress
from spec_jax.progress import Progress, duration
from spec_jax.train.log import Log


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""

    class Clock:
        now_s = 100.0

        def monotonic(self):
            return self.now_s

    monkeypatch.setattr(progress, "time", clock := Clock())
    return clock


def test_lines_say_how_long_is_left_and_compilation_counts_once(clock, capsys):
    with Progress(6, "measuring") as bar:
        for seconds in (60, 10, 20, 30, 1, 1):
            clock.now_s += seconds
            bar.step("a row")
    assert capsys.readouterr().err.splitlines() == [
        "measuring 1/6: a row (about 5 min left)",  # all that is known
        "measuring 2/6: a row (about 40 s left)",  # 10 s a step, since the first one
        "measuring 3/6: a row (about 45 s left)",
        "measuring 4/6: a row (about 40 s left)",
        "measuring 5/6: a row (about 15 s left)",
        "measuring 6/6: a row",
    ]


def test_steps_of_an_earlier_run_tell_nothing(clock, capsys):
    with Progress(1000, "prompts", num_done=900, every_s=30.0) as bar:
        clock.now_s += 40
        bar.step("one", 20)
        clock.now_s += 10  # too early for a line
        bar.step("one", 20)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "prompts 920/1000: one (about 3 min left)"


def test_lines_of_training_say_it_too(clock, tmp_path, capsys):
    with Log(tmp_path, 0, 4000) as log:
        clock.now_s += 30
        log.write(10, loss=2.0)
        clock.now_s += 10
        log.write(20, loss=1.0)
        log.write(4000, loss=0.5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[2] for line in lines] == [
        "about 3 h 20 min left)",
        "about 1 h 6 min left)",
        "",
    ]
    with Log(tmp_path, 900, 4000) as log:  # resumed
        clock.now_s += 60  # of compilation
        log.begin(901)
        clock.now_s += 9
        log.write(910, loss=1.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(" (about 52 min left)"), "3,090 steps of a second each"
    assert duration(59.4) == "59 s" and duration(3599) == "1 h 0 min"
