"""Plain rows that end with the cache are those of a pass without one.

Prompts leave room for 1 to 5 tokens. With what a round writes ahead they fill every slot there is.
One row begins earlier, so that those that have ended stay while it goes on. Drafted rows are held
against plain ones by the conformance of every kind.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import BAMBA, LLAMA, MAMBA2, loaded

from spec_jax import SpeculativeDecoder
from spec_jax.models import transformer

LIMIT = 127  # of the 128 slots that decoding allocates
ROOMS = (1, 2, 3, 4, 5, 60)  # tokens that are left to a prompt


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [LLAMA, MAMBA2, BAMBA], ids=["llama", "mamba2", "bamba"])
def test_plain_rows_that_fill_the_cache_are_those_of_a_pass_without_one(config):
    target = loaded(config, "t")
    text = np.random.default_rng(0).integers(0, 9, 12).tolist() * LIMIT
    prompts = [text[i : i + LIMIT - room] for i, room in enumerate(ROOMS)]
    rows = SpeculativeDecoder(target).generate(prompts, max_length=LIMIT, stop_tokens=())
    assert [len(row.tokens) for row in rows] == list(ROOMS)
    whole = jnp.asarray([[*prompt, *row.tokens] for prompt, row in zip(prompts, rows)])
    best = np.asarray(transformer.logits(target.params, whole, config=config)).argmax(axis=-1)
    for row, room, tokens in zip(rows, ROOMS, best):
        assert list(row.tokens) == tokens[LIMIT - room - 1 : LIMIT - 1].tolist()
