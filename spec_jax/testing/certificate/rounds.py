"""Whether a round that plain decoding follows has plain decoding's distribution.

Its drafts are given; coins and last tokens are forced. If every outcome after every text has the
probability that it should have, so has any number of rounds, since the noise of each is its own.

Probabilities may be tiny, so each is compared by what float32 may lose of it. A logit of size L is
rounded by 6e-8 L, so a probability p is known to about 6e-8 p (1 + |ln p|). A coin near 1 is known
to 6e-8, and so is the chance that it fails: the tokens that follow a failure may gain or lose that,
each by its share. Where a coin may have been rounded to 1 it is not known which tokens lose it, and
all of them are compared without regard to their size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.contracts import Drafter, Model, Noise, Proposal, Rule, Verdict
from spec_jax.drafters.standalone.model import standalone
from spec_jax.testing import oracles
from spec_jax.testing.certificate import forcing
from spec_jax.testing.certificate.records import (
    ALPHA,
    TOLERANCE,
    CertificateError,
    Range,
    StatementError,
    probability,
    settings_of,
)
from spec_jax.testing.certificate.subjects import standard_rows, system_of
from spec_jax.testing.mocks import toy_model, toy_params
from spec_jax.testing.oracles import LogitsOf, Row

_CHUNK = 4096  # outcomes that are computed at once
_DRAWS = 200_000  # of last tokens, of a rule that is no Gumbel-max draw
_MARGIN = 1e-6  # of a coin, and of its logarithm: 16 roundings of float32
_CLEARLY = 1e-3  # apart: two probabilities whose order no rounding changes
_SAMPLES = 4096  # draws after each text, where a rule does not do what it states
_SAMPLED_TOLERANCE = 0.05  # more than six standard deviations of such a probability
_UNDERFLOW = 2**-104  # times a tolerance of 1e-6: four times the smallest float32


class RoundOutcome(NamedTuple):
    """What may become of a round.

    Attributes:
      item: the number of the round.
      emitted: tokens.
      weight: its probability.
      rounding: how fast the weight changes with the probabilities of the coins that fail. Near 1
        a float32 is only known to 6e-8, and so is the chance to fail, however small it is.
    """

    item: int
    emitted: tuple[int, ...]
    weight: float
    rounding: float


class RoundOutcomes(NamedTuple):
    """All outcomes of some rounds.

    Attributes:
      ends: the outcomes.
      may_miss: bool[N], of which items outcomes may be missing, since a coin is 1, but perhaps only
        rounded to 1.
      p_value: of the rule's last tokens, corrected for the number of tests, where they are not the
        argmax of the stated distribution's logarithm and the noise; None where they are.
    """

    ends: list[RoundOutcome]
    may_miss: np.ndarray
    p_value: float | None


def one_by_one(accept: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """Returns a rule's function that is called for every row of a batch in a batch of its own."""

    def one(*row):
        verdict = accept(*jax.tree.map(lambda x: x[None], row))
        return jax.tree.map(lambda x: x[0], verdict)

    return jax.vmap(one)


