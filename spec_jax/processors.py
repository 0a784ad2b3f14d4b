"""Logit processors: what changes the logits of a row before temperature and filters.

A ``spec_jax.Processor`` of your own is a step of sampling like the penalties, see
docs/processors.md:

    processor = spec_jax.Processor("no repeats", *per_token(init, apply, advance))
    decoder.generate(prompt, sampler=spec_jax.SamplerConfig(processors=(processor,)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplerConfig, columns
from spec_jax.contracts import Processor
from spec_jax.errors import ConfigError

LOGIT_BIAS = Processor(
    "logit_bias",
    init=lambda tokens, length, vocab_size: (),
    apply=lambda bias, state, logits, drafted, is_before: logits + bias,
    advance=lambda state, tokens, n: state,
)
"""Adds its parameters, f32[V] of a row; it has no state."""


def _bias_of(configs: Sequence[SamplerConfig], vocab_size: int) -> np.ndarray | None:
    """Returns f32[B,V], the bias of each row; None where no row has one.

    Raises:
      ConfigError: a biased id is not in the vocabulary.
    """
    if not any(config.logit_bias for config in configs):
        return None
    bias = np.zeros((len(configs), vocab_size), np.float32)
    for row, config in enumerate(configs):
        for token, value in config.logit_bias:
            if token >= vocab_size:
                raise ConfigError(f"logit_bias names token {token}; the vocabulary is {vocab_size}")
            bias[row, token] = value
    return bias


@flax.struct.dataclass
class TokenCounts:
    """Which tokens a row has seen; the state of ``PENALTIES``."""

    prompt: jax.Array  # bool[B,V], in the prompt
    output: jax.Array  # i32[B,V], times in the output, the pending token included


def _init_counts(tokens: jax.Array, length: jax.Array, vocab_size: int) -> TokenCounts:
    columns = jnp.where(jnp.arange(len(tokens)) < length, tokens, vocab_size)
    prompt = jnp.zeros(vocab_size, bool).at[columns].set(True, mode="drop")
    return TokenCounts(prompt, jnp.zeros(vocab_size, jnp.int32))


def _advance_counts(counts: TokenCounts, tokens: jax.Array, n: jax.Array) -> TokenCounts:
    is_new = (jnp.arange(len(tokens)) < n).astype(jnp.int32)
    return counts.replace(output=counts.output.at[tokens].add(is_new))


def _apply_penalties(
    penalties: dict[str, jax.Array], counts: TokenCounts, x_TV, drafted, is_before
):
    """Applies penalties by the row's counts, then again to the few tokens that drafts change."""

    def penalty(x, output, is_seen):
        r = penalties["repetition_penalty"]
        x = jnp.where(is_seen, jnp.where(x > 0, x / r, x * r), x)
        x -= penalties["presence_penalty"] * (output > 0)
        return x - penalties["frequency_penalty"] * output

    penalised = penalty(x_TV, counts.output, counts.prompt | (counts.output > 0))
    T, V = x_TV.shape
    K = len(drafted)
    if K == 0:
        return penalised
    if is_before is None:
        is_before = jnp.arange(K) < jnp.arange(T)[:, None]
    is_same = drafted[:, None] == drafted
    repeats = is_before.astype(jnp.int32) @ is_same.astype(jnp.int32)
    new = penalty(x_TV[:, drafted], counts.output[drafted] + repeats, True)
    column = jnp.where(is_before, drafted, V)  # V is out of range: dropped
    return penalised.at[jnp.arange(T)[:, None], column].set(new, mode="drop")


PENALTIES = Processor("penalties", _init_counts, _apply_penalties, _advance_counts)
"""The penalties of ``SamplerConfig``, by name, and ``TokenCounts`` of one row.

Source: the logits processors of transformers, and the penalties of the OpenAI API.
"""


@flax.struct.dataclass
class BatchedProcessor:
    """A processor that some row of a batch uses, with its parameters and its state by row."""

    processor: Processor = flax.struct.field(pytree_node=False)
    params: Any  # of a row's config, [B,...]; None for a processor of your own
    is_on: jax.Array | None = None  # bool[B], rows that use it; None: all
    state: Any = None  # [B,...]; None before the prompts are known

    def start(self, tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> BatchedProcessor:
        """Returns it with the state after the prompts i32[B,T] of ``lengths`` i32[B]."""

        def init(tokens, length):
            return self.processor.init(tokens, length, vocab_size)

        return self.replace(state=jax.vmap(init)(tokens, lengths))

    def apply(self, logits: jax.Array, drafted: jax.Array, is_before: jax.Array | None):
        """Returns the logits f32[B,T,V] of T nodes, see ``Processor.apply``."""
        axes = (0, 0, 0, 0, None if is_before is None else 0)
        given = (self.params, self.state, logits, drafted, is_before)
        new = jax.vmap(self.processor.apply, axes)(*given)
        if new.shape != logits.shape:
            raise ConfigError(
                f"processor {self.processor.name!r} returns logits of shape {new.shape[1:]}; "
                f"expected {logits.shape[1:]}"
            )
        return new if self.is_on is None else jnp.where(self.is_on[:, None, None], new, logits)

    def advance(self, tokens: jax.Array, n: jax.Array) -> BatchedProcessor:
        """Returns it after the first n (i32[B]) of i32[B,P] tokens were emitted or drafted."""
        return self.replace(state=jax.vmap(self.processor.advance)(self.state, tokens, n))


def from_configs(configs: Sequence[SamplerConfig], vocab_size: int) -> tuple[BatchedProcessor, ...]:
    """Returns the processors that rows use, in the order in which they are applied.

    Args:
      configs: one for each row.
      vocab_size: V.

    Raises:
      ConfigError: a biased id is not in the vocabulary, or two processors have one name.
    """
    penalties = columns(configs, "penalties")
    if penalties is not None:
        penalties = {name: np.asarray(x, np.float32) for name, x in penalties.items()}
    own = {LOGIT_BIAS: _bias_of(configs, vocab_size), PENALTIES: penalties}
    given = dict.fromkeys(p for config in configs for p in config.processors)
    names = [p.name for p in (*own, *given)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"two processors are named {min(twice)!r}; expected one of a name")

    package = [
        BatchedProcessor(p, jax.tree.map(jnp.asarray, params))
        for p, params in own.items()
        if params is not None
    ]
    custom = [
        BatchedProcessor(p, None, jnp.asarray(np.asarray([p in x.processors for x in configs])))
        for p in given
    ]
    return (*package, *custom)


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
