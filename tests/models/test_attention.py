"""Attention over the filled part of a cache: equal to all of it, and no more is read."""

import jax
import numpy as np
import pytest
from support.tiny_models import LLAMA, random_weights

from spec_jax.config import SpeculativeConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedModel
from spec_jax.models import transformer
from spec_jax.models.attention import MIN_SLOTS, NUM_PARTS, PREFIXES, attend, attend_prefix

S, N, G, H = MIN_SLOTS + 88, 4, 2, 4  # slots that prefixes do not divide
SIZE = -(-S // NUM_PARTS)
EDGES = [n * SIZE + d for n in range(1, NUM_PARTS) for d in (-1, 0, 1)]

over_prefix, over_all = jax.jit(attend_prefix), jax.jit(attend)


def inputs(mask):
    """Queries, keys and values for this mask bool[B,T,S]."""
    B, T, S = mask.shape
    draw = np.random.RandomState(0).standard_normal
    shapes = ((B, T, N, H), (B * G, S, H), (B * G, S, H))
    return [draw(shape).astype(np.float32) for shape in shapes]


def chains(lengths, T):
    """bool[B,T,S]: the mask of each row's T tokens after as many others as given."""
    ends = np.asarray(lengths)[:, None] + np.arange(T)
    return np.arange(S) <= ends[:, :, None]


def assert_reads_the_prefix_alone(mask):
    q, k, v = inputs(mask)
    np.testing.assert_allclose(over_prefix(q, k, v, mask), over_all(q, k, v, mask), atol=1e-5)
    last = np.flatnonzero(mask.any(axis=(0, 1)))[-1]
    past = (last // SIZE + 1) * SIZE if last < PREFIXES[-1] * SIZE else S
    k[:, past:], v[:, past:] = np.nan, np.nan  # which would reach the output, masked or not
    assert np.isfinite(over_prefix(q, k, v, mask)).all()
    if past < S:
        assert np.isnan(over_all(q, k, v, mask)).any()


@pytest.mark.parametrize("T", [2, 5])
def test_a_window_reads_the_shortest_prefix_that_holds_it(T):
    for edge in EDGES:
        assert_reads_the_prefix_alone(chains([edge - T], T))


@pytest.mark.parametrize("edge", EDGES[:6] + [S])
def test_the_longest_row_decides_for_ragged_rows(edge):
    assert_reads_the_prefix_alone(chains([3, edge - 3, 40], 3))


def test_a_tree_reads_up_to_its_last_node():
    for edge in EDGES[:6] + [S]:
        mask = np.arange(S) < (edge - 4)
        mask = np.broadcast_to(mask, (1, 4, S)).copy()
        mask[0, :, edge - 4 : edge] = np.eye(4, dtype=bool)
        mask[0, :, edge - 4] = True
        assert_reads_the_prefix_alone(mask)


def test_a_layer_of_a_stack_is_read_whole():
    mask = chains([20, 60], 3)
    q, k, v = inputs(mask)
    of_stack = [x.reshape(2, G, S, H) for x in (k, v)]
    assert str(jax.make_jaxpr(attend_prefix)(q, *of_stack, mask)).count("dot_general") == 2
    np.testing.assert_allclose(over_prefix(q, *of_stack, mask), over_all(q, k, v, mask), atol=1e-5)


WINDOWS = [
    (5, S, "cpu", len(PREFIXES) + 1),
    (1, S, "cpu", len(PREFIXES) + 1),
    (5, MIN_SLOTS - 1, "cpu", 1),
    (5, S, "tpu", 1),
    (5, S, "cuda", 1),
]


@pytest.mark.parametrize("T, slots, platform, num_prefixes", WINDOWS)
def test_there_is_a_choice_of_prefixes_on_a_cpu_alone(T, slots, platform, num_prefixes):
    mask = np.ones((1, T, slots), bool)
    traced = jax.jit(attend_prefix).trace(*inputs(mask), mask)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("dot_general") == 2 * num_prefixes  # scores and values


@pytest.mark.exhaustive
@pytest.mark.parametrize("tree", [None, (2, 2)], ids=["chain", "tree"])
def test_decoding_across_prefixes_emits_the_plain_tokens(tree):
    """Rows at different lengths, over half of the cache's prefixes."""
    params = random_weights(LLAMA)
    draw = np.random.RandomState(0).standard_normal
    noisy = jax.tree.map(lambda w: w * (1 + 0.1 * draw(w.shape).astype(np.float32)), params)
    model = transformer.model(LLAMA)
    target, draft = (LoadedModel("tiny", model, p, config=LLAMA) for p in (params, noisy))
    options = dict(tree=tree, rejection_sampling_strategy="greedy")
    config = SpeculativeConfig(num_speculative_tokens=4 if tree is None else 6, **options)
    prompts = [[1, 2, 3], [*range(30)] * 3]
    fast = SpeculativeDecoder(target, draft, config).generate(prompts, 320)
    slow = SpeculativeDecoder(target).generate(prompts, 320)
    for one, other in zip(fast, slow):
        assert len(one.tokens) == 320
        assert list(one.tokens) == list(other.tokens)
        assert 0 < one.stats.accepted < one.stats.drafted
