"""Heads of ``block_kind`` with random weights."""

import dataclasses

import jax
from support.block_kind import BlockConfig

from spec_jax.loading import random_head
from spec_jax.models.config import ModelConfig


def new(width, vocab_size, taps=(1,), num_layers=2):
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    layer = ModelConfig(
        vocab_size=vocab_size + 1,
        hidden_size=width,
        intermediate_size=6,
        num_hidden_layers=num_layers,
        max_position_embeddings=128,
        model_type="qwen3",
        **heads,
    )
    return BlockConfig(layer, vocab_size, taps)


def make_head(config, seed=0, scale=8.0):
    """A head of random weights, large enough that its distributions are not flat."""
    head = random_head(config, jax.random.key(seed))
    return dataclasses.replace(head, params=jax.tree.map(lambda w: scale * w, head.params))
