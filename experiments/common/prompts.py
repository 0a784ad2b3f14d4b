"""Prompts for the experiments: held-out functions, or the rows of a file."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from experiments.common import data_sources, inputs
from spec_jax.data import python_source
from spec_jax.data.conversations import Encoder, num_prompts, opening
from spec_jax.data.records import (
    Conversation,
    Text,
    is_json,
    left_out,
    parse_record,
    read_objects,
    read_text,
)
from spec_jax.engine.request import encode, encode_messages
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel

T = TypeVar("T")


class Prompt(NamedTuple):
    """A text to continue, or a conversation to answer.

    Attributes:
      name: A name for reports.
      text: The text to continue, or the first message of the user.
      conversation: The messages up to the first answer, which the target writes.
    """

    name: str
    text: str
    conversation: Conversation | None = None


def load_prompts(
    data: str, n: int, seed: int, malformed: list[str] | None = None
) -> list[Prompt]:
    """Returns ``n`` prompts.

    Args:
      data: "" for functions of held-out modules of the standard library; otherwise the name of a
        question set, see ``data_sources``, or a file, of which rows are taken at even distances. A
        JSON file (see ``records.is_json``) has rows of
        the forms of ``records.parse_record``, among them those of HumanEval, Spec-Bench, GSM8K,
        Alpaca, ShareGPT and UltraChat; of a conversation the target writes the first answer. Any
        other file has one prompt per line. Line ends at the end of a text are removed, since
        tokenizers join them with what follows.
      n: The number of prompts.
      seed: Chooses the held-out functions.
      malformed: Gets the message of each row that is not a prompt, and that is then left out; None
        means that the first one is an error.

    Raises:
      ConfigError: No such file, fewer than n prompts, or a row that is not a prompt.
    """
    if not data:
        found = python_source.held_out_prompts(n, seed)
        return [Prompt(prompt.name, prompt.text) for prompt in found]
    if data_sources.is_name(data):
        rows = usable(data_sources.rows(data), _from_row, malformed)
    else:
        rows = read_rows(pathlib.Path(data), malformed)
    if len(rows) < n:
        why = f" ({len(malformed)} are left out: {malformed[0]})" if malformed else ""
        raise ConfigError(f"{data} holds {len(rows)} prompts; num_prompts asks for {n}{why}")
    return evenly(rows, n)


def usable(
    rows: Iterable[tuple[Any, str]], read: Callable[[Any, str], T], malformed: list[str] | None
) -> list[T]:
    """Reads rows; one that cannot be used is left out and named, or an error.

    Args:
      rows: Values, each with its place.
      read: Returns what a row is, or raises a ConfigError.
      malformed: Gets the messages of the rows that are left out; None: the first one is an error.
    """
    found = []
    for value, source in rows:
        try:
            found.append(read(value, source))
        except ConfigError as error:
            if malformed is None:
                raise
            malformed.append(left_out(error))
    return found


def evenly(rows: Sequence[Any], n: int) -> list[Any]:
    """Returns ``n`` of the rows, at even distances."""
    return [rows[i * len(rows) // n] for i in range(n)]


def read_rows(path: pathlib.Path, malformed: list[str] | None = None) -> list[Prompt]:
    """Returns every prompt of a file, see ``load_prompts``.

    Raises:
      ConfigError: No such file, or a row that is not a prompt.
    """
    if is_json(path):
        return usable(read_objects(path, malformed), _from_row, malformed)
    lines = enumerate(read_text(path).split("\n"), 1)
    return [Prompt(f"line {i}", line.rstrip("\r")) for i, line in lines if line.strip()]


def _from_row(row, where: str) -> Prompt:
    """Returns the prompt of one JSON value; ``where`` is its place in the file."""
    check_unicode(row, where)
    record = parse_record(row, where)
    row = row if isinstance(row, dict) else {}
    name = row.get("task_id", row.get("question_id", pathlib.Path(where).name))
    return _of_record(record, f"{name} ({row['category']})" if "category" in row else f"{name}")


def check_unicode(row: Any, where: str) -> None:
    """Raises a ConfigError if a text of a JSON value cannot be encoded.

    Args:
      row: The value.
      where: Its place, for the message.
    """
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds half of a surrogate pair; expected text") from None


def _of_record(record: Conversation | Text, name: str) -> Prompt:
    text, talk = (record.text, None) if isinstance(record, Text) else _opening(record)
    if not text.strip():
        raise ConfigError(f"{record.source} has an empty prompt; expected a text to continue")
    return Prompt(name, text.rstrip("\n"), talk)


def _opening(record: Conversation) -> tuple[str, Conversation]:
    """Returns the first message of the user, and everything before the first answer."""
    talk = opening(record)
    if talk is None:
        raise ConfigError(f"{record.source} has no message to answer")
    said = [m["content"] for m in talk.messages if m["role"] == "user" and m["content"]]
    if not said:
        raise ConfigError(f"{record.source} has no text of the user before its first answer")
    return said[0], talk


class PromptEncoder:
    """Encodes prompts as ids, conversations with the target's chat template.

    A target without a template continues a conversation of a single message as a text.
    """

    def __init__(self, target: LoadedModel):
        self._target = target

    def is_templated(self, prompt: Prompt) -> bool:
        """Returns whether the chat template is used for the prompt."""
        return self._is_chat(prompt.conversation)

    def _is_chat(self, talk: Conversation | None) -> bool:
        tokenizer = self._target.tokenizer
        if talk is None or tokenizer is None:
            return False
        return len(talk.messages) > 1 or "default" in tokenizer.chat_templates

    def __call__(self, prompt: Prompt) -> list[int]:
        """Returns the ids; of a conversation, up to the beginning of its first answer.

        Raises:
          ConfigError: The chat template refuses the conversation, or there is no template.
          PromptError: The target has no tokenizer.
        """
        if not self.is_templated(prompt):
            return encode(self._target, prompt.text)
        talk = prompt.conversation
        return encode_messages(self._target, talk.messages, talk.tools)

    def every(self, record: Conversation | Text) -> list[list[int]]:
        """Returns the ids of all prompts of a record: one for each answer of a conversation.

        Raises:
          ConfigError: The chat template refuses the conversation, or there is no prompt.
          PromptError: The target has no tokenizer.
        """
        if isinstance(record, Conversation) and self._is_chat(opening(record)):
            return self._conversations.prompts(record)
        return [self(_of_record(record, ""))] if self.count(record) else []

    def count(self, record: Conversation | Text) -> int:
        """Returns the number of prompts that ``every`` returns."""
        if isinstance(record, Text):
            return 1
        talk = opening(record)
        return num_prompts(record) if self._is_chat(talk) else int(talk is not None)

    @functools.cached_property
    def _conversations(self) -> Encoder:
        return Encoder(self._target.tokenizer)


def room_for_prompt(
    models: Sequence[LoadedModel | LoadedHead], max_new_tokens: int, longest: int | None = None
) -> int:
    """Returns the maximum tokens of a prompt.

    Args:
      models: The target, then the drafts; the smallest maximum length applies.
      max_new_tokens: The room to leave for new tokens.
      longest: Another limit, or None.

    Raises:
      ConfigError: There is no room for a prompt.
    """
    smallest = min(models, key=lambda m: m.max_length)
    room = smallest.max_length - max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, which leaves no room for a prompt: "
            f"{smallest.name} holds {smallest.max_length} tokens"
        )
    return min(room, longest or room)


def fit(
    prompts: list[Prompt], models: Sequence[LoadedModel | LoadedHead], max_new_tokens: int,
    longest: int | None,
) -> tuple[list[list[int]], int]:
    """Encodes prompts and cuts the beginning of those that are too long.

    A token that the tokenizer puts first (BOS) is kept.

    Args:
      prompts: Texts and conversations.
      models: The target, then the drafts; the smallest maximum length applies.
      max_new_tokens: The room to leave for new tokens.
      longest: The maximum tokens of a prompt, or None.

    Returns:
      The ids, and the number of prompts that were cut.

    Raises:
      ConfigError: There is no room for a prompt, or another process has other prompts.
    """
    target, room = models[0], room_for_prompt(models, max_new_tokens, longest)
    whole = list(map(PromptEncoder(target), prompts))
    ids = [cut(prompt, room, target.config.bos_token_id) for prompt in whole]
    inputs.check_prompts(ids)
    return ids, sum(len(prompt) > room for prompt in whole)


def cut_note(num_cut: int, ids: Sequence[Sequence[int]]) -> list[str]:
    """Returns a sentence on the prompts that ``fit`` has cut, if there are any."""
    if not num_cut:
        return []
    longest = max(map(len, ids))
    return [f"{num_cut} of {len(ids)} prompts were too long: their last {longest} tokens are used"]


def cut(prompt: list[int], room: int, begin: int | None) -> list[int]:
    """Removes the beginning of a prompt that is too long.

    Args:
      prompt: Its ids.
      room: The maximum number of ids.
      begin: The id of BOS, which is kept; None if there is none.
    """
    if len(prompt) <= room:
        return prompt
    head = prompt[:1] if prompt[0] == begin and room > 1 else []
    return head + prompt[len(prompt) - room + len(head) :]
