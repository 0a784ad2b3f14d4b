"""What a call and a queue share: the engine, and the rows that are decoded together."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from spec_jax import decoding
from spec_jax.compilation import Timed
from spec_jax.decoding import Finish
from spec_jax.engine import request
from spec_jax.engine.build import DecoderParts
from spec_jax.engine.cancellation import RowCancellation
from spec_jax.engine.engine import Engine
from spec_jax.engine.generation import Generation
from spec_jax.engine.request import GenerateOptions
from spec_jax.engine.stats import Stats
from spec_jax.engine.text import TextTracker
from spec_jax.errors import ConfigError
from spec_jax.sampling import check_samplers

# Rounds between two looks: with stop strings to find; and without streaming, so that a cancellation
# token that is requested during the call is still seen.
ROUNDS_TO_STOPS = 8
ROUNDS_UNWATCHED = 32


class Row(NamedTuple):
    """A row that is decoding: the index and the ids of its prompt, and its text."""

    index: int
    prompt: list[int]
    text: TextTracker


class Driver:
    """Holds what rows are decoded with, follows their text, and counts those that have ended.

    Args:
      decoder: whose call or queue it is.
      options: of the call or the queue.
      count: gets the times of what runs, and the counts of each row that is collected.
      batch: B, where rows are cancelled one by one; 1 where they are cancelled together.
      has_pieces: whether text is streamed.

    Attributes:
      engine: runs the programs.
      cancellation: says which rows are cancelled.
      samplers: the target's, one for all rows or several.
      draft_samplers: the draft's, likewise; None: see ``sampling.draft_samplers``.
      stop_tokens: ids at which a row ends.
      rows: those that decode, by their place in the batch.
      state: of the batch; None before the prefill.
      chunk: what the last rounds produced.
      pieces: text that has become final, as (place, text).

    Raises:
      ConfigError: an invalid option, or the rule cannot serve the samplers.
    """

    def __init__(
        self,
        decoder: DecoderParts,
        options: GenerateOptions,
        count: Callable[[Stats], None],
        *,
        batch: int = 1,
        has_pieces: bool = False,
    ):
        target = decoder.target
        self.cancellation = RowCancellation(decoder.token, options.cancellation_token, batch)
        self._tokenizer = target.tokenizer
        self._stops = request.stop_strings(options.stop)
        if (has_pieces or self._stops) and target.tokenizer is None:
            raise ConfigError(f"{target.name} has no tokenizer, so it has no text to look at")
        sampler = request.named_sampler(target, options.sampler)
        check_samplers(sampler=sampler, draft_sampler=options.draft_sampler)
        self.samplers = decoder.target_sampler if sampler is None else sampler
        drafts = options.draft_sampler
        self.draft_samplers = decoder.draft_sampler if drafts is None else drafts
        stop_tokens = options.stop_tokens
        self.stop_tokens = target.stop_tokens if stop_tokens is None else stop_tokens
        observers = (decoding.LOGPROBS,) if options.logprobs else ()
        self.engine = Engine(decoder, self.samplers, observers, count)
        self.has_pieces = has_pieces
        self.count = count
        self.rows: dict[int, Row] = {}
        self.state: decoding.DecodeState | None = None
        self.chunk: decoding.Chunk | None = None
        self.pieces: deque[tuple[int, str]] = deque()

    def add(self, place: int, index: int, prompt: list[int]) -> None:
        """Begins to follow a row that is prefilled.

        Args:
          place: in the batch.
          index: of its prompt.
          prompt: its ids.
        """
        text = TextTracker(self._tokenizer, prompt, self._stops, has_pieces=self.has_pieces)
        self.rows[place] = Row(index, prompt, text)

    def prefill(self, prompts: request.Request) -> decoding.DecodeState:
        """Returns the state of prefilled prompts: of the batch, or of rows to insert into it."""
        batch = len(prompts.limits if self.state is None else self.state.limit)
        with Timed() as timed:
            self.engine.params(batch)  # lays weights out: no part of the times
        self.count(Stats(compile_s=timed.compile_s))
        return self.engine.prefill(prompts)

    def num_rounds(self, limit: int = ROUNDS_UNWATCHED) -> int:
        """Returns how many rounds to run before the next look, at most ``limit``."""
        limit = 1 if self.has_pieces or self.cancellation.is_watched else limit
        return min(limit, ROUNDS_TO_STOPS) if self._stops else limit

    def look(self) -> tuple[np.ndarray, np.ndarray]:
        """Waits for the rounds of ``chunk``, and follows the text.

        Returns:
          i32[B], the ``Finish`` of each row; and i32[B], STOP_STRING for rows that must end now,
          else RUNNING.
        """
        finish = np.asarray(self.chunk.finish)
        ending = np.full(len(finish), Finish.RUNNING, np.int32)
        if self.has_pieces or self._stops:
            tokens = np.asarray(self.chunk.tokens)
            total = np.asarray(self.chunk.total)
            for place, row in self.rows.items():
                ids = tokens[place, len(row.prompt) : total[place]].tolist()
                ending[place], piece = row.text.look(ids, finish[place])
                if piece:
                    self.pieces.append((place, piece))
        self.count(Stats(decode_s=time.perf_counter() - self.engine.dispatched_s))
        return finish, ending

    def count_row(self, found: Generation) -> None:
        """Counts a row that is collected, and remembers its tokens for drafters that copy them.

        Args:
          found: what it has produced.
        """
        decoder = self.engine.decoder
        if decoder.history is not None:
            decoder.history.add(found.tokens)
        self.count(dataclasses.replace(found.stats, n1_fallbacks=int(decoder.is_fallback)))
