"""Random automata as logit processors: the first tokens of a prompt choose one of many.

A state allows some tokens, or none where it is dead. The stop token leads to a final state, which
is dead too, and a token that is not allowed leads to a dead state as well.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from spec_jax.contracts import Processor
from spec_jax.processors import per_token
from spec_jax.testing.oracles import toy_logits


class Automata:
    """Automata over ``vocab_size`` tokens, one for each pair of tokens that begins a prompt.

    Attributes:
      prompts: all pairs.
      processor: allows what the automaton of the row allows.
      stop: the stop token.
    """

    def __init__(self, vocab_size: int, num_states: int = 5, seed: int = 0):
        draw, V, S = np.random.default_rng(seed), vocab_size, num_states
        N, self.stop = V * V, V - 1
        self.prompts = [[i // V, i % V] for i in range(N)]
        allowed = draw.random((N, S, V)) < draw.uniform(0.2, 0.9, (N, 1, 1))
        after = draw.integers(0, S, (N, S, V))
        after[:, :, self.stop] = S - 1
        allowed[:, S - 1] = False  # final and dead; a state without a token is dead by chance
        after = np.where(allowed, after, S - 1)
        allowed[:, 0] |= np.eye(V, dtype=bool)[draw.integers(0, V, N)]  # each emits a token
        after[:, 0] = np.where(after[:, 0] == S - 1, draw.integers(0, S - 1, (N, V)), after[:, 0])
        after[:, 0, self.stop] = S - 1
        self.allowed, self.after = allowed, after
        tables = jnp.asarray(allowed), jnp.asarray(after, jnp.int32)

        def init(tokens, length, vocab_size):
            return {"which": tokens[0] * V + tokens[1], "state": jnp.zeros((), jnp.int32)}

        def apply(state, logits):
            return jnp.where(tables[0][state["which"], state["state"]], logits, -jnp.inf)

        def advance(state, token):
            return {**state, "state": tables[1][state["which"], state["state"], token]}

        self.processor = Processor("g", *per_token(init, apply, advance))

    def greedy(self, params, prompt: list[int], max_new_tokens: int) -> tuple[tuple, str]:
        """The greedy output of a toy model, and why it ends, without the code that decodes."""
        which, state, output = prompt[0] * self.allowed.shape[2] + prompt[1], 0, []
        while len(output) < max_new_tokens:
            is_allowed = self.allowed[which, state]
            if not is_allowed.any():
                return tuple(output), "nan_target"
            logits = np.where(is_allowed, toy_logits(params, [*prompt, *output]), -np.inf)
            output.append(int(logits.argmax()))
            state = self.after[which, state, output[-1]]
            if output[-1] == self.stop:
                return tuple(output), "stop_token"
        return tuple(output), "length"
