"""Conversations and texts as token documents, with the assistant's answers marked."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spec_jax.data.chat import ChatTemplate
from spec_jax.data.records import Conversation, Text, read_records
from spec_jax.data.splits import HeldOut, check_split
from spec_jax.data.tokens import separator_id
from spec_jax.errors import ConfigError
from spec_jax.models.tokenizer import Tokenizer


class Document(NamedTuple):
    """Tokens, and which of them a model learns to predict."""

    ids: np.ndarray  # i32[T]
    mask: np.ndarray  # bool[T]
    source: str  # file and line


class Encoder:
    """Turns conversations and texts into prompts and documents, by a tokenizer and its template.

    A document begins with the ids of its prompt, as ``prompt`` returns them for decoding, so that
    every token has the position that it has there. A separator ends it, unless it ends with one.

    Args:
      tokenizer: The target's tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend

    @functools.cached_property
    def separator_id(self) -> int:
        """The id of the token after each document, see ``tokens.separator_id``."""
        return separator_id(self.tokenizer)

    @functools.cached_property
    def _turn_ends(self) -> tuple[str, ...]:
        added = self.backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.content.strip())

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The chat template."""
        return ChatTemplate.from_tokenizer(self.tokenizer)

    def text(self, record: Text) -> list[Document]:
        """Encodes a text as a document of which every token but the first is marked.

        Args:
          record: The text.

        Returns:
          One document, or none if the text is empty.

        Raises:
          ConfigError: It is not Unicode text.
        """
        ids = self.prompt(record) if record.text else []
        if not ids:
            return []
        document = self.document(ids, [False] + [True] * (len(ids) - 1), record.source)
        document.mask[-1] = True  # also the separator: a text ends where the model says so
        return [document]

    def prompts(self, record: Conversation) -> list[list[int]]:
        """Encodes the prompt of each answer, up to where the answer begins.

        A conversation that does not end with an answer has one more prompt, the whole
        conversation. See ``answered``.

        Args:
          record: The conversation.

        Returns:
          The ids of each prompt.

        Raises:
          ConfigError: The template refuses the conversation.
        """
        return [
            self.prompt(record._replace(messages=record.messages[:end]))
            for end in answered(record.messages)
        ]

    def prompt(self, record: Conversation | Text) -> list[int]:
        """Encodes a text to continue, or a conversation up to where its next answer begins.

        Training, regeneration, evaluation and decoding have their prompts from here. A text has
        the special tokens that the tokenizer adds, such as BOS, and a conversation those that its
        template writes.

        Raises:
          ConfigError: The template refuses the conversation, or it is not Unicode text.
        """
        if isinstance(record, Text):
            _check_unicode(record.text, record.source)
            return self.tokenizer.encode(record.text)
        try:
            text = self.template.render(
                record.messages, tools=record.tools, add_generation_prompt=True
            )
        except ConfigError as error:
            raise ConfigError(f"{record.source}: {error}") from error
        _check_unicode(text, record.source)
        return self.backend.encode(text, add_special_tokens=False).ids

    def conversation(self, record: Conversation) -> list[Document]:
        """Encodes a conversation as documents with every turn of the assistant marked.

        The marked tokens are those that the model must predict: the content and the token that
        ends the turn. If the template has ``{% generation %}`` blocks, these are marked. Else a
        turn is found by rendering the conversation twice, up to the generation prompt before
        the turn and up to its end; the difference is marked, without white space after a last
        added token.

        Some templates write earlier turns differently when more turns follow, for example
        without their reasoning. The conversation then becomes several documents, each of which
        ends with a turn as the model wrote it. Every turn is marked once, after the prompt that
        it answered.

        Messages after the assistant's last turn are left out. A turn that opens the
        conversation answers nothing and is not marked, unless it is in a generation block.

        Args:
          record: A conversation that ``read_records`` yields.

        Returns:
          One document or several, as above; none if the assistant has no turn.

        Raises:
          ConfigError: The template refuses the conversation, writes an answer that does not
            begin with its prompt, or has blocks that hold nothing; or the conversation is not
            Unicode text.
        """
        messages = _until_last_answer(record.messages)
        if not messages:
            return []
        try:
            if self.template.has_generation(has_tools=record.tools is not None):
                text, spans = self.template.render_spans(messages, tools=record.tools)
                if not any(end > begin for begin, end in spans):
                    raise ConfigError("the chat template's generation blocks hold no answer")
                parts = [(text, spans)]
            else:
                parts = self._answers(messages, record.tools)
        except ConfigError as error:
            raise ConfigError(f"{record.source}: {error}") from error
        documents = []
        for text, spans in parts:
            _check_unicode(text, record.source)
            encoding = self.backend.encode(text, add_special_tokens=False)
            mask = token_mask(encoding.offsets, spans)
            documents.append(self.document(encoding.ids, mask, record.source))
        return documents

    def _answers(self, messages, tools) -> list[tuple[str, list[tuple[int, int]]]]:
        """Returns texts with the spans of their answers; one, unless turns are rewritten."""
        parts = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i == 0:
                continue
            prompt = self.template.render(messages[:i], tools=tools, add_generation_prompt=True)
            text = self.template.render(messages[: i + 1], tools=tools)
            if not text.startswith(prompt):
                at = len(os.path.commonprefix([prompt, text]))
                raise ConfigError(
                    f"the chat template writes turn {i + 1} otherwise than its prompt begins it: "
                    f"{text[at:]!r:.60} where the prompt has {prompt[at:]!r:.60}; expected a "
                    "template with generation blocks, or variables under which the two agree"
                )
            whole = text.rstrip()
            end = len(whole) if whole.endswith(self._turn_ends) else len(text)
            spans = [(len(prompt), max(end, len(prompt)))]
            if parts and text.startswith(parts[-1][0]):
                spans = parts.pop()[1] + spans
            parts.append((text, spans))
        return parts

    def document(self, ids: Sequence[int], mask: Sequence[bool], source: str) -> Document:
        """Returns ids as a document, with a separator after them that is not marked.

        Args:
          ids: A prompt and its answers. A separator at their end stays as it is.
          mask: Whether each of them is marked.
          source: File and line.
        """
        if ids[-1] != self.separator_id:
            ids, mask = [*ids, self.separator_id], [*mask, False]
        return Document(np.asarray(ids, np.int32), np.asarray(mask, bool), source)


def check_variables(tokenizer: Tokenizer) -> None:
    """Checks the variables that are set for a tokenizer's chat template.

    Raises:
      ConfigError: The template does not read one of them, or there is no template.
    """
    if tokenizer.chat_template_kwargs:
        _ = Encoder(tokenizer).template


def _check_unicode(text: str, source: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source}: character {error.start + 1} is half of a surrogate pair; expected "
            "Unicode text: mend the record or leave it out"
        ) from error


def _until_last_answer(messages) -> list:
    """Returns the messages up to the assistant's last turn; none if it has no turn."""
    roles = [message["role"] for message in messages]
    return messages[: len(roles) - roles[::-1].index("assistant")] if "assistant" in roles else []


