"""A corpus on disk: two arrays of documents to map into memory, and a description."""

from __future__ import annotations

import array
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.data.batches import Corpus
from spec_jax.data.conversations import Document
from spec_jax.errors import ConfigError
from spec_jax.models.files import parse_json
from spec_jax.models.tokenizer import Tokenizer

VERSION = 3


def write_packed(
    directory: str | os.PathLike,
    name: str,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    counts: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
) -> Corpus:
    """Writes documents to NAME.tokens.npy, NAME.mask.npy and NAME.json, and opens them.

    Documents are written one at a time; only the places where they start are kept in memory.
    The files get their names when they are complete, and the description is the last: without it
    there is no corpus.

    Args:
      directory: The folder; it is created if it does not exist.
      name: The name of the corpus, such as its split.
      documents: The documents, see ``read_documents``.
      tokenizer: The tokenizer that encoded them; its ``fingerprint`` is kept.
      counts: The counter that ``read_documents`` fills; it is read after the last document.
      notes: Sentences on how it was made, read likewise.
      about: What it is made of, such as the files: JSON values by name, see ``load_packed``.

    Raises:
      ConfigError: There is no document, or one has ids that the tokenizer does not have.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = _paths(directory, name)
    partial = [path.with_name(path.name + ".partial") for path in paths]
    raw = [path.with_name(path.name + ".raw") for path in paths[:2]]  # until the size is known
    starts = array.array("q", [0])
    num_ids = tokenizer.num_ids
    try:
        with raw[0].open("wb") as tokens, raw[1].open("wb") as mask:
            for ids, is_trained, source in documents:
                if len(ids) != len(is_trained) or not len(ids):
                    raise ConfigError(
                        f"{source}: {len(ids)} ids with a mask of {len(is_trained)}; expected one "
                        "mask value an id, and at least one id"
                    )
                if not 0 <= np.min(ids) <= np.max(ids) < num_ids:
                    raise ConfigError(
                        f"{source}: ids from {np.min(ids)} to {np.max(ids)}; expected them below "
                        f"{num_ids}, the size of the tokenizer's vocabulary"
                    )
                tokens.write(np.asarray(ids, np.int32).tobytes())
                mask.write(np.asarray(is_trained, np.bool_).tobytes())
                starts.append(starts[-1] + len(ids))
        if len(starts) == 1:
            raise ConfigError(f"there is no document for {name}; expected at least one")
        for source, target, dtype in zip(raw, partial, (np.int32, np.bool_)):
            with target.open("wb") as file:
                np.save(file, np.memmap(source, dtype, "r"))
                file.flush()
                os.fsync(file.fileno())
        info = {
            **(about or {}),
            "version": VERSION,
            "tokenizer": fingerprint(tokenizer),
            "counts": {**(counts or {}), "documents": len(starts) - 1},
            "notes": [*notes],
            "starts": starts.tolist(),
        }
        partial[2].write_text(json.dumps(info) + "\n", encoding="utf-8")
        paths[2].unlink(missing_ok=True)
        for source, target in zip(partial, paths):
            os.replace(source, target)
    finally:
        for path in (*raw, *partial):
            path.unlink(missing_ok=True)
    return load_packed(directory, name, tokenizer)


def load_packed(
    directory: str | os.PathLike,
    name: str,
    tokenizer: Tokenizer | None = None,
    about: Mapping[str, Any] | None = None,
) -> Corpus:
    """Opens a corpus that ``write_packed`` wrote. The arrays stay on disk.

    Args:
      directory: The folder.
      name: The name of the corpus.
      tokenizer: The tokenizer that should have encoded it. None means any.
      about: What it should be made of. None means anything.

    Raises:
      ConfigError: There is no complete corpus of that name, another tokenizer encoded it, or it is
        made of something else.
    """
    tokens_file, mask_file, info_file = _paths(pathlib.Path(directory), name)
    remedy = "expected what write_packed writes: pack the corpus again"
    try:
        info = parse_json(info_file.read_text(encoding="utf-8"))
        starts = np.asarray(info.pop("starts"), np.int64)
        tokens, mask = (np.load(path, mmap_mode="r") for path in (tokens_file, mask_file))
        corpus = Corpus(name, tokens, mask, starts, info["counts"], tuple(info["notes"]))
        found = info["tokenizer"]
        version = info["version"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{info_file} is not a packed corpus ({error}); {remedy}") from error
    if version != VERSION:
        raise ConfigError(f"{info_file} has version {version!r}, not {VERSION}; {remedy}")
    shapes = {tokens.shape, mask.shape, (int(starts[-1]),)}
    if len(shapes) > 1 or (tokens.dtype, mask.dtype) != (np.int32, np.bool_):
        raise ConfigError(
            f"{info_file} tells of {starts[-1]} tokens, the arrays beside it are "
            f"{tokens.dtype}{list(tokens.shape)} and {mask.dtype}{list(mask.shape)}; {remedy}"
        )
    if tokenizer is not None and found != fingerprint(tokenizer):
        raise ConfigError(
            f"{info_file} was packed with another vocabulary or chat template ({found}) than the "
            f"tokenizer's ({fingerprint(tokenizer)}); expected the target's tokenizer: pack the "
            "corpus again"
        )
    for key, value in (about or {}).items():
        if info.get(key) != value:
            raise ConfigError(f"{info_file} is of other {key}; expected {value!r:.80}; {remedy}")
    return corpus


def fingerprint(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the SHA-256 of all that a tokenizer makes ids by, and of what templates read."""
    variables = [tokenizer.special_tokens, tokenizer.chat_template_kwargs]

    def sha256(text):
        return hashlib.sha256(text.encode()).hexdigest()

    return {
        "num_ids": tokenizer.num_ids,
        "sha256": sha256(tokenizer.backend.to_str()),
        "chat_sha256": sha256(json.dumps([tokenizer.chat_templates, *variables], sort_keys=True)),
    }


def _paths(directory: pathlib.Path, name: str) -> list[pathlib.Path]:
    return [directory / f"{name}.{end}" for end in ("tokens.npy", "mask.npy", "json")]
