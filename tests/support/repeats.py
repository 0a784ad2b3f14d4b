"""A logit processor of a user's own: a pair of tokens costs more each time that it is repeated."""

import jax.numpy as jnp

from spec_jax import Processor
from spec_jax.processors import per_token

COST = 1.5


def init(tokens, length, vocab_size):
    pairs = jnp.zeros((vocab_size, vocab_size), jnp.int32)
    is_in = jnp.arange(1, len(tokens)) < length
    pairs = pairs.at[tokens[:-1], tokens[1:]].add(is_in.astype(jnp.int32))
    return {"pairs": pairs, "last": tokens[jnp.maximum(length - 1, 0)].astype(jnp.int32)}


def apply(state, logits):
    return logits - COST * state["pairs"][state["last"]]


def advance(state, token):
    return {"pairs": state["pairs"].at[state["last"], token].add(1), "last": token}


REPEATS = Processor("repeats", *per_token(init, apply, advance))
