"""Plain decoding through the verify pass, whose tokens equal speculative decoding's bit for bit."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spec_jax.config import GREEDY_BELOW
from spec_jax.contracts import Context, Drafter, DraftShape, Model, Proposal
from spec_jax.drafters.model_free import model_free
from spec_jax.engine.adaptive.runner import plain_rule
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.models.caches.kv import KVCache
from spec_jax.sampling import highest_temperature


class InvariantPair(NamedTuple):
    """Two decoders whose logits are the same bits, see ``invariant_pair``.

    Attributes:
      speculative: decodes with drafts.
      plain: decodes one token a pass, by passes of the same shape.
    """

    speculative: SpeculativeDecoder
    plain: SpeculativeDecoder


def invariant_pair(decoder: SpeculativeDecoder) -> InvariantPair:
    """Returns speculative decoding and plain decoding whose rounding is the same.

    A pass of one token rounds in another order than a pass of K + 1, so in bfloat16 greedy outputs
    of speculative and of usual plain decoding diverge where two logits nearly tie. This plain
    decoder feeds the pending token and K others that it never accepts: the target runs the very
    program that verifies drafts. Both decoders attend over all slots of their caches, since the
    usual choice of a shorter prefix depends on where a round begins. The only remaining assumption
    is that a matrix product rounds every row alike, whatever its index in the window; this holds on
    the CPUs where it was tested, in bfloat16 and float32, for chains and trees.

    Plain decoding in this mode costs a verify pass for each token, so it is a tool for tests, not
    for comparing times.

    Args:
      decoder: of fixed K, with any drafter and rule. Above temperature 0 only the rule "match"
        emits plain decoding's tokens.

    Raises:
      ConfigError: the decoder does not draft, chooses K while decoding, or drafts on separate
        devices, so that its passes have no fixed width.
    """
    if decoder.num_draft == 0 or decoder.adaptive is not None or decoder.is_overlapped:
        why = "drafts nothing" if decoder.num_draft == 0 else "chooses K while decoding"
        why = "drafts on devices of its own" if decoder.is_overlapped else why
        raise ConfigError(f"the decoder {why}; an invariant pair needs a fixed K of 1 or more")
    system = decoder.system()
    is_greedy = highest_temperature(decoder.target_sampler) < GREEDY_BELOW
    model = read_whole(system.target)
    plain = decoder.with_parts(
        model=model,
        drafter=never_accepted(system.drafter.shape._replace(taps=())),
        rule=plain_rule(is_greedy),
        own_drafter="never-accepted",
        history=None,
        has_expected=False,
    )
    return InvariantPair(decoder.with_parts(model=model), plain)


@functools.cache
def never_accepted(shape: DraftShape = DraftShape()) -> Drafter:
    """Returns a drafter that fills the window of a verify pass without offering a draft.

    Args:
      shape: of the drafts whose place is taken.
    """

    def propose(params, state, context: Context, num_draft: int):
        del params
        B = context.length.shape[0]
        tokens = jnp.zeros((B, num_draft), jnp.int32)
        proposal = Proposal(tokens, jnp.zeros((B,), jnp.int32))
        if shape.tree is not None:  # all of them children of the root
            proposal = proposal.replace(parents=tokens, tree_depth=shape.tree.depth)
        return proposal, state

    return model_free("never-accepted", propose)._replace(shape=shape)


@functools.cache
def read_whole(model: Model) -> Model:
    """Returns the model with caches of which attention reads every slot."""

    def init_cache(params, batch, slots):
        def is_kv(x):
            return isinstance(x, KVCache)

        def whole(x):
            return x.replace(is_read_whole=True) if is_kv(x) else x

        return jax.tree.map(whole, model.init_cache(params, batch, slots), is_leaf=is_kv)

    return model._replace(init_cache=init_cache)
