"""A smaller language model of the same vocabulary as the draft."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spec_jax import rng
from spec_jax.contracts import Context, Drafter, Model, Proposal
from spec_jax.sampling import is_sampling, process, sample


def draw(logits: jax.Array, context: Context, counts, node) -> tuple[jax.Array, jax.Array]:
    """Draws the token of one node of each row, and says from which distribution.

    Args:
      logits: f32[B,V], the draft's at the node's parent.
      context: whose sampler and noise apply.
      counts: prompt, output and the drafts before this one.
      node: i32[], 1..K.

    Returns:
      i32[B] tokens and f32[B,V], the unnormalised log-probabilities they were drawn from.
    """
    processed = process(logits[:, None], context.sampler, counts)[:, 0]
    if context.gumbel is not None:
        return sample(processed, context.gumbel[:, node - 1]), processed

    def noise():
        if context.is_coupled:
            keys = rng.keys(context.request, rng.Stream.TARGET, context.length + node)
        else:
            keys = rng.keys(context.sampler.seed, rng.Stream.DRAFT, context.length, node)
        return rng.gumbel(keys, logits.shape[-1])

    gumbel = jax.lax.cond(is_sampling(context.sampler), noise, lambda: jnp.zeros_like(processed))
    return sample(processed, gumbel), processed


@functools.cache
def small_lm(model: Model) -> Drafter:
    """Drafts by decoding ``model``, K passes a round.

    Its cache stays one token behind the target's: the first pass of a round feeds the last
    two tokens, so the slot that a fully accepted round leaves empty (its last draft was
    never fed) is filled at no extra pass, and the tokens fed are the same for every row.
    """

    def prefill(params, cache, tokens, lengths, pending, features):
        del pending, features
        return model.forward(params, tokens, cache).cache.commit(lengths - 1)

    def propose(params, cache, context: Context, num_draft: int):
        B, V = context.length.shape[0], model.vocab_size
        rows = jnp.arange(B)
        fed = jnp.stack([context.tokens[rows, context.length + i] for i in (-1, 0)], axis=1)

        def step(node, fed, cache, counts, out):
            """One pass and one draw; ``node`` is 1..K, the node that is drawn."""
            T = fed.shape[1]
            with jax.named_scope("draft_pass"):
                output = model.forward(params, fed, cache, window_offset=node + 1 - T)
                logits = model.unembed(params, output.hidden[:, -1])
            token, law = draw(logits, context, counts, node)
            values = {"tokens": token, "probs": jax.nn.softmax(law, axis=-1), "logits": logits}
            out = {name: out[name].at[:, node - 1].set(values[name]) for name in out}
            is_sound = jnp.isfinite(law.max(axis=-1))
            counts = counts.add(token[:, None], jnp.ones((B, 1), bool))
            return token[:, None], output.cache, counts, out, is_sound

        out = {"tokens": jnp.zeros((B, num_draft), jnp.int32)}
        if context.has_probs:
            out["probs"] = jnp.zeros((B, num_draft, V), jnp.float32)
        if context.has_logits:
            out["logits"] = jnp.zeros((B, num_draft, V), jnp.float32)

        n_draft = jnp.full((B,), num_draft, jnp.int32)
        if num_draft == 0:  # what plain rounds commit is fed all the same: no backlog arises
            return Proposal(n_draft=n_draft, **out), model.forward(params, fed, cache).cache

        def body(node, carry):
            *inputs, is_sound = carry
            *outputs, is_sound_now = step(node, *inputs)
            return (*outputs, is_sound & is_sound_now)

        carry = step(jnp.int32(1), fed, cache, context.counts, out)
        _, cache, _, out, is_sound = jax.lax.fori_loop(2, num_draft + 1, body, carry)
        return Proposal(n_draft=n_draft, is_sound=is_sound, **out), cache

    return Drafter(
        name="standalone",
        vocab_size=model.vocab_size,
        max_length=model.max_length,
        is_sampled=True,
        init=model.init_cache,
        prefill=prefill,
        propose=propose,
        commit=lambda params, cache, tokens, n, features: cache.commit(n),
        insert_row=lambda cache, row, other: cache.insert_row(row, other),
    )
