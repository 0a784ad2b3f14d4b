"""Drafts a chain, token by token or from the logits of a whole block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax import rng
from spec_jax.contracts import Context, Drafter, Proposal
from spec_jax.sampling import Sampler, argmax, process, process_rows, sample
from spec_jax.sharding import SAMPLED_ROWS, constrain, shard_map_rows


def rows_axis(context: Context) -> str:
    """Returns the logical axis of the rows that are drawn, see ``sharding.shard_map_rows``.

    Rows that are sampled are split over all devices; if all of them take the argmax, as the batch.
    """
    is_greedy = context.sampler.temperature is None and context.gumbel is None
    return "batch" if is_greedy else SAMPLED_ROWS


@flax.struct.dataclass
class Drafted:
    """A chain of drafts while it is drawn.

    Attributes:
      out: the fields of the ``Proposal`` that the rule reads, K columns each.
      sampler: the draft's, after the drafts so far.
      is_sound: bool[B], no logits that would have been drawn from were NaN or infinite.
      n_draft: i32[B], how many drafts are offered so far.
      is_going: bool[B], whether the next draft is offered too.
    """

    out: dict[str, jax.Array]
    sampler: Sampler
    is_sound: jax.Array
    n_draft: jax.Array
    is_going: jax.Array

    @classmethod
    def none(cls, context: Context, num_draft: int, vocab_size: int) -> Drafted:
        """Returns a chain without drafts, with room for ``num_draft``."""
        B = context.length.shape[0]
        out = {"tokens": jnp.zeros((B, num_draft), jnp.int32)}
        if context.has_probs:
            out["probs"] = jnp.zeros((B, num_draft, vocab_size), jnp.float32)
        if context.has_logits:
            out["logits"] = jnp.zeros((B, num_draft, vocab_size), jnp.float32)
        yes = jnp.ones((B,), bool)
        return cls(out, context.sampler, yes, jnp.zeros((B,), jnp.int32), yes)

    def add(
        self, logits: jax.Array, context: Context, node, confidence: jax.Array | None = None
    ) -> tuple[jax.Array, Drafted]:
        """Draws one token of each row and adds it to the chain.

        If all rows take the argmax and the rule reads no distribution, the token is that of the
        logits before temperature, which have the same argmax and are finite for the same rows: a
        step then makes one pass less.

        The probability of a token decides whether the *next* one is offered. If it decided on the
        token itself, unlikely tokens would be offered less often than their distribution says, and
        the output would no longer have the target's distribution. For the same reason a confidence
        that decides on the token itself must not depend on it.

        Where nothing can be drawn, since every token is forbidden or the logits are not finite, the
        chain ends before the token.

        Args:
          logits: f32[B,V], the draft's logits at the last token.
          context: the sampler and the noise to draw with.
          node: i32[], 1..K.
          confidence: f32[B], how probably the token will be accepted, known before it is drawn;
            None: the probability of the token before stands for it.

        Returns:
          The token i32[B], and the longer chain.
        """
        context = context._replace(sampler=self.sampler)
        if rows_axis(context) == "batch" and not context.has_probs:  # found where the logits lie
            dist = process(logits[:, None], self.sampler, is_argmax=True)[:, 0]
            token = argmax(dist)
        else:

            def draw(sampler, request, length, gumbel, logits, node):
                dist = process_rows(logits[:, None], sampler)[:, 0]
                if gumbel is not None:
                    return sample(dist, gumbel[:, node - 1]), dist
                if sampler.temperature is None:
                    return argmax(dist), dist
                if context.is_coupled:
                    keys = rng.keys(request, rng.Purpose.TARGET, length + node)
                else:
                    keys = sampler.keys(rng.Purpose.DRAFT, length, node)
                return sample(dist, rng.gumbel(keys, logits.shape[-1])), dist

            token, dist = shard_map_rows(draw, rows_axis(context))(
                self.sampler,
                context.request,
                context.length,
                context.gumbel,
                logits,
                jnp.int32(node),
            )
        token = constrain(token, "batch")
        values = {"tokens": token, "probs": jax.nn.softmax(dist, axis=-1), "logits": logits}
        values["confidence"] = confidence
        out = {name: array.at[:, node - 1].set(values[name]) for name, array in self.out.items()}
        sampler = self.sampler.advance(token[:, None], jnp.ones_like(token))
        best = constrain(dist.max(axis=-1), "batch")
        # NaN or infinity, also of a head that then has no confidence; -inf: nothing is allowed.
        is_sound = self.is_sound & ((best < jnp.inf) | ~self.is_going)
        is_going = self.is_going & jnp.isfinite(best)
        if confidence is not None and context.stop_below > 0:
            is_going &= confidence >= context.stop_below
        n_draft = self.n_draft + is_going
        if confidence is None and context.stop_below > 0:
            probs = jax.nn.softmax(logits, axis=-1)  # before temperature, which may leave one token
            drawn = jnp.take_along_axis(probs, token[:, None], axis=-1)[:, 0]
            is_going &= drawn >= context.stop_below
        return token, Drafted(out, sampler, is_sound, n_draft, is_going)

    def proposal(self) -> Proposal:
        """Returns the chain as a proposal."""
        return Proposal(n_draft=self.n_draft, is_sound=self.is_sound, **self.out)


def draft_chain(
    logits: jax.Array,
    carry: Any,
    advance: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]],
    context: Context,
    num_draft: int,
    confidence: Callable[[Any], jax.Array] | None = None,
) -> tuple[Proposal, Any]:
    """Draws K tokens, each from the logits after the one before.

    With ``Context.stop_below`` the passes end as soon as no row goes on.

    Args:
      logits: f32[B,V], the logits that the first draft is drawn from.
      carry: the state of ``advance``.
      advance: ``(carry, token i32[B], node i32[]) -> (logits f32[B,V], carry)``, called for
        nodes 2..K with the token of the node before.
      context: the sampler and the noise to draw with.
      num_draft: K, which may be 0.
      confidence: ``(carry) -> f32[B]``, for the draft that is drawn from the logits that the carry
        came with, see ``Drafted.add``; None: the draft has no such estimate.

    Returns:
      The proposal, and the carry after the last pass.
    """
    drafted = Drafted.none(context, num_draft, logits.shape[1])
    if num_draft == 0:
        return drafted.proposal(), carry
    if confidence is not None:
        drafted.out["confidence"] = jnp.zeros(drafted.out["tokens"].shape)

    def body(node, state):
        carry, token, drafted = state
        logits, carry = advance(carry, token, node)
        return carry, *drafted.add(logits, context, node, confidence and confidence(carry))

    first = drafted.add(logits, context, jnp.int32(1), confidence and confidence(carry))
    state = (carry, *first)
    if context.stop_below > 0:

        def going(loop):
            return (loop[0] <= num_draft) & loop[1][2].is_going.any()

        def step(loop):
            return (loop[0] + 1, body(*loop))

        _, state = jax.lax.while_loop(going, step, (jnp.int32(2), state))
    else:
        state = jax.lax.fori_loop(2, num_draft + 1, body, state)
    carry, _, drafted = state
    return drafted.proposal(), carry


def draft_block(logits: jax.Array, context: Context, num_draft: int) -> Proposal:
    """Draws K tokens from K distributions that are known at once, none of which knows the others.

    Args:
      logits: f32[B,T,V], those of each draft, where T is K or more, and at least 1.
      context: the sampler and the noise to draw with.
      num_draft: K, which may be 0.
    """

    def read(carry, token, node):
        return (logits[:, node - 1], carry)

    return draft_chain(logits[:, 0], None, read, context, num_draft)[0]


@functools.cache
def with_confidence_stop(drafter: Drafter, stop_below: float) -> Drafter:
    """Returns the drafter, which now stops after an unlikely draft.

    It stays lossless: whether a token is offered depends on the tokens before it, never on itself.

    Args:
      drafter: a drafter of chains that draws with ``draft_chain`` or ``Drafted``.
      stop_below: minimum probability, by the draft's raw logits, of a token after which another is
        offered, in (0, 1].
    """

    def propose(params, state, context: Context, num_draft: int):
        context = context._replace(stop_below=stop_below)
        return drafter.propose(params, state, context, num_draft)

    return drafter._replace(propose=propose)
