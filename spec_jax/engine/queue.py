"""Continuous batching: a row that has finished is refilled from a queue of prompts."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Integral
from typing import Any, NamedTuple, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spec_jax import decoding, rng
from spec_jax.compilation import Timed
from spec_jax.config import SamplerConfig, check_integer
from spec_jax.decoding import Finish
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.generation import (
    Generation,
    collect,
    describe_fault,
    describe_nan_drafts,
    find_forbidding,
    find_raised,
)
from spec_jax.engine.request import (
    Prompt,
    Request,
    check_room,
    is_one_prompt,
    make_request,
    named_sampler,
    refuse_options,
    slots_for,
    stop_strings,
)
from spec_jax.engine.session import ROUNDS_TO_STOPS, ROUNDS_UNWATCHED
from spec_jax.engine.stats import Stats
from spec_jax.engine.text import TextTracker
from spec_jax.errors import Cancelled, ConfigError, InvalidDraftError, PromptError
from spec_jax.sampling import Sampler, Samplers, check_samplers, draft_samplers, make_sampler

ROUNDS_BETWEEN = 4  # that other rows decode between two chunks of a long prompt

_log = logging.getLogger(__name__)
_Request = tuple[int, list[int]]  # index, ids
Numbered = tuple[int, Prompt]


class Usage(NamedTuple):
    """Counts of row-rounds: a round of B rows counts B, and the active rows are useful."""

    row_rounds: int = 0
    useful: int = 0

    @property
    def share(self) -> float:
        """Share of useful row-rounds; NaN before the first round."""
        return self.useful / self.row_rounds if self.row_rounds else float("nan")

    def plus(self, row_rounds: int, useful: int) -> Usage:
        return Usage(self.row_rounds + row_rounds, self.useful + useful)


class DecodeQueue:
    """Decodes a stream of prompts; iterates over ``(index, Generation)`` in order of completion.

        prompts = ["def parse_args(", "class Stack:", "import os"]
        for index, row in spec_jax.DecodeQueue(decoder, prompts, batch=2):
            print(prompts[index], row.text)

    Rounds run until any row finishes; that row takes the next prompt. A prompt longer than the
    decoder's ``prefill_chunk`` is fed in chunks, between which the other rows decode. A prompt's
    result depends on its index alone, never on the batch or the order: with indices 0, 1, 2, ...
    and one sampler, or one for each prompt, the results equal those of ``decoder.generate`` on all
    of the prompts, unless the drafter or adaptive K learn from finished rows (see ``generate``).
    Rows that end with a fault are yielded; their ``finish_reason`` names it.

    If the iterator ``prompts`` raises, a prompt is invalid, or the function of a ``host_drafter``
    raises, the running rows are finished and yielded before the error is raised. If decoding itself
    raises, the rows that had finished before are yielded first.

    Rows are counted in ``decoder.stats`` when they are yielded. Its ``decode_s`` ends when the
    rounds end, so it includes the time that the caller spends on a row meanwhile.

    Args:
      decoder: target, draft and rule.
      prompts: texts, ids or conversations, as in ``generate``, which are numbered from 0; or tuples
        of an index and a prompt. They are pulled as rows become free, at most two batches ahead of
        the yielded results.
      batch: B, rows decoded together; fewer if there are fewer prompts.
      max_prompt_tokens: length of the longest prompt to come; sets the number of slots. None: found
        by encoding all prompts of a list; an iterator needs the number.
      max_new_tokens: maximum output tokens of a row; by default the limit of the decoder's config,
        else 128.
      max_length: maximum tokens of a row, prompt and output together; in place of max_new_tokens.
      stop: strings at which a row ends, as in ``generate``.
      stop_tokens: ids at which a row ends; by default the target's own.
      chat_template_kwargs: variables of the chat template, as in ``generate``.
      sampler: replaces the decoder's: one, whose seed counts up with the index; or a list that is
        used in turn, whose seeds stand in the first turn. In later turns the number of the turn is
        folded into them, so that prompts share noise only where the list repeats a seed.
        ``sampler_of`` returns the sampler and seed of a prompt. "model" as in ``generate``.
      draft_sampler: likewise; the seeds of draft samplers do not count up, since each is folded
        into its prompt's.
      cancellation_token: ends the queue, in addition to the decoder's own token: no more prompts
        are pulled, and the running rows are yielded with their tokens so far and the finish_reason
        "cancelled". A prompt that is still being fed is dropped.
      logprobs: return the log-probabilities of the output tokens, ``Generation.logprobs``.

    Raises:
      ConfigError: an invalid number, samplers that the rule cannot serve, a decoder that overlaps
        drafting, or an iterator of prompts without ``max_prompt_tokens``.
      PromptError: prompts is a single prompt, or the longest prompt and its output exceed what
        the target can hold; or a prompt of the iterator is longer or invalid; the message has
        its index.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompts: Iterable[Prompt | Numbered],
        *,
        batch: int,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampler: Samplers | str | None = None,
        draft_sampler: Samplers | None = None,
        cancellation_token: CancellationToken | None = None,
        logprobs: bool = False,
        **unknown: Never,
    ):
        refuse_options(unknown, DecodeQueue)
        if decoder.is_overlapped:
            raise ConfigError(
                "a queue refills rows, which draft and target on devices of their own cannot yet "
                "do: build its decoder without devices"
            )
        sampler = named_sampler(decoder.target, sampler)
        check_samplers(sampler=sampler, draft_sampler=draft_sampler)
        samplers = decoder.target_sampler if sampler is None else sampler
        drafts = decoder.draft_sampler if draft_sampler is None else draft_sampler
        self._decoder = decoder
        self._chat_template_kwargs = chat_template_kwargs
        self._engine = decoder.engine(samplers, (decoding.LOGPROBS,) if logprobs else ())
        system = self._engine.system
        self._batch = check_integer("batch", batch, 1)
        if max_prompt_tokens is None:
            prompts, max_prompt_tokens = self._encoded(prompts)
        self._longest = check_integer("max_prompt_tokens", max_prompt_tokens, 1)
        self._prompts = _numbered(prompts)
        self._limits = {"max_new_tokens": max_new_tokens, "max_length": max_length}
        (limit,) = decoder.output_limits([range(self._longest)], **self._limits)
        check_room(system, self._longest, limit)
        self._slots = slots_for(system, self._longest, limit)
        vocab_size = system.target.vocab_size
        self._samplers = samplers
        self._has_warned = False
        self._sampler = _in_turn(samplers, vocab_size)
        is_own = bool(drafts)  # then its seed is folded into the request's, and does not count up
        drafts = draft_samplers(drafts, samplers, system.drafter.draft_temperature)
        self._draft_sampler = _in_turn(drafts, vocab_size, counts_up=not is_own)
        self._stops = stop_strings(decoder.target, stop)
        self._trackers: dict[int, TextTracker] = {}  # of the rows that decode
        self._stop_tokens = decoder.target.stop_tokens if stop_tokens is None else stop_tokens
        self._cancellation = decoder.row_cancellation(cancellation_token, 1)
        self._is_empty = False
        self._error = None
        self._feeding: list[tuple[list[int], Iterator[decoding.DecodeState | None]]] = []
        self._usage = Usage()
        self._tail = Usage()
        self._results = self._run()

    @property
    def usage(self) -> Usage:
        """Row-rounds until the queue was found empty."""
        return self._usage

    @property
    def tail(self) -> Usage:
        """Row-rounds since the queue was found empty, in which finished rows are idle."""
        return self._tail

    def __iter__(self) -> Iterator[tuple[int, Generation]]:
        return self

    def __next__(self) -> tuple[int, Generation]:
        return next(self._results)

    def _run(self) -> Iterator[tuple[int, Generation]]:
        if self._cancellation.rows():
            raise Cancelled(
                "the queue was cancelled before its first prompt; a token that was used before "
                "begins anew after reset()"
            )
        rows = dict(enumerate(self._pull(self._batch)))
        B = len(rows)
        free = []
        finished = []
        if rows:
            state = self._begin(list(rows.values()))
        while True:
            try:
                taken = dict(zip(free, self._pull(len(free))))
                rows |= taken
                if not rows:
                    break
                num_active = len(rows) - len(taken) - len(self._waiting)
                state = self._insert(state, taken, is_alone=num_active == 0)
                state, is_over = self._feed(state, rows)
                if not rows:
                    break
                ending = np.full(B, Finish.CANCELLED if is_over else Finish.RUNNING, np.int32)
                stopped = ({*free} - {*rows}) | self._waiting  # on the host, and perhaps active yet
                ending[[*stopped]] = Finish.STOP_STRING
                num_rounds = ROUNDS_BETWEEN if self._feeding else ROUNDS_UNWATCHED
                num_rounds = min(num_rounds, ROUNDS_TO_STOPS) if self._stops else num_rounds
                num_rounds = 1 if self._cancellation.is_watched else num_rounds
                args = (state, ending, num_rounds, len(rows) - len(self._waiting))
                state, chunk = self._timed("decode_s", self._engine.generate, *args)
                begin = time.perf_counter()
            except Exception as error:  # what had finished is yielded first
                self._error = error
                break
            yield from map(self._collect, finished)  # the host's work, while the device decodes
            finish = self._look(chunk, rows)
            self._decoder.count(Stats(decode_s=time.perf_counter() - begin))
            self._count(B * int(chunk.rounds), int(chunk.row_rounds))
            waiting = self._waiting
            free = [row for row in rows if finish[row] != Finish.RUNNING and row not in waiting]

            def read(row):
                return self._timed("decode_s", self._engine.read, state, row)

            finished = [(rows.pop(row), read(row), self._trackers.pop(row)) for row in free]
        yield from map(self._collect, finished)
        if self._error is not None:
            raise self._error

    def _look(self, chunk: decoding.Chunk, rows: dict[int, _Request]) -> np.ndarray:
        """Returns each row's ``Finish``, also of rows that a stop string ends."""
        finish = np.array(chunk.finish)
        tokenizer = self._decoder.target.tokenizer
        for row in set(rows) - self._waiting:
            if row not in self._trackers:
                self._trackers[row] = TextTracker(tokenizer, [rows[row][1]], self._stops)
            if self._stops:
                part = slice(row, row + 1)
                seen = (np.asarray(x)[part] for x in (chunk.tokens, chunk.total))
                (ending,) = self._trackers[row].look(*seen, finish[part])
                finish[row] = ending if finish[row] == Finish.RUNNING else finish[row]
        return finish

    def _pull(self, limit: int) -> list[_Request]:
        found = []
        self._is_empty |= bool(self._cancellation.rows())
        while len(found) < limit and not self._is_empty:
            try:
                found.append(self._checked(*next(self._prompts)))
            except StopIteration:
                self._is_empty = True
            except Exception as error:  # of the caller's iterator too: raised when rows are done
                self._is_empty = True
                self._error = error
        return found

    def _encoded(self, prompts: Iterable[Prompt | Numbered]) -> tuple[list[_Request], int]:
        """Returns the ids of all prompts of a list, and the length of the longest."""
        if isinstance(prompts, Iterable) and not isinstance(prompts, Sized):
            raise ConfigError(
                f"prompts is a {type(prompts).__name__} and max_prompt_tokens is None: name the "
                "length of the longest prompt to come, or give the prompts as a list"
            )
        requests = [(index, self._encode(index, prompt)) for index, prompt in _numbered(prompts)]
        return requests, max((len(ids) for _, ids in requests), default=1)

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        try:
            return self._decoder.encode(prompt, self._chat_template_kwargs)
        except (ConfigError, PromptError) as error:
            hint = ""
            if isinstance(prompt, list) and _is_pair(prompt):
                hint = f"; an index and its prompt are a tuple: ({prompt[0]}, prompt)"
            raise type(error)(f"prompt {index}: {error}{hint}") from error

    def _checked(self, index: int, prompt: Prompt) -> _Request:
        ids = self._encode(index, prompt)
        if len(ids) > self._longest:
            raise PromptError(
                f"prompt {index} has {len(ids)} tokens; max_prompt_tokens is {self._longest}"
            )
        return index, ids

    def _request(self, requests: list[_Request]) -> Request:
        indices = [index for index, _ in requests]
        prompts = [ids for _, ids in requests]
        return make_request(
            self._engine.system,
            prompts,
            self._decoder.output_limits(prompts, **self._limits),
            self._sampler(indices),
            self._draft_sampler(indices),
            stop_tokens=self._stop_tokens,
            slots=self._slots,
        )

    def _start(self, requests: list[_Request]) -> decoding.DecodeState:
        request = self._request(requests)
        self._engine.params()  # lays weights out: no part of the times

        def prefill():
            return jax.block_until_ready(self._engine.prefill(request))

        return self._timed("prefill_s", prefill)

    def _insert(
        self, state, taken: dict[int, _Request], is_alone: bool = True
    ) -> decoding.DecodeState:
        """Prefills the new prompts of rows together, and inserts them.

        Long prompts are fed later, by ``_feed``, unless no other row is decoding.
        """

        def is_late(ids):
            return not is_alone and len(ids) > self._engine.system.prefill_chunk

        groups = self._together(taken, is_late)
        if len(groups) == 1 and len(taken) == len(state.limit):  # all rows are new
            return self._start([taken[row] for row in sorted(taken)])
        for rows in groups:
            requests = [taken[row] for row in rows]
            # A few numbers of rows compile; what fills up is never read.
            more = _round_up(len(rows), self._batch, self._engine.mesh) - len(rows)
            requests += requests[-1:] * more
            if is_late(requests[0][1]):
                steps = self._engine.prefill_by_chunk(self._request(requests))
                self._feeding.append((rows, steps))
            else:
                state = self._put(state, rows, self._start(requests))
        return state

    def _put(self, state, rows: list[int], prefix: decoding.DecodeState) -> decoding.DecodeState:
        for index, row in enumerate(rows):
            state = self._timed("prefill_s", self._engine.insert, state, row, prefix, index)
        return state

    def _feed(self, state, rows: dict[int, _Request]) -> tuple[decoding.DecodeState, bool]:
        """Feeds one chunk of the waiting prompts, or more until any row can decode.

        Returns:
          The state, and whether the queue is cancelled; if so, waiting rows are removed from
          ``rows``.
        """
        while not (is_over := bool(self._cancellation.rows())) and self._feeding:
            fed, steps = self._feeding[0]
            prefix = self._timed(
                "prefill_s", lambda steps=steps: jax.block_until_ready(next(steps))
            )
            if prefix is not None:
                del self._feeding[0]
                state = self._put(state, fed, prefix)
            if len(self._waiting) < len(rows):
                break
        for row in self._waiting if is_over else ():
            del rows[row]
        self._feeding = [] if is_over else self._feeding
        return state, is_over

    @property
    def _waiting(self) -> set[int]:
        """Rows whose prompts are being fed."""
        return {row for rows, _ in self._feeding for row in rows}

    def _together(
        self, taken: dict[int, _Request], is_late: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """The rows whose prompts can be prefilled in one call.

        A target that cannot rewind cannot discard padding, so its prompts have one length. Prompts
        that are fed later are grouped apart, so that no other prompt waits for them.
        """
        can_pad = self._engine.system.target.can_rewind
        groups = {}
        for row, (_, ids) in taken.items():
            key = (None if can_pad else len(ids), is_late(ids))
            groups.setdefault(key, []).append(row)
        return list(groups.values())

    def _timed(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function and adds its time, with compilation apart, to the decoder's."""
        with Timed() as timed:
            result = function(*args)
        self._decoder.count(Stats(compile_s=timed.compile_s, **{name: timed.run_s}))
        return result

    def _begin(self, requests: list[_Request]) -> decoding.DecodeState:
        """The first batch."""
        if self._engine.system.target.can_rewind:
            return self._start(requests)
        # Prompts of different lengths cannot be prefilled together.
        state = self._start(requests[:1] * len(requests))
        return self._insert(state, {i: x for i, x in enumerate(requests) if i})

    def _count(self, row_rounds: int, useful: int) -> None:
        if self._is_empty:
            self._tail = self._tail.plus(row_rounds, useful)
        else:
            self._usage = self._usage.plus(row_rounds, useful)

    def _collect(
        self, finished: tuple[_Request, decoding.Record, TextTracker]
    ) -> tuple[int, Generation]:
        (index, ids), record, tracker = finished
        generation = collect(jax.device_get(record), tracker, 0, self._engine.system)
        self._engine.remember(generation.tokens)
        finish = Finish[generation.finish_reason.upper()]
        system = self._engine.system
        raised = find_raised(finish, system, (*ids, *generation.tokens))
        sampler = sampler_of(self._samplers, index)
        processor = find_forbidding(finish, system, sampler, ids, generation.tokens)
        text = describe_fault(finish, system, raised, processor)
        if generation.stats.nan_drafts and not self._has_warned:
            self._has_warned = True
            _log.warning("%s, first in the row of prompt %s", describe_nan_drafts(system), index)
        if raised is not None:
            if self._error is None:
                self._error = InvalidDraftError(f"prompt {index}: {text}", [generation])
                self._error.__cause__ = raised
            self._is_empty = True
        elif text is not None:
            _log.warning("%s, in the row of prompt %s, which stopped there", text, index)
        self._decoder.count(
            dataclasses.replace(generation.stats, n1_fallbacks=int(self._engine.is_fallback))
        )
        return index, generation


def _round_up(count: int, batch: int, mesh: Mesh | None) -> int:
    """Returns how many rows to prefill for ``count`` prompts, so that few numbers compile.

    One prompt is prefilled alone. Otherwise each device along the axis "data" of a mesh gets the
    same power of two, at most its share of a batch.
    """
    if count == 1:
        return 1
    groups = 1 if mesh is None else mesh.shape.get("data", 1)
    each = -(-count // groups)
    return groups * min(1 << (each - 1).bit_length(), max(each, -(-batch // groups)))


def _numbered(prompts: Iterable[Prompt | Numbered]) -> Iterator[Numbered]:
    """Yields an index and a prompt for each item; the index is the given one, or counted from 0.

    Raises:
      PromptError: ``prompts`` is a single prompt or is not iterable; while iterating, only some of
        the prompts have an index.
    """
    if not isinstance(prompts, Iterable):
        raise PromptError(
            f"prompts is {prompts!r:.80}; expected a list or an iterator of prompts, or of tuples "
            "of an index and a prompt"
        )
    if is_one_prompt(prompts):
        raise PromptError(
            f"prompts is one prompt, {prompts!r:.80}; a queue takes a list of them, [prompt], or "
            "an iterator"
        )

    def numbered():
        has_indices = None  # known from the first item on
        for i, item in enumerate(prompts):
            is_numbered = isinstance(item, tuple) and _is_pair(item)
            if has_indices not in (None, is_numbered):
                raise PromptError(
                    f"item {i} of prompts, {item!r:.80}, {'has an' if is_numbered else 'lacks an'} "
                    "index, unlike those before it; give all prompts as tuples (index, prompt), or "
                    "none, which numbers them from 0"
                )
            has_indices = is_numbered
            yield item if is_numbered else (i, item)

    return numbered()


def _is_pair(item: Sequence[Any]) -> bool:
    """Whether this is an index and a prompt; two integers are a prompt of two ids."""
    is_pair = len(item) == 2 and isinstance(item[0], Integral)
    return is_pair and not isinstance(item[1], Integral)


def sampler_of(samplers: Samplers, index: int) -> SamplerConfig:
    """Returns the sampler of a queue's prompt, with the seed that ``generate`` takes for its row.

    Args:
      samplers: one, whose seed counts up; or several, which are used in turn (``rng.turn_seed``).
      index: the prompt's.
    """
    if isinstance(samplers, SamplerConfig):
        return dataclasses.replace(samplers, seed=(samplers.seed + index) % 2**32)
    turn, number = divmod(index, len(samplers))
    config = samplers[number]
    return dataclasses.replace(config, seed=rng.turn_seed(config.seed, turn))


def _in_turn(
    samplers: Samplers, vocab_size: int, *, counts_up: bool = True
) -> Callable[[Sequence[int]], Sampler]:
    """Returns a map from prompt indices to sampler rows, which share all compiled features.

    Seeds are those of ``sampler_of`` or, without ``counts_up``, the configs' own.
    """
    configs = [samplers] if isinstance(samplers, SamplerConfig) else samplers
    table = jax.tree.map(np.asarray, make_sampler(configs, len(configs), vocab_size))

    def rows_of(indices: Sequence[int]) -> Sampler:
        turns = [index % len(configs) for index in indices]
        rows = jax.tree.map(lambda column: jnp.asarray(column[turns]), table)
        if not counts_up:
            return rows
        seeds = [sampler_of(samplers, index).seed for index in indices]
        return rows.replace(seed=jnp.asarray(np.asarray(seeds, np.uint32)))

    return rows_of
