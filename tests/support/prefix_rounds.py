"""Rounds of a head of one pass, whose rows are prefixes of one text."""

import jax
import jax.numpy as jnp
import numpy as np
from support.block_drafts import TARGET, features_of
from support.tiny_models import LLAMA

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context, Prompt
from spec_jax.models import transformer
from spec_jax.sampling import make_sampler

TEXT = np.random.default_rng(5).integers(0, LLAMA.vocab_size, 14)
N = np.arange(1, 7)  # one row a prompt's length
MORE = 1 + N % 4  # and what each commits after it


class Rounds:
    """A drafter with a head, made by ``make(config, model)``.

    Attributes:
      config: of the head.
      features: dtype[1,T,E], the target's tapped states of the text.
    """

    def __init__(self, make, head):
        self.config = head.config
        self.drafter = make(head.config, transformer.model(LLAMA, head.config.taps))
        self.params = {"head": head.params, "target": TARGET.params}
        self.features = features_of(head.config, TEXT[None])
        self.tokens = jnp.asarray(np.tile(TEXT, (len(N), 1)), jnp.int32)
        self.propose = jax.jit(self._propose, static_argnums=2)

    def prefilled(self, lengths, *chunk):
        """The drafter's state after so many tokens of each row."""
        T = int(max(lengths))
        features = jnp.repeat(self.features[:, :T], len(N), axis=0)
        prompt = self.tokens[:, :T], jnp.asarray(lengths), jnp.asarray(TEXT[lengths]), features

        def run(params, *prompt):
            state = self.drafter.init(params, len(N), 20)
            return self.drafter.prefill(params, state, Prompt(*prompt, *chunk))

        return jax.jit(run)(self.params, *prompt)

    def committed(self, state, lengths, more):
        """The state after ``more`` tokens of each row."""
        at = lengths[:, None] + np.arange(4)
        new = jnp.asarray(TEXT[at + 1]), jnp.asarray(more), self.features[0][at], None
        return jax.jit(self.drafter.commit)(self.params, state, *new)

    def _propose(self, state, length, num_draft):
        sampler = make_sampler(SamplerConfig(), len(N), LLAMA.vocab_size)
        request = jnp.zeros(len(N), jnp.uint32)
        context = Context(self.tokens, length, sampler, request, False, False, True)
        return self.drafter.propose(self.params, state, context, num_draft)


def check_two_rounds(rounds, num_draft, expected):
    """Greedy drafts after a prefill, after a commit of any number of tokens, and after a prefill of
    these tokens in chunks, against ``expected(length)``, the logits f64[K,V] of a prefix.
    """

    def check(state, lengths):
        proposal, state = rounds.propose(state, jnp.asarray(lengths), num_draft)
        for b, n in enumerate(lengths):
            logits = expected(n)
            assert proposal.tokens[b].tolist() == logits.argmax(-1).tolist()
            np.testing.assert_allclose(proposal.logits[b], logits, rtol=1e-5, atol=2e-4)
        return state

    state = check(rounds.prefilled(N), N)
    check(rounds.committed(state, N, MORE), N + MORE)
    check(rounds.prefilled(N + MORE, 3), N + MORE)
