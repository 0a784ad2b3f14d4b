"""Proof, by enumeration and by sampling, that emitted tokens have the target's distribution."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Drafter, Model, Rule
from spec_jax.drafters.standalone.model import standalone
from spec_jax.sampling import make_sampler
from spec_jax.testing.certificate.enumeration import outcomes
from spec_jax.testing.certificate.forcing import DRAFT_SEED, DraftDistribution
from spec_jax.testing.certificate.records import CertificateError
from spec_jax.testing.mocks import ragged, toy_model, toy_params
from spec_jax.testing.oracles import (
    LogitsOf,
    Row,
    chi_square,
    plain_distribution,
    reference_distribution,
    toy_logits,
)

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
        temperature=0.8,
        top_k=3,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((1, 0.5),),
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
    draft_distribution: DraftDistribution | None = None,
    params: dict | None = None,
    target: Model | None = None,
    logits_of: LogitsOf = toy_logits,
    batch: int = 512,
    seed: int = 0,
    tolerance: float = 1e-6,
) -> float:
    """Proves by enumeration that the rule, with what the drafter reports, is lossless.

    Every draft is forced through the drafter's noise and weighted by an independent
    computation of its distribution; every coin is forced to either side of the probability that the
    rule states, every last token through its Gumbel noise; the outcome is what the
    drafter's and the rule's own functions return. Because the noise is forced, a drafter or a
    rule that draws from noise that something else has used is not seen here:
    ``certify_decoder`` sees it.

    Args:
      rule: not coupled (certify those by equality with plain decoding).
      vocab_size: V of the toy target, whose distribution depends on two tokens of context.
      num_draft: K; that of the drafter's tree, where it has one.
      num_tokens: length of the joint distribution.
      rows: settings, all certified in one batch; by default ``standard_rows()``.
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
      CertificateError: the distributions differ, or the rule does not do what it states.
    """
    if rule.is_coupled or rule.is_greedy:
        raise CertificateError(f"{rule.name} emits plain decoding's tokens: certify by equality")
    if drafter is None:
        again = functools.partial(
            certify_rule,
            rule,
            vocab_size=vocab_size,
            num_draft=num_draft,
            num_tokens=num_tokens,
            rows=rows,
            draft_distribution=draft_distribution,
            params=params,
            target=target,
            logits_of=logits_of,
            batch=batch,
            seed=seed,
            tolerance=tolerance,
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
    dists = [np.zeros((vocab_size,) * num_tokens) for _ in rows]
    frontier = {(i, (pending,)): 1.0 for i in range(len(rows))}
    # Each round emits at least one token: taken by length, every prefix is visited once.
    for size in range(1, num_tokens + 1):
        now = {k: v for k, v in frontier.items() if len(k[1]) == size}
        found = outcomes(system, params, rows, now, draft_distribution, num_tokens, batch)
        for row, emitted, weight in found:
            if len(emitted) > num_tokens:
                dists[row][emitted[1 : num_tokens + 1]] += weight
            else:
                frontier[row, emitted] = frontier.get((row, emitted), 0.0) + weight
    worst = 0.0
    for i, row in enumerate(rows):
        dist = plain_distribution(params["target"], row, pending, num_tokens, logits_of)
        error = np.abs(dists[i] - dist).max()
        worst = max(worst, float(error))
        if not error <= tolerance:
            raise CertificateError(
                f"rule {rule.name!r}, drafter {drafter.name!r}: with {row} a joint probability "
                f"of {num_tokens} tokens differs from plain decoding's by {error:.2e}"
            )
    return worst


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
    """Tests the jitted decoder's tokens against the target's distribution with a chi-square test.

    The tested tokens are the ``num_tokens`` after the first, whose own distribution is summed
    over.

    Args:
      rule: any lossless rule.
      drafter: by default ``standalone`` over a toy draft.
      vocab_size: V.
      num_draft: K; that of the drafter's tree, where it has one.
      num_tokens: of the joint distribution; the table has V**num_tokens outcomes.
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
            params,
            tokens,
            full(length),
            full(length + 1 + num_tokens),
            jnp.full((batch, 1), -1, jnp.int32),
            make_sampler(row.target, batch, V, seeds),
            make_sampler(row.draft, batch, V, [DRAFT_SEED] * batch),
            system=system,
            slots=slots,
        )
        state, _ = loop.generate(params, state, full(0), jnp.int32(2**30), system=system)
        out = np.asarray(state.tokens)[:, length + 1 : length + 1 + num_tokens]
        np.add.at(counts, tuple(out.T), 1)
    first = reference_distribution(
        logits_of(params["target"], row.prompt), row.target, row.prompt, ()
    )
    dist = sum(
        first[t] * plain_distribution(params["target"], row, int(t), num_tokens, logits_of)
        for t in np.flatnonzero(first > 1e-12)
    )
    p_value = chi_square(counts, dist)
    if not p_value >= alpha:
        raise CertificateError(
            f"rule {rule.name!r}, drafter {system.drafter.name!r}: the decoded tokens do not have "
            f"the target's distribution (chi-square p-value {p_value:.1e} over {trials} trials)"
        )
    return p_value
