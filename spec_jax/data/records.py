"""Conversations and texts, read one by one from files in the usual formats."""

from __future__ import annotations

import gzip
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from spec_jax.errors import ConfigError
from spec_jax.models.files import parse_json

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
FORMS = (
    "messages",
    "conversations",
    "data (a list of texts in turn)",
    "turns",
    "instruction (with input and output)",
    "question (with answer)",
    "prompt (with completion)",
    "text",
)
_EXPECTED = {  # by the keys of FORMS
    **dict.fromkeys(("messages", "conversations"), "a list of objects"),
    **dict.fromkeys(("data", "turns"), "a list of texts, at least one"),
    **dict.fromkeys(("instruction", "question", "prompt", "text"), "a text"),
}
_WHOLE = f"Expected one object a line, or a list of objects, each with one of {', '.join(FORMS)}"
_REMEDY = ": mend it or leave it out"
MAX_UNPACKED_BYTES = 1 << 30  # of a compressed file
T = TypeVar("T")
_ANSWERS = ("output", "answer", "completion", "response")


class Conversation(NamedTuple):
    """Messages as chat templates read them: dicts with a role and a content."""

    messages: list[dict[str, Any]]
    tools: list[dict] | None
    source: str  # file and line


class Text(NamedTuple):
    """A text that is not a conversation."""

    text: str
    source: str  # file, and line if the file holds several


def read_records(
    path: str | os.PathLike,
    malformed: list[str] | None = None,
    read: Callable[[Any, str], Conversation | Text] | None = None,
) -> Iterator[Conversation | Text]:
    """Reads the conversations and texts of one file, or of all files of a folder by name.

    A JSON file (see ``is_json``) holds objects of the forms of ``parse_record``. Any other file
    is one text. All files may be compressed (.gz), up to ``MAX_UNPACKED_BYTES`` unpacked. Of a
    folder, hidden files and folders and ``__pycache__`` are not read.

    Args:
      path: The file or folder.
      malformed: Gets the message of each line, object or text that cannot be read, and that is then
        left out; None means that the first one is an error.
      read: Reads a JSON value, given its place for messages; by default ``parse_record``.

    Raises:
      ConfigError: The file does not exist, is not UTF-8, or has a malformed line or object; the
        message says which.
    """
    if path == "":
        raise ConfigError("the path is ''; expected a file or folder ('.' is the current one)")
    path = pathlib.Path(path)
    if path.is_dir():
        for file in sorted(path.rglob("*"), key=lambda f: f.relative_to(path).as_posix()):
            parts = file.relative_to(path).parts
            is_hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            if file.is_file() and not is_hidden:
                yield from read_records(file, malformed, read)
        return
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; expected conversations or text")
    yield from usable(read_rows(path, malformed), read or parse_record, malformed)


def usable(
    rows: Iterable[tuple[Any, str]], read: Callable[[Any, str], T], malformed: list[str] | None
) -> Iterator[T]:
    """Yields what rows are; one that cannot be used is left out and named, or an error.

    Args:
      rows: Values, each with its place.
      read: Returns what a row is, or raises a ConfigError.
      malformed: Gets the messages of the rows that are left out; None: the first one is an error.
    """
    for value, source in rows:
        try:
            found = read(value, source)
        except ConfigError as error:
            if malformed is None:
                raise
            malformed.append(str(error).removesuffix(_REMEDY))  # it is left out already
        else:
            yield found


def is_json(path: pathlib.Path) -> bool:
    """Whether a file's name ends in .json or .jsonl, with or without .gz."""
    name = path.with_suffix("") if _is_gzip(path) else path
    return name.suffix.lower() in (".json", ".jsonl")


def read_rows(
    path: pathlib.Path, malformed: list[str] | None = None, *, has_lines: bool = False
) -> Iterator[tuple[Any, str]]:
    """Yields what a file holds, with the place of each for error messages.

    A JSON file holds one value a line, or one list. Lines are read one at a time and blank lines
    are skipped; a list is held in memory. Any other file is one text, or one a line.

    Args:
      path: The file.
      malformed: Gets the message of each line or text that is not UTF-8 or not JSON, and that is
        then left out; None means that the first one is an error.
      has_lines: Whether each line of a file that is not JSON is a text.

    Raises:
      ConfigError: The file cannot be read, is not UTF-8 or not JSON; the message says where.
    """
    is_objects = is_json(path)
    if is_objects and _is_list(path):
        text = _decode(b"".join(_lines(path)), str(path))
        for number, value in enumerate(_parse(text, str(path)), 1):
            yield value, f"{path}: object {number}"
        return
    if not (is_objects or has_lines):

        def whole(path: pathlib.Path, source: str) -> tuple[str, str]:
            return _decode(b"".join(_lines(path)), source), source

        yield from usable([(path, str(path))], whole, malformed)
        return

    def read(line: bytes, source: str) -> tuple[Any, str] | None:
        text = _decode(line, source).rstrip("\r\n")
        if not text.strip():
            return None
        return (_parse(text, source) if is_objects else text), source

    lines = ((line, f"{path}:{number}") for number, line in enumerate(_lines(path), 1))
    yield from filter(None, usable(lines, read, malformed))


