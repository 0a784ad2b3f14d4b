"""Whether one round, followed by plain decoding, leaves the distribution plain decoding's.

If it does after every text, any number of rounds does, since the noise of each round is its own.

Probabilities may be tiny, so each is compared by what float32 may lose of it. A logit of size L is
rounded by 6e-8 L, so a probability p is known to about 6e-8 p (1 + |ln p|). A coin near 1 is known
to 6e-8, and so is the chance that it fails: the tokens that follow a failure may gain or lose that,
each by its share. Where a coin may have been rounded to 1 it is not known which tokens lose it, and
all of them are compared without regard to their size.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from spec_jax import decoding
from spec_jax.contracts import Drafter, Model, Rule
from spec_jax.drafters.standalone.model import standalone
from spec_jax.testing.certificate.forcing import DraftDistribution, Drafting, Forced
from spec_jax.testing.certificate.records import (
    TOLERANCE,
    CertificateError,
    Range,
    StatementError,
    probability,
    settings_of,
)
from spec_jax.testing.certificate.reported import check_report, force_all, mixed_lengths
from spec_jax.testing.certificate.subjects import standard_rows, system_of
from spec_jax.testing.certificate.verdicts import RoundOutcome, sample_verdicts, verdicts
from spec_jax.testing.mocks import toy_model, toy_params
from spec_jax.testing.oracles import (
    LogitsOf,
    Row,
    plain_distribution,
    reference_distribution,
    toy_logits,
)

_SAMPLES = 4096  # draws after each text, where a rule does not do what it states
_SAMPLED_TOLERANCE = 0.05  # more than six standard deviations of such a probability
_UNDERFLOW = 2**-104  # times a tolerance of 1e-6: four times the smallest float32


class Difference(NamedTuple):
    """Where a round differs from plain decoding.

    Attributes:
      row: prompt and settings.
      output: the tokens before the one that differs.
      token: the one that differs.
      actual: its probability.
      expected: the probability that it should have.
      error: how far the joint probability of the round's tokens is off.
      excess: the error, over how fast this probability changes with roundings; the tolerance is
        for it.
    """

    row: Row
    output: tuple[int, ...]
    token: int
    actual: float
    expected: float
    error: float
    excess: float

    def text(self, num_draft: int) -> str:
        """Says what differs, and where."""
        actual, expected = map(probability, (self.actual, self.expected))
        if actual == expected:
            actual, expected = (f"{x:.9f}" for x in (self.actual, self.expected))
        return (
            f"after the prompt {self.row.prompt} and the output {self.output}, token {self.token} "
            f"has probability {actual} and should have {expected} "
            f"(K={num_draft}, {settings_of(self.row)})"
        )


class RoundComparison(NamedTuple):
    """Rounds compared with plain decoding.

    Attributes:
      error: the largest error of a joint probability.
      num_outcomes: how many outcomes there were.
      p: the probabilities that the target gave.
      p_value: of the rule's last tokens; None where they are Gumbel-max draws, see ``verdicts``.
      first: the difference after the shortest output, the largest of these; None where all errors
        are within the tolerance.
    """

    error: float
    num_outcomes: int
    p: Range
    first: Difference | None = None
    p_value: float | None = None


def compare(
    found: Iterable[RoundOutcome],
    forced: Forced,
    rows: Sequence[Row],
    logits_of: Callable[[Sequence[int]], np.ndarray],
    tolerance: float,
    may_miss: np.ndarray | None = None,
) -> RoundComparison:
    """Compares the outcomes of rounds with plain decoding.

    Args:
      found: all outcomes; those of one (row, output) have probability 1 together.
      forced: of which the items are.
      rows: prompts and samplers.
      logits_of: ``tokens -> f32[V]``, what the target says, computed another way.
      tolerance: on the errors.
      may_miss: bool[N], see ``verdicts``; None: all errors are compared without regard to the size
        of the probability, as frequencies are.
    """
    after = {item: defaultdict(lambda: np.zeros(2)) for item in set(forced.items)}
    missed = dict.fromkeys(after, 0.0 if may_miss is not None else 1.0)
    for i in [] if may_miss is None else np.flatnonzero(may_miss):
        missed[forced.items[i]] += forced.weights[i]
    num_outcomes = 0
    for item, emitted, *weight in found:
        num_outcomes += 1
        after[forced.items[item]][emitted] += weight
    differences = [
        each
        for (row, output), ends in after.items()
        for each in _differences(ends, missed[row, output], rows[row], output, logits_of)
    ]
    worst = max((0.0, *(difference.error for difference, _ in differences)))
    tested = Range.join(Range.of(dist) for _, dist in differences)
    wrong = [difference for difference, _ in differences if not difference.excess <= tolerance]
    first = min(wrong, key=lambda x: (len(x.output), -abs(x.actual - x.expected)), default=None)
    return RoundComparison(worst, num_outcomes, tested, first)


def _differences(ends, missed: float, row: Row, output, logits_of):
    """Yields the largest difference after every text that a round can have begun, and plain
    decoding's distribution there.

    Args:
      ends: weight and rounding of each sequence of emitted tokens.
      missed: in how much of the rounds some outcomes may be missing.
      row: prompt and samplers.
      output: the tokens before the round.
      logits_of: see ``compare``.
    """
    through = defaultdict(lambda: np.zeros(2))  # the round emits this and more
    for emitted, weight in ends.items():
        for n in range(len(emitted)):
            through[emitted[:n]] += weight
    ending = defaultdict(float)
    for emitted, (weight, _) in ends.items():
        ending[emitted[:-1]] += weight

    # Each token has a share of what the round leaves to its last token.
    def share(x, emitted):
        return x[0] / ending[emitted[:-1]] * through[emitted[:-1]][0]

    ends = {emitted: x + (0.0, share(x, emitted)) for emitted, x in ends.items() if x[0] > 0}
    none = np.zeros(2)
    # Emitted so far; its probability; that of plain decoding; how many roundings that has; the
    # part where the round has ended.
    todo = [((), 1.0, 1.0, 0.0, none)]
    while todo:
        emitted, actual, expected, steps, ended = todo.pop()
        text = (*output, *emitted)
        dist = reference_distribution(logits_of((*row.prompt, *text)), row.target, row.prompt, text)
        largest = None
        for token, p in enumerate(dist.tolist()):
            longer = (*emitted, token)
            joint = expected * p
            now_ended = ended * p + ends.get(longer, none)
            now, rounding = through.get(longer, none) + now_ended
            more = steps + 1 + (abs(math.log(p)) if p > 0 else 0.0)
            scale = min(1.0, joint * more + rounding + missed) + _UNDERFLOW
            error = abs(now - joint)
            if largest is None or not error / scale <= largest.excess:
                ratio = now / actual if actual > 0 else 0.0
                largest = Difference(row, text, token, ratio, p, error, error / scale)
            if longer in through:
                todo.append((longer, now, joint, more, now_ended))
        yield largest, dist


def check_round(
    system: decoding.System,
    forced: Forced,
    rows: Sequence[Row],
    logits_of: Callable[[Sequence[int]], np.ndarray],
    tolerance: float = TOLERANCE,
) -> RoundComparison:
    """Enumerates the outcomes of rounds and compares them with plain decoding.

    Args:
      system: target, drafter, rule and K.
      forced: the drafts; the weights of each (row, output) sum to one.
      rows: prompts and samplers.
      logits_of: ``tokens -> f32[V]``, what the target says, computed another way.
      tolerance: on the errors, see ``compare``.

    Raises:
      CertificateError: a difference; the message says where.
    """
    name = f"rule {system.rule.name!r}, drafter {system.drafter.name!r}"
    judge = functools.partial(compare, rows=rows, logits_of=logits_of)
    try:
        found = verdicts(system.rule, forced)
    except StatementError as error:
        # What the verdict states cannot be summed over; what the rule does can be sampled.
        sizes = np.asarray([len(output) for _, output in forced.items])
        for size in np.unique(sizes):  # short texts first: a difference mostly shows there
            some = forced.at(np.flatnonzero(sizes == size))
            sampled = sample_verdicts(system.rule, some, _SAMPLES)
            first = judge(sampled, some, tolerance=_SAMPLED_TOLERANCE).first
            if first is not None:
                raise StatementError(
                    f"{error}: {first.text(system.num_draft)}, measured in {_SAMPLES:,} draws"
                ) from None
        raise
    comparison = judge(found.ends, forced, tolerance=tolerance, may_miss=found.may_miss)
    if comparison.first is not None:
        raise CertificateError(f"{name}: {comparison.first.text(system.num_draft)}")
    return comparison._replace(p_value=found.p_value)


def certify_rule(
    rule: Rule,
    *,
    vocab_size: int = 3,
    num_draft: int = 2,
    num_tokens: int = 4,
    rows: Sequence[Row] | None = None,
    drafter: Drafter | None = None,
    draft_distribution: DraftDistribution | None = None,
    params: dict[str, Any] | None = None,
    target: Model | None = None,
    logits_of: LogitsOf = toy_logits,
    batch: int = 512,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> float:
    """Proves by enumeration that the rule, with what the drafter reports, is lossless.

    A round is enumerated after every text of up to ``num_tokens`` tokens that plain decoding may
    have emitted. Because the noise is forced, a drafter or a rule that draws from noise that
    something else has used is not seen here: ``certify_decoder`` sees it.

    Args:
      rule: not coupled (certify those by equality with plain decoding).
      vocab_size: V of the toy target, whose distribution depends on two tokens of context.
      num_draft: K; that of the drafter's tree, where it has one.
      num_tokens: maximum tokens before a round.
      rows: settings, all certified in one batch; by default ``standard_rows()``.
      drafter: draws with ``Context.gumbel`` where given; by default ``standalone`` over a toy
        draft, with 0 to K drafts offered. Of a dynamic tree nothing is forced.
      draft_distribution: ``(row, output, drafted) -> f64[V]``, the distribution its next token
        should have; by default the toy draft's under the row's draft sampler. A deterministic
        drafter has none.
      params: ``{"target": ..., "draft": ...}``; by default random ones of toy models.
      target: the model that scores the drafts, whose V is then ``vocab_size``; by default a toy.
      logits_of: what the target says, computed another way.
      batch: rows drafted at once; fewer where the drafter has a ``KVCache``, whose writes are
        compiled row by row.
      seed: of the toy parameters.
      tolerance: on the errors of joint probabilities, in proportion to these, see ``compare``. Give
        1e-5 where ``logits_of`` and the target round in different orders, as two passes of a
        transformer do.

    Returns:
      The largest error of a joint probability.

    Raises:
      CertificateError: the distributions differ, or the drafter or the rule does not do what it
        states.
    """
    if rule.is_coupled or rule.is_greedy:
        raise CertificateError(f"{rule.name} emits plain decoding's tokens: certify by equality")
    rows = standard_rows() if rows is None else list(rows)
    if params is None:
        params = {"target": toy_params(vocab_size, seed), "draft": toy_params(vocab_size, seed + 1)}

    def distribution_of_toy(row, output, drafted):
        history = [*output, *drafted]
        logits = toy_logits(params["draft"], (*row.prompt, *history))
        return reference_distribution(logits, row.draft, row.prompt, history)

    given = drafter or standalone(toy_model(vocab_size))
    system = system_of(target or toy_model(vocab_size), given, rule, num_draft)
    starts = []
    for i, row in enumerate(rows):
        for size in range(num_tokens):
            plain = plain_distribution(params["target"], row, 0, size, logits_of)
            starts += [(i, (0, *output.tolist())) for output in np.argwhere(plain > 0)]
    stated = draft_distribution or distribution_of_toy
    drafting = Drafting(system, params, rows, num_tokens, batch)
    forced = force_all(drafting, starts, stated)
    if forced is None:
        raise CertificateError(
            f"drafter {given.name!r} does not draw with Context.gumbel from a distribution that "
            "covers the tokens it should be able to draw"
        )
    check_report(drafting, forced)
    rounds = [forced] if drafter else mixed_lengths(forced)
    of_target = functools.partial(logits_of, params["target"])
    return max(check_round(system, x, rows, of_target, tolerance).error for x in rounds)
