"""Directories of a tiny target and a tiny draft that share a tokenizer, for experiments."""

import pathlib

from support.tiny_models import random_weights

from spec_jax.data import python_source, tokens
from spec_jax.models import checkpoint
from spec_jax.models.config import ModelConfig
from spec_jax.models.tokenizer import Tokenizer


def tiny_pair(folder: pathlib.Path) -> pathlib.Path:
    """Writes ``target`` (two layers) and ``draft`` (one) to a folder, and returns the folder."""
    text = [text for _, text in python_source.documents("held_out")[:3]]
    tokenizer = Tokenizer(tokens.train_tokenizer(text, 300))
    for name, layers in (("target", 2), ("draft", 1)):
        settings = dict(num_attention_heads=2, max_position_embeddings=128, bos_token_id=0)
        options = dict(num_hidden_layers=layers, **settings)
        config = ModelConfig(vocab_size=300, hidden_size=16, intermediate_size=24, **options)
        checkpoint.save_pretrained(folder / name, random_weights(config), config, tokenizer)
    return folder
