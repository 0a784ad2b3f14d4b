"""Acceptance rules for a chain of drafts, each written for one row.

Notation, as in the papers: ``p[i]`` is the target's distribution of the token after node i,
and ``q[i]`` the distribution that draft ``i+1`` was drawn from; node 0 is the pending token. A
rule returns how many drafts it accepts, one token of the target's after them, the probability
of each of its coins, and the distribution of that last token. Uniforms lie in [0, 1) and the
comparison is strict, so a token of probability zero is never accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from spec_jax.contracts import Noise, Proposal, TargetScores, Verdict
from spec_jax.sampling import argmax, sample

LOGIT_MARGIN = 1e-5


def _at(rows_KV, tokens_K):
    return jnp.take_along_axis(rows_KV, tokens_K[:, None], axis=1)[:, 0]


def _leading(is_accepted_K):
    """Returns i32[], how many drafts are accepted before the first that is not."""
    return jnp.cumprod(is_accepted_K.astype(jnp.int32)).sum()


def _verdict(n_accept, proposal: Proposal, token, accept_probs, replacement) -> Verdict:
    index = jnp.arange(proposal.tokens.shape[0] + 1)
    drafts = jnp.append(proposal.tokens, 0)
    tokens = jnp.where(index < n_accept, drafts, jnp.where(index == n_accept, token, 0))
    return Verdict(n_accept, tokens, accept_probs, replacement)


def _draft_distribution(proposal: Proposal, vocab_size: int):
    """Returns q[K,V]; a deterministic draft is a point mass."""
    if proposal.probs is None:
        return jax.nn.one_hot(proposal.tokens, vocab_size, dtype=jnp.float32)
    return proposal.probs


def replace(
    weights_V: jax.Array, fallback_V: jax.Array, gumbel_V: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws the token that replaces the first rejected draft.

    Args:
      weights_V: f32[V], what is left of the target's mass, not normalised.
      fallback_V: f32[V], the distribution where nothing is left, as when p equals q and only
        rounding rejected: p itself.
      gumbel_V: f32[V], noise.

    Returns:
      f32[V], the distribution, and i32[], the token.
    """
    mass = weights_V.sum()
    dist = jnp.where(mass > 0, weights_V / jnp.where(mass > 0, mass, 1.0), fallback_V)
    return dist, sample(jnp.log(dist), gumbel_V)


def residual(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Accepts d with probability min(1, p(d)/q(d)); else draws from norm(max(p - q, 0)).

    Lossless; accepts with probability sum(min(p, q)).
    Source: Leviathan et al., arXiv 2211.17192, Algorithm 1; Chen et al., arXiv 2302.01318.

    Args:
      target: the target's scores of one row, f32[K+1,V].
      proposal: the row's drafts i32[K], with their distributions f32[K,V] if they were drawn.
      noise: coins f32[K], and Gumbel noise f32[1,V] of the last token.
    """
    p = target.probs
    is_draft = proposal.is_offered
    q = _draft_distribution(proposal, p.shape[-1])
    p_d = _at(p[:-1], proposal.tokens)
    q_d = _at(q, proposal.tokens)
    n_accept = _leading((noise.uniforms * q_d < p_d) & is_draft)
    # After the row's last draft there is nothing to subtract: the token is the bonus token.
    q_next = jnp.where(n_accept < proposal.n_draft, q[jnp.minimum(n_accept, len(q) - 1)], 0.0)
    dist, token = replace(jnp.maximum(p[n_accept] - q_next, 0.0), p[n_accept], noise.gumbel[0])
    coins = jnp.where(is_draft & (p_d > 0), jnp.minimum(1.0, p_d / jnp.maximum(q_d, p_d)), 0.0)
    return _verdict(n_accept, proposal, token, coins, dist)


def block(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Accepts the longest prefix of the block whose coin succeeds.

    Lossless, and no lossless rule for one chain accepts more tokens on average.
    Source: Sun et al., arXiv 2403.10444, Algorithm 2.

    Args:
      target: the target's scores of one row, f32[K+1,V].
      proposal: the row's drafts i32[K], with their distributions f32[K,V] if they were drawn.
      noise: coins f32[K], and Gumbel noise f32[1,V] of the last token.
    """
    p = target.probs
    n_draft = proposal.n_draft
    q = _draft_distribution(proposal, p.shape[-1])
    K = proposal.tokens.shape[0]
    p_d = _at(p[:-1], proposal.tokens)
    q_d = _at(q, proposal.tokens)
    ratio = jnp.where(p_d > 0, p_d / jnp.where(q_d > 0, q_d, 1.0), 0.0)
    reach = [jnp.float32(1.0)]
    for i in range(K):
        reach.append(jnp.minimum(reach[-1] * ratio[i], 1.0))
    reach = jnp.stack(reach)  # P_0 .. P_K of the paper
    left = jnp.maximum(reach[:-1, None] * p[:-1] - q, 0.0)  # row i: what q[i] leaves of P_i p[i]
    mass = jnp.append(left.sum(axis=-1), 0.0)[1:]
    size = jnp.arange(1, K + 1)
    room = mass + 1.0 - reach[1:]
    coins = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 0.0)
    coins = jnp.where(size < n_draft, coins, jnp.where(size == n_draft, reach[1:], 0.0))
    n_accept = jnp.where(noise.uniforms < coins, size, 0).max()
    weights = jnp.where(n_accept < n_draft, left[jnp.minimum(n_accept, K - 1)], p[n_accept])
    dist, token = replace(weights, p[n_accept], noise.gumbel[0])
    return _verdict(n_accept, proposal, token, coins, dist)