def parse_record(value: Any, source: str) -> Conversation | Text:
    """Reads one value of a JSON file as a conversation or a text.

    The first of these keys that is there decides:

    - ``messages``, each with role and content, a string or a list of text parts.
    - ``conversations``, each with from and value, as in ShareGPT.
    - ``data``, texts of user and assistant in turn, as in UltraChat.
    - ``turns``, questions of which the first is used, as in Spec-Bench.
    - ``instruction`` with ``input`` and ``output``, as in Alpaca.
    - ``question`` with ``answer``, as in GSM8K.
    - ``prompt``: a text to continue, as in HumanEval; with ``completion`` a conversation.
    - ``text``; a string alone is a text too.

    Answers may be missing; they may also be called ``output``, ``answer``, ``completion`` or
    ``response``. Every conversation may have ``system`` and ``tools``.

    Args:
      value: The parsed JSON value.
      source: The file and the line, for error messages.

    Raises:
      ConfigError: The value has none of these forms.
    """
    if isinstance(value, str):
        return Text(value, source)
    if not isinstance(value, dict):
        raise _malformed(source, f"{value!r:.60} is not an object. {_WHOLE}")
    given = {key: x for key, x in value.items() if x is not None}
    messages = _messages(given, source)
    if messages is None:
        text = given.get("prompt", given.get("text"))
        if not isinstance(text, str):
            raise _malformed(source, _what_is_wrong(value))
        return Text(text, source)
    system = given.get("system", given.get("system_prompt"))
    if isinstance(system, str) and system and [m["role"] for m in messages[:1]] != ["system"]:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, _tools(value.get("tools"), source), source)


def _messages(given: dict[str, Any], source: str) -> list[dict[str, Any]] | None:
    """Returns the messages of an object; None if it has no form of a conversation."""
    for key in ("messages", "conversations"):
        if isinstance(given.get(key), list):
            return [_message(turn, source) for turn in given[key]]

    def is_texts(x):
        return isinstance(x, list) and x and all(isinstance(text, str) for text in x)

    if is_texts(given.get("data")):
        return _in_turn(given["data"])
    if is_texts(given.get("turns")):
        return _in_turn(given["turns"][:1])
    answers = [given[key] for key in _ANSWERS if isinstance(given.get(key), str)]
    for key in ("instruction", "question", *(["prompt"] if answers else [])):
        if isinstance(given.get(key), str):
            parts = [given[key], given.get("input") if key == "instruction" else None]
            asked = "\n\n".join(part for part in parts if isinstance(part, str) and part)
            return _in_turn([asked, *filter(None, answers[:1])])
    return None


def _in_turn(texts: list[str]) -> list[dict[str, Any]]:
    """Returns the messages of user and assistant, who take turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(texts)]


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


def _what_is_wrong(value: dict[str, Any]) -> str:
    """Says why an object has none of the known forms: its wrong value, or its keys."""
    keys = sorted((key for key in _EXPECTED if key in value), key=lambda key: value[key] is None)
    if not keys:
        return f"an object with the keys {', '.join(map(repr, value)) or 'none'}. {_WHOLE}"
    return f"{keys[0]} is {value[keys[0]]!r:.60}; expected {_EXPECTED[keys[0]]}"


def _malformed(source: str, problem: str) -> ConfigError:
    return ConfigError(f"{source}: {problem}{_REMEDY}")


def _is_gzip(path: pathlib.Path) -> bool:
    return path.suffix.lower() == ".gz"


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    try:
        if not _is_gzip(path):
            with path.open("rb") as file:
                yield from file
            return
        room = MAX_UNPACKED_BYTES
        with gzip.open(path) as file:
            while line := file.readline(room + 1):
                room -= len(line)
                if room < 0:
                    raise ConfigError(
                        f"{path} unpacks to more than {MAX_UNPACKED_BYTES:,} bytes; unpack it and "
                        f"name the unpacked file: gunzip -k {path}"
                    )
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse(text: str, source: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        problem = f"not JSON ({error}). Expected one object a line, or one list of objects"
        raise _malformed(source, problem) from error


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} is not UTF-8; expected text in UTF-8"
        raise _malformed(source, problem) from error


def _is_list(path: pathlib.Path) -> bool:
    starts = (line.lstrip(b"\xef\xbb\xbf \t\r\n") for line in _lines(path))
    return next(filter(None, starts), b"").startswith(b"[")
