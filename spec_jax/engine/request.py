"""Prompts and limits of a call: checked, and laid out as arrays."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplerConfig, check_integer
from spec_jax.data.conversations import Encoder
from spec_jax.data.records import Text, parse_record
from spec_jax.decoding import System
from spec_jax.decoding.loop import passes_of
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.errors import ConfigError, PromptError, did_you_mean
from spec_jax.loading import LoadedModel
from spec_jax.sampling import Sampler, Samplers
from spec_jax.sharding import log_once

Messages = Sequence[Mapping[str, Any]]  # a conversation: objects with a role and a content
Prompt = str | Sequence[int] | Messages

_MAX_NEW_TOKENS = 128
_SLOT_BUCKET = 128


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """What ``generate``, ``stream`` and ``generate_async`` take beside prompts."""

    messages: Messages | Sequence[Messages] | None = None
    max_length: int | None = None
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None
    sampler: Samplers | str | None = None
    draft_sampler: Samplers | None = None
    seeds: Sequence[int] | None = None
    cancellation_token: CancellationToken | Sequence[CancellationToken] | None = None
    rounds_per_sync: int | None = None
    pad_to: int = 0
    logprobs: bool = False
    num_samples: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


def encode(
    target: LoadedModel, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Returns the ids of a text, of ids or of a conversation, checked.

    Args:
      target: the model that they are for.
      prompt: the text, the ids or the conversation.
      chat_template_kwargs: of a conversation, see ``Tokenizer.with_chat_template_kwargs``.

    Raises:
      PromptError: an empty prompt, text without a tokenizer or that is not Unicode, or an id
        outside of the vocabulary.
      ConfigError: a conversation that the chat template refuses, see ``encode_messages``; or
        variables of the template for a prompt that is none.
    """
    if _is_conversation(prompt):
        return encode_messages(target.with_chat_template_kwargs(chat_template_kwargs), prompt)
    if chat_template_kwargs:
        raise ConfigError(
            f"chat_template_kwargs are given, and the prompt {prompt!r:.40} is no conversation; "
            "give messages"
        )
    if isinstance(prompt, str):
        _check_tokenizer(target)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"character {error.start + 1} of the prompt is half of a surrogate pair, as a "
                "shell makes of bytes that are not UTF-8; expected Unicode text"
            ) from None
        ids = Encoder(target.tokenizer).prompt(Text(prompt, "the prompt"))
    else:
        try:
            ids = list(map(operator.index, np.asarray(prompt).tolist()))
        except (TypeError, ValueError):
            raise PromptError(f"the prompt {prompt!r} is neither text nor integer ids") from None
    if not ids:
        raise PromptError("the prompt is empty; decoding needs at least one token")
    last = target.model.last_id
    bad = [i for i in ids if not 0 <= i <= last]
    if bad:
        raise PromptError(f"the prompt holds id {bad[0]}; {target.name} has ids 0 to {last}")
    return ids


def _check_tokenizer(target: LoadedModel) -> None:
    if target.tokenizer is None:
        raise PromptError(
            f"{target.name} has no tokenizer: give the prompt as ids; or put a tokenizer.json into "
            "its directory, which AutoTokenizer.from_pretrained(...).save_pretrained(...) of "
            "transformers makes of a tokenizer.model"
        )


