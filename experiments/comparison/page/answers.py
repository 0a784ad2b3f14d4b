"""Answers of a run, made small enough to stand in a page.

A line of answers.jsonl is what one cell made of one question: ``cell``, ``method``, ``k``,
``tree``, ``rule``, ``temperature``, ``batch``, ``question``, ``category`` and ``turns``. A turn has
``prompt``, ``prompt_tokens``, ``tokens``, ``pieces``, ``kinds``, ``offered``, ``rejected``,
``decode_s``, ``finish``, and, where one more pass of the target was made, ``probs`` and
``alternatives``.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_jax.evaluation.cells import Cell

BUDGET_BYTES = 300_000  # of all answers of a page
MAX_TOKENS = 512  # of one turn
_CANDIDATES = 8  # questions of a category that are kept in memory, and those with probabilities
_MAX_PROMPT = 4000  # characters
_MAX_PIECE = 400
_LETTERS = {"first": "f", "accepted": "a", "corrected": "c", "bonus": "b", "target": "t"}


def select(answers: Iterable[Mapping[str, Any]], budget: int = BUDGET_BYTES) -> dict | None:
    """Chooses questions of every category in turn until the budget is spent, and packs them.

    Questions whose target probabilities are known come first. A question that does not fit with all
    of its cells is left out, but for the first one, of which one cell is packed in any case.

    Args:
      answers: Lines of answers.jsonl. Of several lines of one cell, batch and question the last
        one counts, and of several batches the smallest one is shown.
      budget: The size of the packed answers as JSON, in bytes.

    Returns:
      Plain values for the page's script, None if there are no answers: "cells", "questions",
      "prompts" and "texts", which turns refer to by number, "units", and "total", the number of
      questions there were.
    """
    found, total = _candidates(line for line in answers if line["turns"])
    if not found:
        return None
    packed = _Packed()
    for question in _in_turn(found):
        units = list(found[question].values())
        if not packed.add(units, budget) and not packed.size:
            packed.add(units[:1], math.inf)
    return packed.values(total)


def _candidates(
    lines: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Mapping[str, Any]]], int]:
    """Lines by question and cell, of some questions of each category, and how many there are."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    questions: set[str] = set()
    of_category: Counter[str] = Counter()
    for line in lines:
        question = line["question"]
        questions.add(question)
        if question not in found:
            if of_category[line["category"]] >= _CANDIDATES and not _has_probs(line):
                continue
            of_category[line["category"]] += 1
        cells = found.setdefault(question, {})
        before = cells.get(line["cell"])
        if before is None or before["batch"] >= line["batch"]:
            cells[line["cell"]] = line
    return found, len(questions)


def _in_turn(found: Mapping[str, Mapping[str, Mapping]]) -> list[str]:
    """The questions, one of each category after another, those with probabilities first."""
    by_category: dict[str, list[str]] = {}
    has_probs = {q: any(map(_has_probs, units.values())) for q, units in found.items()}
    for question in sorted(found, key=lambda q: not has_probs[q]):
        line = next(iter(found[question].values()))
        by_category.setdefault(line["category"], []).append(question)
    longest = max(map(len, by_category.values()))
    turns = [q[i] for i in range(longest) for q in by_category.values() if i < len(q)]
    return sorted(turns, key=lambda q: not has_probs[q])


def _has_probs(line: Mapping[str, Any]) -> bool:
    return any(turn.get("probs") for turn in line["turns"])


class _Packed:
    """Units whose equal texts and prompts are stored once."""

    def __init__(self):
        self.size = 0
        names = ("cells", "questions", "prompts", "texts", "units")
        self._lists: dict[str, dict[str, int]] = {name: {} for name in names}

    def _number(self, name: str, value: Any) -> int:
        """Where a value stands in its list; it is appended if it is new."""
        numbers = self._lists[name]
        text = json.dumps(value)
        if text not in numbers:
            numbers[text] = len(numbers)
            self.size += len(text)
        return numbers[text]

    def add(self, lines: Sequence[Mapping[str, Any]], budget: float) -> bool:
        """Adds all lines, or none of them if they do not fit; returns whether they did."""
        before = copy.deepcopy(vars(self))
        for line in lines:
            self._unit(line)
        if is_too_large := self.size > budget:
            vars(self).update(before)
        return not is_too_large

    def _unit(self, line: Mapping[str, Any]) -> None:
        cell = {
            "label": Cell(*(line.get(name) for name in Cell._fields)).name,
            "temperature": line["temperature"],
            "k": line["k"],
            "batch": line["batch"],
        }
        question = {"id": line["question"], "category": line["category"]}
        unit = {
            "cell": self._number("cells", cell),
            "question": self._number("questions", question),
            "turns": [self._turn(turn) for turn in line["turns"]],
        }
        self._number("units", unit)

    def _turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        shown = {name: x[:MAX_TOKENS] for name, x in turn.items() if isinstance(x, list)}
        text = {"ids": shown["tokens"], "pieces": [_cut(p, _MAX_PIECE) for p in shown["pieces"]]}
        if turn["probs"]:
            text["probs"] = [round(p, 4) for p in shown["probs"]]
            text["alternatives"] = [
                [[_cut(piece, 40), round(p, 4)] for piece, p in likeliest]
                for likeliest in shown["alternatives"]
            ]
        drafts = enumerate(shown["rejected"])
        prompt = {"text": _cut(turn["prompt"], _MAX_PROMPT), "tokens": turn["prompt_tokens"]}
        return {
            "prompt": self._number("prompts", prompt),
            "text": self._number("texts", text),
            "kinds": _letters(shown["kinds"], shown["offered"]),
            "offered": shown["offered"],
            "rejected": {i: _cut(draft, _MAX_PIECE) for i, draft in drafts if draft is not None},
            "total": len(turn["kinds"]),
            "ms": round(statistics.median(turn["decode_s"]) * 1e3, 2),
            "finish": turn["finish"],
        }

    def values(self, total: int) -> dict[str, Any]:
        lists = {name: [*map(json.loads, texts)] for name, texts in self._lists.items()}
        return lists | {"total": total}


def _letters(kinds: Sequence[str], offered: Sequence[int]) -> str:
    """Returns a letter for each token; a bonus of a round without drafts is the target's own."""
    letters = []
    count = None
    for kind, drafts in zip(kinds, offered):
        count = drafts if drafts >= 0 else count
        letters.append(_LETTERS["target" if kind == "bonus" and count == 0 else kind])
    return "".join(letters)


def _cut(text: str, size: int) -> str:
    """The text, without its middle if it is longer than ``size``."""
    if len(text) <= size:
        return text
    half = size // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"
