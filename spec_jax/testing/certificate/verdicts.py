"""Every outcome of rounds whose drafts are given: coins and last tokens are forced."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.contracts import Noise, Proposal, Rule, Verdict
from spec_jax.testing.certificate.forcing import AS_WRITTEN, Forced, in_chunks, is_argmax
from spec_jax.testing.certificate.records import ALPHA, CertificateError, StatementError
from spec_jax.testing.oracles import tail_of_sums

_CHUNK = 4096  # outcomes that are computed at once
_DRAWS = 200_000  # of last tokens, of a rule that is no Gumbel-max draw
_MARGIN = 1e-6  # of a coin, and of its logarithm: 16 roundings of float32
_CLEARLY = 1e-3  # apart: two probabilities whose order no rounding changes


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


def verdicts(rule: Rule, forced: Forced) -> RoundOutcomes:
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
    is_gumbel_max = is_argmax(drawn, again.replacement, gumbel[:, 0]).all()
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


def _check_alone(rule: Rule, forced: Forced, index, verdict: Verdict, alone: Verdict) -> None:
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
    p_values = tail_of_sums(off, variance)[variance > 0]
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


def sample_verdicts(rule: Rule, forced: Forced, trials: int) -> Iterator[RoundOutcome]:
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


def _accept_all(rule: Rule, forced: Forced, index: np.ndarray, noise: Noise):
    """What ``_accept`` returns of the rounds at ``index``, each with noise of its own."""

    def run(index, noise):
        rounds = (forced.logits, forced.contexts, forced.proposal)
        return _accept(rule, *jax.tree.map(lambda x: x[index], rounds), noise)

    return in_chunks(run, _CHUNK, index, noise)


@functools.partial(bounded_jit, static_argnames="rule", compiler_options=AS_WRITTEN)
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
