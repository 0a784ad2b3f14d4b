"""The data of ``experiments.train_head``: text, and responses that the target wrote."""

from __future__ import annotations

import collections
import pathlib

import numpy as np
from ml_collections import ConfigDict

from experiments.training import training_text
from spec_jax.data.batches import Corpus
from spec_jax.data.conversations import Encoder
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel
from spec_jax.models.files import parse_json

_WHOLE = ("length", "stop_token", "stop_string")  # how a sound response ends


def load(
    config: ConfigDict, target: LoadedModel, folder: pathlib.Path
) -> tuple[list[Corpus], Corpus]:
    """Returns the training texts, the target's responses last, and a held-out text.

    Args:
      config: See ``configs/train_head_default.py``; its ``data`` names the sources.
      target: The target, whose tokenizer and chat template are used.
      folder: The folder for packed documents; those that it has are not packed again.

    Raises:
      ConfigError: A file that cannot be read, another vocabulary, or a target without a
        tokenizer.
    """
    if target.tokenizer is None:
        raise ConfigError(f"{target.name} has no tokenizer; expected tokenizer.json beside it")
    train, held_out = training_text.load(config.data, target.tokenizer, folder)
    texts = [train]
    if config.data.responses:
        path = pathlib.Path(config.data.responses)
        texts.append(responses(path, Encoder(target.tokenizer)))
    return texts, held_out


def responses(path: pathlib.Path, encoder: Encoder) -> Corpus:
    """Packs the rows of ``experiments.regenerate``; only the response tokens are trained on.

    Rows that ended with a fault are skipped and counted. A separator is put between rows that
    have none.

    Args:
      path: The JSONL file.
      encoder: The encoder, which knows the separator.

    Raises:
      ConfigError: No such file, or a row without ``prompt_ids`` and ``response_ids``.
    """
    ids, mask, number, counts = [], [], 0, collections.Counter()
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            number += 1
            row = parse_json(line)
            if row.get("finish_reason", "length") not in _WHOLE:
                counts["faults"] += 1
                continue
            counts["documents"] += 1
            prompt, response = row["prompt_ids"], row["response_ids"]
            if prompt[0] != encoder.separator_id:
                prompt = [encoder.separator_id, *prompt]
            ids += [prompt, response]
            mask += [np.zeros(len(prompt), bool), np.ones(len(response), bool)]
    except OSError as error:
        raise ConfigError(f"the responses {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path}, line {number} is no response ({error!r}); expected what "
            "experiments.regenerate writes"
        ) from error
    if not ids:
        raise ConfigError(f"{path} holds no response; run experiments.regenerate")
    tokens, is_response = np.concatenate(ids).astype(np.int32), np.concatenate(mask)
    return Corpus(str(path), tokens, is_response, counts=counts)
