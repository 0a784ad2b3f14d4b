"""Rewards: functions ``(prompt, output) -> float`` of texts, or of ids."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from spec_jax.errors import ConfigError, TrainingError
from spec_jax.named import find

_REFUSED = (SyntaxError, ValueError, RecursionError, MemoryError)  # what the parser raises


def parses(prompt: str, output: str) -> float:
    """Returns the share of the output's lines, blank ones apart, up to which the text is Python."""
    lines = output.split("\n")
    total = sum(bool(line.strip()) for line in lines)
    for n in range(len(lines), 0, -1):
        kept = sum(bool(line.strip()) for line in lines[:n])
        if kept == 0:
            break
        try:
            with warnings.catch_warnings(action="ignore"):  # of invalid escapes
                ast.parse(prompt + "\n".join(lines[:n]))
            return kept / total
        except _REFUSED:
            continue
    return 0.0


def is_short(prompt: str, output: str) -> float:
    """Returns 1 for an answer of one sentence of at most 20 words, and less the longer it is.

    Half of it counts words, and half sentences; what follows the last end of a sentence is one too.
    """
    del prompt
    text = output.strip()
    words = len(text.split())
    ends = len(re.findall(r"[.!?](?=\s|$)", text))
    sentences = ends + (text[-1:] not in (".", "!", "?"))
    return (min(1.0, 20 / words) + 1 / sentences) / 2 if words else 0.0


def load(name: str) -> Callable[[Any, Any], float]:
    """Returns the reward ``module:function``.

    Raises:
      ConfigError: There is no such function.
    """
    found = find(name, "reward")
    if not callable(found):
        raise ConfigError(f"reward is {name!r}, a {type(found).__name__}; expected a function")
    return found


def score(
    reward: Callable[[Any, Any], float],
    name: str,
    pairs: Sequence[tuple[Any, Any]],
    describe: Callable[[int], str],
) -> list[float]:
    """Returns the reward of each pair of a prompt and an output.

    Args:
      reward: The function.
      name: Its name, for messages.
      pairs: Texts, or lists of ids.
      describe: Says which row a number is.

    Raises:
      TrainingError: It raised, or returned something else than a finite number; the row is named.
    """
    found = []
    for row, pair in enumerate(pairs):
        try:
            value = float(reward(*pair))
            fault = "" if math.isfinite(value) else f"returned {value}"
        except Exception as error:  # whatever a function of the user's raises
            value, fault = math.nan, f"raised {type(error).__name__}: {error}"
        if fault:
            raise TrainingError(
                f"the reward {name} {fault} for {describe(row)}; mend it and run the same command "
                "again: the run goes on from its last checkpoint"
            )
        found.append(value)
    return found
