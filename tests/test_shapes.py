"""Arrays against axis letters."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.errors import ShapeError
from spec_jax.shapes import check_shapes


def test_sizes_are_read_off_and_agree():
    options = dict(logits=(np.zeros((2, 5, 7)), "B T V"), scalar=(np.zeros(()), ""))
    sizes = check_shapes(tokens=(jnp.zeros((2, 5)), "B T"), **options)
    assert sizes == {"B": 2, "T": 5, "V": 7}


def test_known_sizes_hold_and_are_left_alone():
    known = {"B": 2}
    assert check_shapes(known, x=(np.zeros((2, 3)), "B K")) == {"B": 2, "K": 3}
    assert known == {"B": 2}
    with pytest.raises(ShapeError, match=r"x has shape \(4, 3\), so B=4; expected B=2"):
        check_shapes(known, x=(np.zeros((4, 3)), "B K"))


def test_two_arrays_that_disagree_are_an_error_that_names_the_later():
    with pytest.raises(ShapeError, match=r"lengths has shape \(3,\), so B=3; expected B=2"):
        check_shapes(tokens=(np.zeros((2, 5)), "B T"), lengths=(np.zeros(3), "B"))


def test_one_letter_twice_must_be_one_size():
    with pytest.raises(ShapeError, match="K=4; expected K=3"):
        check_shapes(mask=(np.zeros((3, 4)), "K K"))


def test_another_rank_is_an_error_that_states_the_axes():
    with pytest.raises(ShapeError, match=r"tokens has shape \(5,\); expected \[B T\]"):
        check_shapes(tokens=(np.zeros(5), "B T"))


def test_numbers_are_literal_sizes():
    assert check_shapes(x=(np.zeros((2, 1)), "B 1")) == {"B": 2}
    with pytest.raises(ShapeError, match="expected 1=1"):
        check_shapes(x=(np.zeros((2, 3)), "B 1"))
