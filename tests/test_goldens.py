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
CELLS = (
    "toy/plain/match/chain", "toy/ngram/greedy/chain", "toy/ngram/match/adaptive",
    "toy/suffix/residual/queue", "toy/standalone/block/chain",
    "toy/standalone/traversal/dynamic", "toy/standalone/typical-acceptance/chain",
    "toy/standalone/logit-comparison/chain", "toy/standalone/synthetic/chain",
    "toy/eagle1/residual/chain", "toy/eagle3/traversal/static", "toy/mtp/match/dynamic",
    "toy/mtp-sequential/greedy/chain",
)  # fmt: skip


@pytest.mark.exhaustive
def test_toys_decode_to_the_recorded_tokens_counts_and_finish_reasons():
    old = json.loads(TOKENS.read_text(encoding="utf-8"))["decode"]
    new = {"decode": {name: toys.cells()[name]() for name in CELLS}}
    assert record.differences({"decode": {name: old[name] for name in CELLS}}, new) == []
