"""Text in, text out: ``SpeculativeDecoder``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.config import (
    GREEDY_BELOW,
    SamplerConfig,
    SpeculativeConfig,
    check_integer,
)
from spec_jax.config.asynchronous import AsyncSpecConfig
from spec_jax.contracts import Drafter, Rule
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.suffix import History
from spec_jax.engine import request, stats
from spec_jax.engine.adaptive.runner import AdaptiveRunner, AdaptiveState, plain_rule
from spec_jax.engine.assemble import make_drafter, tapped_model, with_adaptive
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.request import Prompt
from spec_jax.engine.session import Call, Generation, Session
from spec_jax.engine.stream import Stream
from spec_jax.engine.text import TextTracker
from spec_jax.errors import ConfigError, PromptError
from spec_jax.loading import LoadedHead, LoadedModel, check_loaded
from spec_jax.parallel import overlap
from spec_jax.rules import make_rule
from spec_jax.sampling import Samplers, highest_temperature, make_sampler

_SLOT_BUCKET = 128
# Rounds between two stops: to look for stop strings, and where nobody looks, in case that the
# decoder's cancellation token is asked for while a call runs.
_ROUNDS_TO_STOPS, _ROUNDS_UNWATCHED = 8, 32


def _width(longest: int) -> int:
    """T of a batch whose longest prompt has so many tokens."""
    return max(16, 1 << (longest - 1).bit_length())


class SpeculativeDecoder:
    """Decodes a target, with a draft that makes it faster and leaves its law as it is.

    Several calls at once are safe, from threads and from tasks: each has a state of its own, and
    what it gives is what it would give alone. Calls in threads run side by side; asynchronous
    ones take turns, a round each, in one thread that belongs to the decoder.

    Args:
      target: from ``load_model``.
      draft: a smaller model of the same vocabulary for the method "standalone", a head from
        ``load_head`` or ``load_mtp`` for "eagle" and "mtp", else None.
      config: what drafts and which rule judges; by default ``SpeculativeConfig()`` where there
        is a draft, and plain decoding for a target alone. Samplers and limit of an
        ``AsyncSpecConfig`` are the decoder's.
      target_sampler: how the target's tokens are drawn; greedy by default.
      draft_sampler: how drafts are drawn; by default as the target's tokens.
      drafter: a ``Drafter`` of your own in place of the config's method; ``draft`` then
        holds its parameters, if it has any.
      rule: a ``Rule`` of your own in place of the config's strategy.
      has_expected: record the rule's closed-form acceptance beside the measured one.
      force_n1: check draft and config, and then draft nothing (see ``new_n1``).
      devices: of draft and target, to draft the next block while the target verifies this one
        (see ``overlap``); None where they take turns. Sides that share a device take turns too,
        and a warning says so.
      timeline: gets what ran when, where the two are overlapped.

    Attributes:
      adaptive: costs and acceptance that adaptive decoding has learned; None where K is fixed.

    Raises:
      ModelNotLoaded: target or draft is a path, a config, or has no weights.
      ConfigError: the parts do not fit each other.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | LoadedHead | None = None,
        config: SpeculativeConfig | AsyncSpecConfig | None = None,
        *,
        target_sampler: Samplers | None = None,
        draft_sampler: Samplers | None = None,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
        has_expected: bool = False,
        force_n1: bool = False,
        devices: overlap.Devices | None = None,
        timeline: list[overlap.Span] | None = None,
    ):
        if isinstance(draft, SpeculativeConfig | AsyncSpecConfig):
            raise ConfigError(f"draft is a {type(draft).__name__}; name it: config=...")
        check_loaded("target", target, LoadedModel)
        if draft is not None:
            check_loaded("draft", draft, LoadedModel | LoadedHead)
        self._max_tokens = None
        if isinstance(config, AsyncSpecConfig):
            if target_sampler is not None or draft_sampler is not None:
                raise ConfigError("samplers stand in the AsyncSpecConfig; give them once, there")
            target_sampler, draft_sampler = config.target_sampler, config.draft_sampler
            force_n1, self._max_tokens = force_n1 or config.force_n1, config.max_tokens
            method = draft.method if isinstance(draft, LoadedHead) else "standalone"
            has_drafts = not force_n1 or draft is not None or drafter is not None
            config = SpeculativeConfig(method, config.spec_k) if has_drafts else None
        if not isinstance(config, SpeculativeConfig | None):
            raise ConfigError(f"config is {config!r}; expected a SpeculativeConfig")
        if config is None and isinstance(draft, LoadedHead):
            config = SpeculativeConfig(draft.method)
        elif config is None and (draft is not None or drafter is not None):
            config = SpeculativeConfig()
        self.target, self.draft = target, draft
        self.target_sampler = SamplerConfig() if target_sampler is None else target_sampler
        self.draft_sampler = draft_sampler
        self._config, self._rule, self._has_expected = config, rule, has_expected
        self._model = tapped_model(target, draft)
        self._drafter = with_adaptive(config, drafter or make_drafter(config, self._model, draft))
        has_history = config is not None and config.is_suffix() and drafter is None
        self._history = History(config.suffix.history_tokens) if has_history else None
        is_adaptive = config is not None and config.is_adaptive
        self.adaptive = AdaptiveState(config.buckets) if is_adaptive else None
        self._has_fallen_back = config is not None and not (force_n1 or target.model.can_rewind)
        is_apart = devices is not None and not (force_n1 or self._has_fallen_back)
        self._loop = overlap.make_loop(devices, timeline, stacklevel=3) if is_apart else decoding
        self._check_parts()
        self.system()  # a strategy or a rule that cannot be is refused here
        if force_n1 or self._has_fallen_back:
            self._model, self._drafter = target.model, NO_DRAFT
            self._config = self._rule = self._history = self.adaptive = None
        self._lock, self._token, self._is_token_held = threading.Lock(), CancellationToken(), False
        self._worker = ThreadPoolExecutor(1, "spec_jax")  # starts with the first asynchronous call
        self.reset_stats()

    @classmethod
    def new_n1(cls, target: LoadedModel, draft=None, config=None, **options) -> SpeculativeDecoder:
        """A decoder of the same law that feeds the target one token a pass and drafts nothing.

        The oracle for a decoder with the same arguments. A draft and a config are checked, and
        left aside; so are a drafter and a rule of your own.
        """
        return cls(target, draft, config, force_n1=True, **options)

    def _check_parts(self) -> None:
        ours, theirs = self.target.model.vocab_size, self._drafter.vocab_size
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"the vocabularies differ: target {self.target.name} has {ours} tokens, "
                f"draft {self._drafter.name} has {theirs}"
            )
        if self.is_overlapped and self.adaptive is not None:
            raise ConfigError("is_adaptive is set; an overlapped draft needs a fixed K")
        a, b = self.target.tokenizer, getattr(self.draft, "tokenizer", None)
        if a is not None and b is not None and not a.has_same_vocab(b):
            raise ConfigError(
                f"the vocabularies differ: {self.target.name} and {self.draft.name} give the "
                "same ids to different tokens"
            )

    @property
    def config(self) -> SpeculativeConfig | None:
        """The config with every default filled in; None for plain decoding.

        A rule of your own judges in place of its strategy.
        """
        return self.resolved_config(self.target_sampler)

    @property
    def is_overlapped(self) -> bool:
        """Whether drafts are made on devices of their own while the target verifies."""
        return self._loop is not decoding

    @property
    def num_draft(self) -> int:
        return 0 if self._config is None else self._config.num_speculative_tokens

    @property
    def stats(self) -> stats.Stats:
        """Counts and times of every call since ``reset_stats``, cancelled ones included.

        A call is counted when it ends.
        """
        return self._stats

    def reset_stats(self) -> None:
        with self._lock:
            self._stats = stats.Stats()

    def _ended(self, rows: Sequence[Generation], of_call: stats.Stats) -> None:
        if self._has_fallen_back:
            of_call += stats.Stats(n1_fallbacks=len(rows))
        with self._lock:
            self._stats += of_call
            self.remember(rows)

    def remember(self, rows: Sequence[Generation]) -> None:
        """Keeps finished outputs for a drafter that copies from past ones."""
        for row in rows if self._history is not None else ():
            self._history.add(row.tokens)

    @property
    def cancellation_token(self) -> CancellationToken:
        """Cancels every call of this decoder; ``reset`` it before the next.

        Once it has been asked for, every call stops after each round to look at it; one that
        was running before does so within 32 rounds, or as many as it was told to run at once.
        """
        self._is_token_held = True
        return self._token

    def cancellations(self, of_call, batch: int) -> list[Callable[[], bool]]:
        """By row: is it cancelled, by the decoder's token or by the call's own?"""
        return request.cancellations(self._token, of_call, batch)

    def rounds_unseen(self, is_watched: bool) -> int:
        """Most rounds until the host looks again: 1 where text or a token is of interest to it."""
        return 1 if is_watched or self._is_token_held else _ROUNDS_UNWATCHED

    def resolved_config(self, samplers: Samplers) -> SpeculativeConfig | None:
        """The config as it is used with these samplers of the target.

        Raises:
          ConfigError: the strategy cannot serve their temperature.
        """
        if self._config is None:
            return None
        return self._config.resolve(
            highest_temperature(samplers), is_sampled=self._drafter.is_sampled
        )

    def system(self, samplers: Samplers | None = None) -> decoding.System:
        """What is compiled for these samplers: target, drafter, rule and K."""
        samplers = self.target_sampler if samplers is None else samplers
        config = self.resolved_config(samplers)
        if self._rule is not None:
            rule = self._rule
        elif config is not None:
            rule = make_rule(config)
        else:
            rule = plain_rule(highest_temperature(samplers) < GREEDY_BELOW)
        if rule.is_greedy and highest_temperature(samplers) >= GREEDY_BELOW:
            raise ConfigError(f"rule {rule.name!r} emits argmax tokens: it needs temperature 0")
        if rule.needs_probs and self.num_draft == 0:
            raise ConfigError(f"rule {rule.name!r} judges drafts; plain decoding has none")
        if self._drafter.tree is not None and not rule.has_trees:
            raise ConfigError(
                f"rule {rule.name!r} judges chains; trees need 'residual', 'traversal' or 'match'"
            )
        has_form = rule.expected_acceptance is not None and self._drafter.tree is None
        has_expected = self._has_expected and has_form
        system = decoding.System(self._model, self._drafter, rule, self.num_draft, has_expected)
        if self.is_overlapped:
            overlap.check(system)
        return system

    def params(self, batch: int | None = None, num_draft: int | None = None) -> dict:
        """What ``decoding.prefill`` and ``decoding.generate`` take as ``params``.

        Args:
          batch: rows that are decoded together, for the layout that suits them; None: any.
          num_draft: K; by default the config's.
        """
        K = self.num_draft if num_draft is None else num_draft
        target = self.target.decoding_params(None if batch is None else batch * (K + 1))
        draft = None
        if self.num_draft > 0 and self.draft is not None:
            draft = self.draft.draft_params(target, batch, K, self._drafter.tree)
        elif self.num_draft > 0 and self._history is not None:
            draft = self._history.tokens
        return {"target": target, "draft": draft}

    def pacer(self, system: decoding.System, batch: int) -> Callable:
        """``(state, stop, max_rounds[, min_active]) -> (state, Chunk)`` for one generation.

        It is ``decoding.generate`` of this system and so many rows; where K is adaptive, with a K
        of its own choice, and perhaps fewer rounds.
        """
        params_of = functools.partial(self.params, batch)
        params_of()  # weights are laid out here
        if self.adaptive is not None:
            return AdaptiveRunner(system, params_of, self.adaptive)
        return lambda *args: self._loop.generate(params_of(), *args, system=system)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt, checked.

        Raises:
          PromptError: an empty prompt, text without a tokenizer, or an id outside of the
            vocabulary.
        """
        return request.encode(self.target, prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        sampler: Samplers | None = None,
        draft_sampler: Samplers | None = None,
        seeds: Sequence[int] | None = None,
        on_token: Callable[..., None] | None = None,
        cancellation_token: CancellationToken | Sequence[CancellationToken] | None = None,
        rounds_per_sync: int | None = None,
        pad_to: int = 0,
    ) -> Generation | list[Generation]:
        """Decodes one prompt, or a batch of them at once.

        The tokens of a row depend on its prompt, its sampler and its seed alone, never on
        the other rows; rows finish, stream and are cancelled each for itself. (Under a rule
        other than "greedy" and "match" they depend on what is drafted, so with ``is_adaptive``
        on the Ks, with "suffix" on past outputs; their law does not.)

        Args:
          prompts: a text or its ids; or a list of these.
          max_new_tokens: most output tokens of a row, 128 by default.
          max_tokens: most tokens of a row, prompt and output together; in place of
            max_new_tokens.
          stop: strings at which a row ends; the text is cut before them.
          stop_tokens: ids at which a row ends; by default the target's own.
          sampler: in place of the decoder's, one for all rows or one a row.
          draft_sampler: likewise.
          seeds: of each row, for target and draft; by default the samplers' own, plus the
            row's index where one sampler serves all rows.
          on_token: called with text as it becomes final, after prefill and after each round:
            ``on_token(piece)``, for a batch ``on_token(row, piece)``. A piece never ends within
            a character; together a row's pieces are its text. An error that it raises ends the
            call and reaches the caller.
          cancellation_token: ends the call, or a row each, beside the decoder's own token.
            What there is is returned, with the finish_reason "cancelled".
          rounds_per_sync: rounds between two looks at tokens and cancellation; by default 1
            where either is of interest, 8 for stop strings, else 32.
          pad_to: make room for prompts of so many tokens even where these are shorter, so
            that calls with different prompts share one compiled program.

        Returns:
          A ``Generation``, or a list of them in the order of the prompts.

        Raises:
          PromptError: a prompt is empty, too long with its output, or has unknown ids.
          Cancelled: every row was cancelled before its first token. (Where a row was and others
            were not, it returns without tokens.)
          InvalidDraftError: the drafter proposed an id outside of the vocabulary; the
            error carries every row's result.
        """
        stream = self._stream(
            prompts, max_new_tokens, max_tokens=max_tokens, stop=stop, stop_tokens=stop_tokens,
            sampler=sampler, draft_sampler=draft_sampler, seeds=seeds,
            has_pieces=on_token is not None, cancellation_token=cancellation_token,
            rounds_per_sync=rounds_per_sync, pad_to=pad_to,
        )  # fmt: skip
        return stream.drain(on_token)

    def stream(self, prompts, max_new_tokens: int | None = None, **options) -> Stream:
        """The text of ``generate`` as it comes: an iterator, and an asynchronous one.

        It takes what ``generate`` takes, but for on_token.

        Raises:
          PromptError, ConfigError: at once; other errors of ``generate`` come with a piece.
        """
        return self._stream(prompts, max_new_tokens, has_pieces=True, **options)

    async def generate_async(
        self, prompts, max_new_tokens: int | None = None, *, on_token=None, **options
    ) -> Generation | list[Generation]:
        """``generate`` without blocking the event loop.

        ``on_token`` is called in the event loop, and awaited if it is a coroutine function. A task
        that is cancelled, or whose event loop is closed, ends the call at its next round.

        Args and errors are those of ``generate``.
        """
        options = {"rounds_per_sync": 1, **options}
        stream = self._stream(prompts, max_new_tokens, has_pieces=on_token is not None, **options)
        return await stream.drain_async(on_token)

    def _stream(
        self, prompts, max_new_tokens, *, has_pieces, max_tokens=None, stop=(), stop_tokens=None,
        sampler=None, draft_sampler=None, seeds=None, cancellation_token=None,
        rounds_per_sync=None, pad_to=0,
    ) -> Stream:  # fmt: skip
        """Checks everything that a call was given; nothing is decoded yet."""
        ids, is_single = request.encode_all(self.target, prompts)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise ConfigError("a stop string is empty")
        if (stops or has_pieces) and self.target.tokenizer is None:
            raise ConfigError(f"{self.target.name} has no tokenizer, so it has no text to look at")
        samplers = self.target_sampler if sampler is None else sampler
        drafts = self.draft_sampler if draft_sampler is None else draft_sampler
        system, B = self.system(samplers), len(ids)
        if rounds_per_sync is not None:
            check_integer("rounds_per_sync", rounds_per_sync, 1)
        has_token = cancellation_token is not None

        def num_rounds() -> int:
            if rounds_per_sync is not None:
                return rounds_per_sync
            most = self.rounds_unseen(has_pieces or has_token)
            return min(most, _ROUNDS_TO_STOPS) if stops else most

        call = Call(
            system=system,
            start=self.prepare(
                ids, self.new_tokens(ids, max_new_tokens, max_tokens), system,
                make_sampler(samplers, B, system.target.vocab_size, seeds),
                make_sampler(drafts or samplers, B, system.target.vocab_size, seeds),
                stop_tokens=self.target.stop_tokens if stop_tokens is None else stop_tokens,
                pad_to=pad_to,
            ),
            pacer=lambda: self.pacer(system, B),
            tracker=TextTracker(self.target.tokenizer, ids, stops, has_pieces=has_pieces),
            is_cancelled=self.cancellations(cancellation_token, B),
            num_rounds=num_rounds,
            ended=self._ended,
        )  # fmt: skip
        return Stream(Session(call), self._worker, is_single=is_single)

    def new_tokens(self, ids, max_new_tokens=None, max_tokens=None) -> list[int]:
        """Most output tokens of each row, see ``generate``; the config's limit by default."""
        return request.new_tokens(ids, max_new_tokens, max_tokens, self._max_tokens)

    def start(self, ids, max_new_tokens, system, sampler, draft_sampler, **options):
        """Prefills a batch of checked prompts: the first ``DecodeState``; see ``prepare``."""
        return self.prepare(ids, max_new_tokens, system, sampler, draft_sampler, **options)()

    def prepare(
        self, ids, max_new_tokens, system, sampler, draft_sampler, *, stop_tokens=(), pad_to=0,
        slots=None,
    ) -> Callable[[], decoding.DecodeState]:  # fmt: skip
        """Checks what prefill is given; the function that is returned runs it.

        The width of the prompts and the slots are rounded up, so that few shapes compile.
        With ``slots``, from ``slots_for`` of the longest prompt to come, rows that are started
        one by one fit into one batch. ``max_new_tokens`` is one for all rows, or one a row.

        Raises:
          PromptError: a prompt and its output exceed what the target or the draft can hold.
        """
        lengths = np.asarray([len(i) for i in ids], np.int32)
        most = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(ids)
        most = np.asarray([check_integer("max_new_tokens", n, 1) for n in most])
        if not isinstance(stop_tokens, (Sequence, np.ndarray)) or isinstance(stop_tokens, str):
            raise ConfigError(f"stop_tokens is {stop_tokens!r}; expected a list of ids")
        stop_tokens = [check_integer("a stop token", token, 0) for token in stop_tokens]
        longest = int((lengths + most).argmax())  # with its output
        self.check_room(int(lengths[longest]), int(most[longest]), system)
        if slots is None:
            wide = np.maximum(lengths, pad_to)
            slots = max(self.slots_for(int(n), int(m), system) for n, m in zip(wide, most))
        width = _width(max(int(lengths.max()), pad_to))
        if not system.target.can_rewind:  # what it is fed it keeps, padding too
            width = int(lengths.max())
            if (lengths < width).any():
                raise PromptError(
                    f"prompts of {int(lengths.min())} and {width} tokens are one batch; the target "
                    "cannot forget what pads the shorter: decode them one by one"
                )
        tokens = np.zeros((len(ids), width), np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = prompt
        stop_ids = np.tile(np.asarray([*stop_tokens, -1], np.int32), (len(ids), 1))
        limits = (lengths + most).astype(np.int32)
        return lambda: self._loop.prefill(
            self.params(), jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(limits),
            jnp.asarray(stop_ids), sampler, draft_sampler, system=system, slots=slots,
        )  # fmt: skip

    def check_room(self, longest: int, max_new_tokens: int, system: decoding.System) -> None:
        """Checks that target and draft can hold a prompt of ``longest`` tokens and its output.

        Raises:
          PromptError: one of them cannot.
        """
        for model in (system.target, system.drafter):
            if model.max_length is not None and longest + max_new_tokens > model.max_length:
                kind = "target" if model is system.target else "draft"
                raise PromptError(
                    f"a prompt of {longest} tokens and {max_new_tokens} new ones make "
                    f"{longest + max_new_tokens}; the {kind} holds {model.max_length}"
                )

    def slots_for(self, longest: int, max_new_tokens: int, system: decoding.System) -> int:
        """S and M of a batch whose longest prompt has so many tokens."""
        slots = max(longest + max_new_tokens + system.lookahead_slots, _width(longest))
        return -(-slots // _SLOT_BUCKET) * _SLOT_BUCKET