def all_outcomes(rule: Rule, forced: forcing.Forced) -> RoundOutcomes:
    """Returns every outcome of rounds with given drafts.

    Args:
      rule: whose coins and last token are forced.
      forced: the drafts.

    Raises:
      StatementError: the rule does not do what it states.
      CertificateError: the rule gives a row another verdict in a batch of one.
    """
    size, K = forced.proposal.tokens.shape
    V = forced.logits.shape[2]
    run = functools.partial(_accept_all, rule, forced)
    noise = Noise(np.zeros((size, K), np.float32), np.zeros((size, 1, V), np.float32))
    verdict, of_draft, _ = run(np.arange(size), noise)
    stated = np.asarray(verdict.accept_probs, np.float64)
    coins = np.minimum(stated, 1.0)
    may_miss = ((coins == 1) & ~_is_clearly_more(forced.proposal, of_draft)).any(axis=1)
    falls = jax.tree.map(lambda x: np.repeat(x, V, axis=0), _all_falls(coins))
    index = falls.index
    token = np.tile(np.arange(V), len(index) // V)
    gumbel = 1e4 * np.eye(V, dtype=np.float32)[token][:, None]
    verdict, _, alone = run(index, Noise(falls.near, gumbel))
    _check_alone(rule, forced, index, verdict, alone)
    # The coin must flip at the stated probability and nowhere else, and ordinary noise must
    # draw from the stated replacement.
    random = np.random.default_rng(1)
    gumbel = random.gumbel(size=gumbel.shape).astype(np.float32)
    again, _, _ = run(index, Noise(falls.far, gumbel))
    is_same = (again.n_accept == verdict.n_accept) & (
        np.abs(again.accept_probs - stated[index]).max(axis=1) < 1e-6
    )
    if not is_same[falls.is_apart].all():
        raise StatementError(f"rule {rule.name!r} does not flip its coins at accept_probs")
    places = np.arange(len(index))
    drawn = again.tokens[places, again.n_accept]
    dist = np.asarray(verdict.replacement, np.float64)[places, token]
    n = verdict.n_accept
    possible = np.flatnonzero(dist > 0)
    is_gumbel_max = forcing.is_argmax(drawn, again.replacement, gumbel[:, 0]).all()
    is_gumbel_max &= (verdict.tokens[places, n] == token)[possible].all()
    p_value = None
    if not is_gumbel_max:  # it may read the noise in another way
        some = np.resize(places, max(_DRAWS, len(places)))
        gumbel = random.gumbel(size=(len(some), 1, V)).astype(np.float32)
        draws, _, _ = run(index[some], Noise(falls.far[some], gumbel))
        p_value = _test_last([forced.items[i] for i in index[some]], draws)
        if not p_value >= ALPHA:
            raise StatementError(
                f"rule {rule.name!r} does not draw from its replacement distribution"
            )
    weights = forced.weights[index] * falls.weight * dist
    rounding = forced.weights[index] * falls.rounding * dist
    ends = []
    for i in possible:
        emitted = (*verdict.tokens[i, : n[i]].tolist(), int(token[i]))
        ends.append(RoundOutcome(int(index[i]), emitted, weights[i], rounding[i]))
    return RoundOutcomes(ends, may_miss, p_value)


class _Falls(NamedTuple):
    """Ways in which the coins of rounds may fall, M of them.

    Attributes:
      index: i64[M], the round.
      near: f32[M,K], uniform numbers just on this side of the coins' probabilities, no nearer than
        these are known.
      far: f32[M,K], numbers as far from these probabilities as can be.
      weight: f64[M], the probability.
      rounding: f64[M], see ``RoundOutcome``.
      is_apart: bool[M], no coin that falls on tails is so near 1 that both numbers may be heads.
    """

    index: np.ndarray
    near: np.ndarray
    far: np.ndarray
    weight: np.ndarray
    rounding: np.ndarray
    is_apart: np.ndarray


def _all_falls(coins: np.ndarray) -> _Falls:
    """Returns every way in which coins f64[N,K], given by the probability of heads, may fall."""
    margin = _MARGIN * (1 - np.log(np.clip(coins, 2**-126, 1)))
    last = 1 - 2**-24  # the largest uniform number
    outside = coins * (1 + margin)
    found = []
    for heads in itertools.product((True, False), repeat=coins.shape[1]):
        chances = np.where(heads, coins, 1.0 - coins)
        weight = chances.prod(axis=1)
        others = weight[:, None] / np.where(chances, chances, 1.0)
        near = np.clip(np.where(heads, coins * (1 - margin), outside), 0.0, last)
        far = np.broadcast_to(np.where(heads, 0.0, last), coins.shape)
        of_all = _Falls(
            np.arange(len(coins)),
            near.astype(np.float32),
            far.astype(np.float32),
            weight,
            np.where(heads, 0.0, others).sum(axis=1),
            (heads | (outside < last)).all(axis=1),
        )
        found.append([x[weight != 0] for x in of_all])
    return _Falls(*map(np.concatenate, zip(*found)))


def _check_alone(
    rule: Rule, forced: forcing.Forced, index, verdict: Verdict, alone: Verdict
) -> None:
    """Raises a CertificateError where a row's verdict in a batch of one is another one."""
    is_read = np.arange(verdict.tokens.shape[1]) <= verdict.n_accept[:, None]
    is_same = ((verdict.tokens == alone.tokens) | ~is_read).all(axis=1)
    differing = np.flatnonzero(~is_same | (verdict.n_accept != alone.n_accept))
    if not len(differing):
        return
    i = differing[0]
    emitted, others = (x.tokens[i, : x.n_accept[i] + 1].tolist() for x in (verdict, alone))
    raise CertificateError(
        f"rule {rule.name!r} emits {others} for a row in a batch of one, and {emitted} in a larger "
        f"batch, with the same noise, after the output {forced.items[index[i]][1]} "
        f"(K={is_read.shape[1] - 1})"
    )


def _test_last(items: Sequence[tuple[int, tuple[int, ...]]], verdict: Verdict) -> float:
    """Returns the p-value of last tokens, by row and by text, token by token and by rank.

    Args:
      items: (row, output) before each draw.
      verdict: what the rule gave with ordinary noise for the last token.
    """
    places = np.arange(len(items))
    texts = {item: i for i, item in enumerate(dict.fromkeys(items))}
    by_text = np.asarray([texts[item] for item in items])
    V = verdict.replacement.shape[1]
    P = verdict.tokens.shape[1]
    by_row = np.asarray([row for row, _ in items]) * P + verdict.n_accept
    off, variance = np.zeros((2, 2, 2, 1 + max(by_text.max(), by_row.max()), V))
    dist = np.asarray(verdict.replacement, np.float64)
    drawn = verdict.tokens[places, verdict.n_accept]
    if not (dist[places, drawn] > 0).all():
        return 0.0
    dist /= dist.sum(axis=1, keepdims=True)
    by_id = np.eye(V)[drawn] - dist, dist * (1 - dist)
    order = np.argsort(-dist, axis=1)
    by_rank = [np.take_along_axis(x, order, axis=1) for x in by_id]
    for i, group in enumerate((by_text, by_row)):
        for j, (x, y) in enumerate((by_id, by_rank)):
            np.add.at(off[i, j], group, x)
            np.add.at(variance[i, j], group, y)
    p_values = oracles.tail_of_sums(off, variance)[variance > 0]
    return min(1.0, float(p_values.min(initial=1.0)) * len(p_values))


def _is_clearly_more(proposal: Proposal, of_draft: np.ndarray) -> np.ndarray:
    """bool[N,K], drafts of a chain that the target surely prefers, without being sure of them.

    So a coin of 1 is not one that was rounded to 1. In a tree it may be: what earlier siblings
    have left of the two distributions is not known here.
    """
    if proposal.probs is None or proposal.parents is not None:
        return np.zeros(of_draft.shape, bool)
    q = np.take_along_axis(proposal.probs, proposal.tokens[:, :, None], axis=2)[:, :, 0]
    return (of_draft > (1 + _CLEARLY) * q) & (of_draft < 1 - _CLEARLY)


def sample_outcomes(rule: Rule, forced: forcing.Forced, trials: int) -> Iterator[RoundOutcome]:
    """Yields rounds with ordinary noise, weighted by their frequency.

    Args:
      rule: what accepts.
      forced: the drafts, which are drawn by their weights.
      trials: draws for each (row, output).
    """
    free = np.random.default_rng(3)
    K = forced.proposal.tokens.shape[1]
    V = forced.logits.shape[2]
    places = defaultdict(list)
    for i, item in enumerate(forced.items):
        places[item].append(i)
    for indices in places.values():
        weights = forced.weights[indices] / forced.weights[indices].sum()
        index = free.choice(indices, size=trials, p=weights)
        noise = Noise(
            free.random((trials, K), np.float32),
            free.gumbel(size=(trials, 1, V)).astype(np.float32),
        )
        verdict, _, _ = _accept_all(rule, forced, index, noise)
        for i, n, tokens in zip(index, verdict.n_accept, verdict.tokens):
            yield RoundOutcome(int(i), tuple(tokens[: n + 1].tolist()), 1 / trials, 0.0)


def _accept_all(rule: Rule, forced: forcing.Forced, index: np.ndarray, noise: Noise):
    """What ``_accept`` returns of the rounds at ``index``, each with noise of its own."""

    def run(index, noise):
        rounds = (forced.logits, forced.contexts, forced.proposal)
        return _accept(rule, *jax.tree.map(lambda x: x[index], rounds), noise)

    return forcing.in_chunks(run, _CHUNK, index, noise)


@functools.partial(bounded_jit, static_argnames="rule", compiler_options=forcing.AS_WRITTEN)
def _accept(rule: Rule, logits, contexts, proposal, noise):
    """The verdict, the target's f32[N,K] of every draft, and the verdicts in batches of one."""
    _, _, sampler, _ = contexts
    scores = decoding.score(logits, sampler, proposal, is_argmax=rule.is_greedy)
    K = proposal.tokens.shape[1]
    parents = jnp.arange(K) if proposal.parents is None else proposal.parents
    rows = jnp.arange(len(logits))[:, None]
    of_draft = scores.probs[rows, parents, proposal.tokens]
    alone = rule._replace(accept=one_by_one(rule.accept))
    verdict, own = (decoding.call_accept(x, scores, proposal, noise) for x in (rule, alone))
    return verdict, of_draft, own


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
      p_value: of the rule's last tokens; None where they are Gumbel-max draws.
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
    forced: forcing.Forced,
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
      may_miss: see ``RoundOutcomes``; None: all errors are compared without regard to the size
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
        dist = oracles.reference_distribution(
            logits_of((*row.prompt, *text)), row.target, row.prompt, text
        )
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
    forced: forcing.Forced,
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
        found = all_outcomes(system.rule, forced)
    except StatementError as error:
        # What the verdict states cannot be summed over; what the rule does can be sampled.
        sizes = np.asarray([len(output) for _, output in forced.items])
        for size in np.unique(sizes):  # short texts first: a difference mostly shows there
            some = forced.at(np.flatnonzero(sizes == size))
            sampled = sample_outcomes(system.rule, some, _SAMPLES)
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
    draft_distribution: forcing.DraftDistribution | None = None,
    params: dict[str, Any] | None = None,
    target: Model | None = None,
    logits_of: LogitsOf = oracles.toy_logits,
    batch: int = 512,
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
        params = {"target": toy_params(vocab_size, 0), "draft": toy_params(vocab_size, 1)}

    def distribution_of_toy(row, output, drafted):
        history = [*output, *drafted]
        logits = oracles.toy_logits(params["draft"], (*row.prompt, *history))
        return oracles.reference_distribution(logits, row.draft, row.prompt, history)

    given = drafter or standalone(toy_model(vocab_size))
    system = system_of(target or toy_model(vocab_size), given, rule, num_draft)
    starts = []
    for i, row in enumerate(rows):
        for size in range(num_tokens):
            plain = oracles.plain_distribution(params["target"], row, 0, size, logits_of)
            starts += [(i, (0, *output.tolist())) for output in np.argwhere(plain > 0)]
    stated = draft_distribution or distribution_of_toy
    drafting = forcing.Drafting(system, params, rows, num_tokens, batch)
    forced = forcing.force_all(drafting, starts, stated)
    if forced is None:
        raise CertificateError(
            f"drafter {given.name!r} does not draw with Context.gumbel from a distribution that "
            "covers the tokens it should be able to draw"
        )
    forcing.check_report(drafting, forced)
    rounds = [forced] if drafter else forcing.mixed_lengths(forced)
    of_target = functools.partial(logits_of, params["target"])
    return max(check_round(system, x, rows, of_target, tolerance).error for x in rounds)
