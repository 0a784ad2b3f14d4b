"""Confidence of a head that has no output for it: fitted to the row's own rounds as it decodes.

The estimate is logistic in features that are known before a token is drawn: the log-odds of the
likeliest token, and the position in the block. After each round every draft that the rule reached
is one observation. The fit is Bayesian: a Gaussian over the weights, one Newton step for each
observation. Its upper bound decides, or a row that began with rejections would stop drafting and
never learn that it should go on.

What is fitted belongs to the row and to this call: it begins anew at every prefill, and a round's
estimate depends only on earlier rounds, whose noise no later round uses. So the output keeps the
target's distribution, and nothing has to be counted (see ``Drafter.has_memory``).

Source: the update is the extended Kalman filter of logistic regression, such as in Murphy,
Probabilistic Machine Learning, section 18.4.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.models.caches.kv import KVCache

NUM_FEATURES = 3
# At first a draft is believed as its distribution says.
PRIOR_MEAN = (0.0, 1.0, 0.0)
PRIOR_SPREAD = (1.0, 0.5, 0.5)  # standard deviations
_LARGEST = 6.0  # log-odds; a probability of 0.9975 or its complement
_PER_POSITION = 0.125  # so that a block's positions are about as large as the other features


@flax.struct.dataclass
class Fit:
    """What a row has learned about its drafts, and the round that it is drafting."""

    mean: jax.Array  # f32[B,F], of the weights
    spread: jax.Array  # f32[B,F,F], their covariance
    features: jax.Array  # f32[B,K,F], of the drafts of this round
    offered: jax.Array  # i32[B], how many of these were offered; 0 between rounds

    @classmethod
    def fresh(cls, batch: int, max_draft: int) -> Fit:
        """Returns what rows know before they have drafted."""
        F = NUM_FEATURES
        mean = jnp.broadcast_to(jnp.asarray(PRIOR_MEAN), (batch, F))
        spread = jnp.broadcast_to(jnp.diag(jnp.asarray(PRIOR_SPREAD) ** 2), (batch, F, F))
        features = jnp.zeros((batch, max_draft, F))
        return cls(mean, spread, features, jnp.zeros((batch,), jnp.int32))

    def estimate(self, features: jax.Array) -> jax.Array:
        """Returns f32[B], the largest probability of acceptance that one deviation allows.

        Args:
          features: f32[B,F], see ``draft_features``.
        """
        middle = jnp.einsum("bf,bf->b", self.mean, features)
        variance = jnp.einsum("bf,bfg,bg->b", features, self.spread, features)
        return jax.nn.sigmoid(middle + jnp.sqrt(jnp.maximum(variance, 0.0)))

    def drafted(self, features: jax.Array, offered: jax.Array) -> Fit:
        """Returns the fit with the drafts of a round, f32[B,K,F], of which i32[B] are offered."""
        padding = self.features.shape[1] - features.shape[1]
        features = jnp.pad(features, ((0, 0), (0, padding), (0, 0)))
        return self.replace(features=features, offered=offered)

    def observed(self, n_accept: jax.Array) -> Fit:
        """Returns the fit after a round, none of whose drafts is left.

        Args:
          n_accept: i32[B], accepted drafts; below 0 in rows that did nothing.
        """
        mean, spread = self.mean, self.spread
        for i in range(self.features.shape[1]):
            x = self.features[:, i]
            is_seen = (i <= n_accept) & (i < self.offered)
            chance = jax.nn.sigmoid(jnp.einsum("bf,bf->b", mean, x))
            slope = chance * (1 - chance)
            along = jnp.einsum("bfg,bg->bf", spread, x)
            gain = along / (1 + slope * jnp.einsum("bf,bf->b", along, x))[:, None]
            surprise = jnp.where(is_seen, (i < n_accept) - chance, 0.0)
            mean = mean + gain * surprise[:, None]
            less = slope[:, None, None] * gain[:, :, None] * along[:, None, :]
            spread = jnp.where(is_seen[:, None, None], spread - less, spread)
        return self.replace(mean=mean, spread=spread, offered=jnp.zeros_like(self.offered))


def draft_features(logits: jax.Array, position: jax.Array) -> jax.Array:
    """Returns f32[B,F] of what is drawn from logits f32[B,V], at a position of the block."""
    best = jax.nn.log_softmax(logits, axis=-1).max(axis=-1)
    odds = best - jnp.log(jnp.maximum(-jnp.expm1(best), 1e-6))
    odds = jnp.clip(jnp.nan_to_num(odds), -_LARGEST, _LARGEST)
    place = jnp.full_like(odds, position * _PER_POSITION)
    return jnp.stack([jnp.ones_like(odds), odds, place], axis=-1)


@flax.struct.dataclass
class FittedState:
    """The state of a drafter that fits its confidence."""

    cache: KVCache
    fit: Fit

    def insert_row(self, row: jax.Array, other: FittedState) -> FittedState:
        """Returns the state with row ``row`` replaced by the only row of ``other``."""
        put = lambda own, new: own.at[row].set(new[0])
        fit = jax.tree.map(put, self.fit, other.fit)
        return FittedState(self.cache.insert_row(row, other.cache), fit)
