"""Prompts for the experiments: held-out functions, or the rows of a file."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from experiments.run import inputs
from spec_jax.data import data_sources, python_source
from spec_jax.data.conversations import Encoder, num_prompts, opening
from spec_jax.data.records import (
    Conversation,
    Text,
    is_json,
    parse_record,
    read_lines,
    read_objects,
    usable,
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


def load_prompts(data: str, n: int, seed: int, notes: list[str] | None = None) -> list[Prompt]:
    """Returns ``n`` prompts, or all of a file that has fewer.

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
      notes: Gets a sentence on each row that is not a prompt, and that is left out, and on a number
        of prompts below ``n``. None means that both are errors.

    Raises:
      ConfigError: No such file, no prompt in it, or what ``notes`` says of errors.
    """
    if not data:
        found = python_source.held_out_prompts(n, seed)
        return [Prompt(prompt.name, prompt.text) for prompt in found]
    malformed = None if notes is None else []
    if data_sources.is_name(data):
        rows = [*usable(data_sources.rows(data), _from_row, malformed)]
    else:
        rows = read_rows(pathlib.Path(data), malformed)
    if notes is None and len(rows) < n:
        raise ConfigError(f"{data} holds {len(rows)} prompts; num_prompts asks for {n}")
    return take(rows, n, data, "prompts", malformed or [], [] if notes is None else notes)


def take(
    rows: Sequence[T], n: int, data: str, what: str, malformed: Sequence[str], notes: list[str]
) -> list[T]:
    """Returns ``n`` of the rows at even distances, or all of them, and says what is left out.

    Args:
      rows: What could be read.
      n: How many; 0, or more than there are: all.
      data: Where they come from, for messages.
      what: What they are, in the plural.
      malformed: The messages of rows that are left out.
      notes: Gets a sentence on each of them, and one if there are fewer rows than asked for.

    Raises:
      ConfigError: There is none.
    """
    notes += [f"left out: {said}" for said in malformed]
    if not rows:
        why = f" ({'; '.join(malformed)})" if malformed else ""
        raise ConfigError(f"{data} has no {what.removesuffix('s')}{why}; expected one a line")
    if n > len(rows):
        notes.append(f"{data} has {len(rows)} {what}, not {n}: all of them are used")
    return evenly(rows, n) if 0 < n < len(rows) else [*rows]


def evenly(rows: Sequence[T], n: int) -> list[T]:
    """Returns ``n`` of the rows, at even distances."""
    return [rows[i * len(rows) // n] for i in range(n)]


def read_rows(path: pathlib.Path, malformed: list[str] | None = None) -> list[Prompt]:
    """Returns every prompt of a file, see ``load_prompts``.

    Args:
      path: The file.
      malformed: See ``records.usable``.

    Raises:
      ConfigError: No such file, or a row that is not a prompt.
    """
    if is_json(path):
        return [*usable(read_objects(path, malformed), _from_row, malformed)]
    return [
        Prompt(f"line {source.rpartition(':')[2]}", text)
        for text, source in read_lines(path, malformed)
    ]


def _from_row(row: Any, where: str) -> Prompt:
    """Returns the prompt of one JSON value; ``where`` is its place in the file."""
    record = read_record(row, where)
    row = row if isinstance(row, dict) else {}
    name = row.get("task_id", row.get("question_id", pathlib.Path(where).name))
    return _of_record(record, f"{name} ({row['category']})" if "category" in row else f"{name}")


def read_record(row: Any, where: str) -> Conversation | Text:
    """Returns the record of a JSON value that holds a prompt, which every experiment can use.

    Args:
      row: The value.
      where: Its place, for the message.

    Raises:
      ConfigError: It has none of the forms, a text that cannot be encoded, an empty prompt or turn,
        no text of the user before its first answer, or a category that is no text.
    """
    check_unicode(row, where)
    record = parse_record(row, where)
    given = row if isinstance(row, dict) else {}
    category, turns = given.get("category") or "", given.get("turns")
    if not isinstance(category, str | int | float):
        raise ConfigError(f"{where}: category is {category!r:.60}; expected a text")
    if is_of_turns(record, turns) and not all(isinstance(x, str) and x.strip() for x in turns):
        raise ConfigError(f"{where} has an empty turn; expected a question in each")
    _of_record(record, "")
    return record


def is_of_turns(record: Conversation | Text, turns: Any) -> bool:
    """Whether a record was read of a row's ``turns``, of which it has the first."""
    if isinstance(record, Text) or not isinstance(turns, list) or not record.messages:
        return False
    return record.messages[-1]["content"] == turns[0]


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


def fitting(batches: Sequence[int], num_prompts: int) -> tuple[tuple[int, ...], list[str]]:
    """Returns batch sizes of at most as many rows as there are prompts, and notes on the larger.

    A larger batch would hold copies of all its rows, whose tokens would count.
    """
    notes = [
        f"batches of {b} are of {num_prompts}, since there are {num_prompts} prompts (turns "
        "counted); a larger --config.num_prompts asks for more, if the questions have more"
        for b in batches
        if b > num_prompts
    ]
    return tuple(sorted({min(b, num_prompts) for b in batches})), notes


def encodable(
    items: Sequence[T], encode: Callable[[T], object], place: Callable[[T], str], notes: list[str]
) -> list[T]:
    """Returns what can be encoded, such as conversations that the chat template takes.

    Args:
      items: Prompts or questions.
      encode: Encodes one, or raises a ConfigError.
      place: The place of one, for a note that does not name it.
      notes: Gets a sentence on each that is left out.

    Raises:
      ConfigError: None of several can be encoded, or the only one cannot.
    """
    found, refused = [], []
    for item in items:
        try:
            encode(item)
        except ConfigError as error:
            text = str(error)
            refused.append(text if text.startswith(place(item)) else f"{place(item)}: {text}")
        else:
            found.append(item)
    if refused and not found:
        raise ConfigError("; ".join(dict.fromkeys(refused)))
    notes += [f"left out: {said}" for said in refused]
    return found


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
