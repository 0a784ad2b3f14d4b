"""Acceptance at given rates, whatever the tokens: for benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from spec_jax.config import SyntheticConfig
from spec_jax.contracts import Noise, Proposal, TargetScores, Verdict
from spec_jax.rules.chain import own_token


def accept_at(conditional_rates: tuple[float, ...]) -> Callable[..., Verdict]:
    """Accepts draft i with ``conditional_rates[i]``, whatever it is. Lossy: for benchmarks."""

    def accept(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
        K = proposal.tokens.shape[0]
        rates = jnp.asarray(conditional_rates[:K], jnp.float32)
        coins = jnp.where(proposal.is_offered, rates, 0.0)
        verdict = own_token(noise.uniforms < coins, target.probs, proposal, noise)
        return verdict.replace(accept_probs=coins)

    return accept


def synthetic_rates(config: SyntheticConfig, num_draft: int) -> tuple[float, ...]:
    """Returns the conditional acceptance rate of each of K positions.

    A mean rate r solves ``(1/K) sum_{i=1..K} b**i = r`` for b; a mean length counts the
    target's own token and fills positions from the front.

    Args:
      config: any way of stating the rates.
      num_draft: K.
    """
    K = num_draft
    if config.conditional_rates is not None:
        return config.conditional_rates[:K]
    if config.acceptance_rates is not None:
        rates = config.acceptance_rates[:K]
        before = (1.0, *rates)
        return tuple(r / b if b > 0 else 0.0 for r, b in zip(rates, before))
    if config.mean_length is not None:
        drafts = config.mean_length - 1
        return tuple(min(max(drafts - i, 0.0), 1.0) for i in range(K))
    rate = config.acceptance_rate
    if rate in (0, 1):
        return (float(rate),) * K
    low = 0.0
    high = 1.0
    for _ in range(60):
        b = (low + high) / 2
        mean = sum(b**i for i in range(1, K + 1)) / K
        low, high = (b, high) if mean < rate else (low, b)
    return ((low + high) / 2,) * K
