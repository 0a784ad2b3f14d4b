"""A JSONL file that survives a kill at any moment: each line is on disk before the next begins."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec_jax import processes
from spec_jax.errors import ConfigError

REFUSED = (ValueError, LookupError, TypeError, AttributeError, AssertionError)


class Journal:
    """Appends objects to a file, a line each. Reading cuts off an incomplete last line.

    Of several processes the first one has the file.

    Args:
      path: The file, which is created with the first line.
    """

    def __init__(self, path: pathlib.Path):
        self.path, self._file = path, None

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
        """Writes lines together, and returns when they are on disk."""
        if not processes.is_writer():
            return
        if self._file is None:
            self._file = open(self.path, "a", encoding="utf-8")
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        self._file.write(text)
        self._file.flush()
        os.fsync(self._file.fileno())

    def truncate(self, num_lines: int) -> None:
        """Keeps the first lines only."""
        if not self.path.exists() or not processes.is_writer():
            return
        with open(self.path, "r+b") as file:
            for _ in range(num_lines):
                file.readline()
            file.truncate()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
