"""Conversations as text, by the chat templates that come with Hugging Face tokenizers."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from spec_jax.errors import ConfigError
from spec_jax.models.tokenizer import Tokenizer

_MARKS = "_marks_of_generation"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PRIVATE_USE = range(0xE000, 0xF900)


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a tokenizer, and the variables that they read.

    Rendering is the same as in transformers: Jinja in a sandbox, with ``raise_exception``,
    ``tojson``, ``strftime_now``, loop controls and ``{% generation %}`` blocks.
    """

    sources: Mapping[str, str]  # template texts by name
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str | None = None  # None: "tool_use" for conversations with tools, else "default"
    now: datetime.datetime = dataclasses.field(default_factory=datetime.datetime.now)

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Tokenizer,
        *,
        variables: Mapping[str, Any] | None = None,
        name: str | None = None,
        now: datetime.datetime | None = None,
    ) -> ChatTemplate:
        """Takes the tokenizer's chat templates, with its special tokens as variables.

        Args:
          tokenizer: A tokenizer that ``Tokenizer.from_directory`` loaded.
          variables: More variables, such as ``enable_thinking``. They override special tokens.
          name: The name of the template, if there are several.
          now: The time that ``strftime_now`` shows. None means the time of this call.

        Raises:
          ConfigError: The tokenizer has no chat template, or none of that name.
        """
        sources = tokenizer.chat_templates
        if not sources:
            raise ConfigError(
                "the tokenizer has no chat template; expected chat_template.jinja beside "
                "tokenizer.json, or chat_template in tokenizer_config.json"
            )
        template = cls(
            sources,
            {**tokenizer.special_tokens, **(variables or {})},
            name,
            now or datetime.datetime.now(),
        )
        template.source()
        return template

    def source(self, *, has_tools: bool = False) -> str:
        """Returns the text of the template for conversations with or without tools.

        Args:
          has_tools: Whether the conversation has tools.

        Raises:
          ConfigError: There is no template of that name, or no default one.
        """
        name = self.name
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ConfigError(
                f"the tokenizer has no chat template {name!r}; expected name to be one of "
                f"{', '.join(map(repr, sorted(self.sources)))}"
            )
        return self.sources[name]

    def has_generation(self, *, has_tools: bool = False) -> bool:
        """Whether the template marks the assistant's turns with ``{% generation %}``."""
        return _compile(self.source(has_tools=has_tools))[1]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Renders a conversation as text, with the special tokens that the template writes.

        Args:
          messages: JSON objects with a role and a content. Keys whose value is None count as
            absent.
          tools: JSON schemas of functions, for templates that show them.
          documents: Documents, for templates that show them.
          add_generation_prompt: Whether to end with the header of an assistant's turn.

        Raises:
          ConfigError: There is no message, one is not a JSON object, or the template fails.
        """
        return self._render(messages, tools, documents, add_generation_prompt, ("", ""))

    def render_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a conversation, and finds its ``{% generation %}`` blocks.

        Args:
          messages: See ``render``.
          tools: See ``render``.
          documents: See ``render``.

        Returns:
          The text, and the begin and end of each block in characters.

        Raises:
          ConfigError: See ``render``; or the template changes the text of a block, so that its
            place in the whole text is unknown.
        """
        text = self._render(messages, tools, documents, False, ("", ""))
        used = set(text) | set(self.source(has_tools=tools is not None))
        begin, end, *_ = (chr(c) for c in _PRIVATE_USE if chr(c) not in used)
        marked = self._render(messages, tools, documents, False, (begin, end))
        position, open_blocks, spans, pieces = 0, [], [], []
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

    def _render(self, messages, tools, documents, add_generation_prompt, marks) -> str:
        if not messages:
            raise ConfigError("the conversation has no message; expected at least one")
        try:
            # A copy of plain JSON types, so that a template cannot call methods of the caller's.
            messages, tools, documents = json.loads(json.dumps([messages, tools, documents]))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a message holds what JSON cannot: {error}") from error
        for message in messages:
            if not isinstance(message, dict):
                raise ConfigError(f"a message is {message!r:.80}; expected an object with a role")
        template, _ = _compile(self.source(has_tools=tools is not None))
        try:
            return template.render({
                "strftime_now": self.now.strftime,
                **self.variables,
                "messages": [_with_reasoning(message) for message in messages],
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                _MARKS: marks,
            })
        except Exception as error:  # a template is a program and may fail in any way
            raise ConfigError(
                f"the chat template refuses the conversation: {str(error) or type(error).__name__}"
            ) from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}``; rendering chooses the marks around the text."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _marked(self, context, caller) -> str:
        begin, end = context[_MARKS]
        return begin + caller() + end


class _Namespace(jinja2.utils.Namespace):
    """Refuses names with a leading underscore, through which a template could reach internals."""

    def __init__(*args, **values):
        self, *rest = args  # not a named argument, as a template may set a name "self"
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*rest, **values).items():
            self[name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
        super().__setitem__(name, value)


def _dict(*args, **values) -> dict:
    return dict(*args, **values)


_dict.fromkeys = dict.fromkeys


def _raise(message):
    raise jinja2.exceptions.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> tuple[jinja2.Template, bool]:
    """Returns the template, and whether it has generation blocks."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {"raise_exception": _raise, "dict": _dict, "namespace": _Namespace}
    try:
        tree = sandbox.parse(source)
        found = tree.find_all(nodes.ExtensionAttribute)
        return sandbox.from_string(source), any(node.name == "_marked" for node in found)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template cannot be read: line {error.lineno}: {error.message}"
        ) from error


def _with_reasoning(message: dict) -> dict:
    """Drops absent values, and puts the reasoning under the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    found = [message[key] for key in _REASONING if key in message]
    return {"thinking": found[0], **message, "reasoning_content": found[0]} if found else message
