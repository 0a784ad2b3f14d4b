"""Trees of drafts: shapes, rules, drafting, and the loop around them."""

import functools

import jax
import numpy as np
import pytest
from support.decoders import prefill, rule
from support.eagle_heads import CONFIGS, PROMPTS, np_draft, system_of

from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context
from spec_jax.drafters.eagle.model import eagle
from spec_jax.drafters.standalone.model import standalone
from spec_jax.sampling import make_sampler
from spec_jax.testing import toy_model, toy_params
from spec_jax.tree import DynamicTree, Tree


@functools.partial(jax.jit, static_argnames="system")
def proposal_of(system, params, state):
    greedy = make_sampler(SamplerConfig(), len(state.finish), system.target.vocab_size)
    options = dict(is_coupled=False, has_probs=False, has_logits=False)
    context = Context(state.tokens, state.length, greedy, state.sampler.seed, **options)
    return system.drafter.propose(params["draft"], state.draft, context, system.num_draft)[0]


def test_a_dynamic_tree_is_grown_as_published():
    """Against a plain growth of the whole tree from the draft's log-probabilities."""
    shape = DynamicTree(num_nodes=8, depth=3, top_k=2)
    params = {"target": toy_params(5, 0), "draft": toy_params(5, 1)}
    system = decoding.System(toy_model(5), standalone(toy_model(5), shape), rule("greedy"), 8)
    state = prefill(system, params, [[1, 2], [3]], 20, SamplerConfig(), slots=96)
    proposal = proposal_of(system, params, state)
    table = np.asarray(params["draft"]["logits"], np.float64)
    logp = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    for row, length in enumerate(np.asarray(state.length)):
        history = np.asarray(state.tokens)[row, : length + 1].tolist()
        level, pool = [((), 0.0)], []
        for _ in range(3):
            seen = []
            for way, score in level:
                a, b = (0, *history, *way)[-2:]
                best = np.argsort(-logp[a * 5 + b], kind="stable")[:2]
                seen += [((*way, int(t)), score + logp[a * 5 + b, t]) for t in best]
            pool += seen
            level = sorted(seen, key=lambda node: -node[1])[:2]
        wanted = {way for way, _ in sorted(pool, key=lambda node: -node[1])[:8]}
        ways = {0: ()}
        for i, (token, parent) in enumerate(zip(proposal.tokens[row], proposal.parents[row])):
            ways[i + 1] = (*ways[int(parent)], int(token))
        assert set(ways.values()) - {()} == wanted


@pytest.mark.exhaustive
def test_a_heads_tree_holds_its_chain():
    """The likeliest child of the likeliest child is the chain's next draft."""
    config, shape = CONFIGS["eagle-3"], Tree.branching((2, 2, 1))
    system, params = system_of(config, "greedy", shape.num_nodes)
    system = system._replace(drafter=eagle(config, system.target, shape))
    state = prefill(system, params, PROMPTS, 8)
    proposal = proposal_of(system, params, state)
    first = [1, 3, 7]  # the first child at each depth
    for row, prompt in enumerate(PROMPTS):
        pending = int(state.tokens[row, len(prompt)])
        drafts, _ = np_draft(config, params, prompt, pending, 3)
        assert [int(proposal.tokens[row, i - 1]) for i in first] == drafts
