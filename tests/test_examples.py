"""The default tier tries the same examples in every run."""

from __future__ import annotations

import sys
import types

import hypothesis
from hypothesis import strategies as st
from support import examples


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
