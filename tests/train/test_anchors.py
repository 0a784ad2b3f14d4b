"""Where blocks begin, what counts in them, and how much: by hand, and by loops over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.errors import ConfigError
from spec_jax.train import anchors

# Two turns of an assistant in the first window, one at the end of the second, none in the third.
MASK = np.zeros((3, 12), bool)
MASK[0, [2, 3, 4, 8, 9]] = MASK[1, 9:] = True
OPEN = {0: {2, 3, 8}, 1: {9, 10}, 2: set()}


def test_blocks_begin_where_an_answer_goes_on():
    """At a token that counts and is followed by one, though not at the first of all."""
    found = np.asarray(anchors.can_begin(jnp.asarray(MASK)))
    assert {b: set(np.flatnonzero(row)) for b, row in enumerate(found)} == OPEN
    everywhere = np.asarray(anchors.can_begin(jnp.ones((1, 5), bool)))
    np.testing.assert_array_equal(everywhere, [[False, True, True, True, False]])


@pytest.mark.parametrize("count", [2, 5, 40])
def test_anchors_are_drawn_without_replacement_anew_in_every_step(count):
    draw = jax.jit(anchors.draw_anchors, static_argnums=2)
    rows = []
    for step in range(6):
        places, is_kept = map(np.asarray, draw(jax.random.key(step), jnp.asarray(MASK), count))
        assert places.shape == is_kept.shape == (3, min(count, 12))
        for b in range(3):
            kept = places[b][is_kept[b]].tolist()
            assert kept == sorted(set(kept)) and set(kept) <= OPEN[b]
            assert len(kept) == min(count, len(OPEN[b]))
            assert not places[b][~is_kept[b]].any()
        rows.append(tuple(places[0][is_kept[0]]))
    assert (len(set(rows)) > 1) == (count < 3)


def test_a_draft_counts_if_its_token_and_all_before_it_do():
    """The mask is read at the predicted token: at the end of a turn and of the window."""
    places, is_kept = jnp.asarray([[2, 8], [9, 10], [0, 0]]), jnp.asarray([[1, 1], [1, 1], [0, 0]])
    found = anchors.counted(jnp.asarray(MASK), places, is_kept > 0, 6)  # 8 counts, 5 to 7 do not
    expected = [[[1, 1], [1, 0]], [[1, 1], [1, 0]], np.zeros((2, 2))]
    np.testing.assert_array_equal(found, np.pad(expected, ((0, 0), (0, 0), (0, 4))))


def test_dpace_weights_are_those_of_the_hand_example():
    """p = .6, .2, 1 with a floor of a half: s = .8, .6, 1, products .8, .48, .48."""
    counts = jnp.asarray([[[True] * 3, [True, True, False], [False] * 3]])
    probs = jnp.broadcast_to(jnp.asarray([0.6, 0.2, 1.0]), counts.shape)
    weigh = lambda probs: anchors.weigh_slots("dpace", counts, probs, decay=1.0)
    expected = [[[1.76, 0.96, 0.48], [1.28, 0.48, 0], [0, 0, 0]]]
    np.testing.assert_allclose(weigh(probs), expected, rtol=1e-6)
    assert not np.asarray(jax.grad(lambda p: weigh(p).sum())(probs)).any()
    with pytest.raises(ConfigError, match="slot_weights is 'even'; expected one of decay, dpace"):
        anchors.weigh_slots("even", counts, probs, decay=1.0)
