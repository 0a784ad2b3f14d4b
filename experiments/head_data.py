"""What ``experiments.train_head`` trains on: packed text, and responses of the target itself."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from ml_collections import ConfigDict

from spec_jax.data import python_source, tokens
from spec_jax.data.batches import Text
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel


def load(config: ConfigDict, target: LoadedModel) -> tuple[list[Text], Text]:
    """The training texts (the target's responses second, where there are any), and a held-out one.

    Raises:
      ConfigError: a file that cannot be read, or a target without a tokenizer.
    """
    data = config.data
    if data.text == "stdlib":
        if target.tokenizer is None:
            raise ConfigError(f"{target.name} has no tokenizer; expected tokenizer.json")
        backend = target.tokenizer.backend
        train = python_source.documents("train", tests_share=data.tests_share)
        texts = [Text("the library's source", tokens.pack(backend, train))]
        held_out = Text(
            "held-out modules", tokens.pack(backend, python_source.documents("held_out"))
        )
    else:
        raise ConfigError(f"data.text is {data.text!r}; expected 'stdlib'")
    if data.responses:
        texts.append(responses(pathlib.Path(data.responses)))
    return texts, held_out


def responses(path: pathlib.Path) -> Text:
    """The rows that ``experiments.regenerate`` wrote, packed; what the target wrote counts."""
    ids, mask = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids += [row["prompt"], row["tokens"]]
        mask += [np.zeros(len(row["prompt"]), bool), np.ones(len(row["tokens"]), bool)]
    return Text(str(path), np.concatenate(ids).astype(np.int32), np.concatenate(mask))
