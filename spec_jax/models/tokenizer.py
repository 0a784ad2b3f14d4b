"""Text to ids and back, through the ``tokenizers`` library."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import tokenizers

from spec_jax.errors import WeightsError


class Tokenizer:
    """A ``tokenizer.json`` and its companion ``tokenizer_config.json``."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict | None = None):
        self.backend = backend
        self.config = dict(config or {})

    @classmethod
    def from_directory(cls, directory: str | pathlib.Path) -> Tokenizer:
        """Loads the tokenizer of a Hugging Face directory.

        Raises:
          WeightsError: no readable tokenizer.json there, or an unreadable companion.
        """
        directory = pathlib.Path(directory)
        file = directory / "tokenizer.json"
        if not file.exists():
            raise WeightsError(f"{directory} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises a bare Exception
            raise WeightsError(f"{file} cannot be read as a tokenizer: {error}") from error
        file = directory / "tokenizer_config.json"
        if not file.exists():
            return cls(backend)
        try:
            return cls(backend, json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise WeightsError(f"{file} cannot be read: {error}") from error

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"), pretty=False)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def num_ids(self) -> int:
        """The largest id and one; more than ``vocab_size`` where ids are left out."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer itself adds."""
        return self.backend.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out, and the text is not cleaned up."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def decode_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """The text that ``ids`` add behind a prompt, a leading space included.

        A SentencePiece-like decoder strips the space before the first token it is given, so
        the last tokens of the prompt are decoded along.
        """
        context = list(prompt[-8:])
        before, whole = self.decode(context), self.decode([*context, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids)

    def has_same_vocab(self, other: Tokenizer) -> bool:
        return self.backend.get_vocab() == other.backend.get_vocab()
