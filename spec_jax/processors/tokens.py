"""Makes a processor from functions of one token, which need not handle drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.errors import ConfigError


def per_token(
    init: Callable[..., Any],
    apply: Callable[[Any, jax.Array], jax.Array],
    advance: Callable[[Any, jax.Array], Any],
) -> tuple[Callable[..., Any], ...]:
    """Returns the three functions of a ``Processor``, made of functions of one row and one token.

    The state of each drafted node follows from the drafts before it, on a chain in K steps for the
    whole window, on a tree in K steps for every node.

    Args:
      init: ``(tokens i32[T], length i32[], vocab_size) -> state``, of a prompt whose first
        ``length`` tokens count; a pytree of arrays.
      apply: ``(state, logits f32[V]) -> f32[V]``, what the next token is drawn from.
      advance: ``(state, token i32[]) -> state``, with the same structure, shapes and dtypes.
    """

    def step(state, token, is_taken):
        after = advance(state, token)

        def shapes(tree):
            return jax.tree.map(lambda x: str(jax.typeof(x)), tree)

        if shapes(after) != shapes(state):
            raise ConfigError(
                f"a processor changes its state {shapes(state)} to {shapes(after)}; expected the "
                "same structure, shapes and dtypes"
            )
        return jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), after, state)

    def apply_window(params, state, logits, drafted, is_before):
        if len(drafted) == 0:
            return jax.vmap(apply, (None, 0))(state, logits)
        if is_before is None:

            def follow(state, token):
                return 2 * (step(state, token, True),)

            _, after = jax.lax.scan(follow, state, drafted)
            states = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), state, after)
            return jax.vmap(apply)(states, logits)

        def at_node(logits, is_before):
            def follow(state, draft):
                return (step(state, *draft), None)

            return apply(jax.lax.scan(follow, state, (drafted, is_before))[0], logits)

        return jax.vmap(at_node)(logits, is_before)

    def advance_many(state, tokens, n):
        def follow(state, token):
            return (step(state, *token), None)

        is_taken = jnp.arange(len(tokens)) < n
        return jax.lax.scan(follow, state, (tokens, is_taken))[0]

    return init, apply_window, advance_many
