"""Questions as ids that the target has room for."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_jax import processes
from spec_jax.data.conversations import Encoder, answered, check_variables
from spec_jax.data.questions import Question, of_record
from spec_jax.data.records import Conversation, Text
from spec_jax.engine.request import encode, encode_messages
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel


class PromptEncoder:
    """Encodes questions as ids, conversations with the target's chat template.

    A target without a template continues a conversation as a text.

    Args:
      target: The model, perhaps with variables for its template.

    Raises:
      ConfigError: The template does not read one of the variables, or there is no template.
    """

    def __init__(self, target: LoadedModel):
        self._target = target
        tokenizer = target.tokenizer
        self._has_template = tokenizer is not None and "default" in tokenizer.chat_templates
        if tokenizer is not None:
            check_variables(tokenizer)

    def is_templated(self, question: Question, answers: Sequence[str] = ()) -> bool:
        """Returns whether the chat template is used for the turn that follows ``answers``.

        A conversation that opens with several messages needs it.
        """
        if self._target.tokenizer is None or not question.turns:
            return False
        return self._has_template or (not answers and len(question.turns[0]) > 1)

    def __call__(self, question: Question, answers: Sequence[str] = ()) -> list[int]:
        """Returns the ids of the turn that follows ``answers``.

        Raises:
          ConfigError: The chat template refuses the conversation, or there is no template.
          PromptError: The target has no tokenizer.
        """
        if question.ids:
            return [*question.ids]
        if not self.is_templated(question, answers):
            return encode(self._target, question.plain_text(answers))
        return encode_messages(self._target, question.messages(answers), question.tools)

    def every(self, record: Conversation | Text) -> list[list[int]]:
        """Returns the ids of all prompts of a record: one for each answer of a conversation.

        Raises:
          ConfigError: The chat template refuses the conversation, or there is no prompt.
          PromptError: The target has no tokenizer.
        """
        if isinstance(record, Conversation) and self.is_templated(of_record(record)):
            return self._conversations.prompts(record)
        return [self(of_record(record))] if self.count(record) else []

    def count(self, record: Conversation | Text) -> int:
        """Returns the number of prompts that ``every`` returns."""
        if isinstance(record, Text):
            return 1
        count = len(answered(record.messages))
        return count if self.is_templated(of_record(record)) else min(count, 1)

    @functools.cached_property
    def _conversations(self) -> Encoder:
        return Encoder(self._target.tokenizer)


def check_effect(variables: Mapping[str, Any], questions: Iterable[Question]) -> None:
    """Checks that variables of a chat template, if there are any, reach a conversation.

    Args:
      variables: The ``chat_template_kwargs`` of an experiment.
      questions: What is encoded.

    Raises:
      ConfigError: None of the questions is a conversation.
    """
    if variables and not any(question.turns for question in questions):
        raise ConfigError(
            f"chat_template_kwargs is {variables!r:.80}, and there is no conversation to render; "
            "expected conversations, or an empty chat_template_kwargs"
        )


def room_for_prompt(target: LoadedModel, max_new_tokens: int, longest: int | None = None) -> int:
    """Returns the maximum tokens of a prompt.

    Args:
      target: The model that holds them and the new ones.
      max_new_tokens: The room to leave for new tokens.
      longest: Another limit, or None.

    Raises:
      ConfigError: There is no room for a prompt.
    """
    room = target.max_length - max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, which leaves no room for a prompt: "
            f"{target.name} holds {target.max_length} tokens"
        )
    return min(room, longest or room)


def fit(
    questions: Sequence[Question], target: LoadedModel, max_new_tokens: int, longest: int | None
) -> tuple[list[list[int]], int]:
    """Encodes the first turn of questions and cuts the beginning of those that are too long.

    A token that the tokenizer puts first (BOS) is kept.

    Args:
      questions: Texts and conversations.
      target: The model that answers them.
      max_new_tokens: The room to leave for new tokens.
      longest: The maximum tokens of a prompt, or None.

    Returns:
      The ids, and the number of prompts that were cut.

    Raises:
      ConfigError: There is no room for a prompt, or another process has other prompts.
    """
    room = room_for_prompt(target, max_new_tokens, longest)
    whole = list(map(PromptEncoder(target), questions))
    ids = [cut(prompt, room, target.config.bos_token_id) for prompt in whole]
    check_same_prompts(ids)
    return ids, sum(len(prompt) > room for prompt in whole)


def check_same_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Checks that every process has the same prompts.

    Args:
      prompts: The ids of each prompt.

    Raises:
      ConfigError: In every process, where one has others.
    """
    text = json.dumps([list(map(int, prompt)) for prompt in prompts])
    processes.check_same({"the prompts": [len(prompts), zlib.crc32(text.encode())]})


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
    questions: Sequence[Question], encode: PromptEncoder
) -> tuple[list[Question], list[str]]:
    """Returns the questions that the chat template takes, and a sentence on each of the others.

    Args:
      questions: The questions.
      encode: Encodes the first turn of one.

    Raises:
      ConfigError: None of several can be encoded, or the only one cannot.
    """
    kept = []
    refused = []
    for question in questions:
        try:
            encode(question)
        except ConfigError as error:
            refused.append(f"question {question.name}: {error}")
        else:
            kept.append(question)
    if refused and not kept:
        raise ConfigError("; ".join(refused))
    return kept, [f"left out: {message}" for message in refused]


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
