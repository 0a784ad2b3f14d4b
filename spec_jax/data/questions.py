"""Questions: texts to continue and conversations to answer, with categories and turns."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from spec_jax.data import python_source, sources
from spec_jax.data.conversations import answered
from spec_jax.data.records import Conversation, Text, parse_record, read_rows, usable
from spec_jax.errors import ConfigError

CONVERSATION = "multi-turn conversation"
# Spec-Bench's groups: MT-bench's categories, ten questions of two turns each, are one of its six.
_MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities".split()
_NAMES = ("task_id", "question_id", "id")
_CONTINUED = "\n\n"  # between turns and answers, where there is no chat template


class Question(NamedTuple):
    """A text to continue, or the user's side of a conversation.

    Attributes:
      name: Unique among the questions of a set.
      category: Its category; the data's name where the file names none.
      turns: The messages before each answer; of a text, none.
      text: The text to continue; of a conversation, None.
      ids: The tokens of a text that is given as such.
      tools: What a chat template shows as functions.
      is_of_conversations: Whether its category belongs to the group of conversations.
    """

    name: str
    category: str = ""
    turns: tuple[tuple[dict[str, Any], ...], ...] = ()
    text: str | None = None
    ids: tuple[int, ...] = ()
    tools: list[dict] | None = None
    is_of_conversations: bool = False

    @property
    def num_turns(self) -> int:
        """The number of prompts, each of which is answered."""
        return len(self.turns) or 1

    @property
    def group(self) -> str:
        """Spec-Bench's group of the category."""
        return CONVERSATION if self.is_of_conversations else self.category

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Returns the conversation up to the turn that follows ``answers``; none of a text."""
        messages = [*(self.turns[0] if self.turns else ())]
        for answer, asked in zip(answers, self.turns[1:]):
            messages += [{"role": "assistant", "content": answer}, *asked]
        return messages

    def plain_text(self, answers: Sequence[str] = ()) -> str:
        """Returns the prompt for a target without a chat template.

        Turns and answers are joined by empty lines. Line ends at the end are removed, since
        tokenizers join them with what follows.
        """
        if self.text is not None:
            return self.text
        texts = [m["content"] for m in self.messages(answers) if m["content"]]
        return _CONTINUED.join(texts).rstrip("\n")


class Questions(NamedTuple):
    """The questions of a run, and what must be said of them.

    Attributes:
      chosen: The questions.
      source: What they are, for the report.
      notes: Lines that were left out, categories without questions.
    """

    chosen: list[Question]
    source: str
    notes: list[str]


def load(data: str, n: int, categories: Sequence[str] = (), seed: int = 0) -> Questions:
    """Loads questions by name or from a file; malformed rows are left out and named.

    A JSON file (see ``records.is_json``) has rows of the forms of ``records.parse_record``, among
    them those of HumanEval, Spec-Bench, GSM8K, Alpaca, ShareGPT and UltraChat. Any other file has
    one text per line.

    Args:
      data: "" for functions of held-out modules of the standard library; otherwise the name of a
        question set, see ``sources``, or a file.
      n: How many, at even distances; 0, or more than there are: all.
      categories: Categories and groups to choose from; empty: all.
      seed: Chooses the held-out functions.

    Raises:
      ConfigError: The data cannot be read, or has no question of these categories.
    """
    if not data:
        functions = python_source.held_out_prompts(n, seed)
        chosen = [Question(f.name, "functions", text=f.text) for f in functions]
        return Questions(chosen, "functions of held-out modules of the standard library", [])
    malformed: list[str] = []
    questions = _with_unique_names(read(data, malformed))
    # Categories of MT-bench whose questions all have several turns.
    grouped = {*_MT_BENCH} - {q.category for q in questions if q.num_turns == 1}
    questions = [q._replace(is_of_conversations=q.category in grouped) for q in questions]
    if not questions:
        why = f" ({'; '.join(malformed)})" if malformed else ""
        raise ConfigError(f"{data} has no question{why}; expected one a line")
    notes = [f"left out: {message}" for message in malformed]
    known = [*dict.fromkeys(name for q in questions for name in (q.group, q.category))]
    if categories:
        questions = [q for q in questions if q.category in categories or q.group in categories]
    if not questions:
        raise ConfigError(
            f"categories are {', '.join(categories)}, and {data} has no question of them; it has "
            f"{', '.join(known)}"
        )
    total = len(questions)
    if n > total:
        notes.append(f"{data} has {total} questions, not {n}: all of them are used")
    notes += [
        f"{data} has no question of the category {name!r}; it has {', '.join(known)}"
        for name in categories
        if name not in known
    ]
    if 0 < n < total:
        questions = [questions[i * total // n] for i in range(n)]
    return Questions(questions, f"questions of {data}", notes)


def read(data: str, malformed: list[str] | None = None) -> list[Question]:
    """Returns every question of a set or a file.

    Args:
      data: The name of a question set, or a file, see ``load``.
      malformed: Gets a message on each row that is left out; None: the first one is an error.

    Raises:
      ConfigError: The data cannot be read, or a row is not a question.
    """
    sources.check(data)
    path = pathlib.Path(data)
    is_set = sources.is_name(data)
    usual = data if is_set else path.name.partition(".")[0]
    rows = sources.rows(data) if is_set else read_rows(path, malformed, has_lines=True)

    def question(value: Any, source: str) -> Question:
        record = read_record(value, source)
        row = value if isinstance(value, dict) else {}
        place = pathlib.PurePath(source).name
        name = str(next((row[key] for key in _NAMES if row.get(key) is not None), place))
        category = " ".join(str(row.get("category") or usual).split()) or usual
        return of_record(record, name, category, row.get("turns"))

    return [*usable(rows, question, malformed)]


def read_record(row: Any, source: str) -> Conversation | Text:
    """Returns the record of a JSON value that holds a prompt, which every experiment can use.

    Args:
      row: The value.
      source: Its place, for the message.

    Raises:
      ConfigError: It has none of the forms, a text that cannot be encoded, an empty prompt or turn,
        no text of the user before its first answer, or a category that is no text.
    """
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{source} holds half of a surrogate pair; expected text") from None
    record = parse_record(row, source)
    fields = row if isinstance(row, dict) else {}
    category = fields.get("category") or ""
    turns = fields.get("turns")
    if not isinstance(category, str | int | float):
        raise ConfigError(f"{source}: category is {category!r:.60}; expected a text")
    if _is_of_turns(record, turns) and not all(isinstance(x, str) and x.strip() for x in turns):
        raise ConfigError(f"{source} has an empty turn; expected a question in each")
    if isinstance(record, Text):
        texts = [record.text]
    else:
        ends = answered(record.messages)
        if not ends:
            raise ConfigError(f"{source} has no message to answer")
        before = record.messages[: ends[0]]
        texts = [m["content"] for m in before if m["role"] == "user" and m["content"]]
        if not texts:
            raise ConfigError(f"{source} has no text of the user before its first answer")
    if not texts[0].strip():
        raise ConfigError(f"{source} has an empty prompt; expected a text to continue")
    return record


def _is_of_turns(record: Conversation | Text, turns: Any) -> bool:
    """Whether a record was read of a row's ``turns``, of which it has the first."""
    if isinstance(record, Text) or not isinstance(turns, list) or not record.messages:
        return False
    return record.messages[-1]["content"] == turns[0]


