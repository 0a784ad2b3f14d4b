"""Any function from tokens to logits as a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config.checks import check_integer
from spec_jax.contracts import ForwardOutput, Model
from spec_jax.errors import ConfigError
from spec_jax.models.caches.tokens import TokenCache
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.tokenizer import Tokenizer


class Tappable(NamedTuple):
    """A function from tokens to logits in parts, so that heads can draft for it.

    Attributes:
      states: ``(params, tokens i32[B,T]) -> L + 2 states dtype[B,T,D]``, which heads may tap, in
        the order of ``Model.embedding``; the last is the input of ``unembed``. Causal.
      unembed: ``(params, hidden dtype[...,D]) -> logits [...,V]``.
      embedding: ``(params) -> dtype[V,D]``, the tokens' embeddings.
    """

    states: Callable[[Any, jax.Array], Sequence[jax.Array]]
    unembed: Callable[[Any, jax.Array], jax.Array]
    embedding: Callable[[Any], jax.Array]


def wrap(
    logits_fn: Callable[[Any, jax.Array], jax.Array] | Tappable,
    params: Any,
    *,
    vocab_size: int,
    max_length: int,
    tokenizer: Tokenizer | None = None,
    stop_tokens: Sequence[int] = (),
    name: str = "wrapped",
) -> LoadedModel:
    """Makes a target or a draft of a function from tokens to logits.

    There is no cache: every pass computes the logits of all slots of a row, prompt and output,
    and a pass over a tree of Q nodes those of Q rows for each row. So a round costs what a
    full-length pass costs, however many tokens are drafted; to decode long texts fast, write a
    ``Model`` with a cache (docs/bring_a_model.md). ``logits_fn`` is traced once for each shape,
    within the programs that decode.

    Example:
      ```python
      import jax
      import jax.numpy as jnp

      import spec_jax

      def logits_fn(params, tokens):  # of your own model, of any library
          return jnp.cumsum(params["embedding"][tokens], axis=1) @ params["embedding"].T

      params = {"embedding": jax.random.normal(jax.random.key(0), (32, 16))}
      target = spec_jax.wrap(logits_fn, params, vocab_size=32, max_length=64)
      print(spec_jax.SpeculativeDecoder(target).generate([1, 2, 3], 8).tokens)
      ```

    Args:
      logits_fn: ``(params, tokens i32[B,T]) -> logits [B,T,V]``, causal: the logits at a position
        depend on the tokens up to it. It is called with any B and with T up to ``max_length``. Its
        parts instead, a ``Tappable``, let heads draft for it.
      params: its weights, a pytree of arrays.
      vocab_size: V.
      max_length: maximum tokens of a row, prompt and output together.
      tokenizer: to decode text; ids that it does not have are never drawn. None: prompts are ids.
      stop_tokens: ids that end a row.
      name: the model's name in messages and reports.

    Raises:
      ConfigError: a size is below 1, or ``logits_fn`` returns something else than such logits.
    """
    check_integer("vocab_size", vocab_size, 1)
    check_integer("max_length", max_length, 1)
    parts = logits_fn
    if not isinstance(parts, Tappable):
        parts = Tappable(lambda *given: (logits_fn(*given),), lambda params, hidden: hidden, None)

    def whole(params, tokens):
        return parts.unembed(params, parts.states(params, tokens)[-1])

    T = min(4, max_length)
    tokens = jax.ShapeDtypeStruct((2, T), jnp.int32)
    found = jax.eval_shape(whole, params, tokens)
    num_states = len(jax.eval_shape(parts.states, params, tokens))
    if isinstance(logits_fn, Tappable) and num_states < 3:
        raise ConfigError(
            f"states of the Tappable returned {num_states}; expected L + 2 of L layers, 3 or more"
        )
    shape = getattr(found, "shape", None)
    if shape != (2, T, vocab_size) or not jnp.issubdtype(found.dtype, jnp.floating):
        what = type(found).__name__ if shape is None else f"{found.dtype}{list(shape)}"
        raise ConfigError(
            f"logits_fn returned {what} for tokens i32[2,{T}]; expected logits "
            f"f32[2,{T},{vocab_size}], of vocab_size={vocab_size}"
        )

    def init_cache(params, batch, slots):
        del params
        return TokenCache.create(batch, slots)

    def forward(
        params, tokens, cache, *, window_offset=0, window_mask=None, positions=None, taps=()
    ):
        del positions  # a sequence has no others than its own
        cache, slots = cache.write(tokens, window_offset)
        if window_mask is None:
            rows = cache.tokens
            last = slots
        else:
            own = window_offset + jnp.arange(tokens.shape[1], dtype=jnp.int32)
            rows, last = _paths(cache, window_mask, own)
        # No token past the maximum length is emitted, and a function may have no position for it.
        rows, last = rows[:, :max_length], jnp.minimum(last, max_length - 1)
        states = parts.states(params, rows)
        hidden, *tapped = (
            jnp.take_along_axis(states[i], last[..., None], axis=1).reshape(*tokens.shape, -1)
            for i in (-1, *taps)
        )
        return ForwardOutput(hidden, cache, jnp.concatenate(tapped, -1) if taps else None)

    def unembed(params, hidden):
        logits = parts.unembed(params, hidden).astype(jnp.float32)
        return logits if num_tokens is None else jnp.where(is_token, logits, -jnp.inf)

    num_ids = vocab_size if tokenizer is None else tokenizer.num_ids
    num_tokens = num_ids if num_ids < vocab_size else None
    is_token = np.arange(vocab_size) < num_ids
    model = Model(
        vocab_size,
        max_length,
        init_cache,
        forward,
        unembed,
        num_tokens,
        embedding=parts.embedding,
        num_layers=num_states - 2,
    )
    return LoadedModel(name, model, params, tokenizer, stop_tokens=tuple(stop_tokens))


def _paths(cache, window_mask, own):
    """Returns for each node of a tree the row that ends with its path, and its last slot.

    Args:
      cache: with the window written.
      window_mask: bool[B|1,T,W], the slots of the window that each node sees.
      own: i32[T], the slot of each node in the window, which it sees.

    Returns:
      i32[B*T,S] and i32[B*T,1].
    """
    B, S = cache.tokens.shape
    T, W = window_mask.shape[1:]
    is_own = own[:, None] == jnp.arange(W)
    seen = jnp.broadcast_to(window_mask | is_own, (B, T, W))
    path = jnp.argsort(~seen, axis=-1, stable=True).astype(jnp.int32)  # what is seen comes first
    length = cache.length[:, None, None]
    slots = jnp.arange(S, dtype=jnp.int32)
    place = jnp.broadcast_to(slots - length, (B, T, S))  # in the window
    moved = length + jnp.take_along_axis(path, jnp.clip(place, 0, W - 1), axis=2)
    source = jnp.where((place >= 0) & (place < W), moved, slots)
    rows = jnp.take_along_axis(cache.tokens[:, None], source, axis=2)
    last = length + seen.sum(axis=2, keepdims=True, dtype=jnp.int32) - 1
    return rows.reshape(B * T, S), last.reshape(B * T, 1)
