"""Conversations as text: the chat templates that come with Hugging Face tokenizers."""

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
    """The templates of one tokenizer, and what they may refer to.

    Rendering is transformers': Jinja in a sandbox, with ``raise_exception``, ``tojson``,
    ``strftime_now``, loop controls and ``{% generation %}`` blocks.
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
        """The tokenizer's chat templates, with its special tokens as variables.

        Args:
          tokenizer: as ``Tokenizer.from_directory`` loads it.
          variables: more for the template, such as ``enable_thinking``; they go before the
            special tokens.
          name: of the template, where there are several.
          now: what ``strftime_now`` shows; None: the time of this call.

        Raises:
          ConfigError: the tokenizer has no chat template, or none of that name.
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
        """The text of the template that a conversation with or without tools takes.

        Raises:
          ConfigError: no template of that name, or no default.
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
        """Whether the template marks what the assistant writes with ``{% generation %}``."""
        return _compile(self.source(has_tools=has_tools))[1]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text, the special tokens that the template writes included.

        Args:
          messages: each with a role and a content, as JSON has them; keys whose value is
            None count as absent.
          tools: JSON schemas of functions, for templates that show them.
          documents: for templates that show them.
          add_generation_prompt: whether to end with the header of an assistant's turn.

        Raises:
          ConfigError: no message, one that is no JSON object, or a template that fails.
        """
        return self._render(messages, tools, documents, add_generation_prompt, ("", ""))

    def render_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the character spans of its ``{% generation %}`` blocks.

        Raises:
          ConfigError: as ``render``; or the template computes with the text of a block, so
            that its place in the whole is lost.
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
            # A copy of plain JSON types: a template can reach no method of a caller's object.
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
        except Exception as error:  # a template is a program: it may fail in any way
            raise ConfigError(
                f"the chat template refuses the conversation: {str(error) or type(error).__name__}"
            ) from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}``: its text, between marks that rendering sets."""

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
    """Refuses names with a leading underscore, by which a template could reach internals."""

    def __init__(*args, **values):
        self, *rest = args  # a template may well set a name "self"
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
    """The template, and whether it has generation blocks."""
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
    """A message without its absent values, its reasoning under the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    found = [message[key] for key in _REASONING if key in message]
    return {"thinking": found[0], **message, "reasoning_content": found[0]} if found else message