def encode_messages(
    target: LoadedModel, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """Returns the ids of a conversation by the target's chat template, ready for its answer.

    Args:
      target: the model that answers.
      messages: objects with a role and a content; the last one is not the assistant's.
      tools: JSON schemas of functions, for templates that show them.

    Raises:
      PromptError: there is no tokenizer, or nothing to answer.
      ConfigError: there is no chat template, it refuses the conversation, or a message is no
        object with a role and a text.
    """
    _check_tokenizer(target)
    if not target.tokenizer.chat_templates:
        raise ConfigError(
            f"the tokenizer of {target.name} has no chat template, which messages need; pass plain "
            "text as the prompt, or put the chat_template.jinja of an instruction-tuned model "
            "beside tokenizer.json"
        )
    record = parse_record({"messages": list(messages), "tools": tools}, "messages")
    if record.messages[-1]["role"] == "assistant":
        raise PromptError(
            "the last message is the assistant's, so there is nothing to answer; end with a "
            "message of the user, or continue a text with prompts"
        )
    return encode(target, Encoder(target.tokenizer).prompt(record))


def check_transfers() -> None:
    """Checks that arrays may move between the host and the device.

    Raises:
      ConfigError: ``jax_transfer_guard`` forbids it.
    """
    for way in ("host_to_device", "device_to_host"):
        guard = getattr(jax.config, f"jax_transfer_guard_{way}")
        if guard is not None and guard.startswith("disallow"):
            raise ConfigError(
                f"jax_transfer_guard is {guard!r}; a decoder moves prompts to the device and "
                "tokens back: call it within jax.transfer_guard('allow')"
            )


def encode_all(
    target: LoadedModel,
    prompts: Prompt | Sequence[Prompt] | None,
    messages: Messages | Sequence[Messages] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[list[int]], bool]:
    """Returns the ids of every prompt or conversation, and whether a single one was given.

    Args:
      target: the model that they are for.
      prompts: one or several.
      messages: in their place.
      chat_template_kwargs: see ``encode``.

    Raises:
      PromptError: no prompt, or one that cannot be decoded; or both prompts and messages.
      ConfigError: a conversation that the chat template refuses, see ``encode_messages``; or
        ``jax_transfer_guard`` forbids moving arrays.
    """
    check_transfers()
    if isinstance(prompts, jax.core.Tracer):
        raise PromptError(
            "the prompts are traced by a jax.jit or jax.vmap around this call, and a decoder runs "
            "programs of its own; call decoding.prefill and decoding.generate there, see "
            "docs/bring_a_model.md"
        )
    if (prompts is None) == (messages is None):
        raise PromptError(
            f"prompts and messages are both {'missing' if prompts is None else 'given'}; expected "
            "one of them"
        )
    if messages is not None:
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not is_list or not (_is_conversation(messages) or all(map(_is_conversation, messages))):
            raise PromptError(
                f"messages is {messages!r:.80}; expected a list of objects with role and content, "
                "or a list of such lists"
            )
        prompts = messages
    if not isinstance(prompts, (str, Sequence, np.ndarray, jax.Array)):
        raise PromptError(f"the prompt {prompts!r} is neither text, ids, nor a list of these")
    is_single = is_one_prompt(prompts)
    every = [prompts] if is_single else prompts
    ids = [encode(target, prompt, chat_template_kwargs) for prompt in every]
    if not ids:
        name, item = ("prompts", "prompt") if messages is None else ("messages", "conversation")
        raise PromptError(
            f"{name} is {prompts!r:.80}, a batch without rows; expected at least one {item} (skip "
            "the call where a batch may have none)"
        )
    return ids, is_single


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the strings at which a row ends, checked.

    Raises:
      ConfigError: one is empty or no text.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) for text in stops):
        raise ConfigError(f"stop is {stop!r:.80}; expected a text or a list of texts")
    if "" in stops:
        raise ConfigError("a stop string is empty")
    return stops


def named_sampler(target: LoadedModel, sampler: Samplers | str | None) -> Samplers | None:
    """Returns a sampler; in place of "model" that of the target's generation_config.json."""
    return target.stated_sampler() if isinstance(sampler, str) and sampler == "model" else sampler


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a prompt by itself, not a collection of them: a text, ids or messages."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, (Sequence, np.ndarray, jax.Array)) or len(prompts) == 0:
        return False
    return not isinstance(prompts[0], (str, Sequence)) and np.ndim(prompts[0]) == 0


