"""Proof, by enumeration and by sampling, that emitted tokens have the target's law."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context, Drafter, Model, Noise, Rule
from spec_jax.drafters.standalone.model import standalone
from spec_jax.errors import SpecJaxError
from spec_jax.sampling import Counts, make_sampler
from spec_jax.testing.mocks import ragged, toy_model, toy_params
from spec_jax.testing.oracles import (
    LogitsOf,
    Row,
    chi_square,
    plain_distribution,
    reference_distribution,
    toy_logits,
)

_FREE = -1  # a token that the enumeration does not force
_BUCKET = 8  # histories are padded to a multiple of it, so that settings share programs


class CertificateError(SpecJaxError, AssertionError):
    """The emitted tokens do not have the target's law."""


STANDARD_SETTINGS = {
    "temperature 0.7": SamplerConfig(temperature=0.7),
    "temperature 1.3": SamplerConfig(temperature=1.3),
    "top-k": SamplerConfig(temperature=1.0, top_k=2),
    "top-p": SamplerConfig(temperature=1.0, top_p=0.7),
    "min-p": SamplerConfig(temperature=1.0, min_p=0.3),
    "penalties": SamplerConfig(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.4
    ),
    "all together": SamplerConfig(
        temperature=0.8, top_k=3, top_p=0.9, min_p=0.05, repetition_penalty=1.3,
        presence_penalty=0.2, frequency_penalty=0.3, logit_bias=((1, 0.5),),
    ),
}


def standard_rows(draft: SamplerConfig | None = None) -> list[Row]:
    """Every standard setting as one row of a mixed batch, with prompts of different lengths.

    Args:
      draft: the draft's sampler; by default each row's own setting.
    """
    prompts = ((0, 1), (2,), (1, 1, 2))
    rows = enumerate(STANDARD_SETTINGS.values())
    return [Row(prompts[i % 3], setting, draft or setting) for i, setting in rows]


