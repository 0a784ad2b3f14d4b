"""Every outcome of one round, by forcing its drafts, its coins and its last token."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.contracts import Context, Noise, Rule
from spec_jax.errors import SpecJaxError
from spec_jax.sampling import Counts, make_sampler
from spec_jax.testing.oracles import Row

DraftDistribution = Callable[[Row, Sequence[int], Sequence[int]], np.ndarray]

_FREE = -1  # a token that the enumeration does not force
_BUCKET = 8  # histories are padded to a multiple of it, so that settings share programs


class CertificateError(SpecJaxError, AssertionError):
    """The emitted tokens do not have the target's distribution."""


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
    V, K = system.target.vocab_size, system.num_draft
    items, forced = [], []
    is_sampled = system.drafter.is_sampled
    tree = system.drafter.tree
    parents = range(K) if tree is None or not is_sampled else tree.parents
    for (row, output), prob in frontier.items():
        dist = functools.partial(draft_distribution, rows[row], output)
        drafts = _possible_drafts(parents, dist) if is_sampled else [((_FREE,) * K, 1.0)]
        for draft, weight in drafts:
            items.append((row, output, prob * weight))
            forced.append(draft)
    if not items:
        return
    width = max(len(r.prompt) for r in rows) + num_tokens + K + 2
    width = -(-width // _BUCKET) * _BUCKET
    contexts = _contexts(rows, items, width, V)
    forced = np.asarray(forced)
    push = np.zeros((len(items), K, V), np.float32)
    for i, parent in enumerate(parents):
        at = np.flatnonzero(forced[:, i] != _FREE)
        push[at, parent, forced[at, i]] = 1e4 * (K - i)  # the first sibling is pushed hardest
    propose = functools.partial(_propose, system, params)
    logits, proposal = _in_chunks(propose, batch, contexts, push)
    is_other = (proposal.tokens != forced) & (forced != _FREE)
    is_other &= np.arange(K) < proposal.n_draft[:, None]
    if is_other.any():
        raise CertificateError(
            f"drafter {system.drafter.name!r} does not draw with Context.gumbel from a "
            "distribution that covers the tokens it should be able to draw"
        )
    free = np.random.default_rng(0)
    if proposal.probs is not None:
        # Ordinary noise: the distribution that it reports must be the one that it draws from.
        gumbel = free.gumbel(size=push.shape).astype(np.float32)
        _, drawn = _in_chunks(propose, batch, contexts, gumbel)
        if not _draws_as_reported(drawn, gumbel, parents):
            raise CertificateError(
                f"drafter {system.drafter.name!r} draws from another distribution than "
                "Proposal.probs"
            )
    size = len(items)
    accept = functools.partial(_accept, system.rule)
    noise = Noise(np.zeros((size, K), np.float32), np.zeros((size, 1, V), np.float32))
    verdict = _in_chunks(accept, 4096, logits, contexts, proposal, noise)
    coins = np.asarray(verdict.accept_probs, np.float64)

    index, uniforms, ends, weights = [], [], [], []
    for heads in itertools.product((True, False), repeat=K):
        weight = np.where(heads, coins, 1.0 - coins).prod(axis=1)
        # Just inside and just outside of the stated probability.
        u = np.where(heads, coins * (1 - 1e-6) - 1e-7, coins * (1 + 1e-6) + 1e-7)
        keep = np.flatnonzero(weight)
        index.append(keep)
        uniforms.append(np.clip(u, 0.0, 1 - 2**-24)[keep])
        ends.append(np.tile(np.where(heads, 0.0, 1 - 2**-24), (len(keep), 1)))
        weights.append(weight[keep])
    index, uniforms, ends, weights = map(np.concatenate, (index, uniforms, ends, weights))
    index, uniforms, ends = (np.repeat(x, V, axis=0) for x in (index, uniforms, ends))
    token = np.tile(np.arange(V), len(weights))
    gumbel = 1e4 * np.eye(V, dtype=np.float32)[token][:, None]
    pick = lambda tree: jax.tree.map(lambda x: x[index], tree)
    noise = Noise(uniforms.astype(np.float32), gumbel)
    verdict = _in_chunks(accept, 4096, logits[index], pick(contexts), pick(proposal), noise)
    # The coin must flip at the stated probability and nowhere else, and ordinary noise must
    # draw from the stated replacement.
    gumbel = free.gumbel(size=gumbel.shape).astype(np.float32)
    noise = Noise(ends.astype(np.float32), gumbel)
    far = _in_chunks(accept, 4096, logits[index], pick(contexts), pick(proposal), noise)
    likely = np.repeat(weights, V) > 1e-6
    is_same = (far.n_accept == verdict.n_accept) & (
        np.abs(far.accept_probs - coins[index]).max(axis=1) < 1e-6
    )
    if not is_same[likely].all():
        raise CertificateError(
            f"rule {system.rule.name!r} does not flip its coins at accept_probs"
        )
    own = far.tokens[np.arange(len(index)), far.n_accept]
    other_draw = f"rule {system.rule.name!r} does not draw from its replacement distribution"
    if not _is_argmax(own, far.replacement, gumbel[:, 0]):
        raise CertificateError(other_draw)
    dist = np.asarray(verdict.replacement, np.float64)[np.arange(len(index)), token]
    n, tokens = verdict.n_accept, verdict.tokens
    possible = np.flatnonzero(dist > 0)
    if (tokens[possible, n[possible]] != token[possible]).any():
        raise CertificateError(other_draw)
    weights = np.repeat(weights, V) * dist
    for i in possible:
        row, output, prob = items[index[i]]
        emitted = (*output, *map(int, tokens[i, : n[i] + 1]))
        yield row, emitted, prob * weights[i]


def _possible_drafts(parents, dist):
    """Yields (tokens, probability) of every draft along ``parents``, siblings all different.

    Where siblings have used up the distribution a token is ``_FREE``: the drafter's own choice.
    """
    K = len(parents)

    def visit(tokens, weight):
        i = len(tokens)
        if i == K:
            yield tokens, weight
            return
        way, node = [], parents[i]
        while node:
            way.insert(0, tokens[node - 1])
            node = parents[node - 1]
        q = np.array(dist(way))
        q[[tokens[j] for j in range(i) if parents[j] == parents[i] and tokens[j] != _FREE]] = 0.0
        if q.sum() <= 1e-12:
            if i + 1 in parents:
                raise ValueError(f"node {i + 1} has children, and no distribution to draw it from")
            yield from visit((*tokens, _FREE), weight)
            return
        for token in np.flatnonzero(q):
            yield from visit((*tokens, int(token)), weight * q[token] / q.sum())

    yield from visit((), 1.0)


def _draws_as_reported(drawn, gumbel, parents) -> bool:
    """Whether each token is its parent's Gumbel-max draw, earlier siblings left out."""
    probs = np.array(drawn.probs)
    for i, parent in enumerate(parents):
        q, token = probs[:, parent], drawn.tokens[:, i]
        at = np.flatnonzero((q.max(axis=1) > 0) & (i < drawn.n_draft))
        if not _is_argmax(token[at], q[at], gumbel[at, parent]):
            return False
        np.put_along_axis(q, token[:, None], 0.0, axis=1)
    return True


def _is_argmax(tokens, probs, gumbel) -> bool:
    """Whether the tokens are the Gumbel-max draws from ``probs``, near ties aside."""
    with np.errstate(divide="ignore"):
        scores = np.log(np.asarray(probs, np.float64)) + gumbel
    drawn = np.take_along_axis(scores, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    return bool((drawn >= scores.max(axis=-1) - 1e-3).all())


def _contexts(rows, items, width, V):
    """The context of every item, as the decoder would hold it."""
    size = len(items)
    tokens = np.zeros((size, width), np.int32)
    length = np.zeros(size, np.int32)
    seen, output_counts = np.zeros((size, V), bool), np.zeros((size, V), np.int32)
    for i, (row, output, _) in enumerate(items):
        history = (*rows[row].prompt, *output)
        tokens[i, : len(history)] = history
        length[i] = len(history) - 1
        seen[i, list(rows[row].prompt)] = True
        np.add.at(output_counts[i], list(output), 1)
    # The samplers of all rows, whichever are left: all calls share programs.
    of = np.asarray([item[0] for item in items])
    samplers = [make_sampler(side, len(rows), V) for side in zip(*(row[1:] for row in rows))]
    sampler, draft_sampler = jax.tree.map(lambda x: np.asarray(x)[of], samplers)
    return tokens, length, sampler, draft_sampler, Counts(seen, output_counts)


def _in_chunks(function, chunk, *trees):
    """Calls ``function`` on NumPy arrays a chunk of rows at a time: one compiled shape."""
    size = len(jax.tree.leaves(trees)[0])
    results = []
    for begin in range(0, size, chunk):
        index = np.minimum(np.arange(begin, begin + chunk), size - 1)
        result = function(*jax.tree.map(lambda x: x[index], trees))
        results.append(jax.tree.map(np.asarray, result))
    return jax.tree.map(lambda *x: np.concatenate(x)[:size], *results)


@functools.partial(jax.jit, static_argnames="system")
def _propose(system: decoding.System, params, contexts, gumbel):
    """Prefills both models afresh, drafts with forced noise, scores the window."""
    tokens, length, sampler, draft_sampler, counts = contexts
    target, drafter, rule, *_ = system
    size, width = tokens.shape
    slots = width + system.lookahead_slots
    cache = target.init_cache(params["target"], size, slots)
    fed = target.forward(params["target"], tokens, cache)
    state = drafter.init(params["draft"], size, slots)
    pending = jnp.take_along_axis(tokens, length[:, None], axis=1)[:, 0]
    state = drafter.prefill(params["draft"], state, tokens, length, pending, fed.features)
    context = Context(
        tokens, length, draft_sampler, counts, sampler.seed, is_coupled=False, has_probs=True,
        has_logits=rule.needs_logits, gumbel=gumbel,
    )
    proposal, _ = decoding.propose(params["draft"], state, context, system)
    logits, _, _ = decoding.target_pass(
        params["target"], fed.cache.commit(length), tokens, proposal.tokens, system, proposal.paths
    )
    return logits, proposal


@functools.partial(jax.jit, static_argnames="rule")
def _accept(rule: Rule, logits, contexts, proposal, noise):
    _, _, sampler, _, counts = contexts
    return rule.accept(decoding.score(logits, sampler, counts, proposal, rule), proposal, noise)
