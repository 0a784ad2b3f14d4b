"""The data of ``experiments.train_head``: packed text, and responses that the target wrote."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from ml_collections import ConfigDict

from spec_jax import processes
from spec_jax.data import packed, python_source, tokens
from spec_jax.data.batches import Corpus
from spec_jax.data.conversations import Encoder, read_documents
from spec_jax.data.splits import SPLITS
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel
from spec_jax.models import files

STDLIB = "stdlib"
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
    data = config.data
    if target.tokenizer is None:
        raise ConfigError(f"{target.name} has no tokenizer; expected tokenizer.json beside it")
    if data.text == STDLIB:
        pack = lambda split, **options: tokens.pack(
            target.tokenizer.backend, python_source.documents(split, **options)
        )
        train = Corpus("the library's source", pack("train", tests_share=data.tests_share))
        held_out = Corpus("its held-out modules", pack("held_out"))
    else:
        train, held_out = (_packed(data, split, target, folder) for split in SPLITS)
    texts = [train]
    if data.responses:
        texts.append(responses(pathlib.Path(data.responses), Encoder(target.tokenizer)))
    return texts, held_out


def _packed(data: ConfigDict, split: str, target: LoadedModel, folder: pathlib.Path) -> Corpus:
    """Returns one split of the documents that ``data.text`` names; they are packed once.

    Of several processes the first one packs; all of them read its files.
    """
    paths = [path.strip() for path in data.text.split(",")]
    about = {"paths": paths, "held_out_share": data.held_out_share, "cut": data.max_length}
    try:
        found = packed.load_packed(folder, split, target.tokenizer)
    except ConfigError:
        found = None
    is_packed = found is not None and {name: found.info.get(name) for name in about} == about
    if not processes.from_writer(is_packed):
        documents = read_documents(
            paths, Encoder(target.tokenizer), split=split, held_out_share=data.held_out_share,
            max_length=data.max_length or None,
        )  # fmt: skip
        print(f"packing {', '.join(paths)} for {split}", flush=True)
        files.write_once(lambda: packed.write_packed(
            folder, split, documents, target.tokenizer, sources=paths, about=about
        ))  # fmt: skip
        found = None
    if found is None:
        found = packed.load_packed(folder, split, target.tokenizer)
    return Corpus(f"{data.text} ({split})", found.tokens, found.mask)


def responses(path: pathlib.Path, encoder: Encoder) -> Corpus:
    """Packs the rows of ``experiments.regenerate``; only the response tokens are trained on.

    Rows that ended with a fault are skipped. A separator is put between rows that have none.

    Args:
      path: The JSONL file.
      encoder: The encoder, which knows the separator.

    Raises:
      ConfigError: No such file, or a row without ``prompt_ids`` and ``response_ids``.
    """
    ids, mask, number = [], [], 0
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            number += 1
            row = json.loads(line)
            if row.get("finish_reason", "length") not in _WHOLE:
                continue
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
    return Corpus(str(path), np.concatenate(ids).astype(np.int32), np.concatenate(mask))
