"""Drafters, rules and samplers of wrong types and shapes are refused while a program is traced.

The messages name who broke the contract, what was found and what is expected. Nothing is compiled
for them: ``jax.eval_shape`` traces the decoder's own functions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from support.decoders import rule

from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, decoding, testing
from spec_jax.contracts import Noise, Proposal, Rule, TargetScores
from spec_jax.decoding.calls import call_accept, check_state
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.rules import batched, chain
from spec_jax.sampling import make_sampler

V, K = 11, 3
HOT = SamplerConfig(1.0)
SYSTEM = decoding.System(testing.toy_model(V), NO_DRAFT, rule("residual"), K)

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
ROUND = (
    TargetScores(f32(2, K + 1, V), f32(2, K + 1, V)),
    Proposal(i32(2, K), i32(2), f32(2, K, V)),
    Noise(f32(2, K), f32(2, 1, V)),
)
RESIDUAL = batched(chain.residual)


def traced_rule(accept):
    return jax.eval_shape(functools.partial(call_accept, Rule("mine", accept, True)), *ROUND)


def verdicts(**changes):
    return lambda *args: RESIDUAL(*args).replace(**changes)


SHAPES = (
    r"tokens i32\[2,3\], expected i32\[B=2,P=4\]; "
    r"replacement f32\[2,1,11\], expected f32\[B=2,V=11\]"
)
ONE_ROW = (
    r"accept of rule 'mine' is written for one row and was given the batch, .*"
    r"target.logits f32\[2,4,11\], .*proposal.tokens i32\[2,3\].*rules.batched"
)
DTYPE = r"rule 'mine' returned n_accept f32\[2\], expected i32\[B=2\](\n|$)"
TUPLE = r"rule 'mine' returned a tuple; expected a Verdict\(n_accept, tokens"
TWO = dict(tokens=jnp.zeros((2, K), jnp.int32), replacement=jnp.zeros((2, 1, V)))


def branches(target, proposal, noise):
    """Written for one row; its branch is Python's."""
    if proposal.n_draft > 1:
        return chain.residual(target, proposal, noise)
    return chain.greedy(target, proposal, noise)


BRANCHES = r"rule 'mine' branches on the value .*jnp.where\(.*accept=spec_jax.rules.batched"
RULES = [
    (chain.residual, ShapeError, ONE_ROW),
    (lambda *args: tuple(jax.tree.leaves(RESIDUAL(*args))), ConfigError, TUPLE),
    (lambda *args: None, ConfigError, "rule 'mine' returned None; expected a Verdict"),
    (verdicts(n_accept=jnp.zeros(2)), ShapeError, DTYPE),
    (verdicts(**TWO), ShapeError, SHAPES),
    (verdicts(accept_probs=None), ShapeError, r"accept_probs None, expected f32\[B=2,K=3\]"),
    (verdicts(path=jnp.zeros((2, 4), "i4")), ShapeError, "returned a path; the drafts are a"),
    (branches, ConfigError, BRANCHES),
    (batched(branches), ConfigError, BRANCHES),
]


def test_a_rules_own_error_passes_with_a_note_of_what_it_was_given():
    def broken(target, proposal, noise):
        raise KeyError("temperature")

    with pytest.raises(KeyError, match="temperature") as error:
        traced_rule(broken)
    note = error.value.__notes__[0]  # jax may add its own
    assert note.startswith("raised in accept of rule 'mine', which was given target.logits f32[2")


def traced_proposal(propose, num_draft=K):
    system = SYSTEM._replace(
        drafter=NO_DRAFT._replace(name="mine", propose=propose, is_sampled=True)
    )
    sampler = make_sampler([HOT, HOT], 2, V)

    def run(tokens, length):
        context = system.context(tokens, length, sampler, sampler.seed, sampler.is_greedy)
        return decoding.propose(None, (), context, system)

    return jax.eval_shape(run, i32(2, 16), i32(2))


