"""Directories of a tiny target and a tiny draft that share a tokenizer, for experiments."""

import pathlib

from support.files import held_out, tiny_config, tokenizer_of
from support.tiny_models import random_weights

from spec_jax.models import checkpoint


def tiny_pair(folder: pathlib.Path) -> pathlib.Path:
    """Writes ``target`` (two layers) and ``draft`` (one) to a folder, and returns the folder."""
    tokenizer = tokenizer_of(held_out(3))
    for name, layers in (("target", 2), ("draft", 1)):
        config = tiny_config(layers, bos_token_id=0)
        checkpoint.save_pretrained(folder / name, random_weights(config), config, tokenizer)
    return folder