def certify_rule(
    rule: Rule,
    *,
    vocab_size: int = 3,
    num_draft: int = 2,
    num_tokens: int = 4,
    rows: Sequence[Row] | None = None,
    drafter: Drafter | None = None,
    draft_distribution: Callable[[Row, Sequence[int], Sequence[int]], np.ndarray] | None = None,
    params: dict | None = None,
    target: Model | None = None,
    logits_of: LogitsOf = toy_logits,
    batch: int = 512,
    seed: int = 0,
    tolerance: float = 1e-6,
) -> float:
    """Proves by enumeration that the rule, with what the drafter reports, is lossless.

    Every draft is forced through the drafter's noise and weighted by an independent
    computation of its law; every coin is forced to either side of the probability that the
    rule states, every last token through its Gumbel noise; the outcome is what the
    drafter's and the rule's own functions return. Because the noise is forced, a drafter or a
    rule that draws from noise that something else has used is not seen here:
    ``certify_decoder`` sees it.

    Args:
      rule: not coupled (certify those by equality with plain decoding).
      vocab_size: V of the toy target, whose law depends on two tokens of context.
      num_draft: K; that of the drafter's tree, where it has one.
      num_tokens: length of the joint law.
      rows: settings, all judged in one batch; by default ``standard_rows()``.
      drafter: draws with ``Context.gumbel`` where given; by default ``standalone`` over a toy
        draft, once with all of K drafts offered and once with 0 to K of them. Of a dynamic tree
        nothing is forced.
      draft_distribution: ``(row, output, drafted) -> f64[V]``, the distribution its next token
        should have; by default the toy draft's under the row's draft sampler. A deterministic
        drafter has none.
      params: ``{"target": ..., "draft": ...}``; by default random ones of toy models.
      target: the model that scores the drafts, whose V is then ``vocab_size``; by default a toy.
      logits_of: what the target says, computed another way.
      batch: rows drafted at once; fewer where the drafter has a ``KVCache``, whose writes are
        compiled row by row.
      seed: of the toy parameters.
      tolerance: on the largest difference of a joint probability.

    Returns:
      The largest difference found.

    Raises:
      CertificateError: the laws differ, or the rule does not do what it states.
    """
    if rule.is_coupled or rule.is_greedy:
        raise CertificateError(f"{rule.name} emits plain decoding's tokens: certify by equality")
    if drafter is None:
        again = functools.partial(
            certify_rule, rule, vocab_size=vocab_size, num_draft=num_draft, num_tokens=num_tokens,
            rows=rows, draft_distribution=draft_distribution, params=params, target=target,
            logits_of=logits_of, batch=batch, seed=seed, tolerance=tolerance,
        )
        whole = standalone(toy_model(vocab_size))
        cut = ragged(whole, lambda length: length % (num_draft + 1))
        return max(again(drafter=whole), again(drafter=cut))
    rows = standard_rows() if rows is None else list(rows)
    if params is None:
        params = {"target": toy_params(vocab_size, seed), "draft": toy_params(vocab_size, seed + 1)}
    if draft_distribution is None:

        def draft_distribution(row, output, drafted):
            history = [*output, *drafted]
            logits = toy_logits(params["draft"], (*row.prompt, *history))
            return reference_distribution(logits, row.draft, row.prompt, history)

    if drafter.tree is not None:
        num_draft = drafter.tree.num_nodes
    system = decoding.System(target or toy_model(vocab_size), drafter, rule, num_draft)
    pending = 0
    laws = [np.zeros((vocab_size,) * num_tokens) for _ in rows]
    frontier = {(i, (pending,)): 1.0 for i in range(len(rows))}
    # Each round emits at least one token: taken by length, every prefix is visited once.
    for size in range(1, num_tokens + 1):
        now = {k: v for k, v in frontier.items() if len(k[1]) == size}
        found = _outcomes(system, params, rows, now, draft_distribution, num_tokens, batch)
        for row, emitted, weight in found:
            if len(emitted) > num_tokens:
                laws[row][emitted[1 : num_tokens + 1]] += weight
            else:
                frontier[row, emitted] = frontier.get((row, emitted), 0.0) + weight
    worst = 0.0
    for i, row in enumerate(rows):
        law = plain_distribution(params["target"], row, pending, num_tokens, logits_of)
        error = np.abs(laws[i] - law).max()
        worst = max(worst, float(error))
        if not error <= tolerance:
            raise CertificateError(
                f"rule {rule.name!r}, drafter {drafter.name!r}: with {row} a joint probability "
                f"of {num_tokens} tokens differs from plain decoding's by {error:.2e}"
            )
    return worst