def _is_conversation(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


_ELSEWHERE = {  # options of other libraries, and what stands for them here
    ("do_sample",): "pass sampler=SamplerConfig(temperature=1.0); temperature 0 is greedy",
    ("logits_processor", "logits_processors"): "pass sampler=SamplerConfig(processors=...)",
    ("bad_words_ids",): "pass sampler=SamplerConfig(logit_bias={id: float('-inf')})",
    ("ignore_eos",): "pass stop_tokens=() to decode past the target's own",
    ("min_tokens", "min_new_tokens", "min_length"): (
        "there is no minimum; a processor can forbid the stop tokens (SamplerConfig.processors)"
    ),
    ("pad_token_id", "attention_mask"): "prompts are lists of ids of any lengths, without padding",
    ("assistant_model", "draft_model"): "give the draft to SpeculativeDecoder(target, draft)",
    ("num_beams", "use_beam_search", "length_penalty", "early_stopping"): (
        "there is no beam search; num_samples draws several outputs"
    ),
}


def refuse_options(
    options: Mapping[str, Any], function: Callable[..., Any], known: Collection[str] = ()
) -> None:
    """Refuses the keyword arguments that a function does not take.

    Args:
      options: the ``**options`` of a call.
      function: what the caller called; its name and parameters are in the message.
      known: what ``options`` may hold.

    Raises:
      ConfigError: ``max_tokens`` is among them; the message has the names to choose from.
      TypeError: there are others.
    """
    unknown = [name for name in options if name not in known]
    if "max_tokens" in unknown:
        raise ConfigError(ambiguous_limit("max_tokens", "max_new_tokens", "max_length"))
    for name in unknown:
        parameters = inspect.signature(function).parameters.values()
        stated = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        elsewhere = next((f"; {text}" for names, text in _ELSEWHERE.items() if name in names), "")
        hint = elsewhere or did_you_mean(name, [*stated, *known])
        if name in SamplerConfig.__dataclass_fields__ and "sampler" in {*stated, *known}:
            hint = f"; pass sampler=SamplerConfig({name}=...)"
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{hint}")


def ambiguous_limit(name: str, of_output: str, of_both: str) -> str:
    """Returns why the name of a limit is refused.

    Args:
      name: the name that was given.
      of_output: the name of the limit of the output.
      of_both: the name of the limit of prompt and output together.
    """
    return (
        f"{name} is ambiguous here; name {of_output}, which counts the output alone (what vLLM "
        f"and OpenAI call max_tokens), or {of_both}, which counts prompt and output together"
    )


def output_limits(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | None,
    max_length: int | None,
    default: int | None,
) -> list[int]:
    """Maximum output tokens of each row.

    Args:
      prompts: ids of every row.
      max_new_tokens: of the output, or None.
      max_length: of prompt and output together, or None.
      default: ``max_tokens`` of the decoder's config, which counts like ``max_length`` and holds
        where neither is given; None: 128 new ones.

    Raises:
      ConfigError: both are given, or no integer above 0.
      PromptError: a prompt leaves no room for output.
    """
    if max_new_tokens is not None and max_length is not None:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens} (the output alone) and max_length {max_length} "
            "(prompt and output together); name one of them"
        )
    name = "max_length"
    limit = max_length
    if max_new_tokens is None and max_length is None:
        name = "max_tokens of the decoder's config"
        limit = default
    if limit is None:
        limit = _MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        return [check_integer("max_new_tokens", limit, 1)] * len(prompts)
    longest = max(map(len, prompts))
    if longest >= check_integer(name, limit, 1):
        raise PromptError(
            f"a prompt of {longest} tokens leaves no room for output: {name} is {limit}, prompt "
            "and output together"
        )
    return [limit - len(prompt) for prompt in prompts]


