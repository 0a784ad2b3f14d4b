"""Whether one round, followed by plain decoding, leaves the distribution plain decoding's.

If it does after every text, any number of rounds does, since the noise of each round is its own.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from spec_jax import decoding
from spec_jax.testing.enumeration import sample_verdicts, verdicts
from spec_jax.testing.forcing import Forced
from spec_jax.testing.oracles import Row, reference_distribution
from spec_jax.testing.record import CertificateError, StatementError, settings_of

_SAMPLES = 4096  # draws after each text, where a rule does not do what it states
_SAMPLED_TOLERANCE = 0.05  # more than six standard deviations of such a probability


class Difference(NamedTuple):
    """Where a round differs from plain decoding.

    Attributes:
      row: prompt and settings.
      output: the tokens before the one that differs.
      token: the one that differs.
      actual: its probability.
      expected: the probability that it should have.
      error: how far the joint probability of the round's tokens is off.
    """

    row: Row
    output: tuple[int, ...]
    token: int
    actual: float
    expected: float
    error: float

    def text(self, num_draft: int) -> str:
        """Says what differs, and where."""
        return (
            f"after the prompt {self.row.prompt} and the output {self.output}, token {self.token} "
            f"has probability {self.actual:.3f} and should have {self.expected:.3f} "
            f"(K={num_draft}, {settings_of(self.row)})"
        )


def compare(
    found: Iterable[tuple[int, tuple[int, ...], float]],
    forced: Forced,
    rows: Sequence[Row],
    logits_of: Callable[[Sequence[int]], np.ndarray],
    tolerance: float,
) -> tuple[float, Difference | None]:
    """Returns the largest error of a joint probability, and the first difference.

    Args:
      found: (item, emitted tokens, probability) of all outcomes; those of one (row, output) have
        probability 1 together.
      forced: of which the items are.
      rows: prompts and samplers.
      logits_of: ``tokens -> f32[V]``, what the target says, computed another way.
      tolerance: on the error.

    Returns:
      The error, and the difference after the shortest output, the largest of these; None where
      all errors are within the tolerance.
    """
    after = {item: defaultdict(float) for item in set(forced.items)}
    for item, emitted, weight in found:
        after[forced.items[item]][emitted] += weight
    worst, first = 0.0, None
    for (row, output), ends in after.items():
        for difference in _differences(ends, rows[row], output, logits_of):
            worst = max(worst, difference.error)
            is_wrong = not difference.error <= tolerance
            if is_wrong and (first is None or _rank(difference) < _rank(first)):
                first = difference
    return worst, first


def _rank(difference: Difference):
    return len(difference.output), -abs(difference.actual - difference.expected)


def _differences(ends, row: Row, output, logits_of):
    """Yields the largest difference after every text that a round can have begun.

    Args:
      ends: the probability of each sequence of emitted tokens.
    """
    through = defaultdict(float)  # the round emits this and more
    for emitted, weight in ends.items():
        for n in range(len(emitted)):
            through[emitted[:n]] += weight
    # Emitted so far; its probability; that of plain decoding; the part where the round has ended.
    todo = [((), 1.0, 1.0, 0.0)]
    while todo:
        emitted, actual, expected, ended = todo.pop()
        text = (*output, *emitted)
        dist = reference_distribution(
            logits_of((*row.prompt, *text)), row.target, row.prompt, text
        )
        largest = None
        for token, p in enumerate(dist):
            longer = (*emitted, token)
            now_ended = ended * p + ends.get(longer, 0.0)
            now = through.get(longer, 0.0) + now_ended
            error = abs(now - expected * p)
            if largest is None or not error <= largest.error:
                ratio = now / actual if actual > 0 else 0.0
                largest = Difference(row, text, token, ratio, float(p), float(error))
            if through.get(longer, 0.0) > 0:
                todo.append((longer, now, expected * p, now_ended))
        yield largest


def check_round(
    system: decoding.System, forced: Forced, rows: Sequence[Row],
    logits_of: Callable[[Sequence[int]], np.ndarray], tolerance: float,
) -> tuple[float, int]:  # fmt: skip
    """Enumerates the outcomes of rounds and compares them with plain decoding.

    Args:
      system: target, drafter, rule and K.
      forced: the drafts; the weights of each (row, output) sum to one.
      rows: prompts and samplers.
      logits_of: ``tokens -> f32[V]``, what the target says, computed another way.
      tolerance: on the error of a joint probability.

    Returns:
      The largest error, and the number of outcomes.

    Raises:
      CertificateError: a difference; the message says where.
    """
    name = f"rule {system.rule.name!r}, drafter {system.drafter.name!r}"
    judge = functools.partial(
        compare, forced=forced, rows=rows, logits_of=logits_of
    )
    try:
        found = list(verdicts(system.rule, forced))
    except StatementError as error:
        # What the verdict states cannot be summed over; what the rule does can be sampled.
        sampled = sample_verdicts(system.rule, forced, _SAMPLES)
        _, first = judge(sampled, tolerance=_SAMPLED_TOLERANCE)
        if first is None:
            raise
        raise StatementError(
            f"{error}: {first.text(system.num_draft)}, measured in {_SAMPLES:,} draws"
        ) from None
    error, first = judge(found, tolerance=tolerance)
    if first is not None:
        raise CertificateError(f"{name}: {first.text(system.num_draft)}")
    return error, len(found)