def drafts(**changes):
    options = dict(n_draft=jnp.full(2, K, jnp.int32), probs=jnp.full((2, K, V), 1 / V))
    fields = dict(tokens=jnp.zeros((2, K), jnp.int32), **options)
    return lambda *args: (Proposal(**{**fields, **changes}), ())


PAIR = r"propose of drafter 'mine' returned a Proposal; expected a pair \(Proposal, state\)"
ONE = r"propose of drafter 'mine' returned tokens i32\[3\], expected i32\[B=2,K=3\](\n|$)"
WIDE = r"probs f32\[2,4,11\], expected f32\[B=2,K=3,V=11\]"
DRAFTERS = [
    (lambda *args: drafts()()[0], ConfigError, PAIR),
    (lambda *args: (jnp.zeros((2, K), jnp.int32), ()), ConfigError, "a pair"),
    (lambda *args: None, ConfigError, "returned None; expected a pair"),
    (drafts(tokens=jnp.zeros(K, jnp.int32)), ShapeError, ONE),
    (drafts(tokens=jnp.zeros((2, K))), ShapeError, r"tokens f32\[2,3\], expected i32\["),
    (drafts(n_draft=K), ShapeError, r"n_draft an int, expected i32\[B=2\]"),
    (drafts(probs=jnp.zeros((2, K + 1, V))), ShapeError, WIDE),
    (drafts(parents=jnp.zeros((2, K), "i4")), ShapeError, "tree_depth 0; expected"),
]
BEFORE = {"last": i32(2), "seen": f32(2, 4)}
STATES = [
    (BEFORE | {"last": f32(2)}, ShapeError, r"made state\['last'\] f32\[2\]; expected i32\[2\]"),
    (BEFORE | {"seen": f32(2, 5)}, ShapeError, r"\['seen'\] f32\[2,5\]; expected f32\[2,4\]"),
    ({"last": i32(2)}, ShapeError, r"state\['seen'\] nothing; expected f32\[2,4\]"),
    (BEFORE | {"x": i32()}, ShapeError, r"state\['x'\] i32\[\]; expected noth"),
]
REFUSED = [
    (trace, *row)
    for trace, rows in (
        (traced_rule, RULES),
        (traced_proposal, DRAFTERS),
        (functools.partial(check_state, "mine", BEFORE), STATES),
    )
    for row in rows
]


@pytest.mark.parametrize(("trace", "part", "error", "message"), REFUSED)
def test_what_is_ill_shaped_is_refused_with_its_name_and_what_is_expected(
    trace, part, error, message
):
    check_state("mine", BEFORE, BEFORE)
    with pytest.raises(error, match=message):
        trace(part)


def test_a_drafter_that_branches_in_python_is_told_what_to_write():
    def branches(params, state, context, num_draft):
        return drafts()() if context.length[0] > 3 else drafts(n_draft=jnp.zeros(2, jnp.int32))()

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        traced_proposal(branches)
    assert any("take jnp.where(condition, a, b)" in note for note in error.value.__notes__)


def test_a_drafters_own_error_passes_with_a_note_of_what_it_was_given():
    def broken(params, state, context, num_draft):
        return context.tokens @ jnp.zeros(3)

    with pytest.raises(TypeError) as error:
        traced_proposal(broken)
    note = error.value.__notes__[0]  # jax may add its own
    assert note.startswith("raised in propose of drafter 'mine', which was given context.tokens")
    assert "i32[2,16]" in note and "num_draft 3" in note


def test_a_drafter_whose_state_changes_in_a_round_is_refused_by_the_decoder():
    counting = NO_DRAFT._replace(
        name="counting",
        init=lambda params, batch, slots: jnp.zeros(batch, jnp.int32),
        commit=lambda params, state, tokens, n, features, path: state + 0.5 * n,
    )
    decoder = SpeculativeDecoder(
        testing.mock_model(V), config=SpeculativeConfig(num_speculative_tokens=K), drafter=counting
    )
    with pytest.raises(ShapeError, match=r"commit of drafter 'counting' made state f32\[1\]"):
        decoder.generate([1], 4)
