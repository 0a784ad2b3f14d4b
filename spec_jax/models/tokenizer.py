"""Converts text to token ids and back, through the ``tokenizers`` library."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models import gguf
from spec_jax.models.added_tokens import DECODER, add_stated_tokens
from spec_jax.models.checks import naming
from spec_jax.models.detokenize import BYTE_TOKEN, Unsettled, unsettled_part
from spec_jax.models.files import read_json, read_text

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"


class Tokenizer:
    """A tokenizer with its chat templates.

    Texts are encoded whole: what tokenizer.json may say of truncation and padding is of the batches
    that its publisher trained with.

    Args:
      backend: the ``tokenizers.Tokenizer`` of tokenizer.json.
      config: the object of tokenizer_config.json. Chat templates are ``config["chat_template"]``,
        wherever they were stored.

    Attributes:
      chat_template_kwargs: variables of the chat templates, see ``with_chat_template_kwargs``.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None):
        self.backend = _untruncated(backend)
        self.config = dict(config or {})
        self.chat_template_kwargs: dict[str, Any] = {}

    def with_chat_template_kwargs(self, variables: Mapping[str, Any] | None) -> Tokenizer:
        """Returns the tokenizer with more variables for its chat templates.

        Args:
          variables: JSON values, such as ``{"enable_thinking": False}``; ``tools`` are the JSON
            schemas of functions, for conversations that have none of their own.

        Raises:
          ConfigError: it is no mapping.
        """
        if not variables:
            return self
        if not isinstance(variables, Mapping):
            raise ConfigError(
                f"chat_template_kwargs is {variables!r:.80}; expected an object, such as "
                "{'enable_thinking': False}"
            )
        other = copy.copy(self)
        other.chat_template_kwargs = {**self.chat_template_kwargs, **variables}
        return other

    @classmethod
    def from_directory(cls, directory: str | pathlib.Path) -> Tokenizer:
        """Loads the tokenizer of a Hugging Face directory or of a GGUF file.

        Chat templates in separate files replace those of tokenizer_config.json. Added tokens that
        tokenizer.json lacks are those of ``added_tokens_decoder`` in tokenizer_config.json, or of
        added_tokens.json and special_tokens_map.json, as in transformers.

        Args:
          directory: holds tokenizer.json, and perhaps these files.

        Raises:
          WeightsError: there is no tokenizer.json, one of the files cannot be read, or an added
            token would get another id than is stated.
        """
        directory = pathlib.Path(directory)
        if gguf.is_gguf(directory):
            with naming(directory):
                return cls(*gguf.read_tokenizer(gguf.read_header(directory)))
        file = directory / "tokenizer.json"
        if not file.exists():
            raise WeightsError(f"{directory} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_str(read_text(file))
            has_ids = backend.get_vocab_size(with_added_tokens=True) > 0
        except BaseException as error:  # the library raises a bare Exception, and Rust's panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise WeightsError(f"{file} cannot be read as a tokenizer: {error}") from error
        if not has_ids:
            raise WeightsError(f"{file} has an empty vocabulary; expected at least one token")
        config = _read_object(directory / "tokenizer_config.json")
        ids = {}
        sources = "tokenizer_config.json"
        if DECODER not in config:
            config |= _read_object(directory / "special_tokens_map.json")
            ids = _read_object(directory / "added_tokens.json")
            sources += ", special_tokens_map.json or added_tokens.json"
        with _errors_of(directory / sources):
            add_stated_tokens(backend, config, ids)
        templates = {}
        for name, file in _template_files(directory).items():
            with _errors_of(file):
                templates[name] = read_text(file)
        return cls(backend, {**config, "chat_template": templates} if templates else config)

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and a file for each chat template.

        Args:
          directory: created if it does not exist.

        Raises:
          WeightsError: a chat template is not a text, or its name cannot be a file's name.
        """
        directory = pathlib.Path(directory)
        templates = self.chat_templates
        for name in templates:
            if not name or pathlib.PurePath(name).name != name:
                raise WeightsError(f"a chat template is named {name!r}; expected a file's name")
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"), pretty=False)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        config.pop("chat_template", None)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
        for file in _template_files(directory).values():  # of an earlier tokenizer
            file.unlink()
        for name, template in templates.items():
            file = directory / TEMPLATE_FILE
            if name != "default":
                file = directory / TEMPLATE_FOLDER / f"{name}.jinja"
                file.parent.mkdir(exist_ok=True)
            file.write_text(template, encoding="utf-8")

    @property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates by name; a template stored without a name is ``default``.

        Raises:
          WeightsError: ``config["chat_template"]`` is neither a text nor texts with names.
        """
        found = self.config.get("chat_template") or {}
        if isinstance(found, str):
            found = {"default": found}
        elif isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
            found = {entry.get("name"): entry.get("template") for entry in found}
        is_named = isinstance(found, dict) and all(
            isinstance(name, str) and isinstance(text, str) for name, text in found.items()
        )
        if not is_named:
            raise WeightsError(
                f"chat_template of the tokenizer's config is {found!r:.80}; expected a text, or a "
                "list of objects with a name and a template"
            )
        return dict(found)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The text of every named special token: ``bos_token``, ``eos_token`` and the like."""
        named = {name: token for name, token in self.config.items() if name.endswith("_token")}
        for group in ("model_specific_special_tokens", "extra_special_tokens"):
            if isinstance(self.config.get(group), dict):
                named |= self.config[group]
        texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in named.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def num_ids(self) -> int:
        """The largest id plus one; larger than ``vocab_size`` if some ids are unused."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token, or None if the vocabulary lacks it."""
        return self.backend.token_to_id(token)

    @functools.cached_property
    def special_texts(self) -> dict[int, str]:
        """The texts of all special tokens, which ``decode`` leaves out, by their ids."""
        added = self.backend.get_added_tokens_decoder().items()
        return {index: token.content for index, token in added if token.special}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with the special tokens that the tokenizer itself adds."""
        return self.backend.encode(text).ids

    def decode(self, ids: Sequence[int], *, has_special: bool = False) -> str:
        """Returns the text of ids, without cleaning up spaces.

        Args:
          ids: the ids.
          has_special: whether the text has the special tokens, such as ``<|im_end|>``.
        """
        return self.backend.decode(list(ids), skip_special_tokens=not has_special)

    def decode_after(
        self, prompt: Sequence[int], ids: Sequence[int], *, has_special: bool = False
    ) -> str:
        """Returns the text that ``ids`` add after a prompt, a leading space included.

        SentencePiece-like decoders strip the space before the first token, so the last tokens of
        the prompt are decoded along with ``ids``.

        Args:
          prompt: ids of the prompt.
          ids: ids of the output so far.
          has_special: See ``decode``.
        """
        decode = functools.partial(self.decode, has_special=has_special)
        begin = max(len(prompt) - 8, 0)
        if self._unsettled is Unsettled.BYTE_RUN:  # part of a run may not be UTF-8
            begin = self._run_start(prompt, begin)
        context = list(prompt[begin:])
        before = decode(context)
        whole = decode([*context, *ids])
        return whole[len(before) :] if whole.startswith(before) else decode(ids)

    def settled_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Returns the part of ``decode_after`` that no further token can change.

        Invariant: it is a prefix of ``decode_after(prompt, [*ids, *more])`` for all ``more``.

        Args:
          prompt: ids of the prompt.
          ids: ids of the output so far.
        """
        if self._unsettled is Unsettled.ALL:
            return ""
        if self._unsettled is Unsettled.BYTE_RUN:
            ids = ids[: self._run_start(ids, len(ids))]
        text = self.decode_after(prompt, ids)
        is_bytes = self._unsettled is Unsettled.CHARACTER
        return text.removesuffix("\ufffd") if is_bytes else text

    def whole_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Returns ``decode_after`` without an unfinished character at its end.

        Args:
          prompt: ids of the prompt.
          ids: ids of the output so far.
        """
        text = self.decode_after(prompt, ids)
        if not text.endswith("\ufffd"):
            return text
        return self.settled_after(prompt, ids) or text.rstrip("\ufffd")

    @functools.cached_property
    def _unsettled(self) -> Unsettled:
        return unsettled_part(self.backend)

    def _run_start(self, ids: Sequence[int], end: int) -> int:
        """Returns where the run of byte tokens that ends before ``ids[end]`` begins.

        Special tokens do not end a run. Without one it is ``end``.
        """

        def is_inside(index):
            token = self.backend.id_to_token(index)
            is_skipped = token is None or index in self.special_texts
            return is_skipped or bool(BYTE_TOKEN.fullmatch(token))

        while end > 0 and is_inside(ids[end - 1]):
            end -= 1
        return end

    def has_same_vocab(self, other: Tokenizer) -> bool:
        """Whether both have the same tokens with the same ids."""
        return self.backend.get_vocab() == other.backend.get_vocab()

    def differing_tokens(self, other: Tokenizer) -> tuple[int, str]:
        """Returns how many tokens only one of them has, or has under this id; and the first."""
        ours = self.backend.get_vocab()
        theirs = other.backend.get_vocab()
        found = dict(ours.items() ^ theirs.items())
        token = min(found, key=lambda token: (found[token], token))
        ids = [vocab.get(token, "none") for vocab in (ours, theirs)]
        return len(found), f"{token!r} of id {ids[0]} in the one and {ids[1]} in the other"


def _untruncated(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer that neither truncates nor pads."""
    if backend.truncation is None and backend.padding is None:
        return backend
    try:
        copy = tokenizers.Tokenizer.from_str(backend.to_str())
    except Exception as error:  # the library raises no other, as for parts written in Python
        raise ConfigError(
            f"the tokenizer truncates or pads, and cannot be copied to switch that off: {error}; "
            "call no_truncation() and no_padding() on it first"
        ) from error
    copy.no_truncation()
    copy.no_padding()
    return copy


def _read_object(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no file."""
    return read_json(file) if file.exists() else {}


@contextlib.contextmanager
def _errors_of(source: pathlib.Path) -> Iterator[None]:
    """Raises a WeightsError that names the source where reading it fails."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise WeightsError(f"{source} cannot be read: {error}") from error


def _template_files(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    files = {file.stem: file for file in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (directory / TEMPLATE_FILE).exists():
        files["default"] = directory / TEMPLATE_FILE
    return files
