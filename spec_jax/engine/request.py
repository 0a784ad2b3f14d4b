"""What a call of a decoder was given, checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import jax
import numpy as np

from spec_jax.config import check_integer
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.errors import ConfigError, PromptError
from spec_jax.loading import LoadedModel

Prompt = str | Sequence[int]

_MAX_NEW_TOKENS = 128


def encode(target: LoadedModel, prompt: Prompt) -> list[int]:
    """Ids of a prompt; see ``SpeculativeDecoder.encode``."""
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise PromptError(f"{target.name} has no tokenizer: give the prompt as ids")
        ids = target.tokenizer.encode(prompt)
    else:
        try:
            ids = list(map(operator.index, np.asarray(prompt).tolist()))
        except (TypeError, ValueError):
            message = f"the prompt {prompt!r} is neither text nor integer ids"
            raise PromptError(message) from None
    if not ids:
        raise PromptError("the prompt is empty; decoding needs at least one token")
    last = target.model.last_id
    bad = [i for i in ids if not 0 <= i <= last]
    if bad:
        raise PromptError(f"the prompt holds id {bad[0]}; {target.name} has ids 0 to {last}")
    return ids


def encode_all(
    target: LoadedModel, prompts: Prompt | Sequence[Prompt]
) -> tuple[list[list[int]], bool]:
    """Ids of every prompt, and whether it is one alone.

    Raises:
      PromptError: none, or one that cannot be.
    """
    if not isinstance(prompts, (str, Sequence, np.ndarray, jax.Array)):
        raise PromptError(f"the prompt {prompts!r} is neither text, ids, nor a list of these")
    is_single = isinstance(prompts, str) or (
        len(prompts) > 0 and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
    )
    ids = [encode(target, p) for p in ([prompts] if is_single else prompts)]
    if not ids:
        raise PromptError("the batch is empty; decoding needs at least one prompt")
    return ids, is_single


def new_tokens(
    prompts: Sequence[Sequence[int]], max_new_tokens, max_tokens, default: int | None
) -> list[int]:
    """Most output tokens of each row.

    Args:
      prompts: ids of every row.
      max_new_tokens: of the output, or None.
      max_tokens: of prompt and output together, or None.
      default: ``max_tokens`` where neither is given; None: 128 new ones.

    Raises:
      ConfigError: both are given, or no integer above 0.
      PromptError: a prompt leaves no room for output.
    """
    if max_new_tokens is not None and max_tokens is not None:
        raise ConfigError("max_new_tokens and max_tokens are given; name one of them")
    if max_new_tokens is None and max_tokens is None:
        max_tokens = default
    if max_tokens is None:
        most = _MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        return [check_integer("max_new_tokens", most, 1)] * len(prompts)
    longest = max(map(len, prompts))
    if longest >= check_integer("max_tokens", max_tokens, 1):
        raise PromptError(
            f"a prompt of {longest} tokens leaves no room for output: max_tokens is "
            f"{max_tokens}, prompt and output together"
        )
    return [max_tokens - len(prompt) for prompt in prompts]


def cancellations(
    of_decoder: CancellationToken,
    of_call: CancellationToken | Sequence[CancellationToken | None] | None,
    batch: int,
) -> list[Callable[[], bool]]:
    """By row: is it cancelled, by either token, now or since this call?

    Raises:
      ConfigError: ``of_call`` is neither a token nor one for each row.
    """
    is_one = isinstance(of_call, CancellationToken | None)
    tokens = [of_call] * batch if is_one else of_call
    is_fit = isinstance(tokens, Sequence) and len(tokens) == batch
    if not is_fit or not all(isinstance(t, CancellationToken | None) for t in tokens):
        raise ConfigError(
            f"cancellation_token is {of_call!r}; expected a CancellationToken, or a list of "
            f"{batch}, one a row"
        )
    whole = of_decoder.watch()
    own = [whole if token is None else token.watch() for token in tokens]
    return [lambda row=row: whole() or own[row]() for row in range(batch)]
