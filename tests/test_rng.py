"""Draws are named by what they are for, and by nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from spec_jax import rng
from spec_jax.rng import Purpose

SEEDS = jnp.asarray([3, 0, 2**32 - 1, 7], jnp.uint32)


def data(*args):
    return np.asarray(jax.random.key_data(rng.keys(*args)))


def test_a_draw_does_not_depend_on_slot_batch_size_or_company():
    position = jnp.asarray([4, 9, 1, 0])
    draw = jax.jit(
        lambda s, p: (
            rng.gumbel(rng.keys(s, Purpose.TARGET, p), 6),
            rng.uniform(rng.keys(s, Purpose.ACCEPT, p), 6),
        )
    )
    whole = draw(SEEDS, position)
    for rows in ([3, 1, 2, 0], [2], [1, 1, 0, 1, 2]):
        part = draw(SEEDS[jnp.array(rows)], position[jnp.array(rows)])
        for a, b in zip(part, whole):
            np.testing.assert_array_equal(a, b[np.array(rows)])


def test_jit_and_traced_indices_change_nothing():
    expected = data(SEEDS, Purpose.DRAFT, jnp.arange(4), 2)
    traced = jax.jit(lambda s, i, n: jax.random.key_data(rng.keys(s, Purpose.DRAFT, i, n)))
    np.testing.assert_array_equal(traced(SEEDS, jnp.arange(4), jnp.int32(2)), expected)


def test_every_name_has_a_key_of_its_own():
    """Seeds, purposes, positions, (start, node) pairs and their order."""
    names = {}
    for purpose, start in itertools.product(Purpose, (0, 1, 2, 300)):
        names[purpose, start] = data(SEEDS, purpose, start)
        for node in (0, 1, 2, 300):
            names[purpose, start, node] = data(SEEDS, purpose, start, node)
    keys = np.concatenate(list(names.values()))
    assert len(np.unique(keys, axis=0)) == len(names) * len(SEEDS)


NAMES = st.tuples(
    st.integers(0, 2**32 - 1),
    st.sampled_from(Purpose),
    st.integers(0, 2**31 - 1),
    st.none() | st.integers(0, 2**28 - 1),
)


@settings(max_examples=50)
@given(names=st.lists(NAMES, min_size=2, max_size=6, unique=True))
def test_names_are_packed_without_loss(names):
    """The words of key and counter tell a name back, so equal words mean equal names."""
    words = [(seed, int(rng.pack(s, node)), position) for seed, s, position, node in names]
    for (seed, purpose, position, node), (key, word, counter) in zip(names, words):
        number, code = divmod(word, 8)
        assert (key, Purpose(code), counter) == (seed, purpose, position)
        assert (number - 1 if number else None) == node
    assert len(set(words)) == len(names)


def test_purposes_are_fixed_numbers():
    assert max(Purpose) < 8  # ``pack`` has no room for more
    assert {s.name: int(s) for s in Purpose} == {"TARGET": 0, "DRAFT": 1, "ACCEPT": 2, "REPLACE": 3}


def test_draws_are_the_same_on_every_version():
    """Recorded values: a change here changes what every seed has ever produced."""
    row = rng.keys(jnp.asarray([1234], jnp.uint32), Purpose.TARGET, jnp.asarray([17]))
    assert jax.random.key_data(row).tolist() == [[1860844284, 2962732898]]
    node = rng.keys(jnp.asarray([1234], jnp.uint32), Purpose.DRAFT, jnp.asarray([17]), 3)
    assert jax.random.key_data(node).tolist() == [[598844885, 3394926836]]
    np.testing.assert_allclose(rng.gumbel(row, 3), [[2.996663, -1.1851393, 1.6687585]], rtol=1e-5)
    np.testing.assert_allclose(rng.uniform(row, 3), [[0.9512737, 0.03796303, 0.8282163]], rtol=1e-6)


def test_turns_of_a_list_of_samplers_never_have_one_seed():
    assert [rng.turn_seed(seed, 0) for seed in (0, 7, 2**32 - 1)] == [0, 7, 2**32 - 1]
    assert len({rng.turn_seed(2**32 - 1, turn) for turn in range(1000)}) == 1000
    for turns, apart in ((1000, 1_900_000), (100_000, 11_000)):
        gap = rng.turn_seed(0, 1) * np.arange(1, turns, dtype=np.uint64) % 2**32
        assert np.minimum(gap, 2**32 - gap).min() >= apart


def test_drafts_of_two_requests_never_have_one_seed():
    far = np.random.default_rng(0).integers(2**32, size=2000).astype(np.uint32)
    for own in (0, 7, 2**32 - 1):
        seeds = rng.draft_seeds(jnp.asarray(far), jnp.full(far.shape, own, jnp.uint32))
        assert len(np.unique(seeds)) == len(np.unique(far))
    np.testing.assert_array_equal(rng.draft_seeds(SEEDS, SEEDS), SEEDS)
    # Two seeds meet where their differences, times two odd numbers that differ by one, do.
    at = lambda request, own: int(rng.draft_seeds(jnp.uint32(request), jnp.uint32(own)))
    step = at(0, 1) * pow(at(1, 0), -1, 2**32) * np.arange(1, 30_000, dtype=np.uint64) % 2**32
    assert np.minimum(step, 2**32 - step).min() >= 30_000


def test_the_default_generator_does_not_matter():
    expected = rng.uniform(rng.keys(SEEDS, Purpose.ACCEPT, 5), 4)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(rng.uniform(rng.keys(SEEDS, Purpose.ACCEPT, 5), 4), expected)


@pytest.mark.parametrize(
    ("draw", "expected"), [(rng.uniform, stats.uniform), (rng.gumbel, stats.gumbel_r)]
)
def test_draws_match_their_distribution_within_and_across_keys(draw, expected):
    keys = rng.keys(jnp.full(400, 5, jnp.uint32), Purpose.ACCEPT, jnp.arange(400))
    x = np.asarray(draw(keys, 50))
    assert x.dtype == np.float32 and x.shape == (400, 50) and np.isfinite(x).all()
    for sample in (x.ravel(), x[:, 0]):
        assert stats.kstest(sample, expected.cdf).pvalue > 1e-4
    neighbours = expected.cdf(x[:-1].ravel()), expected.cdf(x[1:].ravel())
    assert abs(np.corrcoef(*neighbours)[0, 1]) < 4.5 / np.sqrt(x[1:].size)


def test_uniforms_stay_below_one():
    x = np.asarray(rng.uniform(rng.keys(SEEDS, Purpose.ACCEPT, 0), 50_000))
    assert x.min() >= 0 and x.max() < 1
