"""Conversations as text, by the chat templates that come with Hugging Face tokenizers."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.data import template_process
from spec_jax.data.template_program import MARKS
from spec_jax.errors import ConfigError, did_you_mean
from spec_jax.models.files import check_depth
from spec_jax.models.tokenizer import Tokenizer

_REASONING = ("reasoning_content", "thinking", "reasoning")
# Names that every rendering sets, or that are functions.
_OF_CONVERSATIONS = ("messages", "add_generation_prompt")
_FUNCTIONS = ("raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler")
_PRIVATE_USE = range(0xE000, 0xF900)


@functools.cache
def _time_of_process() -> datetime.datetime:
    """One time for all templates, so that a run over midnight has prompts of one date."""
    return datetime.datetime.now()


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a tokenizer, and the variables that they read.

    Rendering is the same as in transformers: Jinja in a sandbox, with ``raise_exception``,
    ``tojson``, ``strftime_now``, loop controls and ``{% generation %}`` blocks. A template is a
    program that comes with a model, so it runs in a process of its own, which all templates share,
    and may take ``template_process.MAX_SECONDS`` and, where the system bounds memory,
    ``template_program.MAX_BYTES``.
    """

    sources: Mapping[str, str]  # template texts by name
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON values
    now: datetime.datetime = dataclasses.field(default_factory=_time_of_process)  # strftime_now's

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Takes the tokenizer's chat templates and its variables for them.

        The tokenizer's ``chat_template_kwargs`` override its special tokens. ``tools`` and
        ``documents`` among them are of conversations that have none of their own.

        Args:
          tokenizer: A tokenizer that ``Tokenizer.from_directory`` loaded.

        Raises:
          ConfigError: The tokenizer has no chat template; or the template does not read one of
            ``chat_template_kwargs``, or every rendering sets it.
        """
        sources = tokenizer.chat_templates
        if not sources:
            raise ConfigError(
                "the tokenizer has no chat template; expected chat_template.jinja beside "
                "tokenizer.json, or chat_template in tokenizer_config.json"
            )
        chosen = tokenizer.chat_template_kwargs
        template = cls(sources, {**tokenizer.special_tokens, **chosen})
        template.source()
        read = set()
        if chosen:
            read = {name for has in (False, True) for name in template._ask(has, None)["names"]}
        for name, value in chosen.items():
            is_list = isinstance(value, (list, tuple)) and all(isinstance(x, dict) for x in value)
            if name in ("tools", "documents") and not is_list and value is not None:
                raise ConfigError(
                    f"{name} of the chat template are {value!r:.60}; expected objects"
                )
            if name in _OF_CONVERSATIONS or name not in read:
                known = sorted(read - {*_OF_CONVERSATIONS, *_FUNCTIONS})
                raise ConfigError(
                    f"the chat template does not read the variable {name!r}"
                    f"{did_you_mean(name, known)}; it reads {', '.join(known) or 'none'}"
                )
        return template

    def source(self, *, has_tools: bool = False) -> str:
        """Returns the text of the template "tool_use", or of the default one.

        Args:
          has_tools: Whether the conversation has tools.

        Raises:
          ConfigError: There is no default template.
        """
        has_tools = has_tools or self.variables.get("tools") is not None
        name = "tool_use" if has_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ConfigError(
                f"the tokenizer has no chat template {name!r}; it has "
                f"{', '.join(map(repr, sorted(self.sources)))}"
            )
        return self.sources[name]

    def has_generation(self, *, has_tools: bool = False) -> bool:
        """Whether the template marks the assistant's turns with ``{% generation %}``."""
        return self._ask(has_tools, None)["has_generation"]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Renders a conversation as text, with the special tokens that the template writes.

        Args:
          messages: JSON objects with a role and a content. Keys whose value is None count as
            absent.
          tools: JSON schemas of functions, for templates that show them.
          add_generation_prompt: Whether to end with the header of an assistant's turn.

        Raises:
          ConfigError: There is no message, one is not a JSON object, or the template fails.
        """
        return self._render(messages, tools, add_generation_prompt)

    def render_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a conversation, and finds its ``{% generation %}`` blocks.

        Args:
          messages: See ``render``.
          tools: See ``render``.

        Returns:
          The text, and the begin and end of each block in characters.

        Raises:
          ConfigError: See ``render``; or the template changes the text of a block, so that its
            place in the whole text is unknown.
        """
        text = self._render(messages, tools)
        used = set(text) | set(self.source(has_tools=tools is not None))
        begin, end, *_ = (chr(c) for c in _PRIVATE_USE if chr(c) not in used)
        marked = self._render(messages, tools, marks=(begin, end))
        position = 0
        open_blocks = []
        spans = []
        pieces = []
        for piece in re.split(f"([{begin}{end}])", marked):
            if piece == begin:
                open_blocks.append(position)
            elif piece == end and open_blocks:
                spans.append((open_blocks.pop(), position))
            else:
                pieces.append(piece)
                position += len(piece)
        if "".join(pieces) != text or open_blocks:
            raise ConfigError(
                "the chat template changes the text of a generation block after the block's end; "
                "expected blocks whose text is written as it is"
            )
        return text, sorted(spans)

    def _render(self, messages, tools, add_generation_prompt=False, marks=("", "")) -> str:
        tools = self.variables.get("tools") if tools is None else tools
        if not messages:
            raise ConfigError("the conversation has no message; expected at least one")
        for name, value in (("message", [messages, tools]), ("variable", dict(self.variables))):
            try:
                json.dumps(value)
                check_depth(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"a {name} holds what JSON cannot: {error}") from error
        for message in messages:
            if not isinstance(message, dict):
                raise ConfigError(f"a message is {message!r:.80}; expected an object with a role")
        return self._ask(
            tools is not None,
            {
                "documents": None,
                **self.variables,
                "messages": [_with_reasoning(message) for message in messages],
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                MARKS: marks,
            },
        )["text"]

    def _ask(self, has_tools: bool, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns what the process of templates answers; without variables nothing is rendered."""
        answer = template_process.ask(
            {
                "source": self.source(has_tools=has_tools),
                "variables": variables,
                "now": self.now.isoformat(),
            }
        )
        if "unreadable" in answer:
            raise ConfigError(f"the chat template cannot be read: {answer['unreadable']}")
        if "refusal" in answer:
            raise ConfigError(f"the chat template refuses the conversation: {answer['refusal']}")
        return answer


def _with_reasoning(message: dict) -> dict:
    """Drops absent values, and puts the reasoning under the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    found = [message[key] for key in _REASONING if key in message]
    return {"thinking": found[0], **message, "reasoning_content": found[0]} if found else message
