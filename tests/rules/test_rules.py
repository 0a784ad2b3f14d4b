"""Rules against numbers worked out independently, and their closed forms against sampling."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import rule

from spec_jax.config import STRATEGIES, SpeculativeConfig
from spec_jax.contracts import Noise, Proposal, TargetScores
from spec_jax.errors import ConfigError
from spec_jax.rules import chain, make_rule

V, K, B = 6, 3, 4000


make = functools.partial(rule, num_speculative_tokens=K)


@pytest.fixture(scope="module")
def case():
    """B independent rounds over the same p and q: target scores, a sampled proposal, noise."""
    g = np.random.default_rng(0)
    p_logits, q_logits = 1.2 * g.standard_normal((2, K + 1, V)).astype(np.float32)
    q = jax.nn.softmax(q_logits[:K])
    dists = np.asarray(q, np.float64)
    tokens = np.stack([g.choice(V, B, p=dist / dist.sum()) for dist in dists], axis=1)
    tile = lambda x: jnp.tile(jnp.asarray(x)[None], (B, *[1] * np.ndim(x)))
    scores = TargetScores(tile(p_logits), tile(p_logits))
    proposal = Proposal(
        jnp.asarray(tokens, jnp.int32), jnp.full((B,), K), tile(q), tile(q_logits[:K])
    )
    noise = Noise(
        jnp.asarray(g.random((B, K)), jnp.float32),
        jnp.asarray(g.gumbel(size=(B, K + 1, V)), jnp.float32),
    )
    p = np.asarray(jax.nn.softmax(p_logits), np.float64)
    return p, np.asarray(q, np.float64), scores, proposal, noise


def one_noise(rule, noise):
    return noise if rule.is_coupled else noise.replace(gumbel=noise.gumbel[:, :1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_emitted_tokens_are_accepted_drafts_then_one_token(case, strategy):
    rule = make(strategy)
    _, _, scores, proposal, noise = case
    verdict = rule.accept(scores, proposal, one_noise(rule, noise))
    n, tokens = np.asarray(verdict.n_accept), np.asarray(verdict.tokens)
    drafts = np.asarray(proposal.tokens)
    for i in range(K):
        kept = n > i
        np.testing.assert_array_equal(tokens[kept, i], drafts[kept, i])
        assert (tokens[n < i, i] == 0).all()
    assert n.min() >= 0 and n.max() <= K and ((tokens >= 0) & (tokens < V)).all()


def _rate(verdict, position=0):
    reached = np.asarray(verdict.n_accept) >= position
    return (np.asarray(verdict.n_accept)[reached] > position).mean()


@pytest.mark.parametrize("strategy", ["residual", "typical-acceptance", "greedy"])
def test_acceptance_is_the_closed_form(case, strategy):
    p, q, scores, proposal, noise = case
    rule = make(strategy)
    found = _rate(rule.accept(scores, proposal, one_noise(rule, noise)))
    form = lambda token: rule.expected_acceptance(jnp.asarray(p[0]), jnp.asarray(q[0]), token)
    if strategy == "greedy":
        drafts, count = np.bincount(proposal.tokens[:, 0], minlength=V), B
        expected = sum(n * form(token) for token, n in enumerate(drafts)) / B
    else:
        expected, count = form(0), B
    assert abs(found - expected) < 4 * 0.5 / np.sqrt(count)
    if strategy == "residual":
        assert expected == pytest.approx(np.minimum(p[0], q[0]).sum(), rel=1e-6)


def test_block_accepts_no_fewer_than_residual(case):
    _, _, scores, proposal, noise = case
    lengths = {
        name: np.asarray(make(name).accept(scores, proposal, one_noise(make(name), noise)).n_accept)
        for name in ("residual", "block")
    }
    assert lengths["block"].mean() > lengths["residual"].mean()


def test_coupled_drafts_are_accepted_by_the_closed_form_and_more_than_independent_ones(case):
    p, q, scores, proposal, noise = case
    rule = make("match")
    coupled = jnp.argmax(jnp.log(jnp.asarray(q)) + noise.gumbel[:, :K], -1).astype(jnp.int32)
    shared = _rate(rule.accept(scores, proposal.replace(tokens=coupled), noise))
    independent = _rate(rule.accept(scores, proposal, noise))
    pairs = np.maximum(p[0][None] / p[0][:, None], q[0][None] / q[0][:, None])  # [x,y]
    brute = (1 / pairs.sum(axis=1)).sum()
    closed = float(rule.expected_acceptance(jnp.asarray(p[0]), jnp.asarray(q[0]), 0))
    assert abs(closed - brute) < 1e-6
    assert abs(shared - brute) < 4 * 0.5 / np.sqrt(B)
    assert abs(independent - (p[0] * q[0]).sum()) < 4 * 0.5 / np.sqrt(B)
    total_variation = 0.5 * np.abs(p[0] - q[0]).sum()
    assert closed >= (1 - total_variation) / (1 + total_variation)


def test_coupled_closed_form_with_dropped_tokens():
    p = np.array([0.5, 0.3, 0.2, 0.0])
    q = np.array([0.0, 0.6, 0.3, 0.1])
    with np.errstate(divide="ignore", invalid="ignore"):
        pairs = np.fmax(p[None] / p[:, None], q[None] / q[:, None])
        brute = sum(1 / pairs[x].sum() for x in range(4) if p[x] > 0 and q[x] > 0)
    assert abs(float(chain.expected_match(jnp.asarray(p), jnp.asarray(q), 0)) - brute) < 1e-6


def test_closed_forms_of_a_deterministic_draft():
    p = jnp.asarray([0.2, 0.7, 0.1])
    assert chain.expected_residual(p, None, 1) == p[1]
    assert chain.expected_match(p, None, 2) == p[2]
    assert chain.expected_greedy(p, None, 1) == 1 and chain.expected_greedy(p, None, 0) == 0
    assert chain.expected_typical(0.09, 0.3)(p, None, 0) == 1.0


def test_typical_acceptance_uses_medusas_threshold():
    # Of the second row the entropy decides: its threshold is 0.082.
    p = np.array(
        [[0.5, 0.3, 0.12, 0.08], [0.31, 0.305, 0.3, 0.085], [0.97, 0.01, 0.01, 0.01], [0.25] * 4]
    )
    entropy = -(p * np.log(p + 1e-5)).sum(-1)
    threshold = np.minimum(0.09, 0.3 * np.exp(-entropy))
    rule = make_rule(SpeculativeConfig(rejection_sampling_strategy="typical-acceptance"))
    for row in range(3):
        for token in range(4):
            scores = TargetScores(*[jnp.log(jnp.asarray(p[None, row : row + 2], jnp.float32))] * 2)
            proposal = Proposal(jnp.asarray([[token]]), jnp.asarray([1]))
            noise = Noise(jnp.zeros((1, 1)), jnp.zeros((1, 1, 4)))
            n = int(rule.accept(scores, proposal, noise).n_accept[0])
            assert n == int(p[row, token] > threshold[row])


def test_logit_comparison_rejects_iff_the_draft_logit_is_larger():
    rule = make("logit-comparison")
    ours = jnp.asarray([[[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]])
    for margin, n in ((0.0, 1), (5e-6, 1), (1e-3, 0), (-1.0, 1)):
        theirs = ours[:, :1] + margin
        proposal = Proposal(jnp.asarray([[1]]), jnp.asarray([1]), logits=theirs)
        noise = Noise(jnp.zeros((1, 1)), jnp.zeros((1, 1, 3)))
        verdict = rule.accept(TargetScores(ours, 10 * ours), proposal, noise)
        assert int(verdict.n_accept[0]) == n
        assert int(verdict.tokens[0, n]) == [1, 2][n]


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "logit-comparison"])
@pytest.mark.parametrize("n_draft", [0, 1, K])
def test_drafts_past_a_rows_own_count_are_never_looked_at(case, strategy, n_draft):
    rule = make(strategy)
    _, _, scores, proposal, noise = case
    noise = one_noise(rule, noise)
    short = proposal.replace(n_draft=jnp.full((B,), n_draft))
    garbage = short.replace(
        tokens=jnp.where(jnp.arange(K) < n_draft, short.tokens, 0),
        probs=jnp.where((jnp.arange(K) < n_draft)[:, None], short.probs, jax.nn.one_hot(0, V)),
    )
    a, b = (rule.accept(scores, x, noise) for x in (short, garbage))
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert np.asarray(a.n_accept).max() <= n_draft


def test_equal_distributions_accept_everything_and_an_empty_residual_falls_back_to_p(case):
    _, _, scores, proposal, noise = case
    same = proposal.replace(probs=scores.probs[:, :K])
    for strategy in ("residual", "block"):
        rule = make(strategy)
        verdict = rule.accept(scores, same, one_noise(rule, noise))
        assert (np.asarray(verdict.n_accept) == K).all()
    just_above = noise.replace(uniforms=jnp.full((B, K), 1 - 2**-24), gumbel=noise.gumbel[:, :1])
    tiny = same.replace(probs=same.probs * (1 + 1e-6))  # rejected by rounding alone
    verdict = make("residual").accept(scores, tiny, just_above)
    assert np.isfinite(np.asarray(verdict.replacement)).all()
    np.testing.assert_allclose(np.asarray(verdict.replacement).sum(-1), 1, rtol=1e-5)


def test_disjoint_distributions_accept_nothing():
    p = jnp.log(jnp.asarray([[[0.5, 0.5, 0.0, 0.0]] * 2]))
    proposal = Proposal(jnp.asarray([[2]]), jnp.asarray([1]), jnp.asarray([[[0.0, 0.0, 0.5, 0.5]]]))
    noise = Noise(jnp.zeros((1, 1)), jnp.zeros((1, 1, 4)))
    for strategy in ("residual", "block", "match"):
        verdict = make(strategy).accept(TargetScores(p, p), proposal, noise)
        assert int(verdict.n_accept[0]) == 0 and int(verdict.tokens[0, 0]) in (0, 1)


KWARGS = [
    ({"synthetic_conditional_rates": (0.9, 0.5, 0.1, 0.0)}, (0.9, 0.5, 0.1)),
    ({"synthetic_acceptance_rates": (0.8, 0.4, 0.0)}, (0.8, 0.5, 0.0)),
    ({"synthetic_acceptance_rates": (0.0, 0.0, 0.0)}, (0.0, 0.0, 0.0)),
    ({"synthetic_mean_length": 3.0}, (1.0, 1.0, 0.0)),
    ({"synthetic_mean_length": 1.25}, (0.25, 0.0, 0.0)),
    ({"synthetic_acceptance_rate": 0.0}, (0.0, 0.0, 0.0)),
    ({"synthetic_acceptance_rate": 1.0}, (1.0, 1.0, 1.0)),
]


@pytest.mark.parametrize("kwargs, expected", KWARGS)
def test_synthetic_rates_by_each_meaning(kwargs, expected):
    config = SpeculativeConfig(num_speculative_tokens=K, **kwargs)
    np.testing.assert_allclose(config.synthetic.rates(K), expected, atol=1e-12)


@pytest.mark.parametrize("num_draft, b", [(1, 0.50), (2, 0.62), (4, 0.74), (8, 0.84)])
def test_synthetic_mean_rate_solves_for_the_published_base(num_draft, b):
    config = SpeculativeConfig(num_speculative_tokens=num_draft, synthetic_acceptance_rate=0.5)
    rates = config.synthetic.rates(num_draft)
    assert len(set(rates)) == 1 and abs(rates[0] - b) < 0.006
    assert abs(np.mean([rates[0] ** i for i in range(1, num_draft + 1)]) - 0.5) < 1e-9


def test_synthetic_acceptance_has_the_stated_rates(case):
    _, _, scores, proposal, noise = case
    rule = make(
        "synthetic", synthetic_acceptance_rate=None, synthetic_conditional_rates=(0.9, 0.5, 0.2)
    )
    verdict = rule.accept(scores, proposal, one_noise(rule, noise))
    for i, rate in enumerate((0.9, 0.5, 0.2)):
        n = (np.asarray(verdict.n_accept) >= i).sum()
        assert abs(_rate(verdict, i) - rate) < 4 * 0.5 / np.sqrt(n)


def test_rules_declare_what_they_are():
    lossy = {name for name in STRATEGIES if not make(name).is_lossless}
    assert lossy == {"typical-acceptance", "logit-comparison", "synthetic"}
    assert make("residual") is make("residual")
    with pytest.raises(ConfigError, match="resolve"):
        make_rule(SpeculativeConfig())
