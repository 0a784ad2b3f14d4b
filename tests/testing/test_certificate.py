"""The certificate: lossless rules pass it, every mutation is caught by a named test.

Family-wise error of all chi-square tests together: ALPHA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import changed_draft, rule

from spec_jax import decoding, testing
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Noise, Proposal, TargetScores
from spec_jax.drafters.ngram import ngram
from spec_jax.rules import batched, chain
from spec_jax.sampling import sample
from spec_jax.testing import CertificateError, Row, certify_decoder, certify_rule

ALPHA = 1e-6
NUM_CHI_SQUARE = 8

optimised = jax.jit(  # for tests that run for longer than they compile
    decoding.generate.__wrapped__,
    static_argnames=("system",),
    donate_argnames=("state",),
    compiler_options={"xla_backend_optimization_level": 1},
)


# ------------------------------------------------------------------------ enumeration


@pytest.mark.representatives("own-residual")
@pytest.mark.parametrize("strategy", ["residual", "block"])
@pytest.mark.parametrize("draft", [None, SamplerConfig(temperature=1.0)], ids=["same", "own"])
def test_every_setting_in_one_batch_matches_target_distribution(strategy, draft):
    assert certify_rule(rule(strategy), rows=testing.standard_rows(draft)) <= 1e-6


@pytest.mark.parametrize("strategy", ["residual", "block"])
def test_a_deterministic_drafter_matches_target_distribution(strategy):
    certify_rule(rule(strategy), drafter=ngram())


def test_mixed_temperature_zero_rows_are_argmax_rows():
    rows = [
        Row((0, 1), SamplerConfig(temperature=0.0), SamplerConfig(temperature=1.0)),
        Row((1,), SamplerConfig(temperature=1.0), SamplerConfig(temperature=0.0)),
    ]
    certify_rule(rule("residual"), rows=rows)


@pytest.mark.parametrize("strategy", ["typical-acceptance", "synthetic"])
def test_lossy_rules_fail_the_enumeration(strategy):
    lossy = rule(strategy)
    assert not lossy.is_lossless
    with pytest.raises(CertificateError):
        certify_rule(lossy)


# ------------------------------------------------------------------------- mutations


def test_mutation_wrong_q_is_caught_by_enumeration():
    """The draft is drawn at its temperature and accepted with q of another."""

    def temper(proposal, context):
        return proposal.replace(probs=jax.nn.softmax(jnp.log(proposal.probs) / 1.3, axis=-1))

    drafter = changed_draft(temper)(testing.mock_model(3))
    with pytest.raises(CertificateError, match="reports probability .* and should report"):
        certify_rule(rule("residual"), drafter=drafter)


def hides_its_coins(target, proposal, noise):
    """Accepts anything with probability 0.6 and states the outcome as the coin."""
    return chain.own_token(noise.uniforms < 0.6, target.probs, proposal, noise)


def draws_sharper(target, proposal, noise):
    verdict = chain.residual(target, proposal, noise)
    token = sample(3 * jnp.log(verdict.replacement), noise.gumbel[0])
    at_end = jnp.arange(len(verdict.tokens)) == verdict.n_accept
    return verdict.replace(tokens=jnp.where(at_end, token, verdict.tokens))


def offers_all(target, proposal, noise):
    """What does not count is not rejected, so it is taken for accepted."""
    return chain.residual(
        target, proposal.replace(n_draft=jnp.int32(proposal.tokens.shape[0])), noise
    )


def replaces_the_bonus(target, proposal, noise):
    """A row that ran out of drafts is treated as if its next one had been rejected."""
    verdict = offers_all(target, proposal, noise)
    return verdict.replace(n_accept=jnp.minimum(verdict.n_accept, proposal.n_draft))


RULES = {
    hides_its_coins: "does not flip its coins",
    draws_sharper: "replacement distribution",
    replaces_the_bonus: "replacement distribution",
    offers_all: "should have",
}


@pytest.mark.parametrize("accept", RULES, ids=lambda accept: accept.__name__)
def test_mutations_of_a_rule_are_caught_by_enumeration(accept):
    with pytest.raises(CertificateError, match=RULES[accept]):
        certify_rule(rule("residual")._replace(accept=batched(accept)))


def test_mutation_inclusive_boundary_is_caught_by_a_uniform_of_zero():
    """u = 0 must not accept a draft that the target gives no probability."""
    scores = TargetScores(
        logits=jnp.zeros((1, 2, 3)), processed=jnp.log(jnp.asarray([[[0.0, 0.5, 0.5]] * 2]))
    )
    proposal = Proposal(
        jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32), jnp.ones((1, 1, 3)) / 3
    )
    noise = Noise(jnp.zeros((1, 1)), jnp.zeros((1, 1, 3)))

    for strategy in ("residual", "block"):
        assert rule(strategy).accept(scores, proposal, noise).n_accept == 0


# ------------------------------------------------------------------------ chi-square


TRIALS = [("residual", 5_000), ("residual", 200_000), ("block", 200_000), ("match", 200_000)]


@pytest.mark.representatives("residual-5000")
@pytest.mark.parametrize("strategy, trials", TRIALS)
def test_decoding_matches_target_joint_distribution(strategy, trials):
    options = dict(trials=trials, batch=min(trials, 20_000), run=optimised)
    certify_decoder(rule(strategy), alpha=ALPHA / NUM_CHI_SQUARE, **options)


STRATEGIES = [
    ("residual", SamplerConfig(temperature=1.0)),
    ("block", SamplerConfig(temperature=0.8, top_p=0.9)),
    ("match", SamplerConfig(temperature=1.2, top_k=100)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy, setting", STRATEGIES, ids=["residual", "block", "match"])
def test_decoding_matches_target_distribution_at_vocabulary_4096(strategy, setting):
    """A first token that is certain leads to a context whose distribution is wide."""
    V = 4096
    params = {
        name: testing.toy_params(V, seed, contexts=2, scale=3.0)
        for name, seed in (("target", 3), ("draft", 4))
    }
    sure = params["target"]["logits"].at[0, 7].set(200.0)
    params["target"]["logits"] = sure
    settings = dict(
        row=Row((0, 0), setting, SamplerConfig(temperature=1.0)),
        alpha=ALPHA / NUM_CHI_SQUARE,
        run=optimised,
    )
    options = dict(trials=5_000, batch=1_000, params=params, **settings)
    certify_decoder(rule(strategy), vocab_size=V, num_draft=1, num_tokens=1, **options)


def test_chi_square_pools_rare_outcomes_and_refuses_impossible_ones():
    dist = np.array([0.6, 0.3995, 0.0004, 0.0001, 0.0])
    fair = np.random.default_rng(0).multinomial(10_000, dist)
    assert testing.chi_square(fair, dist) > 1e-3
    assert testing.chi_square(np.array([6500, 3490, 6, 4, 0]), dist) < 1e-6
    assert testing.chi_square(np.array([6000, 3994, 4, 1, 1]), dist) == 0.0


def test_too_few_trials_to_tell_are_refused():
    with pytest.raises(CertificateError, match="trials is 20; a test of 4 tokens jointly needs"):
        certify_decoder(rule("residual"), trials=20, batch=20)