def answered(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the number of messages before each answer, also before one still to be written."""
    roles = [message["role"] for message in messages]
    given = [i for i, role in enumerate(roles) if role == "assistant" and i > 0]
    return given + ([len(roles)] if roles and roles[-1] != "assistant" else [])


def token_mask(offsets: Sequence[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """Finds the tokens that hold a character of one of the spans.

    Args:
      offsets: The begin and end of each token in characters, as ``tokenizers`` returns them.
      spans: The begin and end of each span in characters.

    Returns:
      bool[T].
    """
    begin, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    # Some tokenizers trim white space off offsets, so that a token of spaces has length 0.
    reached = np.append(0, np.maximum.accumulate(end))[:-1]
    begin = np.where(begin == end, np.minimum(begin, reached), begin)
    end = np.maximum(end, begin + 1)
    mask = np.zeros(len(begin), bool)
    for first, last in spans:
        if first < last:
            mask |= (begin < last) & (end > first)
    return mask


def read_documents(
    paths: Iterable[str | os.PathLike],
    encoder: Encoder,
    *,
    split: str = "train",
    held_out: HeldOut = HeldOut(),
    max_length: int | None = None,
    counts: collections.Counter | None = None,
    notes: list[str] | None = None,
) -> Iterator[Document]:
    """Yields the documents of one split, in the order of the files.

    A record that cannot be encoded, usually a conversation that the template refuses, is skipped
    and counted.

    Args:
      paths: Files and folders, see ``read_records``.
      encoder: Turns records into documents.
      split: "train" or "held_out".
      held_out: What is held out; by default nothing.
      max_length: Documents of more tokens are left out. None means that none is.
      counts: Filled while the documents are read: records ("conversations", "texts",
        "other_split"); those that were skipped ("no_answer" if the assistant has no turn that
        answers; "empty"; "refused"); "messages_after_the_last_answer", which are left out;
        documents that are "too_long", and their tokens "too_long_tokens"; conversations that
        became "several" documents; and "documents".
      notes: Gets a sentence on the first record that could not be encoded.

    Raises:
      ConfigError: An argument is out of range, a record cannot be read, or there is no usable
        document.
    """
    check_split(split)
    if max_length is not None and max_length < 2:
        raise ConfigError(f"max_length is {max_length}; expected at least 2, or None")
    counts = collections.Counter() if counts is None else counts
    notes = [] if notes is None else notes
    return _documents(list(paths), encoder, split, held_out, max_length, counts, notes)


def _documents(paths, encoder, split, held_out, max_length, counts, notes):
    refusal = ""
    for record in (record for path in paths for record in read_records(path)):
        record = held_out.part(record, split)
        if record is None:
            counts["other_split"] += 1
            continue
        is_text = isinstance(record, Text)
        useless = "empty" if is_text else "no_answer"
        counts["texts" if is_text else "conversations"] += 1
        if not is_text:
            try:
                _ = encoder.template
            except ConfigError as error:  # of all conversations, so it is no refusal of this one
                instead = "" if encoder.tokenizer.chat_templates else ", or rows of text"
                raise ConfigError(
                    f"{record.source} is a conversation, but {error}{instead}"
                ) from error
        try:
            found = encoder.text(record) if is_text else encoder.conversation(record)
        except ConfigError as error:
            counts["refused"] += 1
            if not refusal:
                refusal = f"the first refusal: {error}"
                notes.append(refusal)
            continue
        if found and not is_text:
            unread = len(record.messages) - len(_until_last_answer(record.messages))
            counts["messages_after_the_last_answer"] += unread
        counts["several"] += len(found) > 1
        documents = [one for one in found if one.mask[1:].any()]  # the first is input only
        counts[useless] += len(found) - len(documents) if found else 1
        for document in documents:
            if max_length is not None and len(document.ids) > max_length:
                counts["too_long"] += 1
                counts["too_long_tokens"] += len(document.ids)
                continue
            counts["documents"] += 1
            yield document
    if not counts["documents"]:
        seen = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        refusal = f" ({refusal})" if refusal else ""
        why = f" ({held_out.note}): give more text, or another held_out_share"
        raise ConfigError(
            f"{', '.join(map(str, paths)) or 'no file'} gave no document for {split} "
            f"({seen or 'no record'}){refusal}; expected at least one conversation with an "
            f"answer, or one text, in the split{why if held_out.note else ''}"
        )
