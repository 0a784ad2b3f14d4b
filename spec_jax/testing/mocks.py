"""Small models and drafters whose behaviour is known."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.contracts import Context, Drafter, ForwardOutput, Model, Proposal
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.loading import LoadedModel
from spec_jax.models.caches.tokens import TokenCache


@functools.cache
def toy_model(vocab_size: int, max_length: int = 1 << 20, num_tokens: int | None = None) -> Model:
    """A model of second order whose parameters are a table ``{"logits": f32[C,V]}``.

    After the tokens a, b it looks up row ``(a * V + b) mod C``; with C = V * V every context has
    its own row, with C = 1 all share one. It reads a and b from its cache. Its features are its
    logits. Heads find an embedding in ``embed``, beside the table.

    Args:
      vocab_size: V.
      max_length: maximum tokens of a row, prompt and output together.
      num_tokens: ids from this number on are padding; None means that all ids are tokens.
    """

    def init_cache(params, batch, slots):
        del params
        return TokenCache.create(batch, slots)

    def forward(
        params, tokens, cache, *, window_offset=0, window_mask=None, positions=None, num_layers=None
    ):
        del positions  # it reads no positions
        B, T = tokens.shape
        rows = jnp.arange(B)[:, None]
        cache, slots = cache.write(tokens, window_offset)
        held = cache.tokens
        before = slots - 1
        if window_mask is not None:  # the last slot of the window that is seen before its own
            index = jnp.arange(window_mask.shape[2])
            is_before = window_mask & (index < (window_offset + jnp.arange(T))[:, None])
            before = cache.length[:, None] + jnp.where(is_before, index, -1).max(axis=2)
        before = jnp.where(before >= 0, held[rows, jnp.maximum(before, 0)], 0)
        before = before if num_layers is None else jnp.zeros_like(before)
        table = params["logits"]
        hidden = table[(before * vocab_size + held[rows, slots]) % table.shape[0]]
        return ForwardOutput(hidden, cache, features=hidden)

    def unembed(params, hidden):
        del params
        if num_tokens is None:
            return hidden
        return jnp.where(jnp.arange(vocab_size) < num_tokens, hidden, -jnp.inf)

    model = Model(vocab_size, max_length, init_cache, forward, unembed, num_tokens)
    return model._replace(embedding=operator.itemgetter("embed"))


def slow_model(model: Model, pass_s: float) -> Model:
    """Returns the model with passes that also sleep for ``pass_s`` seconds: a known cost."""

    def sleep(zero):
        time.sleep(pass_s)
        return zero

    def forward(params, tokens, cache, **kwargs):
        output = model.forward(params, tokens, cache, **kwargs)
        zero = jnp.zeros_like(output.hidden, shape=()) * output.hidden.ravel()[0]
        zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), zero.dtype), zero)
        return output._replace(hidden=output.hidden + zero)

    return model._replace(forward=forward)


def toy_params(
    vocab_size: int, seed: int, contexts: int | None = None, scale: float = 1.0
) -> dict[str, jax.Array]:
    """Draws parameters of a ``toy_model``: normal logits of standard deviation ``scale``.

    Args:
      vocab_size: V.
      seed: of the numbers.
      contexts: C; by default V * V.
      scale: the standard deviation.
    """
    contexts = vocab_size**2 if contexts is None else contexts
    rng = np.random.default_rng(seed)
    logits = scale * rng.standard_normal((contexts, vocab_size))
    return {"logits": jnp.asarray(logits, jnp.float32)}


def mock_model(
    vocab_size: int = 4, seed: int = 0, *, num_tokens: int | None = None, **kwargs
) -> LoadedModel:
    """Returns a toy model for ``SpeculativeDecoder``.

    Args:
      vocab_size: V.
      seed: of the parameters.
      num_tokens: ids from this number on are padding; None means that all ids are tokens.
      **kwargs: of ``toy_params``.
    """
    params = toy_params(vocab_size, seed, **kwargs)
    return LoadedModel(f"mock-{seed}", toy_model(vocab_size, num_tokens=num_tokens), params)


def scripted_drafter(propose: Callable[[jax.Array, jax.Array, int], jax.Array]) -> Drafter:
    """Makes a deterministic drafter of ``(tokens i32[B,M], length i32[B], K) -> i32[B,K]``."""

    def make(params, state, context: Context, num_draft: int):
        del params
        tokens = propose(context.tokens, context.length, num_draft)
        return Proposal(tokens, jnp.full(context.length.shape, num_draft, jnp.int32)), state

    return NO_DRAFT._replace(name="scripted", propose=make)


def ragged(drafter: Drafter, n_draft: Callable[[jax.Array], jax.Array]) -> Drafter:
    """Returns the drafter with at most ``n_draft(length i32[B]) -> i32[B]`` tokens a row.

    Tokens that are not offered are token 0 with probability 0, as the contract allows.
    """

    def propose(params, state, context: Context, num_draft: int):
        proposal, state = drafter.propose(params, state, context, num_draft)
        n = jnp.clip(n_draft(context.length), 0, proposal.n_draft)
        is_offered = jnp.arange(num_draft) < n[:, None]

        def blank(x):
            return None if x is None else jnp.where(is_offered[:, :, None], x, 0.0)

        return proposal.replace(
            n_draft=n,
            tokens=jnp.where(is_offered, proposal.tokens, 0),
            probs=blank(proposal.probs),
            logits=blank(proposal.logits),
        ), state

    return drafter._replace(name=f"ragged {drafter.name}", propose=propose)
