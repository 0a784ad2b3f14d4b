"""Continuous batching: a row that has finished is refilled from a queue of prompts."""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Integral
from typing import Any, NamedTuple, Never

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding, rng
from spec_jax.config import SamplerConfig, check_integer
from spec_jax.decoding import Finish
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.driver import ROUNDS_UNWATCHED, Driver, Row
from spec_jax.engine.generation import Generation, collect, describe_nan_drafts, fault_of
from spec_jax.engine.request import (
    GenerateOptions,
    Prompt,
    Request,
    check_room,
    is_one_prompt,
    make_request,
    num_fed,
    output_limits,
    refuse_options,
    slots_for,
)
from spec_jax.errors import Cancelled, ConfigError, PromptError
from spec_jax.sampling import Sampler, Samplers, draft_samplers, make_sampler

ROUNDS_BETWEEN = 4  # that other rows decode between two chunks of a long prompt
_TOGETHER = 32  # rows that are read in one call, not one by one

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

    Example:
      ```python
      import spec_jax
      from spec_jax.testing import mock_model

      target = mock_model(vocab_size=8)  # or spec_jax.load_model("zoo/target")
      draft = mock_model(vocab_size=8, seed=1)

      decoder = spec_jax.SpeculativeDecoder(target, draft)
      prompts = [[1, 2, 3], [4, 5], [6]]  # or texts, or conversations
      for index, row in spec_jax.DecodeQueue(decoder, prompts, batch=1, max_new_tokens=4):
          print(prompts[index], row.tokens)
      ```

    Args:
      decoder: target, draft and rule.
      prompts: texts, ids or conversations, as in ``generate``, which are numbered from 0; or tuples
        of an index and a prompt. They are pulled as rows become free, at most two batches ahead of
        the yielded results.
      batch: B, rows decoded together; fewer if there are fewer prompts.
      refill: rows that must have ended before prompts take their places. More than half of the
        batch are fed in one call, which takes an accelerator as long as one prompt alone; but rows
        are idle until then.
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

    Attributes:
      usage: row-rounds until the queue was found empty.
      tail: row-rounds since then, in which finished rows are idle.

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
        refill: int = 1,
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
        self._decoder = decoder
        self._chat_template_kwargs = chat_template_kwargs
        options = GenerateOptions(
            stop=stop,
            stop_tokens=stop_tokens,
            sampler=sampler,
            draft_sampler=draft_sampler,
            cancellation_token=cancellation_token,
            logprobs=logprobs,
        )
        self._driver = Driver(decoder, options, decoder.totals.add)
        self._batch = check_integer("batch", batch, 1)
        self._refill = check_integer("refill", refill, 1)
        if max_prompt_tokens is None:
            if isinstance(prompts, Iterable) and not isinstance(prompts, Sized):
                raise ConfigError(
                    f"prompts is a {type(prompts).__name__} and max_prompt_tokens is None: name "
                    "the length of the longest prompt to come, or give the prompts as a list"
                )
            prompts = [(index, self._encode(index, prompt)) for index, prompt in _numbered(prompts)]
            max_prompt_tokens = max((len(ids) for _, ids in prompts), default=1)
        self._longest = check_integer("max_prompt_tokens", max_prompt_tokens, 1)
        self._prompts = _numbered(prompts)
        self._limits = (max_new_tokens, max_length, decoder.max_length)
        (limit,) = output_limits([range(self._longest)], *self._limits)
        system = self._driver.engine.system
        check_room(system, self._longest, limit)
        self._slots = slots_for(system, self._longest, limit)
        samplers = self._driver.samplers
        self._sampler = _in_turn(samplers, system.target.vocab_size)
        drafts = self._driver.draft_samplers
        is_own = bool(drafts)  # then its seed is folded into the request's, and does not count up
        usual = system.drafter.defaults.draft_temperature
        drafts = draft_samplers(drafts, samplers, usual)
        self._draft_sampler = _in_turn(drafts, system.target.vocab_size, counts_up=not is_own)
        self._has_warned = False
        self._is_empty = False
        self._error = None
        # Prompts that are fed in chunks while other rows decode, by the places that they get.
        self._feeding: list[tuple[dict[int, _Request], Iterator[decoding.DecodeState | None]]] = []
        self.usage = Usage()
        self.tail = Usage()
        self._results = self._run()

    def __iter__(self) -> Iterator[tuple[int, Generation]]:
        return self

    def __next__(self) -> tuple[int, Generation]:
        return next(self._results)

    def _run(self) -> Iterator[tuple[int, Generation]]:
        driver = self._driver
        if driver.cancellation.rows():
            raise Cancelled(
                "the queue was cancelled before its first prompt; a token that was used before "
                "begins anew after reset()"
            )
        taken = dict(enumerate(self._pull(self._batch)))
        B = len(taken)
        finished = []
        ended: list[int] = []  # places whose text has ended, and which wait for more
        while taken or driver.rows or self._feeding:
            try:
                self._insert(taken)
                is_over = self._feed()
                if not driver.rows:
                    break
                ending = np.full(B, Finish.CANCELLED if is_over else Finish.RUNNING, np.int32)
                # The others have ended on the host, and may be active on the device yet.
                ending[[*{*range(B)} - {*driver.rows}, *ended]] = Finish.STOP_STRING
                limit = ROUNDS_BETWEEN if self._feeding else ROUNDS_UNWATCHED
                driver.state, driver.chunk = driver.engine.generate(
                    driver.state, ending, driver.num_rounds(limit), self._min_active()
                )
            except Exception as error:  # what had finished is yielded first
                self._error = error
                break
            yield from map(self._collect, finished)  # the host's work, while the device decodes
            finish, ending = driver.look()
            rounds = B * int(driver.chunk.rounds), int(driver.chunk.row_rounds)
            if self._is_empty:
                self.tail = self.tail.plus(*rounds)
            else:
                self.usage = self.usage.plus(*rounds)
            has_ended = (finish != Finish.RUNNING) | (ending != Finish.RUNNING)
            free = [place for place in driver.rows if has_ended[place]]
            if len(free) <= len(driver.rows) - self._min_active():
                free = []  # they wait for more
            finished = []
            whole = None
            if len(free) >= _TOGETHER:
                whole = jax.device_get(driver.engine.read(driver.state))
            for place in free:
                if whole is None:
                    record = driver.engine.read_row(driver.state, place)
                else:
                    record = jax.tree.map(operator.itemgetter(place), whole)
                finished.append((driver.rows.pop(place), record))
            ended = [place for place in driver.rows if ending[place] != Finish.RUNNING]
            taken = dict(zip(free, self._pull(len(free))))
        yield from map(self._collect, finished)
        if self._error is not None:
            raise self._error

    def _min_active(self) -> int:
        """Rounds run while so many rows are active: until ``refill`` of them have ended."""
        return max(len(self._driver.rows) - self._refill, 0) + 1

    def _pull(self, limit: int) -> list[_Request]:
        found = []
        self._is_empty |= bool(self._driver.cancellation.rows())
        while len(found) < limit and not self._is_empty:
            try:
                index, prompt = next(self._prompts)
                ids = self._encode(index, prompt)
                if len(ids) > self._longest:
                    raise PromptError(
                        f"prompt {index} has {len(ids)} tokens; max_prompt_tokens is "
                        f"{self._longest}"
                    )
                found.append((index, ids))
            except StopIteration:
                self._is_empty = True
            except Exception as error:  # of the caller's iterator too: raised when rows are done
                self._is_empty = True
                self._error = error
        return found

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        try:
            return self._decoder.encode(prompt, self._chat_template_kwargs)
        except (ConfigError, PromptError) as error:
            hint = ""
            if isinstance(prompt, list) and _is_pair(prompt):
                hint = f"; an index and its prompt are a tuple: ({prompt[0]}, prompt)"
            raise type(error)(f"prompt {index}: {error}{hint}") from error

    def _request(self, requests: list[_Request], samples: int = 1) -> Request:
        indices = [index for index, _ in requests]
        prompts = [ids for _, ids in requests]
        return make_request(
            self._driver.engine.system,
            prompts,
            output_limits(prompts, *self._limits),
            self._sampler(indices),
            self._draft_sampler(indices),
            stop_tokens=self._driver.stop_tokens,
            pad_to=self._longest,
            slots=self._slots,
            samples=samples,
        )

    def _insert(self, taken: dict[int, _Request]) -> None:
        """Prefills the new prompts of places together, and inserts them.

        Long prompts are fed later, by ``_feed``, unless no other row is decoding.
        """
        driver = self._driver
        is_alone = not driver.rows
        batch = len(taken) if driver.state is None else len(driver.state.limit)

        def is_late(ids):
            return not is_alone and len(ids) > driver.engine.system.prefill_chunk

        if len(taken) == batch and len(self._together(taken, is_late, batch)) == 1:
            requests = [taken[place] for place in sorted(taken)]  # all rows are new
            driver.state = driver.prefill(self._request(requests))
            for place, request in taken.items():
                driver.add(place, *request)
            return
        rest = taken
        if driver.state is None and taken:  # one prompt is in all rows, until they get their own
            first = min(taken, key=lambda place: len(taken[place][1]))
            driver.state = driver.prefill(self._request([taken[first]] * batch, samples=batch))
            driver.add(first, *taken[first])
            rest = {place: request for place, request in taken.items() if place != first}
        for places in self._together(rest, is_late, batch):
            group = {place: rest[place] for place in places}
            requests = [*group.values()]
            if len(places) > 1:  # two numbers of rows compile; what fills up is never read
                requests += requests[-1:] * (batch - len(places))
            if is_late(requests[0][1]):
                steps = driver.engine.prefill_by_chunk(self._request(requests))
                self._feeding.append((group, steps))
            else:
                self._put(group, driver.prefill(self._request(requests)))

    def _put(self, group: dict[int, _Request], prefix: decoding.DecodeState) -> None:
        driver = self._driver
        for index, (place, request) in enumerate(group.items()):
            driver.state = driver.engine.insert(driver.state, place, prefix, index)
            driver.add(place, *request)

    def _feed(self) -> bool:
        """Feeds one chunk of the waiting prompts, or more until any row can decode.

        Returns:
          Whether the queue is cancelled; if so, no prompt waits any more.
        """
        driver = self._driver
        while not (is_over := bool(driver.cancellation.rows())) and self._feeding:
            group, steps = self._feeding[0]
            prefix = next(steps)
            if prefix is not None:
                del self._feeding[0]
                self._put(group, prefix)
            if driver.rows:
                break
        if is_over:
            self._feeding.clear()
        return is_over

    def _together(
        self, taken: dict[int, _Request], is_late: Callable[[list[int]], bool], batch: int
    ) -> list[list[int]]:
        """The places whose prompts are prefilled in one call, of ``batch`` rows or of one.

        A call of all rows takes as long as its longest prompt, so prompts are fed one by one where
        that is at most half of the work. A target that cannot rewind cannot discard padding, so its
        prompts have one length. Prompts that are fed later are grouped apart, so that no other
        prompt waits for them.
        """
        system = self._driver.engine.system
        groups = {}
        for place, (_, ids) in taken.items():
            key = (None if system.target.can_rewind else len(ids), is_late(ids))
            groups.setdefault(key, []).append(place)
        result = []
        for places in groups.values():
            fed = [num_fed(len(taken[place][1]), self._longest, system) for place in places]
            is_even = batch * max(fed) < 2 * sum(fed)
            result += [places] if is_even else [[place] for place in places]
        return result

    def _collect(self, finished: tuple[Row, decoding.Record]) -> tuple[int, Generation]:
        row, record = finished
        system = self._driver.engine.system
        generation = collect(jax.device_get(record), row.text, system)
        self._driver.count_row(generation)
        sampler = sampler_of(self._driver.samplers, row.index)
        fault = fault_of(generation, system, sampler, row.prompt)
        if generation.stats.nan_drafts and not self._has_warned:
            self._has_warned = True
            text = describe_nan_drafts(system)
            _log.warning("%s, first in the row of prompt %s", text, row.index)
        if fault is not None and fault.raised is not None:
            if self._error is None:
                self._error = fault.error(f"prompt {row.index}: {fault.text}", [generation])
                self._error.__cause__ = fault.raised
            self._is_empty = True
        elif fault is not None:
            text = "%s, in the row of prompt %s, which stopped there"
            _log.warning(text, fault.text, row.index)
        return row.index, generation


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