def _outcomes(system, params, rows, frontier, draft_distribution, num_tokens, rows_at_once):
    """Yields (row, output after the round, probability) of every outcome of one round."""
    V, K = system.target.vocab_size, system.num_draft
    items, forced = [], []
    is_sampled = system.drafter.is_sampled
    tree = system.drafter.tree
    parents = range(K) if tree is None or not is_sampled else tree.parents
    for (row, output), prob in frontier.items():
        law = functools.partial(draft_distribution, rows[row], output)
        drafts = _possible_drafts(parents, law) if is_sampled else [((_FREE,) * K, 1.0)]
        for draft, weight in drafts:
            items.append((row, output, prob * weight))
            forced.append(draft)
    if not items:
        return
    width = max(len(r.prompt) for r in rows) + num_tokens + K + 2
    width = -(-width // _BUCKET) * _BUCKET
    batch = _batch(rows, items, width, V)
    forced = np.asarray(forced)
    push = np.zeros((len(items), K, V), np.float32)
    for i, parent in enumerate(parents):
        at = np.flatnonzero(forced[:, i] != _FREE)
        push[at, parent, forced[at, i]] = 1e4 * (K - i)  # the first sibling is pushed hardest
    propose = functools.partial(_propose, system, params)
    logits, proposal = _in_chunks(propose, rows_at_once, batch, push)
    is_other = (proposal.tokens != forced) & (forced != _FREE)
    is_other &= np.arange(K) < proposal.n_draft[:, None]
    if is_other.any():
        raise CertificateError(
            f"drafter {system.drafter.name!r} does not draw with Context.gumbel from a law that "
            "covers the tokens it should be able to draw"
        )
    free = np.random.default_rng(0)
    if proposal.probs is not None:
        # Ordinary noise: the law that it reports must be the law that it draws from.
        gumbel = free.gumbel(size=push.shape).astype(np.float32)
        _, drawn = _in_chunks(propose, rows_at_once, batch, gumbel)
        if not _draws_from_its_law(drawn, gumbel, parents):
            raise CertificateError(
                f"drafter {system.drafter.name!r} draws from another law than Proposal.probs"
            )
    size = len(items)
    judge = functools.partial(_judge, system.rule)
    noise = Noise(np.zeros((size, K), np.float32), np.zeros((size, 1, V), np.float32))
    verdict = _in_chunks(judge, 4096, logits, batch, proposal, noise)
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
    verdict = _in_chunks(judge, 4096, logits[index], pick(batch), pick(proposal), noise)
    # The coin must flip at the stated probability and nowhere else, and ordinary noise must
    # draw from the stated replacement.
    gumbel = free.gumbel(size=gumbel.shape).astype(np.float32)
    noise = Noise(ends.astype(np.float32), gumbel)
    far = _in_chunks(judge, 4096, logits[index], pick(batch), pick(proposal), noise)
    likely = np.repeat(weights, V) > 1e-6
    is_same = (far.n_accept == verdict.n_accept) & (
        np.abs(far.accept_probs - coins[index]).max(axis=1) < 1e-6
    )
    if not is_same[likely].all():
        raise CertificateError(
            f"rule {system.rule.name!r} does not flip its coins at accept_probs"
        )
    own = far.tokens[np.arange(len(index)), far.n_accept]
    if not _is_argmax(own, far.replacement, gumbel[:, 0]):
        raise CertificateError(f"rule {system.rule.name!r} does not draw from its replacement law")
    law = np.asarray(verdict.replacement, np.float64)[np.arange(len(index)), token]
    n, tokens = verdict.n_accept, verdict.tokens
    possible = np.flatnonzero(law > 0)
    if (tokens[possible, n[possible]] != token[possible]).any():
        raise CertificateError(f"rule {system.rule.name!r} does not draw from its replacement law")
    weights = np.repeat(weights, V) * law
    for i in possible:
        row, output, prob = items[index[i]]
        emitted = (*output, *map(int, tokens[i, : n[i] + 1]))
        yield row, emitted, prob * weights[i]


def _possible_drafts(parents, law):
    """Yields (tokens, probability) of every draft along ``parents``, siblings all different.

    Where siblings have used up their law a token is ``_FREE``: the drafter's own choice.
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
        q = np.array(law(way))
        q[[tokens[j] for j in range(i) if parents[j] == parents[i] and tokens[j] != _FREE]] = 0.0
        if q.sum() <= 1e-12:
            if i + 1 in parents:
                raise ValueError(f"node {i + 1} has children, and no law to draw it from")
            yield from visit((*tokens, _FREE), weight)
            return
        for token in np.flatnonzero(q):
            yield from visit((*tokens, int(token)), weight * q[token] / q.sum())

    yield from visit((), 1.0)


def _draws_from_its_law(drawn, gumbel, parents) -> bool:
    """Whether each token is the Gumbel-max draw of its parent's law, earlier siblings out."""
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


def _batch(rows, items, width, V):
    """Context of every item, as the decoder would hold it."""
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
    of = [item[0] for item in items]
    sampler = make_sampler([rows[r].target for r in of], size, V)
    draft_sampler = make_sampler([rows[r].draft for r in of], size, V)
    counts = Counts(seen, output_counts)
    return jax.tree.map(np.asarray, (tokens, length, sampler, draft_sampler, counts))


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
def _propose(system: decoding.System, params, batch, gumbel):
    """Prefills both models afresh, drafts with forced noise, scores the window."""
    tokens, length, sampler, draft_sampler, counts = batch
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
def _judge(rule: Rule, logits, batch, proposal, noise):
    _, _, sampler, _, counts = batch
    return rule.accept(decoding.score(logits, sampler, counts, proposal, rule), proposal, noise)


def certify_decoder(
    rule: Rule,
    drafter: Drafter | None = None,
    *,
    vocab_size: int = 4,
    num_draft: int = 2,
    num_tokens: int = 4,
    row: Row = Row((0, 1), SamplerConfig(temperature=1.0), SamplerConfig(temperature=1.0)),
    trials: int = 200_000,
    batch: int = 20_000,
    alpha: float = 1e-6,
    params: dict | None = None,
    target: Model | None = None,
    logits_of: LogitsOf = toy_logits,
    seed: int = 0,
    loop: Any = decoding,
) -> float:
    """Tests the jitted decoder's tokens against the target's law with a chi-square test.

    The tested tokens are the ``num_tokens`` behind the first, whose own law is summed over.

    Args:
      rule: any lossless rule.
      drafter: by default ``standalone`` over a toy draft.
      vocab_size: V.
      num_draft: K; that of the drafter's tree, where it has one.
      num_tokens: of the joint law; the table has V**num_tokens outcomes.
      row: prompt and samplers of all trials.
      trials: sequences decoded; each has a seed of its own.
      batch: rows decoded at once.
      alpha: smallest p-value that passes.
      params: ``{"target": ..., "draft": ...}``; by default random ones of toy models.
      target: by default a toy; a mutated one, to see the test fail, or a model of your own.
      logits_of: what the target says, computed another way.
      seed: of the parameters and the trials.
      loop: what decodes, with the ``prefill`` and ``generate`` of ``decode``.

    Returns:
      The p-value.

    Raises:
      CertificateError: the p-value is below ``alpha``.
    """
    V = vocab_size
    if params is None:
        params = {"target": toy_params(V, seed), "draft": toy_params(V, seed + 1)}
    model = target or toy_model(V)
    drafter = drafter or standalone(toy_model(V))
    if drafter.tree is not None:
        num_draft = drafter.tree.num_nodes
    system = decoding.System(model, drafter, rule, num_draft)
    counts = np.zeros((V,) * num_tokens, np.int64)
    length = len(row.prompt)
    slots = length + num_tokens + system.lookahead_slots + 3
    tokens = jnp.tile(jnp.asarray(row.prompt, jnp.int32), (batch, 1))
    full = lambda value: jnp.full((batch,), value, jnp.int32)
    for begin in range(0, trials, batch):
        seeds = [seed * trials + begin + i for i in range(batch)]
        state = loop.prefill(
            params, tokens, full(length), full(length + 1 + num_tokens),
            jnp.full((batch, 1), -1, jnp.int32), make_sampler(row.target, batch, V, seeds),
            make_sampler(row.draft, batch, V, seeds), system=system, slots=slots,
        )
        state, _ = loop.generate(params, state, full(0), jnp.int32(2**30), system=system)
        out = np.asarray(state.tokens)[:, length + 1 : length + 1 + num_tokens]
        np.add.at(counts, tuple(out.T), 1)
    first = reference_distribution(
        logits_of(params["target"], row.prompt), row.target, row.prompt, ()
    )
    law = sum(
        first[t] * plain_distribution(params["target"], row, int(t), num_tokens, logits_of)
        for t in np.flatnonzero(first > 1e-12)
    )
    p_value = chi_square(counts, law)
    if not p_value >= alpha:
        raise CertificateError(
            f"rule {rule.name!r}, drafter {system.drafter.name!r}: the decoded tokens do not have "
            f"the target's law (chi-square p-value {p_value:.1e} over {trials} trials)"
        )
    return p_value
