"""Text in, text out: ``SpeculativeDecoder``."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import AsyncSpecConfig, SpeculativeConfig, check_integer
from spec_jax.contracts import Observer
from spec_jax.engine import request, stats
from spec_jax.engine.build import DecoderParts
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.engine import Engine
from spec_jax.engine.generation import Generation
from spec_jax.engine.request import GenerateOptions, Messages, Prompt, refuse_options
from spec_jax.engine.stream import Stream
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.meshes import mesh_of, on_automatic_axes
from spec_jax.sampling import Samplers


class SpeculativeDecoder(DecoderParts):
    """Decodes a target model, faster with a draft, without changing its output distribution.

    Concurrent calls are safe, from threads and from tasks: each has its own state, and its result
    does not depend on other calls. Calls from threads run concurrently; asynchronous calls take
    turns, one round at a time, in one thread that belongs to the decoder.

    Example:
      ```python
      import spec_jax
      from spec_jax.testing import mock_model

      target = mock_model(vocab_size=8)  # or spec_jax.load_model("zoo/target")
      draft = mock_model(vocab_size=8, seed=1)

      config = spec_jax.SpeculativeConfig(num_speculative_tokens=2)
      decoder = spec_jax.SpeculativeDecoder(target, draft, config)
      result = decoder.generate([1, 2, 3], max_new_tokens=4)
      print(result.tokens, f"{decoder.stats.tau:.2f} tokens per target pass")
      ```

    Args:
      target: from ``load_model``.
      draft: a smaller model of the same vocabulary for the method "standalone", a head from
        ``load_draft`` for the methods of heads, else None.
      config: what drafts, and which rule accepts; by default ``SpeculativeConfig()`` where there is
        a draft, and plain decoding for a target alone. The samplers and the limit of an
        ``AsyncSpecConfig`` become the decoder's.
      target_sampler: how the target's tokens are drawn; greedy by default, whatever the model's
        generation_config.json states. "model": as it states.
      draft_sampler: how drafts are drawn; by default like the target's tokens; for "dflash" and
        "peagle" at temperature 0, where the independent drafts of a block are most consistent.
      drafter: a custom ``Drafter`` in place of the config's method, a function ``make(target)``
        that returns one, or ``module:NAME`` of either; ``draft`` then holds its parameters, if any.
      rule: a custom ``Rule`` in place of the config's strategy, a function that returns one,
        ``module:NAME`` of either, or the name of a built-in rule.
      has_expected: record the rule's closed-form acceptance beside the measured one.
      force_n1: check draft and config, but decode without drafts (see ``new_n1``).
      devices: separate devices for draft and target, so that the next block is drafted while the
        target verifies this one (see ``overlap``). None: they take turns. If the two share a device
        they also take turns, and a warning says so.
      mesh: devices to run on together, from ``make_mesh`` or as text, such as "data:2,tensor:4":
        rows are split over "data", weights and caches over "tensor". None: the devices that hold
        the target's weights. With ``devices``, each side has a mesh of its own there.
      is_draft_replicated: replicate the draft on its mesh.
      observers: functions that watch the rounds, see ``Observer``; their states are in
        ``Generation.seen``.
      prefill_chunk: maximum tokens of a prompt in one pass, by default 512. Longer prompts take
        several passes, each of which holds the activations of that many tokens only. On a CPU
        what is left is fed in passes of 128 and 32 tokens.

    Attributes:
      adaptive: costs and acceptance that adaptive decoding has measured; None where K is fixed.
    Raises:
      ModelNotLoaded: target or draft is a path, a config, or has no weights.
      ConfigError: the parts do not fit each other.
    """

    @classmethod
    def new_n1(
        cls,
        target: LoadedModel,
        draft: LoadedModel | LoadedHead | None = None,
        config: SpeculativeConfig | AsyncSpecConfig | None = None,
        **options: Any,
    ) -> SpeculativeDecoder:
        """Returns a decoder of the same distribution that decodes one token per pass.

        Use it as the reference for a speculative decoder with the same arguments. Draft, config,
        custom drafter and custom rule are checked, and otherwise ignored.

        Example:
          ```python
          import spec_jax
          from spec_jax.testing import mock_model

          target = mock_model(vocab_size=8)  # or spec_jax.load_model("zoo/target")
          draft = mock_model(vocab_size=8, seed=1)

          plain = spec_jax.SpeculativeDecoder.new_n1(target, draft)
          print(plain.config)
          ```

        Args:
          target: see ``SpeculativeDecoder``.
          draft: likewise.
          config: likewise.
          **options: likewise.
        """
        return cls(target, draft, config, force_n1=True, **options)

    def with_params(self, target: Any = None, draft: Any = None) -> SpeculativeDecoder:
        """Returns a decoder with other weights, which runs the same compiled programs.

        For training: sample, update the weights, and go on sampling without compiling. On a CPU the
        weights are laid out again for decoding. What the decoder has learned is shared.

        Args:
          target: the target's parameters, nested as ``decoder.target.params``; None: the same.
          draft: the draft's or the head's, likewise.

        Raises:
          ConfigError: there is no draft, or parameters have other names, shapes or dtypes.
        """
        models = {}
        for name, params in (("target", target), ("draft", draft)):
            if params is None:
                continue
            model = getattr(self, name)
            if model is None:
                raise ConfigError("params of a draft are given; this decoder has none")
            models[name] = dataclasses.replace(model, params=_like(params, model.params, name))
        return self.with_parts(**models)

    @property
    def config(self) -> SpeculativeConfig | None:
        """The config with every default filled in; None for plain decoding.

        For a custom drafter or rule, its name is in place of the method or the strategy.
        """
        return self.resolved_config(self.target_sampler)

    @property
    def stats(self) -> stats.Stats:
        """Counts and times of all calls since ``reset_stats``, cancelled ones included.

        A call is counted when it ends; a row of a ``DecodeQueue`` is counted when it is yielded.
        """
        return self.totals.value

    def reset_stats(self) -> None:
        """Starts counting again."""
        self.totals.reset()

    @property
    def cancellation_token(self) -> CancellationToken:
        """Cancels every call of this decoder; ``reset`` it before the next.

        Once this property has been read, every call checks the token after each round. A call that
        was already running checks it within 32 rounds, or within its ``rounds_per_sync``.
        """
        self.token.is_exposed = True
        return self.token

    def engine(
        self, samplers: Samplers | None = None, observers: tuple[Observer, ...] = ()
    ) -> Engine:
        """Returns an engine for one generation: ``prefill``, ``insert`` and ``generate`` on arrays.

        Args:
          samplers: of the target; by default the decoder's.
          observers: beside the decoder's.

        Raises:
          ConfigError: the rule cannot serve their temperature.
        """
        return Engine(self, self.target_sampler if samplers is None else samplers, observers)

    def params(self, batch: int | None = None) -> dict:
        """Returns ``{"target": ..., "draft": ...}``, see ``Engine.params``."""
        return self.engine().params(batch)

    def encode(
        self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Returns the ids of a prompt (a text, ids or a conversation), after checking them.

        Args:
          prompt: as in ``generate``.
          chat_template_kwargs: likewise.

        Raises:
          PromptError: an empty prompt, text without a tokenizer, or an id outside of the
            vocabulary.
          ConfigError: a conversation that the chat template refuses, or there is no template.
        """
        return request.encode(self.target, prompt, chat_template_kwargs)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        max_new_tokens: int | None = None,
        *,
        messages: Messages | Sequence[Messages] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] | None = None,
        sampler: Samplers | str | None = None,
        draft_sampler: Samplers | None = None,
        seeds: Sequence[int] | None = None,
        on_token: Callable[..., None] | None = None,
        cancellation_token: CancellationToken | Sequence[CancellationToken] | None = None,
        rounds_per_sync: int | None = None,
        pad_to: int = 0,
        logprobs: bool = False,
        num_samples: int | None = None,
        has_progress: bool | None = None,
        **unknown: Never,
    ) -> Generation | list[Generation]:
        """Decodes one prompt, or a batch of them at once.

        Rows finish, stream and are cancelled independently. A row's tokens depend on its prompt,
        its sampler and its seed, not on the other rows, and the same seed gives the same text, with
        two exceptions. First, with rules other than "greedy" and "match", adaptive K and drafters
        that remember earlier outputs ("suffix", a ``host_drafter`` with ``num_updates``) depend on
        what they have learned, so the text may change, but not its distribution. A seed may be
        reused: the row's noise is new after each update. The first call of a new decoder with a
        fixed K always gives the same text; adaptive K also depends on measured times. Second,
        rounding: where two logits nearly tie, mostly in bfloat16, another batch size, or
        speculative instead of plain decoding, may choose the other token, because a program of
        other shapes rounds in another order. ``experiments.decode`` reports whether rounding
        explains such a row.

        Example:
          ```python
          import spec_jax
          from spec_jax.testing import mock_model

          target = mock_model(vocab_size=8)  # or spec_jax.load_model("zoo/target")
          draft = mock_model(vocab_size=8, seed=1)

          decoder = spec_jax.SpeculativeDecoder(target, draft)
          result = decoder.generate([1, 2, 3], max_new_tokens=4)  # or a text, with a tokenizer
          print(result.tokens, result.finish_reason)
          ```

        Args:
          prompts: a text, its ids, or a conversation; or a list of these.
          max_new_tokens: maximum output tokens of a row, 128 by default. This is what vLLM and
            OpenAI call max_tokens, a name that is refused here.
          messages: in place of prompts: a conversation ``[{"role": "user", "content": "Hi"}]``, or
            a list of them. The target's chat template turns them into prompts.
          chat_template_kwargs: variables of the template in all conversations, such as
            ``{"enable_thinking": False, "tools": [...]}``. One that it does not read is an error.
          max_length: maximum tokens of a row, prompt and output together; in place of
            max_new_tokens.
          stop: strings at which a row ends; the text is cut before them. A special token in one,
            such as "<|im_end|>", is matched by its id, though the text leaves it out.
          stop_tokens: ids at which a row ends; by default the target's own.
          sampler: replaces the decoder's; one for all rows or a list with one per row. "model" is
            the sampling that the target's generation_config.json states, as transformers reads it
            (``LoadedModel.stated_sampler``); it is not the default.
          draft_sampler: likewise. Drafts are drawn anew for each seed of the target; the seed of a
            draft sampler is folded into it, and is the same for all rows if one serves all of them.
          seeds: one per row, in place of the target samplers' own; by default these, plus the row's
            index if one sampler serves all rows.
          on_token: called with text as it becomes final, after prefill and after each round:
            ``on_token(piece)``, for a batch ``on_token(row, piece)``. A piece never ends inside a
            character; a row's pieces join to its text. An error that it raises ends the call and
            reaches the caller.
          cancellation_token: a token that cancels the call, or a list of one per row, in addition
            to the decoder's own token. The tokens so far are returned, with the finish_reason
            "cancelled".
          rounds_per_sync: rounds between two checks of tokens and cancellation; by default 1
            if the call streams or can be cancelled, 8 for stop strings, else 32.
          pad_to: make room for prompts of at least this many tokens, so that calls with
            different prompts share one compiled program.
          logprobs: return the log-probabilities of the output tokens, ``Generation.logprobs``.
          num_samples: outputs of each prompt, which is prefilled once for all of them. They are
            adjacent rows with different seeds; arguments per row, such as seeds, have one entry for
            each output.
          has_progress: show the number of decoded tokens and the time left. None: only on a
            terminal or in a notebook, for non-streaming calls longer than two seconds.

        Returns:
          A ``Generation``, or a list of them in the order of the prompts; with num_samples a list.

        Raises:
          PromptError: a prompt is empty, too long with its output, or has unknown ids.
          ConfigError: an invalid option, or messages that the chat template refuses.
          Cancelled: every row was cancelled before its first token. (Where only some rows were,
            those return without tokens.)
          InvalidDraftError: the drafter proposed an id outside of the vocabulary or invalid
            distributions, or the function of a ``host_drafter`` raised; the error holds the results
            of all rows.
          InvalidVerdictError: likewise, the rule returned an inconsistent Verdict.
        """
        refuse_options(unknown, self.generate)
        options = GenerateOptions(
            messages=messages,
            max_length=max_length,
            stop=stop,
            stop_tokens=stop_tokens,
            sampler=sampler,
            draft_sampler=draft_sampler,
            seeds=seeds,
            cancellation_token=cancellation_token,
            rounds_per_sync=rounds_per_sync,
            pad_to=pad_to,
            logprobs=logprobs,
            num_samples=num_samples,
            chat_template_kwargs=chat_template_kwargs,
        )
        has_pieces = on_token is not None
        stream = Stream(self, prompts, max_new_tokens, options, has_pieces=has_pieces)
        return stream.drain(on_token, has_progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> Stream:
        """Streams the text of ``generate``; returns an iterator for ``for`` and ``async for``.

        It takes the arguments of ``generate`` except on_token.

        Example:
          ```python
          import spec_jax

          target = spec_jax.load_model("zoo/target")
          config = spec_jax.SpeculativeConfig("ngram", 3)
          decoder = spec_jax.SpeculativeDecoder(target, config=config)
          for piece in decoder.stream("def connect(self", max_new_tokens=32):
              print(piece, end="", flush=True)
          ```

        Raises:
          PromptError, ConfigError: raised by this call; other errors of ``generate`` are raised
            while iterating.
        """
        refuse_options(options, self.stream, GenerateOptions.__dataclass_fields__)
        return Stream(self, prompts, max_new_tokens, GenerateOptions(**options))

    async def generate_async(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        max_new_tokens: int | None = None,
        *,
        on_token: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Runs ``generate`` without blocking the event loop.

        ``on_token`` is called in the event loop, and awaited if it is a coroutine function. A task
        that is cancelled, or whose event loop is closed, ends the call at its next round.

        Args:
          prompts: see ``generate``, also for errors.
          max_new_tokens: likewise.
          on_token: as above.
          **options: see ``generate``; rounds_per_sync is 1 by default.
        """
        refuse_options(options, self.generate_async, GenerateOptions.__dataclass_fields__)
        options = GenerateOptions(**{"rounds_per_sync": 1, **options})
        has_pieces = on_token is not None
        stream = Stream(self, prompts, max_new_tokens, options, has_pieces=has_pieces)
        return await stream.drain_async(on_token)

    def warmup(
        self,
        prompt_lengths: int | Sequence[int],
        max_new_tokens: int | None = None,
        *,
        max_length: int | None = None,
        batch: int = 1,
        num_samples: int | None = None,
        sampler: Samplers | str | None = None,
        draft_sampler: Samplers | None = None,
        stop_tokens: Sequence[int] | None = None,
        pad_to: int = 0,
        logprobs: bool = False,
        **unknown: Never,
    ) -> float:
        """Compiles ahead of time the programs that calls with such prompts need.

        It prefills and decodes one round; with adaptive K it also compiles and times every K.
        Statistics, past outputs and measured acceptance do not change, but a ``host_drafter`` is
        called and may learn. Programs are shared: prompt lengths are rounded up to 16, 32, 64, ...,
        and the slots for prompt and output together to a multiple of 128.

        Args:
          prompt_lengths: the length of a call's longest prompt, or a list of one for each call.
          max_new_tokens: as in ``generate``, like all arguments below.
          max_length: in place of max_new_tokens.
          batch: prompts that are decoded together.
          num_samples: rows of each prompt, as in ``generate``.
          sampler: the features that it uses are compiled in; their values are not.
          draft_sampler: likewise.
          stop_tokens: their number is compiled in.
          pad_to: as in ``generate``.
          logprobs: whether the calls return log-probabilities.

        Returns:
          Seconds of compilation: 0 where everything was compiled before.

        Raises:
          PromptError: a prompt and its output exceed what the target can hold.
          ConfigError: an argument that ``generate`` would refuse.
        """
        refuse_options(unknown, self.warmup)
        options = GenerateOptions(
            max_length=max_length,
            stop_tokens=stop_tokens,
            sampler=sampler,
            draft_sampler=draft_sampler,
            rounds_per_sync=1,
            pad_to=pad_to,
            logprobs=logprobs,
            num_samples=num_samples,
        )
        lengths = [prompt_lengths] if np.ndim(prompt_lengths) == 0 else prompt_lengths
        rows = check_integer("batch", batch, 1)
        seconds = 0.0
        for length in lengths:
            ids = [[0] * check_integer("a prompt's length", length, 1)] * rows
            # What such a call teaches is forgotten, but for the costs of each K.
            decoder = self.with_parts(
                history=copy.copy(self.history), adaptive=copy.copy(self.adaptive)
            )
            decoder.token = self.token
            Stream(decoder, ids, max_new_tokens, options, has_pieces=False).warm_up()
            seconds += decoder.stats.compile_s
        return seconds


def _like(params: Any, present: Any, name: str) -> Any:
    """Returns parameters on the devices of the present ones.

    Raises:
      ConfigError: they differ from the present ones in names, shapes or dtypes.
    """
    leaves, _ = jax.tree.flatten_with_path(params)
    expected, structure = jax.tree.flatten_with_path(present)
    names, known = ([jax.tree_util.keystr(path) for path, _ in x] for x in (leaves, expected))
    if names != known:
        differing = sorted({*names} ^ {*known})
        raise ConfigError(f"the {name}'s params have other names: {', '.join(differing[:3])}")
    for (path, x), (_, old) in zip(leaves, expected):
        if (x.shape, x.dtype) != (old.shape, old.dtype):
            raise ConfigError(
                f"the {name}'s params{jax.tree_util.keystr(path)} are {x.dtype}{list(x.shape)}; "
                f"expected {old.dtype}{list(old.shape)}"
            )
    params = jax.tree.unflatten(structure, [x for _, x in leaves])  # of a FrozenDict too
    if mesh_of(present) is None:  # committed arrays would need other programs
        return on_automatic_axes(jax.tree.map(jnp.asarray, params))
    return jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), params, present)
