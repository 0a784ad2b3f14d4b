"""The certificate sees rules and drafters that are wrong only where a probability is near 0 or 1.

Each rule is wrong by less than the tolerance wherever the target is neither sure of a token nor
finds one unlikely.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.rounds import force
from support.decoders import changed_draft

from spec_jax.contracts import Rule
from spec_jax.named import to_rule
from spec_jax.rules import batched, chain, chain_or_tree, tree
from spec_jax.testing import CertificateError
from spec_jax.testing.certificate.forcing import report_range
from spec_jax.testing.certificate.records import Range
from spec_jax.testing.certificate.subjects import make_subject, other_drafters
from spec_jax.testing.oracles import goodness_of_fit


def accepts_when_sure(threshold):
    """Accepts every draft that the target gives more than ``threshold``."""

    def change(accept_row):
        def accept(target, proposal, noise):
            parents = proposal.parents
            parents = jnp.arange(len(proposal.tokens)) if parents is None else parents
            is_sure = target.probs[parents, proposal.tokens] > threshold
            is_sure &= proposal.is_offered
            uniforms = jnp.where(is_sure, 0.0, noise.uniforms)
            verdict = accept_row(target, proposal, noise.replace(uniforms=uniforms))
            return verdict.replace(accept_probs=jnp.where(is_sure, 1.0, verdict.accept_probs))

        return accept

    return change


def of_other_scores(probs_of):
    """Computes the target's distributions from its scores in another way."""

    def change(accept_row):
        def accept(target, proposal, noise):
            other = target.replace(processed=jnp.log(probs_of(target.processed)))
            return accept_row(other, proposal, noise)

        return accept

    return change


def drops_below(least):
    probs = lambda x: jax.nn.softmax(x, axis=-1)
    return of_other_scores(lambda x: jnp.where(probs(x) < least, 0.0, probs(x)))


def raises_to(least):
    return of_other_scores(lambda x: jnp.maximum(jax.nn.softmax(x, axis=-1), least))


in_bfloat16 = of_other_scores(
    lambda x: jax.nn.softmax(x.astype(jnp.bfloat16), axis=-1).astype(jnp.float32)
)
MUTANTS = {
    "sure-.9": accepts_when_sure(0.9),
    "sure-.98": accepts_when_sure(0.98),
    "sure-.999": accepts_when_sure(0.999),
    "drops-1e-4": drops_below(1e-4),
    "raises-1e-4": raises_to(1e-4),
    "bfloat16": in_bfloat16,
    "drops-1e-12": drops_below(1e-12),  # far below the tolerance on probabilities of usual size
    "raises-1e-9": raises_to(1e-9),
}


@functools.cache
def one_draft(drafter=None):
    """Rounds of one draft after texts of one token, of the package's rule."""
    return force(drafter, batch=64)


@pytest.mark.representatives("sure-.999", "drops-1e-4", "bfloat16", "raises-1e-9")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_is_wrong_where_the_target_is_sure_or_a_token_rare_is_caught(name):
    rule = Rule("mutant", batched(MUTANTS[name](chain.residual)), True, needs_probs=True)
    with pytest.raises(CertificateError, match=r"token \d has probability .* should have"):
        one_draft().check(rule)


def test_the_probabilities_that_were_tested_reach_from_underflow_to_certainty():
    found, forced = one_draft().check("residual"), one_draft().forced
    q = report_range(forced, [0])
    for tested in (found.p, q):
        assert tested.low < 1e-37 and tested.gap < 3e-6
    best = np.sort(forced.proposal.probs[:, 0].max(axis=1))
    for low, high in ((0.9, 0.99), (0.99, 0.999), (0.999, 0.9999), (0.9999, 1 - 1e-6)):
        assert ((best > low) & (best < high)).any(), (low, high)
    assert (best == 1).any() and np.isclose(best, 1 / 3, atol=1e-6).any()
    assert Range.of(np.asarray([0.25, 0.75, 1e-50])) == Range(0.25, 0.25)


def normal(probs):
    return probs / probs.sum(axis=-1, keepdims=True)


REPORTS = {
    "raises-1e-7": lambda q: normal(jnp.maximum(q, 1e-7)),
    "drops-1e-7": lambda q: normal(jnp.where(q < 1e-7, 0.0, q)),
    "sure": lambda q: jnp.where(q.max(axis=-1, keepdims=True) > 0.999, jnp.round(q), q),
    "bfloat16": lambda q: normal(q.astype(jnp.bfloat16).astype(jnp.float32)),
}


@pytest.mark.representatives("raises-1e-7")
@pytest.mark.parametrize("name", REPORTS)
def test_a_drafter_whose_report_is_wrong_where_a_token_is_rare_is_caught(name):
    report = lambda proposal, _: proposal.replace(probs=REPORTS[name](proposal.probs))
    rounds = one_draft(changed_draft(report))
    assert not rounds.drafting.draws_as_reported(rounds.forced).all()


def test_the_honest_drafter_draws_as_it_reports():
    assert one_draft().drafting.draws_as_reported(one_draft().forced).all()


@functools.cache
def three_drafts(kind):
    """Rounds of deterministic drafts or of a tree, of the package's rule."""
    subjects = other_drafters(to_rule("residual"), make_subject(None, None, 0))
    subject = next(s for s in subjects if s.drafter.name == kind)
    return force(subject, 3, num_tokens=2, batch=512)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["scripted", "tree"])
@pytest.mark.parametrize("name", ["sure-.9", "sure-.98", "sure-.999", "drops-1e-4", "bfloat16"])
def test_deterministic_drafts_and_trees_show_the_same_defects(kind, name):
    change = MUTANTS[name]
    accept = chain_or_tree(change(chain.residual), change(tree.residual))
    rule = to_rule("residual")._replace(name="mutant", accept=accept)
    with pytest.raises(CertificateError, match=r"token \d has probability .* should have"):
        three_drafts(kind).check(rule)


def test_an_outcome_that_is_nearly_sure_is_tested_by_how_often_others_are_seen():
    dist = np.asarray([1 - 1.5e-6, 1e-6, 5e-7])
    assert goodness_of_fit(np.asarray([4000, 0, 0]), dist) == 1.0
    assert goodness_of_fit(np.asarray([3999, 1, 0]), dist) == pytest.approx(0.006, rel=0.01)
    assert goodness_of_fit(np.asarray([3996, 4, 0]), dist) < 1e-6
    assert goodness_of_fit(np.asarray([4000, 1]), np.asarray([1.0, 0.0])) == 0.0
    assert goodness_of_fit(np.asarray([2000, 2000]), np.asarray([0.6, 0.4])) < 1e-6
