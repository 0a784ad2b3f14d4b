"""Drafting by any Python function, which the compiled loop calls on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import rng
from spec_jax.contracts import Context, Drafter, Proposal
from spec_jax.drafters.model_free import NO_DRAFT, model_free
from spec_jax.errors import ConfigError, InvalidDraftError
from spec_jax.sharding import by_row

_LARGEST = np.iinfo(np.int32).max


@functools.cache
def host_drafter(
    function: Callable[[tuple[int, ...], int, int], Any],
    *,
    is_sampled: bool = False,
    vocab_size: int | None = None,
    name: str = "host",
) -> Drafter:
    """A drafter that is a Python function; the loop calls it through ``jax.pure_callback``.

    The function is called for every row in every round. It must be pure, since a call may be
    repeated (on a mesh each device calls it for the rows that it holds) or left out, and must not
    call JAX. The same function and options return the same drafter, so compiled programs are
    shared.

        def repeat_last(prefix, k, seed):
            return [prefix[-1]] * k

        drafter = spec_jax.host_drafter(repeat_last)
        decoder = spec_jax.SpeculativeDecoder(target, drafter=drafter, config=config)

    Every lossless rule stays lossless: without probabilities whatever the function returns, with
    them if the tokens were drawn from the rows that it returns, and if whether a token is offered
    depends on the tokens before it alone.

    Args:
      function: ``(prefix, k, seed)``. ``prefix`` is the row's prompt and output so far, the
        pending token last; ``k >= 1`` the number of drafts requested; ``seed`` an integer below
        2**32 of the draft sampler's seed and the position, which depends neither on the batch
        nor on the row's place in it. The function returns a list of at most k ids; or, with
        ``is_sampled``, ids and f32[len(ids),V], the distributions that they were drawn from
        with noise made from ``seed``, such as ``np.random.default_rng(seed)``.
      is_sampled: the function returns distributions.
      vocab_size: V, needed with ``is_sampled``.
      name: in messages and reports.

    Raises:
      ConfigError: ``is_sampled`` without ``vocab_size``.
      jax.errors.JaxRuntimeError: from the decoder, when the function raises or returns something
        else; the message names the function's error or the value. Ids that the target does not
        have raise the decoder's own ``InvalidDraftError``.
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
            if has_probs:
                result["probs"] = jax.ShapeDtypeStruct((B, num_draft, vocab_size), jnp.float32)
            call = functools.partial(draft_rows, result)
            return jax.pure_callback(call, result, tokens, lengths, seeds)

        # The root's node, 0: drafters that draw in the loop use those from 1 on.
        keys = rng.keys(context.sampler.seed, rng.Stream.DRAFT, context.length, jnp.int32(0))
        seeds = jax.vmap(jax.random.bits)(keys)
        # On a mesh every device asks for its own rows.
        out = by_row(draft)(context.tokens, context.length, seeds)
        return Proposal(**out), state

    def draft_rows(result, tokens, lengths, seeds) -> dict[str, np.ndarray]:
        """Calls the function for every row; arrays of the shapes in ``result``."""
        tokens, lengths, seeds = map(np.asarray, (tokens, lengths, seeds))
        out = {name: np.zeros(of.shape, of.dtype) for name, of in result.items()}
        for row, length in enumerate(lengths):
            prefix = tuple(tokens[row, : length + 1].tolist())
            ids, probs = draft_row(prefix, result["tokens"].shape[1], int(seeds[row]))
            n = out["n_draft"][row] = len(ids)
            out["tokens"][row, :n] = np.clip(ids, -1, _LARGEST)
            if "probs" in out:
                out["probs"][row, :n] = probs
        return out

    def draft_row(prefix: tuple[int, ...], k: int, seed: int):
        """The function's ids i64[n] and their probabilities f64[n,V] or None, checked."""
        try:
            answer = function(prefix, k, seed)
            if not is_sampled:
                return _checked_ids(answer, k), None
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise ValueError(f"expected a pair of ids and probabilities, got {answer!r:.200}")
            ids = _checked_ids(answer[0], k)
            return ids, _checked_probs(answer[1], ids, vocab_size)
        except Exception as error:
            raise InvalidDraftError(
                f"host drafter {name!r}, after a prefix of {len(prefix)} tokens: "
                f"{type(error).__name__}: {error}"
            ) from error

    drafter = model_free(name, propose, vocab_size)
    return drafter._replace(is_sampled=is_sampled)


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
