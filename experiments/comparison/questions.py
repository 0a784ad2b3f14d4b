"""Questions with categories and several turns, for ``experiments.evaluate``."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from experiments.comparison.prompts import Prompt, PromptEncoder, is_of_turns, read_record, take
from spec_jax.data import data_sources
from spec_jax.data.records import Conversation, Text, is_json, read_lines, read_objects, usable
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel

CONVERSATION = "multi-turn conversation"
# Spec-Bench's groups: MT-bench's categories, ten questions of two turns each, are one of its six.
_OF_CONVERSATION = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
_NAMES = ("task_id", "question_id", "id")
_CONTINUED = "\n\n"  # between turns and answers, where there is no chat template


class Question(NamedTuple):
    """A text to continue, or the user's side of a conversation.

    Attributes:
      name: Another one for each question.
      category: Its category; the data's name where the file names none.
      turns: The messages before each answer; of a text, none.
      text: The text to continue; of a conversation, None.
      ids: The tokens of a text that is given as such.
      tools: What a chat template shows as functions.
      is_of_conversations: Whether its category belongs to the group of conversations.
    """

    name: str
    category: str
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

    def prompt(self, answers: Sequence[str], *, is_templated: bool) -> Prompt:
        """Returns the prompt of the turn that follows ``answers``.

        Args:
          answers: The answers to the turns before it.
          is_templated: Whether the target has a chat template. Without one, turns and answers are
            joined by empty lines; the first turn is read as ``PromptEncoder`` does.
        """
        if self.text is not None:
            return Prompt(self.name, self.text)
        messages = [*self.turns[0]]
        for answer, asked in zip(answers, self.turns[1:]):
            messages += [{"role": "assistant", "content": answer}, *asked]
        texts = [m["content"] for m in messages if m["content"]]
        text = texts[0] if len(messages) == 1 else _CONTINUED.join(texts)
        if answers and not is_templated:
            return Prompt(self.name, text)
        return Prompt(self.name, text, Conversation(messages, self.tools, self.name))


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


def load(data: str, n: int, categories: Sequence[str] = ()) -> Questions:
    """Loads questions by name or from a file; malformed rows are left out and named.

    Args:
      data: The name of a question set, or a file, see ``prompts.load_prompts``.
      n: How many, at even distances; 0, or more than there are: all.
      categories: Categories and groups to choose from; empty: all.

    Raises:
      ConfigError: It cannot be read, or has no question of these categories.
    """
    malformed: list[str] = []
    is_set = data_sources.is_name(data)
    usual = data if is_set else pathlib.Path(data).name.partition(".")[0]
    read = functools.partial(_question, usual=usual)
    found = [*usable(_rows(data, malformed), read, malformed)]
    found, notes, more = _with_groups(_with_own_names(found)), [], []
    if found:
        found, more = _of_categories(found, categories, data)
    chosen = take(found, n, data, "questions", malformed, notes)
    return Questions(chosen, f"questions of {data}", notes + more)


class Asker:
    """Turns questions into ids, with what was answered before."""

    def __init__(self, target: LoadedModel):
        self._encode = PromptEncoder(target)
        tokenizer = target.tokenizer
        self.is_templated = tokenizer is not None and "default" in tokenizer.chat_templates

    def __call__(self, question: Question, answers: Sequence[str] = ()) -> list[int]:
        """Returns the ids of the turn that follows ``answers``.

        Raises:
          ConfigError: The chat template refuses the conversation, or there is no template.
          PromptError: The target has no tokenizer.
        """
        if question.ids:
            return [*question.ids]
        return self._encode(question.prompt(answers, is_templated=self.is_templated))


def _rows(data: str, malformed: list[str]) -> Iterable[tuple[Any, str]]:
    """Returns the values of a set or a file, each with its place."""
    data_sources.check(data)
    if data_sources.is_name(data):
        return data_sources.rows(data)
    path = pathlib.Path(data)
    return (read_objects if is_json(path) else read_lines)(path, malformed)


def _question(value: Any, source: str, usual: str) -> Question:
    """Reads a row; ``usual`` is the category of rows that name none."""
    record = read_record(value, source)
    row = value if isinstance(value, dict) else {}
    place = pathlib.PurePath(source).name
    name = str(next((row[key] for key in _NAMES if row.get(key) is not None), place))
    category = " ".join(str(row.get("category") or usual).split()) or usual
    if isinstance(record, Text):
        return Question(name, category, text=record.text.rstrip("\n"))
    messages = record.messages
    if is_of_turns(record, row.get("turns")):
        more = [[{"role": "user", "content": turn}] for turn in row["turns"][1:]]
    else:
        messages, *more = _asked(messages) or [[]]
    return Question(name, category, (tuple(messages), *map(tuple, more)), tools=record.tools)


def _asked(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns the messages before each answer, without the answers."""
    parts: list[list[dict[str, Any]]] = [[]]
    for number, message in enumerate(messages):
        is_answer = message["role"] == "assistant" and number > 0
        if is_answer and parts[-1]:
            parts.append([])
        elif not is_answer:
            parts[-1].append(message)
    return [part for part in parts if part]


def _with_own_names(questions: Sequence[Question]) -> list[Question]:
    """Numbers those that share a name, past the numbers that a file uses itself."""
    taken, found = {question.name for question in questions}, []
    seen: set[str] = set()
    for question in questions:
        name = question.name
        if name in seen:
            numbered = (f"{question.name} #{again}" for again in itertools.count(2))
            name = next(other for other in numbered if other not in taken)
        seen.add(name)
        taken.add(name)
        found.append(question._replace(name=name))
    return found


def _with_groups(questions: Sequence[Question]) -> list[Question]:
    """Marks the categories of MT-bench's, all of whose questions have several turns."""
    single = {question.category for question in questions if question.num_turns == 1}
    grouped = {*_OF_CONVERSATION} - single
    return [q._replace(is_of_conversations=q.category in grouped) for q in questions]


def _of_categories(
    questions: list[Question], categories: Sequence[str], data: str
) -> tuple[list[Question], list[str]]:
    """Returns the questions of some categories, and a note on each that has none."""
    if not categories:
        return questions, []
    known = [*dict.fromkeys(name for q in questions for name in (q.group, q.category))]
    missing = [name for name in categories if name not in known]
    chosen = [q for q in questions if q.category in categories or q.group in categories]
    if not chosen:
        raise ConfigError(
            f"categories are {', '.join(categories)}, and {data} has no question of them; it has "
            f"{', '.join(known)}"
        )
    return chosen, [
        f"{data} has no question of the category {name!r}; it has {', '.join(known)}"
        for name in missing
    ]
