"""Text in, text out: ``SpeculativeDecoder``."""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decode, stats
from spec_jax.config import GREEDY_BELOW, SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Drafter, Model, Rule
from spec_jax.decode import Finish
from spec_jax.draft.ngram import NO_DRAFT, ngram
from spec_jax.draft.small_lm import small_lm
from spec_jax.errors import ConfigError, InvalidDraftError, PromptError
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.models import transformer
from spec_jax.sampling import make_sampler
from spec_jax.verify import MATCH, make_rule
from spec_jax.watch import Watch

Prompt = str | Sequence[int]
Samplers = SamplerConfig | Sequence[SamplerConfig]

_SLOT_BUCKET = 128
_ROUNDS_PER_SYNC = 8
_NO_LIMIT = 2**31 - 1


def check_integer(name: str, value, least: int) -> int:
    """The value as an int.

    Raises:
      ConfigError: it is none, or less than ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= _NO_LIMIT:
        raise ConfigError(f"{name} is {value!r}; expected an integer of {least} or more")
    return number


def _width(longest: int) -> int:
    """T of a batch whose longest prompt has so many tokens."""
    return max(16, 1 << (longest - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Generation:
    """What one prompt produced.

    Attributes:
      text: the output without the prompt, or None where there is no tokenizer.
      tokens: the output's ids, a stop token included.
      finish_reason: "stop_token", "stop_string", "length", or what went wrong:
        "nan_target", "nan_draft", "invalid_draft".
      stats: counts of this row; times are the batch's, in ``SpeculativeDecoder.stats``.
    """

    text: str | None
    tokens: tuple[int, ...]
    finish_reason: str
    stats: stats.Stats


class SpeculativeDecoder:
    """Decodes a target, with a draft that makes it faster and leaves its law as it is.

    Args:
      target: from ``load_model``.
      draft: a smaller model of the same vocabulary for the method "standalone", a head from
        ``load_head`` or ``load_mtp`` for "eagle" and "mtp", else None.
      config: what drafts and which rule judges; by default ``SpeculativeConfig()`` where there
        is a draft, and plain decoding for a target alone.
      target_sampler: how the target's tokens are drawn; greedy by default.
      draft_sampler: how drafts are drawn; by default as the target's tokens.
      drafter: a ``Drafter`` of your own in place of the config's method; ``draft`` then
        holds its parameters, if it has any.
      rule: a ``Rule`` of your own in place of the config's strategy.
      has_expected: record the rule's closed-form acceptance beside the measured one.

    Raises:
      ConfigError: the parts do not fit each other.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | LoadedHead | None = None,
        config: SpeculativeConfig | None = None,
        *,
        target_sampler: Samplers = SamplerConfig(),
        draft_sampler: Samplers | None = None,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
        has_expected: bool = False,
    ):
        if isinstance(draft, SpeculativeConfig):
            raise ConfigError("draft is a SpeculativeConfig; name it: config=...")
        for name, value, kind in (
            ("target", target, LoadedModel), ("draft", draft, LoadedModel | LoadedHead),
            ("config", config, SpeculativeConfig),
        ):  # fmt: skip
            if not isinstance(value, kind) and (value is not None or name == "target"):
                hint = "" if kind is SpeculativeConfig else "; load_model makes one"
                kind = getattr(kind, "__name__", "LoadedModel or LoadedHead")
                raise ConfigError(f"{name} is {value!r}; expected a {kind}{hint}")
        if config is None and isinstance(draft, LoadedHead):
            config = SpeculativeConfig(draft.method)
        elif config is None and (draft is not None or drafter is not None):
            config = SpeculativeConfig()
        self.target, self.draft = target, draft
        self.target_sampler, self.draft_sampler = target_sampler, draft_sampler
        self._config, self._rule, self._has_expected = config, rule, has_expected
        self._model = self._tapped_model()
        self._drafter = drafter or self._make_drafter()
        self._check_parts()
        self.reset_stats()
        self.system()  # a strategy or a rule that cannot be is refused here

    def _make_drafter(self) -> Drafter:
        config, draft = self._config, self.draft
        if config is None:
            return NO_DRAFT
        if config.is_ngram():
            if draft is not None:
                raise ConfigError(
                    f"speculative_method 'ngram' copies tokens; leave the draft {draft.name} out"
                )
            return ngram(config.ngram_max, config.ngram_min)
        method, is_head = config.speculative_method, isinstance(draft, LoadedHead)
        if draft is None:
            needed = "a draft model" if config.is_standalone() else "a head; load_head gives one"
            raise ConfigError(f"speculative_method {method!r} needs {needed}")
        theirs = draft.method if is_head else "standalone"
        if method != theirs:
            raise ConfigError(
                f"speculative_method is {method!r}; the draft {draft.name} is for {theirs!r}"
            )
        if not is_head:
            return small_lm(draft.model, config.tree_shape)
        if config.is_mtp():
            draft.config.check_num_draft(config.num_speculative_tokens)
        return draft.drafter(self._model, config.tree_shape)

    def _tapped_model(self) -> Model:
        """The target, with the states that a head reads."""
        target, draft = self.target, self.draft
        if not isinstance(draft, LoadedHead):
            return target.model
        if target.config is None:
            raise ConfigError(f"target {target.name} has no config; a head needs one to tap it")
        sizes = (target.config.hidden_size, target.config.vocab_size)
        theirs = (draft.config.target_hidden_size, draft.config.target_vocab_size)
        if sizes != theirs:
            raise ConfigError(
                f"head {draft.name} is for a target of width {theirs[0]} and {theirs[1]} ids; "
                f"{target.name} has {sizes[0]} and {sizes[1]}"
            )
        draft.check_params()
        return transformer.model(target.config, draft.config.taps, target.model.num_tokens)

    def _check_parts(self) -> None:
        ours, theirs = self.target.model.vocab_size, self._drafter.vocab_size
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"the vocabularies differ: target {self.target.name} has {ours} tokens, "
                f"draft {self._drafter.name} has {theirs}"
            )
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
    def num_draft(self) -> int:
        return 0 if self._config is None else self._config.num_speculative_tokens

    @property
    def stats(self) -> stats.Stats:
        """Counts and times of every call since ``reset_stats``."""
        return self._stats

    def reset_stats(self) -> None:
        self._stats = stats.Stats()

    def resolved_config(self, samplers: Samplers) -> SpeculativeConfig | None:
        """The config as it is used with these samplers of the target.

        Raises:
          ConfigError: the strategy cannot serve their temperature.
        """
        if self._config is None:
            return None
        return self._config.resolve(
            _highest_temperature(samplers), is_sampled=self._drafter.is_sampled
        )

    def system(self, samplers: Samplers | None = None) -> decode.System:
        """What is compiled for these samplers: target, drafter, rule and K."""
        samplers = self.target_sampler if samplers is None else samplers
        config = self.resolved_config(samplers)
        if self._rule is not None:
            rule = self._rule
        elif config is not None:
            rule = make_rule(_rule_part(config))
        elif _highest_temperature(samplers) >= GREEDY_BELOW:
            rule = MATCH
        else:
            rule = make_rule(SpeculativeConfig(rejection_sampling_strategy="greedy"))
        if rule.is_greedy and _highest_temperature(samplers) >= GREEDY_BELOW:
            raise ConfigError(f"rule {rule.name!r} emits argmax tokens: it needs temperature 0")
        if rule.needs_probs and self.num_draft == 0:
            raise ConfigError(f"rule {rule.name!r} judges drafts; plain decoding has none")
        if self._drafter.tree is not None and not rule.has_trees:
            raise ConfigError(
                f"rule {rule.name!r} judges chains; trees need 'residual', 'traversal' or 'match'"
            )
        has_form = rule.expected_acceptance is not None and self._drafter.tree is None
        has_expected = self._has_expected and has_form
        return decode.System(
            self._model, self._drafter, rule, self.num_draft, has_expected
        )

    def params(self, batch: int | None = None) -> dict:
        """What ``decode.prefill`` and ``decode.generate`` take as ``params``.

        Args:
          batch: rows that are decoded together, for the layout that suits them; None: any.
        """
        target = None if batch is None else batch * (self.num_draft + 1)
        draft = None if batch is None else batch * 2  # a draft's first pass feeds two tokens
        params = {"target": self.target.decoding_params(target), "draft": None}
        if isinstance(self.draft, LoadedHead):
            tree, K = self._drafter.tree, self.num_draft
            most = 1 + (K if tree is None else max(tree.depth, tree.widest))
            head = self.draft.decoding_params(None if batch is None else batch * most)
            params["draft"] = {"head": head, "target": params["target"]}
        elif self.draft is not None:
            params["draft"] = self.draft.decoding_params(draft)
        return params

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt, checked.

        Raises:
          PromptError: an empty prompt, text without a tokenizer, or an id outside of the
            vocabulary.
        """
        if isinstance(prompt, str):
            if self.target.tokenizer is None:
                raise PromptError(f"{self.target.name} has no tokenizer: give the prompt as ids")
            ids = self.target.tokenizer.encode(prompt)
        else:
            try:
                ids = list(map(operator.index, np.asarray(prompt).tolist()))
            except (TypeError, ValueError):
                message = f"the prompt {prompt!r} is neither text nor integer ids"
                raise PromptError(message) from None
        if not ids:
            raise PromptError("the prompt is empty; decoding needs at least one token")
        last = self.target.model.last_id
        bad = [i for i in ids if not 0 <= i <= last]
        if bad:
            raise PromptError(
                f"the prompt holds id {bad[0]}; {self.target.name} has ids 0 to {last}"
            )
        return ids

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        sampler: Samplers | None = None,
        draft_sampler: Samplers | None = None,
        seeds: Sequence[int] | None = None,
        on_text: Callable[[int, str], None] | None = None,
        rounds_per_sync: int | None = None,
        pad_to: int = 0,
    ) -> Generation | list[Generation]:
        """Decodes one prompt, or a batch of them at once.

        The tokens of a row depend on its prompt, its sampler and its seed alone, never on
        the other rows.

        Args:
          prompts: a text or its ids; or a list of these.
          max_new_tokens: most output tokens of a row.
          stop: strings at which a row ends; the text is cut before them.
          stop_tokens: ids at which a row ends; by default the target's own.
          sampler: in place of the decoder's, one for all rows or one a row.
          draft_sampler: likewise.
          seeds: of each row, for target and draft; by default the samplers' own, plus the
            row's index where one sampler serves all rows.
          on_text: called with ``(row, piece)`` as text becomes final.
          rounds_per_sync: rounds between two looks at the tokens; by default 8 where text
            must be looked at, else the whole generation is one call.
          pad_to: make room for prompts of so many tokens even where these are shorter, so
            that calls with different prompts share one compiled program.

        Returns:
          A ``Generation``, or a list of them in the order of the prompts.

        Raises:
          PromptError: a prompt is empty, too long with its output, or has unknown ids.
          InvalidDraftError: the drafter proposed an id outside of the vocabulary; the
            error carries every row's result.
        """
        if not isinstance(prompts, (str, Sequence, np.ndarray, jax.Array)):
            raise PromptError(f"the prompt {prompts!r} is neither text, ids, nor a list of these")
        is_single = isinstance(prompts, str) or (
            len(prompts) > 0 and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
        )
        ids = [self.encode(p) for p in ([prompts] if is_single else prompts)]
        if not ids:
            raise PromptError("the batch is empty; decoding needs at least one prompt")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise ConfigError("a stop string is empty")
        if (stops or on_text) and self.target.tokenizer is None:
            raise ConfigError(f"{self.target.name} has no tokenizer, so it has no text to look at")
        samplers = self.target_sampler if sampler is None else sampler
        drafts = self.draft_sampler if draft_sampler is None else draft_sampler
        system = self.system(samplers)
        if rounds_per_sync is None:
            rounds_per_sync = _ROUNDS_PER_SYNC if stops or on_text else _NO_LIMIT
        rounds_per_sync = check_integer("rounds_per_sync", rounds_per_sync, 1)

        params = self.params(len(ids))  # laid out here the first time: no part of the times
        begin = time.perf_counter()
        state = self.start(
            ids, max_new_tokens, system,
            make_sampler(samplers, len(ids), system.target.vocab_size, seeds),
            make_sampler(drafts or samplers, len(ids), system.target.vocab_size, seeds),
            stop_tokens=self.target.stop_tokens if stop_tokens is None else stop_tokens,
            pad_to=pad_to,
        )
        jax.block_until_ready(state.finish)
        prefilled = time.perf_counter()
        watch = Watch(self.target.tokenizer, ids, stops, on_text)
        ending = np.zeros(len(ids), np.int32)
        while True:
            state, chunk = decode.generate(
                params, state, jnp.asarray(ending), jnp.int32(rounds_per_sync), system=system
            )
            finish = np.asarray(chunk.finish)
            if stops or on_text:
                ending = watch.look(np.asarray(chunk.tokens), np.asarray(chunk.total), finish)
            if ((finish != Finish.RUNNING) | (ending != Finish.RUNNING)).all():
                break
        done = time.perf_counter()
        record = jax.tree.map(np.asarray, decode.Record.of(state))
        rows = [
            collect(jax.tree.map(lambda x: x[row], record), watch, row, system.depth)
            for row in range(len(ids))
        ]
        self._stats += functools.reduce(
            lambda a, b: a + b,
            (row.stats for row in rows),
            stats.Stats(prefill_s=prefilled - begin, decode_s=done - prefilled),
        )
        bad = [i for i, row in enumerate(rows) if row.finish_reason == "invalid_draft"]
        if bad:
            raise InvalidDraftError(
                f"drafter {self._drafter.name!r} proposed ids outside of the vocabulary "
                f"0..{system.target.last_id}, or parents that make no tree, in rows {bad}; "
                "those rows stopped there; all rows' tokens are in this error's `generations`",
                rows,
            )
        return rows[0] if is_single else rows

    def start(
        self, ids, max_new_tokens, system, sampler, draft_sampler, *, stop_tokens=(), pad_to=0,
        slots=None,
    ):  # fmt: skip
        """Prefills a batch of checked prompts: the first ``DecodeState``.

        The width of the prompts and the slots are rounded up, so that few shapes compile.
        With ``slots``, from ``slots_for`` of the longest prompt to come, rows that are started
        one by one fit into one batch.

        Raises:
          PromptError: a prompt and its output exceed what the target or the draft can hold.
        """
        max_new_tokens = check_integer("max_new_tokens", max_new_tokens, 1)
        if not isinstance(stop_tokens, (Sequence, np.ndarray)) or isinstance(stop_tokens, str):
            raise ConfigError(f"stop_tokens is {stop_tokens!r}; expected a list of ids")
        stop_tokens = [check_integer("a stop token", token, 0) for token in stop_tokens]
        lengths = np.asarray([len(i) for i in ids], np.int32)
        longest = int(lengths.max())
        self.check_room(longest, max_new_tokens, system)
        longest = max(longest, pad_to)
        slots = self.slots_for(longest, max_new_tokens, system) if slots is None else slots
        tokens = np.zeros((len(ids), _width(longest)), np.int32)
        for row, prompt in enumerate(ids):
            tokens[row, : len(prompt)] = prompt
        stop_ids = np.tile(np.asarray([*stop_tokens, -1], np.int32), (len(ids), 1))
        return decode.prefill(
            self.params(), jnp.asarray(tokens), jnp.asarray(lengths),
            jnp.asarray(lengths + max_new_tokens), jnp.asarray(stop_ids), sampler, draft_sampler,
            system=system, slots=slots,
        )

    def check_room(self, longest: int, max_new_tokens: int, system: decode.System) -> None:
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

    def slots_for(self, longest: int, max_new_tokens: int, system: decode.System) -> int:
        """S and M of a batch whose longest prompt has so many tokens."""
        slots = max(longest + max_new_tokens + system.slack, _width(longest))
        return -(-slots // _SLOT_BUCKET) * _SLOT_BUCKET


def collect(record: decode.Record, watch: Watch, row: int, depth: int) -> Generation:
    """Makes one row's record, on the host, into what a caller sees.

    Args:
      record: of the row alone.
      watch: what has followed the row's text.
      row: its number there.
      depth: the most drafts that a round accepts.
    """
    begin, tokens, kind = int(record.prompt_length), record.tokens, record.kind
    n, text, is_cut = watch.result(row, int((kind > 0).sum()), tokens)
    kept = slice(begin, begin + n)
    expected = None if record.expected is None else record.expected[kept]
    return Generation(
        text=text,
        tokens=tuple(tokens[kept].tolist()),
        finish_reason=Finish(Finish.STOP_STRING if is_cut else record.finish).name.lower(),
        stats=stats.row_stats(kind[kept], record.offered[kept], depth, expected),
    )


def _highest_temperature(samplers: Samplers) -> float:
    one = isinstance(samplers, SamplerConfig)
    if not one and not samplers:
        raise ConfigError("the list of sampler configs is empty; expected one for each row")
    return samplers.temperature if one else max(s.temperature for s in samplers)


def _rule_part(config: SpeculativeConfig) -> SpeculativeConfig:
    """The fields a rule depends on, so that configs equal in them share compiled programs."""
    return dataclasses.replace(
        SpeculativeConfig(),
        **{
            f.name: getattr(config, f.name)
            for f in dataclasses.fields(config)
            if f.name.startswith(("num_", "rejection_", "synthetic_", "typical_"))
        },
    )
