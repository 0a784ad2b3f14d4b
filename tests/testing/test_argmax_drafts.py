"""Argmax drafts that are accepted as if they were drawn: biased, by enumeration and certificate."""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from conformance.rounds import force
from oracles.argmax_drafts import P, Q, first_token

from docs.examples import argmax_drafts
from spec_jax.contracts import Noise, Proposal, TargetScores
from spec_jax.named import to_rule
from spec_jax.testing import CertificateError


def test_the_first_token_of_the_published_example():
    assert first_token(P, Q, is_drawn=True) == list(P)
    assert first_token(P, Q) == [Fraction(5, 6), Fraction(1, 6), 0]


def of_rule(rule, p, q):
    """The same distribution by what the rule states, with its coin forced to either side."""
    logits = lambda values: jnp.log(jnp.asarray([list(map(float, v)) for v in values]))[None]
    scores = TargetScores(logits([p, p]), logits([p, p]))
    draft = jnp.asarray([[int(np.argmax(q))]])
    proposal = Proposal(draft, jnp.asarray([1]), logits=logits([q]))
    found = np.zeros(len(p))
    for uniform in (0.0, 1 - 2**-24):
        noise = Noise(jnp.full((1, 1), uniform), jnp.zeros((1, 1, len(p))))
        verdict = rule.accept(scores, proposal, noise)
        coin = float(verdict.accept_probs[0, 0])
        if verdict.n_accept[0]:
            found[int(draft[0, 0])] += coin
        else:
            found += (1 - coin) * np.asarray(verdict.replacement[0])
    return found


def test_the_restated_rule_has_this_distribution():
    for p, q in [(P, Q), (P, (Fraction(2, 10), Fraction(5, 10), Fraction(3, 10)))]:
        want = [float(x) for x in first_token(p, q)]
        np.testing.assert_allclose(of_rule(argmax_drafts.rule, p, q), want, atol=1e-6)
        assert np.abs(np.subtract(want, [float(x) for x in p])).max() > 0.1
        exact = of_rule(to_rule("residual"), p, q)
        np.testing.assert_allclose(exact, [float(x) for x in p], atol=1e-6)


def test_the_certificate_refuses_it_and_accepts_point_masses():
    """One round of it, as a certificate begins; docs/peers.md has the whole certificates."""

    def check(rule):
        return force(argmax_drafts.make, num_rows=2, rule=rule, batch=64).check(rule)

    found = check("residual")
    assert found.error <= 1e-6 and found.num_outcomes > 10
    with pytest.raises(CertificateError, match=r"token \d has probability [01]\.\d+ and should"):
        check(argmax_drafts.rule)
