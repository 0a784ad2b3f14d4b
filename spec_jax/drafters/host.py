"""Drafting by any Python function, which the compiled loop calls on the host."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import rng
from spec_jax.contracts import Context, Drafter, Host, Proposal, UpdateCount
from spec_jax.drafters.model_free import NO_DRAFT, model_free
from spec_jax.errors import ConfigError
from spec_jax.sharding import copies_of_rows, shard_map_rows

_LARGEST = np.iinfo(np.int32).max
_INVALID = -1  # a number of drafts that the loop refuses, see ``decoding.validate``
_KEPT = 64  # errors, each with its traceback


@functools.cache
def host_drafter(
    function: Callable[[tuple[int, ...], int, int], Any],
    *,
    is_sampled: bool = False,
    vocab_size: int | None = None,
    num_updates: Callable[[], int] | None = None,
    name: str = "host",
) -> Drafter:
    """A drafter that is a Python function; the loop calls it through ``jax.pure_callback``.

    The function is called for every row in every round. A call may be repeated (on a mesh several
    devices may call it for the same row) or left out, and must not call JAX. The same function and
    options return the same drafter, so compiled programs are shared; a new lambda is a new drafter.

    Without ``num_updates`` the function must be pure: its result depends on its arguments only. A
    function that learns from its prefixes or from outputs needs ``num_updates``; otherwise its
    output is biased wherever a seed is used twice.

    Every lossless rule stays lossless. Without probabilities this holds for any function; with
    them, if the tokens are drawn from the returned distributions and whether a token is offered
    depends only on the tokens before it.

    Example:
      ```python
      import spec_jax
      from spec_jax.testing import mock_model


      def repeat_last(prefix, k, seed):
          return [prefix[-1]] * k


      target = mock_model(vocab_size=8)
      drafter = spec_jax.host_drafter(repeat_last)
      decoder = spec_jax.SpeculativeDecoder(target, drafter=drafter)
      ```

    Args:
      function: ``(prefix, k, seed)``. ``prefix`` is the row's prompt and output so far, the
        pending token last; ``k >= 1`` the number of drafts requested; ``seed`` an integer below
        2**32 of the row's seed, a draft sampler's and the position, which depends neither on the
        batch nor on the row's place in it. The function returns a list of at most k ids; or, with
        ``is_sampled``, ids and f32[len(ids),V], the distributions that they were drawn from
        with noise made from ``seed``, such as ``np.random.default_rng(seed)``.
      is_sampled: the function returns distributions.
      vocab_size: V, needed with ``is_sampled``.
      num_updates: returns how often what the function remembers has been updated, such as
        ``lambda: len(seen)``; read before each call of the function, for its seed, and after it,
        for the row's noise. It must never decrease, not even when the memory is loaded or cleared.
        Another thread that updates the memory increments the count first, and not during a call if
        the function is sampled. On a mesh each row must lie on one device.
      name: in messages and reports.

    Raises:
      ConfigError: ``is_sampled`` without ``vocab_size``.
      InvalidDraftError: from the decoder, when the function raises or returns something else, or
        ids that the target does not have. Its ``__cause__`` is the function's own exception, with
        its traceback; its ``generations`` are all rows. The row of the error has stopped where it
        was, the others are complete.
    """
    if is_sampled and vocab_size is None:
        raise ConfigError(f"host drafter {name!r}: is_sampled needs vocab_size, which is None")

    def propose(params, state, context: Context, num_draft: int):
        if num_draft == 0:
            return NO_DRAFT.propose(params, state, context, num_draft)
        has_probs = is_sampled and context.has_probs

        def draft(tokens, lengths, seeds):
            B = lengths.shape[0]
            result = {
                "tokens": jax.ShapeDtypeStruct((B, num_draft), jnp.int32),
                "n_draft": jax.ShapeDtypeStruct((B,), jnp.int32),
            }
            if num_updates is not None:
                result["num_updates"] = jax.ShapeDtypeStruct((B,), jnp.uint32)
            if has_probs:
                result["probs"] = jax.ShapeDtypeStruct((B, num_draft, vocab_size), jnp.float32)
            call = functools.partial(draft_rows, result)
            return jax.pure_callback(call, result, tokens, lengths, seeds)

        # The root's node, 0: drafters that draw in the loop use those from 1 on.
        sampler = context.sampler
        root = jnp.int32(0)
        keys = sampler.keys(rng.Purpose.DRAFT, context.length, root)
        seeds = jax.vmap(jax.random.bits)(keys)
        if num_updates is not None and (copies := copies_of_rows(len(context.length))) > 1:
            raise ConfigError(
                f"host drafter {name!r} remembers (num_updates), and {copies} devices of this mesh "
                "would call it for the same row; use a mesh of rows alone, data:N, whose N divides "
                "the batch, or none"
            )
        # On a mesh every device asks for its own rows.
        out = shard_map_rows(draft)(context.tokens, context.length, seeds)
        return Proposal(**out), state

    def draft_rows(result, tokens, lengths, seeds) -> dict[str, np.ndarray]:
        """Calls the function for every row; arrays of the shapes in ``result``."""
        tokens, lengths, seeds = map(np.asarray, (tokens, lengths, seeds))
        out = {name: np.zeros(of.shape, of.dtype) for name, of in result.items()}
        for row, length in enumerate(lengths):
            prefix = tuple(tokens[row, : length + 1].tolist())
            seed = int(seeds[row])
            try:
                if num_updates is None:
                    ids, probs = draft_row(prefix, result["tokens"].shape[1], seed)
                else:
                    with remembering:  # no other row's call learns between count and drafts
                        seed = _seed_after(seed, read_count())
                        ids, probs = draft_row(prefix, result["tokens"].shape[1], seed)
                        out["num_updates"][row] = read_count()
            except Exception as error:  # the runtime would log it, and hide its type and traceback
                raised.keep(prefix, error)
                out["n_draft"][row] = _INVALID
                continue
            raised.forget(prefix)
            n = out["n_draft"][row] = len(ids)
            out["tokens"][row, :n] = np.clip(ids, -1, _LARGEST)
            if "probs" in out:
                out["probs"][row, :n] = probs
        return out

    def read_count() -> int:
        count = num_updates()
        if not (hasattr(count, "__index__") and 0 <= operator.index(count) < 2**31):
            raise ValueError(
                f"num_updates() returned {count!r}; expected an integer from 0 to 2**31 - 1"
            )
        return operator.index(count)

    def draft_row(prefix: tuple[int, ...], k: int, seed: int):
        """The function's ids i64[n] and their probabilities f64[n,V] or None, checked."""
        answer = function(prefix, k, seed)
        if not is_sampled:
            return _checked_ids(answer, k), None
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise ValueError(f"expected a pair of ids and probabilities, got {answer!r:.200}")
        ids = _checked_ids(answer[0], k)
        return ids, _checked_probs(answer[1], ids, vocab_size)

    raised = _Raised()
    remembering = threading.Lock()
    drafter = model_free(name, propose, vocab_size)
    return drafter._replace(
        is_sampled=is_sampled,
        memory=None if num_updates is None else UpdateCount(),
        host=Host(raised.find),
    )


