"""Prompts for the experiments: held-out functions, or the rows of a file."""

from __future__ import annotations

import functools
import gzip
import json
import pathlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from spec_jax.data import python_source
from spec_jax.data.conversations import Encoder, num_prompts
from spec_jax.data.records import Conversation, holds_conversations, read_records
from spec_jax.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel


class Prompt(NamedTuple):
    """A text to continue, or a conversation to answer.

    Attributes:
      name: for reports.
      text: to continue; of a conversation, what the user says first.
      conversation: its messages; the first answer is asked for.
    """

    name: str
    text: str
    conversation: Conversation | None = None


def load_prompts(path: str, n: int, seed: int) -> list[Prompt]:
    """Draws ``n`` prompts.

    Args:
      path: "" for functions of held-out modules of the standard library, drawn by ``seed``;
        else a file of which every so many-th row is taken, so that all its parts are seen:
        .jsonl or .jsonl.gz with ``turns`` (the first one counts, as in Spec-Bench),
        ``prompt`` (as in HumanEval) or ``text``; conversations as ``read_records`` reads them
        (the first answer counts); any other file is one prompt a line. Line ends at the end of
        a text are left out: tokenizers join them with what follows.
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
    if holds_conversations(path):
        records = (r for r in read_records(path) if isinstance(r, Conversation) and num_prompts(r))
        return [Prompt(record.source, _opening(record), record) for record in records]
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"the prompts file {path} cannot be read: {error}") from error
    is_json = ".jsonl" in path.suffixes
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if is_json:
        return [_from_json(path, number, line) for number, line in numbered]
    return [Prompt(f"line {number}", line) for number, line in numbered]


def _from_json(path: pathlib.Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number} is no JSON: {error}") from error
    row = row if isinstance(row, dict) else {"text": row}
    turns = row.get("turns") or [None]
    text = next((row[key] for key in ("prompt", "text") if key in row), turns[0])
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"{path}, line {number} has no text in `turns`, `prompt` or `text`; its keys: "
            f"{', '.join(row)}"
        )
    name = row.get("task_id", row.get("question_id", f"line {number}"))
    category = f" ({row['category']})" if "category" in row else ""
    conversation = None
    if text is turns[0]:
        conversation = Conversation([{"role": "user", "content": text}], None, f"{path}:{number}")
    return Prompt(f"{name}{category}", text.rstrip("\n"), conversation)


def _opening(record: Conversation) -> str:
    """What the user says first."""
    said = (m["content"] for m in record.messages if m["role"] == "user")
    return next(said, None) or ""


class PromptEncoder:
    """Prompts to ids: texts by the target's tokenizer, conversations by its chat template too.

    The one turn of a ``turns`` row is continued as a text by a target that has no template.
    """

    def __init__(self, target: LoadedModel):
        self._target = target
        self._encode = SpeculativeDecoder(target).encode
        self._has_template = target.tokenizer is not None and bool(target.tokenizer.chat_templates)

    def is_templated(self, prompt: Prompt) -> bool:
        """Whether the chat template makes the prompt."""
        talk = prompt.conversation
        return talk is not None and (self._has_template or len(talk.messages) > 1)

    def __call__(self, prompt: Prompt) -> list[int]:
        """Ids; of a conversation, up to where its first answer begins.

        Raises:
          ConfigError: a conversation that the chat template refuses; or there is none.
          PromptError: the target has no tokenizer.
        """
        is_text = self._target.tokenizer is None or not self.is_templated(prompt)
        return self._encode(
            prompt.text if is_text else self._conversations.prompts(prompt.conversation)[0]
        )

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
