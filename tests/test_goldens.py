"""Tokens, counts and finish reasons are those that were recorded."""

from __future__ import annotations

import json
import pathlib

import pytest
from goldens import record, toys

GOLDENS = pathlib.Path(__file__).parent / "goldens"
TOKENS = GOLDENS / "tokens.json"
# Each drafter, each rule, each shape and each way of driving the loop once or more; the whole
# product is compared by ``tests/goldens/record.py --against``.
CELLS = """
    plain/match/chain ngram/greedy/chain ngram/match/adaptive suffix/residual/queue
    standalone/block/chain standalone/traversal/dynamic standalone/typical-acceptance/chain
    standalone/logit-comparison/chain standalone/synthetic/chain eagle1/residual/chain
    eagle3/traversal/static mtp/match/dynamic mtp-sequential/greedy/chain
""".split()


@pytest.mark.exhaustive
def test_toys_decode_to_the_recorded_tokens_counts_and_finish_reasons():
    old = json.loads(TOKENS.read_text(encoding="utf-8"))["decode"]
    cells = {
        name: cell for name, cell in toys.cells().items() if name.removeprefix("toy/") in CELLS
    }
    assert len(cells) == len(CELLS)
    new = {"decode": {name: cell() for name, cell in cells.items()}}
    assert record.differences({"decode": {name: old[name] for name in cells}}, new) == []