def of_record(
    record: Conversation | Text, name: str = "", category: str = "", turns: Any = None
) -> Question:
    """Returns the question of a record.

    Args:
      record: A text or a conversation, whose answers are left out.
      name: A name for reports.
      category: Its category.
      turns: The ``turns`` of the row that the record was read from, if it has them.
    """
    if isinstance(record, Text):
        return Question(name, category, text=record.text.rstrip("\n"))
    messages = record.messages
    if _is_of_turns(record, turns):
        more = [[{"role": "user", "content": turn}] for turn in turns[1:]]
    else:
        ends = answered(messages)
        begins = [0, *(end + 1 for end in ends)]
        asked = (messages[begin:end] for begin, end in zip(begins, ends))  # without the answers
        messages, *more = [part for part in asked if part] or [[]]
    return Question(name, category, (tuple(messages), *map(tuple, more)), tools=record.tools)


def _with_unique_names(questions: Sequence[Question]) -> list[Question]:
    """Numbers those that share a name, past the numbers that a file uses itself."""
    taken = {question.name for question in questions}
    unique = []
    seen: set[str] = set()
    for question in questions:
        name = question.name
        if name in seen:
            numbered = (f"{question.name} #{again}" for again in itertools.count(2))
            name = next(other for other in numbered if other not in taken)
        seen.add(name)
        taken.add(name)
        unique.append(question._replace(name=name))
    return unique
