"""Prompts for the experiments: held-out functions, or the rows of a file."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from spec_jax.data import python_source
from spec_jax.data.conversations import Encoder, opening
from spec_jax.data.records import (
    Conversation,
    is_json,
    parse_record,
    read_objects,
    read_text,
)
from spec_jax.engine.request import encode
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel


class Prompt(NamedTuple):
    """A text to continue, or a conversation to answer.

    Attributes:
      name: for reports.
      text: to continue; of a conversation, what the user says first.
      conversation: its messages up to the first answer, which is asked for.
    """

    name: str
    text: str
    conversation: Conversation | None = None


def load_prompts(path: str, n: int, seed: int) -> list[Prompt]:
    """Draws ``n`` prompts.

    Args:
      path: "" for functions of held-out modules of the standard library, drawn by ``seed``;
        else a file of which every so many-th row is taken, so that all its parts are seen.
        JSON (see ``records.is_json``): objects with ``prompt`` (as in HumanEval), ``text``,
        ``turns`` (the first one counts, as in Spec-Bench), or ``messages`` or
        ``conversations`` as ``parse_record`` takes them (the first answer is asked for). Any
        other file is one prompt a line. Line ends at the end of a text are left out:
        tokenizers join them with what follows.
      n: how many.
      seed: of the held-out functions.

    Raises:
      ConfigError: no such file, fewer than n prompts, or a row that is none.
    """
    if not path:
        found = python_source.held_out_prompts(n, seed)
        return [Prompt(prompt.name, prompt.text) for prompt in found]
    rows = read_rows(pathlib.Path(path))
    if len(rows) < n:
        raise ConfigError(f"{path} holds {len(rows)} prompts; num_prompts asks for {n}")
    return [rows[i * len(rows) // n] for i in range(n)]


def read_rows(path: pathlib.Path) -> list[Prompt]:
    """Every prompt of a file, see ``load_prompts``.

    Raises:
      ConfigError: no such file, or a row that is no prompt.
    """
    if is_json(path):
        return [_from_row(value, source) for value, source in read_objects(path)]
    lines = enumerate(read_text(path).split("\n"), 1)
    return [Prompt(f"line {i}", line.rstrip("\r")) for i, line in lines if line.strip()]


def _from_row(row, where: str) -> Prompt:
    """A prompt of one JSON value, which stands at ``where``."""
    row = row if isinstance(row, dict) else {"text": row}
    name = row.get("task_id", row.get("question_id", pathlib.Path(where).name))
    name = f"{name} ({row['category']})" if "category" in row else f"{name}"
    if "messages" in row or "conversations" in row:
        return Prompt(name, *_opening(parse_record(row, where)))
    text, talk = next((row[key] for key in ("prompt", "text") if key in row), None), None
    if text is None and isinstance(row.get("turns"), list) and row["turns"]:
        text = row["turns"][0]
        talk = Conversation([{"role": "user", "content": text}], None, where)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"{where} has no text in `turns`, `prompt` or `text`, and no `messages`; its keys: "
            f"{', '.join(row)}"
        )
    return Prompt(name, text.rstrip("\n"), talk)


def _opening(record: Conversation) -> tuple[str, Conversation]:
    """What the user says first, and all that stands before the first answer."""
    talk = opening(record)
    if talk is None:
        raise ConfigError(f"{record.source} has no message to answer")
    said = [m["content"] for m in talk.messages if m["role"] == "user" and m["content"]]
    if not said:
        raise ConfigError(f"{record.source} has no text of the user before its first answer")
    return said[0], talk


class PromptEncoder:
    """Prompts to ids: texts by the target's tokenizer, conversations by its chat template too.

    What a user alone has said is continued as a text by a target that has no template.
    """

    def __init__(self, target: LoadedModel):
        self._target = target

    def is_templated(self, prompt: Prompt) -> bool:
        """Whether the chat template makes the prompt."""
        talk, tokenizer = prompt.conversation, self._target.tokenizer
        if talk is None or tokenizer is None:
            return False
        return len(talk.messages) > 1 or "default" in tokenizer.chat_templates

    def __call__(self, prompt: Prompt) -> list[int]:
        """Ids; of a conversation, up to where its first answer begins.

        Raises:
          ConfigError: a conversation that the chat template refuses; or there is none.
          PromptError: the target has no tokenizer.
        """
        if not self.is_templated(prompt):
            return encode(self._target, prompt.text)
        return encode(self._target, self._conversations.prompts(prompt.conversation)[0])

    @functools.cached_property
    def _conversations(self) -> Encoder:
        return Encoder(self._target.tokenizer)


def fit(
    prompts: list[Prompt], models: Sequence[LoadedModel | LoadedHead], max_new_tokens: int,
    longest: int | None,
) -> tuple[list[list[int]], int]:
    """Ids of the prompts, and how many had to lose their beginning.

    A token that the tokenizer puts first (BOS) stays.

    Args:
      prompts: texts and conversations.
      models: target first, then what drafts; the one that holds fewest tokens counts.
      max_new_tokens: room to leave.
      longest: most tokens of a prompt, or None.

    Raises:
      ConfigError: no room for a prompt at all.
    """
    target, smallest = models[0], min(models, key=lambda m: m.max_length)
    room = smallest.max_length - max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, which leaves no room for a prompt: "
            f"{smallest.name} holds {smallest.max_length} tokens"
        )
    room = min(room, longest or room)
    begin = target.config.bos_token_id
    whole = list(map(PromptEncoder(target), prompts))
    ids = []
    for prompt in whole:
        head = prompt[:1] if prompt[0] == begin and room > 1 else []
        is_long = len(prompt) > room
        ids.append(head + prompt[len(prompt) - room + len(head) :] if is_long else prompt)
    return ids, sum(len(prompt) > room for prompt in whole)
