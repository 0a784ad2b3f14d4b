"""Files that experiments read: a tiny target with a tokenizer, texts, prompts."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence

from support.tiny_models import random_weights

from configs import train_head_default
from spec_jax.data import python_source, tokens
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.config import ModelConfig
from spec_jax.models.tokenizer import Tokenizer

VOCAB = 300


def held_out(count: int) -> list[str]:
    """The texts of the first held-out modules."""
    return [text for _, text in python_source.documents("held_out")[:count]]


def tokenizer_of(texts: Sequence[str], size: int = VOCAB) -> Tokenizer:
    """A tokenizer that is trained on these texts."""
    return Tokenizer(tokens.train_tokenizer(texts, size))


def tiny_config(num_layers: int = 1, **options) -> ModelConfig:
    """A model of width 16 for ``tokenizer_of``; ``options`` are fields of the config."""
    options = {"num_attention_heads": 2, "max_position_embeddings": 128, **options}
    sizes = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24)
    return ModelConfig(**{**sizes, "num_hidden_layers": num_layers, **options})


def write_lines(path: pathlib.Path, rows: Iterable[object]) -> pathlib.Path:
    """Writes JSON objects, one a line, and returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pieces_of(texts: Sequence[str], end: int) -> list[str]:
    """Pieces of 400 characters of every text, up to ``end``."""
    return [text[i : i + 400] for text in texts for i in range(0, end, 400)]


def experiment_files(folder: pathlib.Path, shape):
    """Writes ``target``, ``texts.jsonl`` and three prompts to a folder; returns the config."""
    texts = held_out(2)
    config = dataclasses.replace(shape, vocab_size=VOCAB, max_position_embeddings=64)
    save_pretrained(folder / "target", random_weights(config), config, tokenizer_of(texts))
    pieces = pieces_of(texts, 4000)
    write_lines(folder / "texts.jsonl", ({"text": piece} for piece in pieces))
    write_lines(folder / "prompts.jsonl", ({"prompt": piece[:9]} for piece in pieces[:3]))
    return config


def head_training(folder: pathlib.Path, objective: str, max_new_tokens: int = 8, windows: int = 2):
    """The config of four steps of training a head on these files."""
    config = train_head_default.get_config()
    config.target, config.objective = str(folder / "target"), objective
    config.data.text, config.data.held_out_share = str(folder / "texts.jsonl"), 0.2
    if objective in ("eagle3", "mtp"):
        config.loss.num_steps = 2
    config.steps, config.batch, config.length, config.log_every = 4, 2, 18, 1
    options = dict(num_prompts=3, max_new_tokens=max_new_tokens, batch=3, windows=windows)
    config.eval.update(every=4, num_draft=2, prompts=str(folder / "prompts.jsonl"), **options)
    return config
