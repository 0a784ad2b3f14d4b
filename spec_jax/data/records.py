"""Conversations and texts, read one by one from files in the usual formats."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from spec_jax.errors import ConfigError

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


class Conversation(NamedTuple):
    """Messages as chat templates read them: dicts with a role and a content."""

    messages: list[dict[str, Any]]
    tools: list[dict] | None
    source: str  # file and line


class Text(NamedTuple):
    """A text that is not a conversation."""

    text: str
    source: str  # file, and line if the file holds several


def read_records(path: str | os.PathLike) -> Iterator[Conversation | Text]:
    """Reads the conversations and texts of one file, or of all files of a folder by name.

    A JSON file (see ``is_json``) holds objects of one of three forms: ``messages``, each with
    role and content, where content is a string or a list of text parts; ``conversations``, each
    with from and value as in ShareGPT, with an optional ``system`` and ``tools``; or ``text``.
    Any other file is one text. All files may be compressed (.gz).

    Args:
      path: The file or folder.

    Raises:
      ConfigError: The file does not exist, is not UTF-8, or has a malformed line or object; the
        message says which.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        files = (f for f in path.rglob("*") if f.is_file() and not f.name.startswith("."))
        for file in sorted(files, key=lambda f: f.relative_to(path).as_posix()):
            yield from read_records(file)
        return
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; expected conversations or text")
    if is_json(path):
        for value, source in read_objects(path):
            yield parse_record(value, source)
    else:
        yield Text(read_text(path), str(path))


def is_json(path: pathlib.Path) -> bool:
    """Whether a file's name ends in .json or .jsonl, with or without .gz."""
    name = path.with_suffix("") if _is_gzip(path) else path
    return name.suffix.lower() in (".json", ".jsonl")


def read_objects(path: pathlib.Path) -> Iterator[tuple[Any, str]]:
    """Yields the values of a JSON file, with the place of each for error messages.

    A file holds one value a line, or one list. Lines are read one at a time and blank lines are
    skipped; a list is held in memory.

    Args:
      path: The file.

    Raises:
      ConfigError: The file cannot be read, is not UTF-8 or not JSON; the message says where.
    """
    if _is_list(path):
        for number, value in enumerate(_parse(read_text(path), str(path)), 1):
            yield value, f"{path}: object {number}"
        return
    for number, line in enumerate(_lines(path), 1):
        source = f"{path}:{number}"
        text = _decode(line, source)
        if text.strip():
            yield _parse(text, source), source


def read_text(path: pathlib.Path) -> str:
    """Reads a whole file as text.

    Args:
      path: The file.

    Raises:
      ConfigError: The file cannot be read, or is not UTF-8.
    """
    return _decode(b"".join(_lines(path)), str(path))


def holds_conversations(path: str | os.PathLike) -> bool:
    """Whether a file's first record is a conversation. False if it cannot be read."""
    try:
        return isinstance(next(read_records(path), None), Conversation)
    except ConfigError:
        return False


def parse_record(value: Any, source: str) -> Conversation | Text:
    """Reads one object of a file as a conversation or a text.

    Args:
      value: The parsed JSON object.
      source: The file and the line, for error messages.

    Raises:
      ConfigError: The object has none of the forms of ``read_records``.
    """
    if not isinstance(value, dict):
        raise _malformed(source, f"{value!r:.60} is no object")
    turns = value.get("messages")
    if turns is None:
        turns = value.get("conversations")
    if turns is None and isinstance(value.get("text"), str):
        return Text(value["text"], source)
    if not isinstance(turns, list):
        raise _malformed(source, f"an object with the keys {', '.join(map(repr, value)) or 'none'}")
    messages = [_message(turn, source) for turn in turns]
    system = value.get("system")
    if isinstance(system, str) and system and [m["role"] for m in messages[:1]] != ["system"]:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, _tools(value.get("tools"), source), source)


def _tools(value: Any, source: str) -> list[dict] | None:
    tools = _parse(value, source) if isinstance(value, str) and value else value
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _malformed(source, f"tools are {tools!r:.60}; expected a list of objects")
    return tools


def _message(turn: Any, source: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise _malformed(source, f"a turn is {turn!r:.60}; expected an object")
    if "from" in turn:
        role = ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise _malformed(
                source,
                f"a turn is from {turn['from']!r} with the value {turn.get('value')!r:.60}; "
                f"expected a text from one of {', '.join(ROLES)}",
            )
        return {"role": role, "content": turn["value"]}
    if not isinstance(turn.get("role"), str):
        raise _malformed(source, f"a message has the role {turn.get('role')!r}; expected a text")
    content = turn.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise _malformed(source, f"a message holds {content!r:.60}; expected text only")
        content = "".join(parts)
    has_more = any(turn.get(key) for key in ("tool_calls", "reasoning_content", "reasoning"))
    if not isinstance(content, str) and not (content is None and has_more):
        raise _malformed(source, f"a message has the content {content!r:.60}; expected a text")
    return {**turn, "content": content}


def _malformed(source: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{source}: {problem}. Expected one object a line, or a list of objects, each with "
        "messages, conversations or text: mend it or leave it out"
    )


def _is_gzip(path: pathlib.Path) -> bool:
    return path.suffix.lower() == ".gz"


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if _is_gzip(path) else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source}: not JSON ({error}). Expected one object a line, or one list of objects: "
            "mend it or leave it out"
        ) from error


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: byte {error.start + 1} is not UTF-8; expected text: convert it or leave "
            "it out"
        ) from error


def _is_list(path: pathlib.Path) -> bool:
    starts = (line.lstrip(b"\xef\xbb\xbf \t\r\n") for line in _lines(path))
    return next(filter(None, starts), b"").startswith(b"[")
