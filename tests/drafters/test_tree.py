"""Trees of drafts: shapes, rules, drafting, and the loop around them."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from support.decoders import prefill, rule, run
from support.eagle_heads import CONFIGS, PROMPTS, np_draft, system_of
from support.tiny_models import LLAMA, random_weights
from support.trees import BUSH

from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context
from spec_jax.drafters.eagle.model import eagle
from spec_jax.drafters.standalone.model import standalone
from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.sampling import make_sampler
from spec_jax.testing import toy_model, toy_params
from spec_jax.tree import DynamicTree, Tree

# --------------------------------------------------------------------------- drafting


def lm_system(strategy, shape, doubt=0.0):
    """A transformer that drafts for itself, from weights with relative noise ``doubt``."""
    model, weights = transformer.model(LLAMA), random_weights(LLAMA)
    draw = np.random.default_rng(0)
    noisy = lambda w: w * (1 + doubt * draw.standard_normal(w.shape).astype(np.float32))
    params = {"target": weights, "draft": jax.tree.map(noisy, weights)}
    return decoding.System(model, standalone(model, shape), rule(strategy), shape.num_nodes), params


def eagle_system(name, strategy, shape):
    system, params = system_of(CONFIGS[name], strategy)
    drafter = eagle(CONFIGS[name], system.target, shape)
    return system._replace(drafter=drafter, num_draft=shape.num_nodes), params


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
    config = CONFIGS["eagle-3"]
    system, params = eagle_system("eagle-3", "greedy", Tree.branching((2, 2, 1)))
    state = prefill(system, params, PROMPTS, 8)
    proposal = proposal_of(system, params, state)
    first = [1, 3, 7]  # the first child at each depth
    for row, prompt in enumerate(PROMPTS):
        pending = int(state.tokens[row, len(prompt)])
        drafts, _ = np_draft(config, params, prompt, pending, 3)
        assert [int(proposal.tokens[row, i - 1]) for i in first] == drafts


STRATEGIES = [
    ("block", BUSH, 6, "rule 'block' accepts chains only; drafter 'standalone' proposes trees"),
    ("greedy", BUSH, 5, "K is 5; the tree has 6 nodes"),
    ("greedy", DynamicTree(40, 2, 40), 40, "40 children .*; the draft's vocabulary has 31"),
]


@pytest.mark.parametrize(("strategy", "shape", "K", "message"), STRATEGIES, ids=str)
def test_a_tree_that_does_not_fit_is_refused(strategy, shape, K, message):
    with pytest.raises(ConfigError, match=message):
        system, params = lm_system(strategy, shape)
        system = system._replace(num_draft=K)
        run(system, params, prefill(system, params, PROMPTS, 4), 1)