def _match(scores, proposal: Proposal) -> Verdict:
    own = argmax(scores)
    is_accepted = (proposal.tokens == own[:-1]) & proposal.is_offered
    n_accept = _leading(is_accepted)
    dist = jax.nn.one_hot(own[n_accept], scores.shape[-1], dtype=jnp.float32)
    return _verdict(n_accept, proposal, own[n_accept], is_accepted.astype(jnp.float32), dist)


def greedy(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Accepts the target's argmax and nothing else. Lossless at temperature 0.

    Args:
      target: the target's scores of one row, f32[K+1,V].
      proposal: the row's drafts i32[K], with their distributions f32[K,V] if they were drawn.
      noise: unused.
    """
    del noise
    return _match(target.processed, proposal)


def match(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Samples the target's own token at every position and accepts drafts equal to it.

    Lossless for any draft. With noise keyed by position the tokens even equal those of plain
    decoding, whatever is drafted. A draft drawn with the same noise is accepted with
    probability sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x)).
    Source: Gumbel-max sampling shared between two distributions, Daliri et al., arXiv 2408.07978.

    Args:
      target: the target's scores of one row, f32[K+1,V].
      proposal: the row's drafts i32[K], with their distributions f32[K,V] if they were drawn.
      noise: Gumbel noise f32[K+1,V], one vector a position; the coins are unused.
    """
    return _match(target.processed + noise.gumbel, proposal)


def typical_acceptance(epsilon: float, delta: float) -> Callable[..., Verdict]:
    """Returns the rule that accepts d iff p(d) > min(epsilon, delta * exp(-H(p))).

    Lossy: it favours likely tokens.
    Source: Medusa, arXiv 2401.10774, section 2.3.1.

    Args:
      epsilon: largest threshold.
      delta: factor of the threshold that falls with the entropy H, in nats.
    """

    def accept(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
        p = target.probs
        is_accepted = _at(p[:-1], proposal.tokens) > _typical_threshold(p[:-1], epsilon, delta)
        return own_token(is_accepted & proposal.is_offered, p, proposal, noise)

    return accept


def _typical_threshold(p, epsilon, delta):
    entropy = -(p * jnp.log(p + 1e-5)).sum(axis=-1)  # nats
    return jnp.minimum(epsilon, delta * jnp.exp(-entropy))


def own_token(is_accepted: jax.Array, p: jax.Array, proposal: Proposal, noise: Noise) -> Verdict:
    """The verdict of a lossy rule, which draws the token after the accepted ones from p itself.

    Args:
      is_accepted: bool[K], by draft; those after the first False are rejected too.
      p: f32[K+1,V], the target's distributions.
      proposal: what was drafted.
      noise: of which the Gumbel part is used.
    """
    n_accept = _leading(is_accepted)
    dist, token = replace(p[n_accept], p[n_accept], noise.gumbel[0])
    return _verdict(n_accept, proposal, token, is_accepted.astype(jnp.float32), dist)


def accept_at(conditional_rates: tuple[float, ...]) -> Callable[..., Verdict]:
    """Accepts draft i with ``conditional_rates[i]``, whatever it is. Lossy: for benchmarks."""

    def accept(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
        K = proposal.tokens.shape[0]
        rates = jnp.asarray(conditional_rates[:K], jnp.float32)
        coins = jnp.where(proposal.is_offered, rates, 0.0)
        verdict = own_token(noise.uniforms < coins, target.probs, proposal, noise)
        return verdict.replace(accept_probs=coins)

    return accept


def logit_comparison(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Rejects d iff the draft's raw logit exceeds the target's by more than 1e-5.

    Lossy: raw logits of two models share no scale.
    Source: the strategy of this name in Modular's MAX.

    Args:
      target: the target's scores of one row, f32[K+1,V].
      proposal: the row's drafts i32[K], with the draft's raw logits f32[K,V].
      noise: Gumbel noise f32[1,V] of the last token; the coins are unused.
    """
    ours = target.logits[:-1]
    theirs = proposal.logits
    is_rejected = _at(theirs, proposal.tokens) > _at(ours, proposal.tokens) + LOGIT_MARGIN
    return own_token(~is_rejected & proposal.is_offered, target.probs, proposal, noise)


def expected_residual(p: jax.Array, q: jax.Array | None, token: jax.Array) -> jax.Array:
    """Returns sum(min(p, q)), or p(token) where the draft is deterministic.

    Args:
      p: f32[V], the target's distribution.
      q: f32[V], the draft's; None if it is deterministic.
      token: i32[], the draft.
    """
    return p[token] if q is None else jnp.minimum(p, q).sum()


def expected_greedy(p: jax.Array, q: jax.Array | None, token: jax.Array) -> jax.Array:
    """Returns 1 where the token is the argmax, else 0.

    Args:
      p: f32[V], the target's distribution.
      q: f32[V], the draft's; None if it is deterministic.
      token: i32[], the draft.
    """
    del q
    return (jnp.argmax(p) == token).astype(jnp.float32)


def expected_match(p: jax.Array, q: jax.Array | None, token: jax.Array) -> jax.Array:
    """Returns the chance that a coupled draft is the target's sample; p(token) if deterministic.

    sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x)): sorted by p/q, the y at or above x take the
    first term and those below the second, so two cumulative sums give the inner sum.

    Args:
      p: f32[V], the target's distribution.
      q: f32[V], the draft's; None if it is deterministic.
      token: i32[], the draft.
    """
    if q is None:
        return p[token]
    is_both = (p > 0) & (q > 0)
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), jnp.inf)
    order = jnp.argsort(ratio)
    p_s = p[order]
    q_s = q[order]
    below_q = jnp.cumsum(q_s) - q_s
    from_p = p_s.sum() - (jnp.cumsum(p_s) - p_s)

    def safe(x):
        return jnp.where(is_both[order], x, 1.0)

    inner = from_p / safe(p_s) + below_q / safe(q_s)
    return jnp.where(is_both[order], 1.0 / inner, 0.0).sum()


def expected_typical(epsilon: float, delta: float) -> Callable[..., jax.Array]:
    """Returns a function of (p, q, token): the draft's mass on the tokens above the threshold."""

    def expected(p, q, token):
        is_typical = p > _typical_threshold(p, epsilon, delta)
        if q is None:
            return is_typical[token].astype(jnp.float32)
        return jnp.where(is_typical, q, 0.0).sum()

    return expected
