"""The default tier tries the same examples in every run; the exhaustive tier searches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types

import hypothesis
import pytest
from hypothesis import strategies as st
from support import examples

_PROPERTY = """
from hypothesis import given, strategies as st

@given(st.lists(st.integers()))
def test_property(numbers):
    with open("drawn", "a") as file:
        print(numbers, file=file)
    assert sum(numbers) < 1000
"""


def test_examples_do_not_depend_on_what_else_was_imported(tmp_path, monkeypatch):
    @hypothesis.settings(hypothesis.settings.get_profile(examples.SAME), max_examples=200)
    @hypothesis.given(st.integers(0, 10**9))
    def draw(number):
        drawn.append(number)

    drawn = []
    draw()
    before, drawn = drawn, []
    module = types.ModuleType("another")
    module.__file__ = str(tmp_path / "another.py")
    (tmp_path / "another.py").write_text(f"NUMBERS = {list(range(10**6, 10**6 + 50))}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    draw()
    assert drawn == before and len(set(drawn)) > 100


def test_a_hypothesis_with_other_internals_is_left_as_it_is(monkeypatch):
    for providers in (None, types.SimpleNamespace(_get_local_constants=None)):
        monkeypatch.setattr(examples, "providers", providers)
        examples.ignore_constants()
    assert providers._get_local_constants is None


@pytest.mark.exhaustive
def test_failing_examples_are_kept_and_printed_where_the_search_is_random(tmp_path, request):
    (tmp_path / "test_planted.py").write_text(_PROPERTY)
    conftest = request.config.rootpath / "tests" / "conftest.py"

    def run(tier):
        """What the run printed, and the examples that it tried."""
        drawn = tmp_path / "drawn"
        drawn.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-m", tier]
        options = dict(capture_output=True, env=os.environ | {"PYTHONPATH": str(conftest.parent)})
        done = subprocess.run(
            [*command, "--rootdir", tmp_path, "test_planted.py"], cwd=tmp_path, text=True, **options
        )
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout, drawn.read_text().splitlines()

    default = "not exhaustive and not measure"
    output, first = run(default)
    assert "searched at random" not in output and not (tmp_path / ".hypothesis/examples").exists()
    assert run(default)[1] == first
    output, found = run("exhaustive")
    assert found != first
    assert "@reproduce_failure" in output
    assert re.search(r"random; .* kept in .hypothesis/examples", output)
    again = run("exhaustive")[1]
    assert again[0] == found[-1]  # it begins with the one that failed
