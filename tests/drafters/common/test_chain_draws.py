"""How drafts are drawn: greedily by a shortcut, for a coupled rule with the rule's own noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import rule

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context
from spec_jax.decoding.round import round_noise
from spec_jax.drafters.common.chain import Drafted, draft_chain
from spec_jax.drafters.common.tree import draft_tree
from spec_jax.sampling import make_sampler
from spec_jax.tree import Tree

LOGITS = np.asarray(
    [
        [0.5, 2.0, -1.0, 2.0],  # a tie: the first one
        [0.5, np.nan, 3.0, np.nan],
        [np.inf, 1.0, np.inf, -np.inf],
        [-np.inf] * 4,
        [-np.inf, -np.inf, -5.0, -np.inf],
        [-np.inf, np.nan, np.inf, 0.0],
    ],
    np.float32,
)


def draw(has_probs, config, confidence=None, stop_below=0.0):
    B, V = LOGITS.shape
    sampler, length = make_sampler(config, B, V), jnp.zeros((B,), jnp.int32)
    sampler = sampler.start(jnp.zeros((B, 1), jnp.int32), length, V)
    options = dict(is_coupled=False, has_probs=has_probs, has_logits=False, stop_below=stop_below)
    context = Context(jnp.zeros((B, 8), jnp.int32), length, sampler, sampler.seed, **options)
    chain = Drafted.none(context, 1, V)
    token, drafted = chain.add(jnp.asarray(LOGITS), context, jnp.int32(1), confidence)
    return np.asarray(token), drafted.n_draft > 0, np.asarray(drafted.is_sound), drafted.out


def test_a_greedy_draft_is_the_argmax_and_offered_where_it_is_finite():
    token, is_offered, is_sound, out = draw(False, SamplerConfig())
    np.testing.assert_array_equal(token, np.argmax(LOGITS, axis=1))
    best = LOGITS[np.arange(len(LOGITS)), token]
    np.testing.assert_array_equal(is_offered, np.isfinite(best))
    np.testing.assert_array_equal(is_sound, np.isfinite(best) | np.isneginf(best))  # all forbidden
    np.testing.assert_array_equal(out["tokens"][:, 0], token)


def test_it_is_the_same_where_the_rule_reads_the_distribution():
    bias = SamplerConfig(logit_bias={0: 4.0})
    for config in (SamplerConfig(), bias):
        *expected, _ = draw(False, config)
        *found, out = draw(True, config)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)
        token, is_offered, _ = found
        point = np.eye(LOGITS.shape[1])[token[is_offered]]
        np.testing.assert_array_equal(np.asarray(out["probs"])[is_offered, 0], point)


def test_a_head_that_is_not_finite_is_unsound_though_it_is_confident_in_nothing():
    _, _, expected, _ = draw(False, SamplerConfig())
    _, is_offered, is_sound, _ = draw(False, SamplerConfig(), jnp.full(len(LOGITS), jnp.nan), 0.3)
    np.testing.assert_array_equal(is_sound, expected)
    assert not is_sound.all() and not is_offered.any()


# A tree, or None; then of each draft the depth of its parent and its rank among the children.
SHAPES = {
    "chain": (None, ((0, 0), (1, 0), (2, 0))),
    "tree": (Tree((0, 0, 1, 3)), ((0, 0), (0, 1), (1, 0), (2, 0))),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_from_the_targets_distribution_is_the_token_of_a_coupled_rule(shape):
    """At every depth, whatever seed the draft's sampler has; its siblings are the next best."""
    tree, places = SHAPES[shape]
    length = jnp.asarray([3, 0, 7], jnp.int32)
    B, V = len(length), 6
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((B, V)), jnp.float32)
    sampler = make_sampler(SamplerConfig(temperature=1.0, seed=1), B, V)
    own = sampler.replace(seed=sampler.seed + 9)
    options = dict(is_coupled=True, has_probs=False, has_logits=False)
    context = Context(jnp.zeros((B, 12), jnp.int32), length, own, sampler.seed, **options)

    def advance(carry, tokens, *place):  # the same logits after every token
        like = logits if tree is None else logits[:, None]
        return jnp.broadcast_to(like, (*tokens.shape, V)), carry

    @jax.jit
    def draft():
        noise = round_noise(rule("match"), sampler, length, 3, V).gumbel
        if tree is None:
            return draft_chain(logits, (), advance, context, len(places))[0].tokens, noise
        return draft_tree(logits, (), advance, context, len(places), tree)[0].tokens, noise

    tokens, noise = draft()
    ranked = np.argsort(-(logits[:, None] + noise), axis=2)
    expected = np.stack([ranked[:, depth, rank] for depth, rank in places], axis=1)
    np.testing.assert_array_equal(tokens, expected)
