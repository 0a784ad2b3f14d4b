"""JSONL files that survive a kill at any moment: each line is on disk before the next begins."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax import processes
from spec_jax.errors import ConfigError

REFUSED = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
DATED = (  # why prompts may differ that nobody has changed
    "a chat template that writes today's date makes other prompts each day: begin such a run with "
    """a fixed date, such as --config.chat_template_kwargs='{"date_string": "26 Jul 2024"}'"""
)


class Journal(contextlib.AbstractContextManager):
    """Appends objects to a file, a line each. Reading cuts off an incomplete last line.

    Of several processes the first one has the file.

    Args:
      path: The file, which is created with the first line.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._file = None

    def read(
        self, take: Callable[[Mapping[str, Any]], None], expected: str, fault: str = ""
    ) -> None:
        """Calls ``take`` with each line's object, and removes what a kill left of a last line.

        Args:
          take: Raises one of ``REFUSED`` for an object that is not what it should be.
          expected: What a line should be, for the message.
          fault: What a line is that ``take`` refuses, likewise.

        Raises:
          ConfigError: A complete line is no such object.
        """
        if not self.path.exists() or not processes.is_writer():
            return
        with open(self.path, "r+b") as file:
            end = 0
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    take(json.loads(line))
                except REFUSED as error:
                    raise ConfigError(
                        f"{self.path}, line {number}{fault}: {error!r}; expected {expected}"
                    ) from error
                end += len(line)
            file.truncate(end)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes lines together, and returns when they are on disk.

        Raises:
          ConfigError: They cannot be written, as on a full disk.
        """
        if not processes.is_writer():
            return
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        try:
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)
            rest = memoryview(text.encode())
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{self.path} could not be written: {error}; make room and run the same command "
                "again: what was written before is kept"
            ) from error

    def truncate(self, num_lines: int) -> None:
        """Keeps the first lines only."""
        if not self.path.exists() or not processes.is_writer():
            return
        with open(self.path, "r+b") as file:
            for _ in range(num_lines):
                file.readline()
            file.truncate()

    def __exit__(self, *_) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_KEYS = ("index", "prompt_ids", "response_ids", "finish_reason")  # what is read of a line


class Responses(Journal):
    """The responses so far. Reading the file cuts off an incomplete last line.

    Of several processes the first one has the file.

    Args:
      path: The file, which is created with the first line.

    Raises:
      ConfigError: A complete line is not a response, or an index occurs twice.
    """

    def __init__(self, path: pathlib.Path):
        super().__init__(path)
        self._prompts: dict[int, int] = {}  # index -> checksum of the prompt's ids
        self.finish_reasons: collections.Counter[str] = collections.Counter()
        self.num_tokens = 0
        expected = f"a JSON object with {', '.join(_KEYS)}, each index once"
        self.read(self._count, expected, " is not a response")
        known = processes.from_writer([list(self._prompts.items()), self.num_tokens])
        self._prompts = dict(map(tuple, known[0]))
        self.num_tokens = known[1]

    def _count(self, row: Mapping) -> None:
        index, prompt, response, reason = (row[key] for key in _KEYS)
        if index in self._prompts:
            raise ValueError(f"index {index} again")
        self._prompts[index] = _checksum(prompt)
        self.finish_reasons[reason] += 1
        self.num_tokens += len(response)

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, index: int) -> bool:
        return index in self._prompts

    def unanswered(self, prompts: Iterable[tuple[int, list[int]]]) -> Iterator:
        """Yields the pairs (index, ids) that have no response yet.

        Raises:
          ConfigError: A line answers another prompt with the same index.
        """
        for index, ids in prompts:
            if index not in self:
                yield index, ids
            elif self._prompts[index] != _checksum(ids):
                raise ConfigError(
                    f"{self.path} answers another prompt {index} than this run has; expected the "
                    "prompts and the tokenizer that it was begun with, or an empty directory; "
                    f"{DATED}"
                )

    def add(self, row: Mapping) -> None:
        """Writes one line to the disk, so that a killed run loses none."""
        self._count(row)
        self.append([row])


def _checksum(ids: list[int]) -> int:
    return zlib.crc32(np.asarray(ids, "<i4").tobytes())
