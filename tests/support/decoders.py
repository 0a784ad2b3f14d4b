"""Rules, first states and drafts, for tests that drive the loop themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding, rng, testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Context
from spec_jax.drafters.standalone.model import standalone
from spec_jax.engine.request import make_request
from spec_jax.rules import make_rule
from spec_jax.sampling import make_sampler

PENALISED = dict(presence_penalty=0.4, frequency_penalty=0.3, logit_bias=((3, 1.0), (4, -np.inf)))
HOT = SamplerConfig(temperature=3.0)  # coupled noise then often gives both the same token
MIXED_SAMPLERS = [
    SamplerConfig(temperature=1.0, seed=11),
    SamplerConfig(temperature=0.0, repetition_penalty=1.3, seed=12),
    SamplerConfig(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, seed=13, **PENALISED),
]


def rule(strategy: str, **options):
    if strategy == "synthetic":
        options.setdefault("synthetic_acceptance_rate", 0.5)
    return make_rule(SpeculativeConfig(rejection_sampling_strategy=strategy, **options))


def prefill(system, params, prompts, new, sampler=None, seeds=None, slots=64, width=16, samples=1):
    """The state after ragged prompts; ``new``: how many tokens all rows, or each, may emit."""
    B = len(prompts)
    sampler = make_sampler(sampler or SamplerConfig(), B, system.target.vocab_size, seeds)
    lengths = jnp.asarray([len(prompt) for prompt in prompts])
    tokens = jnp.asarray([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    request = tokens, lengths, lengths + jnp.asarray(new), jnp.full((B, 1), -1), sampler, sampler
    return decoding.prefill(params, *request, system=system, slots=slots, samples=samples)


@functools.partial(jax.jit, static_argnames="system")
def propose(system, params, state):
    """The greedy drafts of every row."""
    greedy = make_sampler(SamplerConfig(), len(state.finish), system.target.vocab_size)
    request = state.tokens, state.length, greedy, state.sampler.seed
    context = Context(*request, is_coupled=False, has_probs=True, has_logits=True)
    return system.drafter.propose(params["draft"], state.draft, context, system.num_draft)[0]


def run(system, params, state, rounds):
    """The state after at most ``rounds`` rounds, and the chunk."""
    none = jnp.zeros(len(state.finish), jnp.int32)
    return decoding.generate(params, state, none, jnp.int32(rounds), system=system)


@functools.partial(jax.jit, static_argnames="target")
def features_of(target, params, tokens):
    """The states that the drafter reads, of tokens that no cache precedes."""
    return target.forward(params["target"], tokens).features


def plain_tokens(logits_of, prompt, num_tokens, config=SamplerConfig()):
    """Plain decoding in NumPy, of a model given as a function: only the noise's name is shared."""
    output = []
    while len(output) < num_tokens:
        history = [*prompt, *output]
        p = testing.reference_distribution(logits_of(history), config, prompt, output)
        position = jnp.asarray([len(history)])
        key = rng.keys(jnp.asarray([config.seed], jnp.uint32), rng.Purpose.TARGET, position)
        with np.errstate(divide="ignore"):
            output.append(int(np.argmax(np.log(p) + np.asarray(rng.gumbel(key, len(p)))[0])))
    return output


def mutant(see=None, change=None):
    """``make(target)`` of a draft model that is wrong in one way.

    Args:
      see: ``(params, context, num_draft) -> context``, with which it drafts.
      change: ``(proposal, params, context, num_draft) -> proposal``.
    """

    def make(target):
        honest = standalone(target.model)

        def propose(params, state, context, num_draft):
            seen = see(params, context, num_draft) if see and num_draft else context
            proposal, state = honest.propose(params, state, seen, num_draft)
            if change and num_draft:
                proposal = change(proposal, params, context, num_draft)
            return proposal, state

        return honest._replace(name="mutant", propose=propose)

    return make


def changed_draft(change):
    """``mutant`` of ``change(proposal, context)``."""
    return mutant(change=lambda proposal, params, context, num_draft: change(proposal, context))


def start(decoder, prompts, max_new_tokens, sampler, system=None, **options):
    """Prefills prompts with one sampler for target and draft; ``options`` of ``make_request``."""
    engine = decoder.engine()
    system = engine.system if system is None else system
    request = make_request(system, prompts, max_new_tokens, sampler, sampler, **options)
    *arrays, slots, _ = request
    return decoding.prefill(engine.params(), *arrays, system=system, slots=slots)