class Request(NamedTuple):
    """Checked prompts of a batch as arrays: what ``Engine.prefill`` takes.

    Attributes:
      tokens: i32[B,T], right-padded.
      lengths: i32[B], true lengths.
      limits: i32[B], maximum tokens of prompt and output together.
      stop_tokens: i32[B,X], -1 for none.
      sampler: the target's.
      draft_sampler: the draft's.
      slots: S and M.
      samples: every so many rows in turn have one prompt.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    stop_tokens: jax.Array
    sampler: Sampler
    draft_sampler: Sampler
    slots: int
    samples: int = 1


def make_request(
    system: System,
    ids: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    sampler: Sampler,
    draft_sampler: Sampler,
    *,
    stop_tokens: Sequence[int] = (),
    pad_to: int = 0,
    slots: int | None = None,
    samples: int = 1,
) -> Request:
    """Lays a batch of prompts out for prefill.

    The width of the prompts and the slots are rounded up, so that few shapes compile.

    Args:
      system: target, drafter, rule and K.
      ids: of every row.
      max_new_tokens: of all rows, or of each.
      sampler: the target's, by row.
      draft_sampler: the draft's, by row.
      stop_tokens: ids at which a row ends.
      pad_to: make room for prompts of at least this many tokens.
      slots: from ``slots_for`` the longest prompt to come, so that rows that are prefilled one
        by one fit into one batch; None: as this batch needs.
      samples: every so many rows in turn have one prompt, which the target is then fed once.

    Raises:
      PromptError: a prompt and its output exceed what the target can hold.
      ConfigError: an invalid number.
    """
    lengths = np.asarray([len(i) for i in ids], np.int32)
    limits = [max_new_tokens] * len(ids) if np.ndim(max_new_tokens) == 0 else max_new_tokens
    limits = np.asarray([check_integer("max_new_tokens", n, 1) for n in limits])
    if not isinstance(stop_tokens, (Sequence, np.ndarray)) or isinstance(stop_tokens, str):
        raise ConfigError(f"stop_tokens is {stop_tokens!r}; expected a list of ids")
    stop_tokens = [check_integer("a stop token", token, 0) for token in stop_tokens]
    longest = int((lengths + limits).argmax())  # with its output
    check_room(system, int(lengths[longest]), int(limits[longest]))
    if slots is None:
        wide = np.maximum(lengths, pad_to)
        slots = max(slots_for(system, int(n), int(m)) for n, m in zip(wide, limits))
    width = padded_width(max(int(lengths.max()), pad_to))
    if not system.target.can_rewind and lengths.min() < lengths.max():
        raise PromptError(
            f"the batch has prompts of {lengths.min()} and {lengths.max()} tokens; this target "
            "cannot discard padding; decode prompts of different lengths one by one"
        )
    tokens = np.zeros((len(ids), width), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : len(prompt)] = prompt
    stop_ids = np.tile(np.asarray([*stop_tokens, -1], np.int32), (len(ids), 1))
    arrays = (tokens, lengths, (lengths + limits).astype(np.int32), stop_ids)
    return Request(*map(jnp.asarray, arrays), sampler, draft_sampler, slots, samples)


def check_room(system: System, longest: int, max_new_tokens: int) -> None:
    """Checks that the target can hold a prompt and its output; warns if the draft cannot.

    Args:
      system: target, drafter, rule and K.
      longest: tokens of the prompt.
      max_new_tokens: of its output.

    Raises:
      PromptError: the target cannot.
    """
    total = longest + max_new_tokens
    drafter = system.drafter
    if total > system.target.max_length:
        raise PromptError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones are {total}; the maximum "
            f"length of the target is {system.target.max_length}: shorten the prompt or lower "
            "max_new_tokens"
        )
    if system.num_draft > 0 and drafter.max_length is not None and total > drafter.max_length:
        log_once(
            f"the maximum length of drafter {drafter.name!r} is {drafter.max_length}: rows are "
            f"decoded without drafts after {system.drafted_until} tokens of prompt and output; "
            "load_draft(max_length=...) states another"
        )


def slots_for(system: System, longest: int, max_new_tokens: int) -> int:
    """Returns S and M of a batch.

    Args:
      system: target, drafter, rule and K.
      longest: tokens of the longest prompt.
      max_new_tokens: of its output.
    """
    slots = max(longest + max_new_tokens + system.lookahead_slots, padded_width(longest))
    return whole_slots(slots)


def num_fed(num_tokens: int, longest: int, system: System) -> int:
    """Returns how many tokens the passes over a prompt feed, with padding.

    Args:
      num_tokens: of the prompt.
      longest: of the longest prompt to come.
      system: the target, and the tokens of a chunk.
    """
    return sum(size for _, size in passes_of(num_tokens, padded_width(longest), system))


def whole_slots(slots: int) -> int:
    """The number of cache slots that decoding allocates where it needs ``slots``."""
    return -(-slots // _SLOT_BUCKET) * _SLOT_BUCKET


def padded_width(longest: int) -> int:
    """T of a batch whose longest prompt has ``longest`` tokens, of few values."""
    return max(16, 1 << (longest - 1).bit_length())
