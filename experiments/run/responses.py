"""A JSONL file of responses, one line for each prompt, which a later run can continue."""

from __future__ import annotations

import collections
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from experiments.run.journal import Journal
from spec_jax import processes
from spec_jax.errors import ConfigError

_KEYS = ("index", "prompt_ids", "response_ids", "finish_reason")  # what is read of a line


class Responses:
    """The responses so far. Reading the file cuts off an incomplete last line.

    Of several processes the first one has the file.

    Args:
      path: The file, which is created with the first line.

    Raises:
      ConfigError: A complete line is not a response, or an index occurs twice.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._journal = path, Journal(path)
        self._prompts: dict[int, int] = {}  # index -> checksum of the prompt's ids
        self.finish_reasons: collections.Counter[str] = collections.Counter()
        self.num_tokens = 0
        expected = f"a JSON object with {', '.join(_KEYS)}, each index once"
        self._journal.read(self._count, expected, " is no response")
        known = processes.from_writer([list(self._prompts.items()), self.num_tokens])
        self._prompts, self.num_tokens = dict(map(tuple, known[0])), known[1]

    def _count(self, row: Mapping) -> None:
        index, prompt, response, reason = (row[key] for key in _KEYS)
        if index in self._prompts:
            raise ValueError(f"index {index} again")
        self._prompts[index] = _checksum(prompt)
        self.finish_reasons[reason] += 1
        self.num_tokens += len(response)

    def __len__(self) -> int:
        return len(self._prompts)

    def unanswered(self, prompts: Iterable[tuple[int, list[int]]]) -> Iterator:
        """Yields the pairs (index, ids) that have no response yet.

        Raises:
          ConfigError: A line answers another prompt with the same index.
        """
        for index, ids in prompts:
            if index not in self._prompts:
                yield index, ids
            elif self._prompts[index] != _checksum(ids):
                raise ConfigError(
                    f"{self._path} answers another prompt {index} than this run has; expected the "
                    "prompts and the tokenizer that it was begun with, or an empty directory"
                )

    def append(self, row: Mapping) -> None:
        """Writes one line to the disk, so that a killed run loses none."""
        self._count(row)
        self._journal.append([row])

    def __enter__(self) -> Responses:
        return self

    def __exit__(self, *_) -> None:
        self._journal.__exit__()


def _checksum(ids: list[int]) -> int:
    return zlib.crc32(np.asarray(ids, "<i4").tobytes())
