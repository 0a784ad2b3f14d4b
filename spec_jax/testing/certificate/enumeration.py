"""Every outcome of one round, by forcing its drafts, its coins and its last token."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.contracts import Noise, Proposal, Rule
from spec_jax.testing.certificate.forcing import (
    AS_WRITTEN,
    FREE,
    DraftDistribution,
    Forced,
    draws_as_reported,
    force,
    in_chunks,
    is_argmax,
    parents_of,
    possible_drafts,
)
from spec_jax.testing.certificate.records import CertificateError, StatementError
from spec_jax.testing.oracles import Row

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


def outcomes(
    system: decoding.System,
    params: dict[str, Any],
    rows: Sequence[Row],
    frontier: Mapping[tuple[int, tuple[int, ...]], float],
    draft_distribution: DraftDistribution,
    num_tokens: int,
    batch: int,
) -> Iterator[tuple[int, tuple[int, ...], float]]:
    """Yields (row, output after the round, probability) of every outcome of one round.

    Args:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      rows: prompts and samplers.
      frontier: the probability of each (row, output) before the round.
      draft_distribution: see ``certify_rule``.
      num_tokens: of the joint distribution.
      batch: rows drafted at once.

    Raises:
      CertificateError: the drafter or the rule does not do what it states.
    """
    items, drafts, weights = [], [], []
    parents = parents_of(system)
    for (row, output), prob in frontier.items():
        dist = functools.partial(draft_distribution, rows[row], output)
        for draft, weight in possible_drafts(parents, dist if system.drafter.is_sampled else None):
            items.append((row, output))
            drafts.append(draft)
            weights.append(prob * weight)
    if not items:
        return
    drafts = np.asarray(drafts)
    forced = force(system, params, rows, items, drafts, num_tokens, batch)
    is_other = (forced.proposal.tokens != drafts) & (drafts != FREE)
    is_other &= np.asarray(forced.proposal.is_offered)
    if is_other.any():
        raise CertificateError(
            f"drafter {system.drafter.name!r} does not draw with Context.gumbel from a "
            "distribution that covers the tokens it should be able to draw"
        )
    if not draws_as_reported(system, params, forced, batch).all():
        raise CertificateError(
            f"drafter {system.drafter.name!r} draws from another distribution than Proposal.probs"
        )
    ends, _ = verdicts(system.rule, forced._replace(weights=np.asarray(weights)))
    for end in ends:
        row, output = items[end.item]
        yield row, (*output, *end.emitted), end.weight


def verdicts(
    rule: Rule, forced: Forced, chunk: int = 4096
) -> tuple[list[RoundOutcome], np.ndarray]:
    """Returns every outcome of rounds with given drafts.

    Args:
      rule: whose coins and last token are forced.
      forced: the drafts.
      chunk: outcomes computed at once.

    Returns:
      The outcomes, and bool[N]: of which items outcomes may be missing, since a coin is 1, but
      perhaps only rounded to 1.

    Raises:
      StatementError: the rule does not do what it states.
    """
    size, K = forced.proposal.tokens.shape
    V = forced.logits.shape[2]
    accept = functools.partial(_accept, rule)
    run = lambda index, noise: in_chunks(
        lambda index, noise: accept(*_gather(forced, index), noise), chunk, index, noise
    )
    noise = Noise(np.zeros((size, K), np.float32), np.zeros((size, 1, V), np.float32))
    verdict, of_draft = run(np.arange(size), noise)
    stated = np.asarray(verdict.accept_probs, np.float64)
    coins = np.minimum(stated, 1.0)
    may_miss = ((coins == 1) & ~_is_clearly_more(forced.proposal, of_draft)).any(axis=1)
    # Just inside and just outside of the stated probability: no wider than it is known.
    margin = _MARGIN * (1 - np.log(np.clip(coins, 2**-126, 1)))
    last = 1 - 2**-24  # the largest uniform
    outside = coins * (1 + margin)

    index, uniforms, ends, weights, rounding, is_apart = [], [], [], [], [], []
    for heads in itertools.product((True, False), repeat=K):
        chances = np.where(heads, coins, 1.0 - coins)
        weight = chances.prod(axis=1)
        u = np.where(heads, coins * (1 - margin), outside)
        keep = np.flatnonzero(weight)
        index.append(keep)
        uniforms.append(np.clip(u, 0.0, last)[keep])
        ends.append(np.tile(np.where(heads, 0.0, last), (len(keep), 1)))
        weights.append(weight[keep])
        rounding.append(
            np.where(heads, 0.0, weight[:, None] / np.where(chances, chances, 1.0)).sum(axis=1)[
                keep
            ]
        )
        is_apart.append((heads | (outside < last)).all(axis=1)[keep])
    index, uniforms, ends, weights, rounding, is_apart = map(
        np.concatenate, (index, uniforms, ends, weights, rounding, is_apart)
    )
    index, uniforms, ends = (np.repeat(x, V, axis=0) for x in (index, uniforms, ends))
    token = np.tile(np.arange(V), len(weights))
    gumbel = 1e4 * np.eye(V, dtype=np.float32)[token][:, None]
    verdict, _ = run(index, Noise(uniforms.astype(np.float32), gumbel))
    # The coin must flip at the stated probability and nowhere else, and ordinary noise must
    # draw from the stated replacement.
    gumbel = np.random.default_rng(1).gumbel(size=gumbel.shape).astype(np.float32)
    far, _ = run(index, Noise(ends.astype(np.float32), gumbel))
    is_same = (far.n_accept == verdict.n_accept) & (
        np.abs(far.accept_probs - stated[index]).max(axis=1) < 1e-6
    )
    if not is_same[np.repeat(is_apart, V)].all():
        raise StatementError(f"rule {rule.name!r} does not flip its coins at accept_probs")
    drawn = far.tokens[np.arange(len(index)), far.n_accept]
    other_draw = f"rule {rule.name!r} does not draw from its replacement distribution"
    if not is_argmax(drawn, far.replacement, gumbel[:, 0]).all():
        raise StatementError(other_draw)
    dist = np.asarray(verdict.replacement, np.float64)[np.arange(len(index)), token]
    n, tokens = verdict.n_accept, verdict.tokens
    possible = np.flatnonzero(dist > 0)
    if (tokens[possible, n[possible]] != token[possible]).any():
        raise StatementError(other_draw)
    weights, rounding = (
        forced.weights[index] * np.repeat(x, V) * dist for x in (weights, rounding)
    )
    emitted = lambda i: tuple(tokens[i, : n[i] + 1].tolist())
    return [
        RoundOutcome(int(index[i]), emitted(i), weights[i], rounding[i]) for i in possible
    ], may_miss


def _is_clearly_more(proposal: Proposal, of_draft: np.ndarray) -> np.ndarray:
    """bool[N,K], drafts of a chain that the target surely prefers, without being sure of them.

    So a coin of 1 is not one that was rounded to 1. In a tree it may be: what earlier siblings
    have left of the two distributions is not known here.
    """
    if proposal.probs is None or proposal.parents is not None:
        return np.zeros(of_draft.shape, bool)
    q = np.take_along_axis(proposal.probs, proposal.tokens[:, :, None], axis=2)[:, :, 0]
    return (of_draft > (1 + _CLEARLY) * q) & (of_draft < 1 - _CLEARLY)


def sample_verdicts(
    rule: Rule, forced: Forced, trials: int, chunk: int = 4096
) -> Iterator[RoundOutcome]:
    """Yields rounds with ordinary noise, weighted by their frequency.

    Args:
      rule: what accepts.
      forced: the drafts, which are drawn by their weights.
      trials: draws for each (row, output).
      chunk: draws made at once.
    """
    free, K, V = np.random.default_rng(3), forced.proposal.tokens.shape[1], forced.logits.shape[2]
    places = defaultdict(list)
    for i, item in enumerate(forced.items):
        places[item].append(i)
    accept = functools.partial(_accept, rule)
    for indices in places.values():
        weights = forced.weights[indices] / forced.weights[indices].sum()
        index = free.choice(indices, size=trials, p=weights)
        noise = Noise(
            free.random((trials, K), np.float32),
            free.gumbel(size=(trials, 1, V)).astype(np.float32),
        )
        verdict, _ = in_chunks(
            lambda index, noise: accept(*_gather(forced, index), noise), chunk, index, noise
        )
        for i, n, tokens in zip(index, verdict.n_accept, verdict.tokens):
            yield RoundOutcome(int(i), tuple(tokens[: n + 1].tolist()), 1 / trials, 0.0)


def _gather(forced: Forced, index: np.ndarray):
    return jax.tree.map(lambda x: x[index], (forced.logits, forced.contexts, forced.proposal))


@functools.partial(jax.jit, static_argnames="rule", compiler_options=AS_WRITTEN)
def _accept(rule: Rule, logits, contexts, proposal, noise):
    """Returns the verdict, and f32[N,K], the target's probability of every draft."""
    _, _, sampler, _ = contexts
    scores = decoding.score(logits, sampler, proposal, is_argmax=rule.is_greedy)
    K = proposal.tokens.shape[1]
    parents = jnp.arange(K) if proposal.parents is None else proposal.parents
    rows = jnp.arange(len(logits))[:, None]
    of_draft = scores.probs[rows, parents, proposal.tokens]
    return decoding.call_accept(rule, scores, proposal, noise), of_draft
