"""The documents' drafter with a state conforms, and with a defect planted in it it does not."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.testing import ConformanceError, check_conformance, mock_model
from spec_jax.testing.conformance import ROUNDS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "write_a_drafter.md"
SOURCE = re.search(r"import functools\n.*?\n\nsampler = ", PAGE.read_text(), re.DOTALL)[0]
# What is replaced, by what, and the check that finds it.
DEFECTS = {
    "a rejected draft stays": ("shape[1]) < n[:, None]", "shape[1]) <= n[:, None]", "states"),
    "a finished row changes": (
        'last = jnp.where(n > 0, newest, state["last"])',
        "last = newest",
        "states",
    ),
    "drafting changes the state": (
        "return proposal, state  #",
        'return proposal, {**state, "last": proposal.tokens[:, 0]}  #',
        "states",
    ),
    "a token is counted after itself": (
        'jnp.concatenate([state["last"][:, None], tokens[:, :-1]], axis=1)',
        "tokens",
        "states",
    ),
    "the prompt's padding counts": (
        "after, index < lengths[:, None])",
        "after, index >= 0)",
        "states",
    ),
    "the pending token is not the prompt's": (
        "index == lengths[:, None] - 1, pending",
        "index < 0, pending",
        "states",
    ),
    "all rows commit as many tokens": ("shape[1]) < n[:, None]", "shape[1]) < n.max()", "states"),
    "a row reads its neighbour": (
        "logits_after = lambda token: jnp.log(state[",
        "rows = jnp.roll(rows, 1); logits_after = lambda token: jnp.log(state[",
        "rows",
    ),
    "a row goes into another's place": ("at[row].set(one[0])", "at[0].set(one[0])", "insert"),
    "an inserted row keeps the counts": (
        "lambda all_rows, one: all_rows.at[row].set(one[0])",
        "lambda all_rows, one: all_rows if one.ndim > 1 else all_rows.at[row].set(one[0])",
        "insert",
    ),
    "it drafts what is no token": (
        "return proposal, state  #",
        "return proposal.replace(tokens=proposal.tokens + 7), state  #",
        "tokens",
    ),
}


def decoder(source):
    names = {"jax": jax, "jnp": jnp}
    exec(source.removesuffix("sampler = "), names)
    config = SpeculativeConfig(num_speculative_tokens=3, rejection_sampling_strategy="match")
    return SpeculativeDecoder(mock_model(vocab_size=8), config=config, drafter=names["bigrams"](8))


def test_it_conforms():
    check_conformance(decoder(SOURCE), ROUNDS)


@pytest.mark.representatives("a rejected draft stays", "a row reads its neighbour")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(defect):
    old, new, check = DEFECTS[defect]
    assert SOURCE.count(old) == 1
    with pytest.raises(ConformanceError, match=f"^{check} of drafter 'bigrams'"):
        check_conformance(decoder(SOURCE.replace(old, new)), ROUNDS)