def _seed_after(seed: int, num_updates: int) -> int:
    """The seed of drafts made from a memory: the same before its first update, then others."""
    if num_updates == 0:
        return seed
    return int(np.random.SeedSequence((seed, num_updates)).generate_state(1)[0])


class _Raised:
    """The newest exceptions of a function, by the prefix of the call.

    An error belongs to a prefix, not to a call, because a pure function raises it again; so
    concurrent calls find their own errors.
    """

    def __init__(self):
        self._errors: dict[tuple[int, ...], Exception] = {}
        self._lock = threading.Lock()

    def keep(self, prefix: tuple[int, ...], error: Exception) -> None:
        with self._lock:
            self._errors.pop(prefix, None)
            self._errors[prefix] = error
            while len(self._errors) > _KEPT:
                del self._errors[next(iter(self._errors))]

    def forget(self, prefix: tuple[int, ...]) -> None:
        """Drops an older error, after the function has returned for this prefix."""
        if self._errors:
            with self._lock:
                self._errors.pop(prefix, None)

    def find(self, prefix: tuple[int, ...], num_ahead: int = 0) -> Exception | None:
        """See ``Host.find_error``."""
        n = len(prefix)
        with self._lock:

            def is_ahead(given):
                return n <= len(given) <= n + num_ahead and given[:n] == prefix

            matches = filter(is_ahead, self._errors)
            return self._errors.get(min(matches, key=len, default=None))


def _checked_ids(ids: Any, k: int) -> np.ndarray:
    array = np.asarray(ids)
    is_integer = array.size == 0 or array.dtype.kind in "iu"
    if array.ndim != 1 or len(array) > k or not is_integer:
        raise ValueError(f"expected at most {k} integer ids, got {ids!r:.200}")
    return array


def _checked_probs(probs: Any, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(probs, np.float64)
    if array.shape != (len(ids), vocab_size) and array.size + len(ids) > 0:
        raise ValueError(
            f"probabilities have shape {array.shape}; expected ({len(ids)}, {vocab_size})"
        )
    for row, token in zip(array, ids):
        if not (row.min() >= 0 and abs(row.sum() - 1) < 1e-3):
            raise ValueError(f"probabilities sum to {row.sum()}, the least is {row.min()}")
        if 0 <= token < vocab_size and row[token] == 0:
            raise ValueError(f"token {token} has probability 0 in its own row")
    return array.reshape(len(ids), vocab_size)
