"""Logit processors of a user's own are exact at every drafted position, on both sides."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from conformance.rounds import run_of

from spec_jax import testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Processor
from spec_jax.drafters.standalone.model import standalone
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.named import to_rule
from spec_jax.processors import per_token
from spec_jax.sampling import make_sampler, process
from spec_jax.testing import CertificateError
from spec_jax.tree import Tree

V = 5
COST = 1.5


def init(tokens, length, vocab_size):
    pairs = jnp.zeros((vocab_size, vocab_size), jnp.int32)
    is_in = jnp.arange(1, len(tokens)) < length
    pairs = pairs.at[tokens[:-1], tokens[1:]].add(is_in.astype(jnp.int32))
    return {"pairs": pairs, "last": tokens[jnp.maximum(length - 1, 0)].astype(jnp.int32)}


def apply(state, logits):
    return logits - COST * state["pairs"][state["last"]]


def advance(state, token):
    return {"pairs": state["pairs"].at[state["last"], token].add(1), "last": token}


REPEATS = Processor("repeats", *per_token(init, apply, advance))


@pytest.fixture(scope="module")
def mocks():
    return testing.mock_model(V, 0), testing.mock_model(V, 1)


def make(mocks, **options):
    config = SpeculativeConfig("standalone", 3, rejection_sampling_strategy="match")
    return SpeculativeDecoder(*mocks, config, **options)


@pytest.mark.exhaustive
def test_rows_on_a_mesh_are_those_of_plain_decoding_on_one_device(mocks):
    prompts = [[1, 2, 1, 2], [3]]
    samplers = [
        SamplerConfig(processors=(REPEATS,)),
        SamplerConfig(temperature=0.9, seed=3, top_k=4, processors=(REPEATS,)),
    ]
    rows = make(mocks, mesh="data:2").generate(prompts, 14, sampler=samplers)
    plain = SpeculativeDecoder(mocks[0]).generate(prompts, 14, sampler=samplers)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]


ROWS = [
    testing.Row((0, 1, 0), *2 * [SamplerConfig(temperature=1.0, processors=(REPEATS,))]),
    testing.Row((2,), SamplerConfig(temperature=0.8, processors=(REPEATS,)), SamplerConfig(1.0)),
]


@pytest.mark.representatives("block")
@pytest.mark.parametrize("rule", ["residual", "block"])
def test_the_joint_distribution_is_the_targets(rule):
    assert testing.certify_rule(to_rule(rule), rows=ROWS) < 1e-6


def strict(text_length=None):
    """Forbids to repeat the last token, and every token after one that was repeated.

    Args:
      text_length: maximum length of a text; None means unbounded.
    """

    def start(tokens, length, vocab_size):
        return {"last": tokens[length - 1], "length": length, "is_dead": jnp.zeros((), bool)}

    def apply(state, logits):
        is_over = False if text_length is None else state["length"] >= text_length
        is_forbidden = jnp.arange(len(logits)) == state["last"]
        return jnp.where(is_forbidden | state["is_dead"] | is_over, -jnp.inf, logits)

    def advance(state, token):
        is_dead = state["is_dead"] | (token == state["last"])
        return {"last": token, "length": state["length"] + 1, "is_dead": is_dead}

    return Processor("strict", *per_token(start, apply, advance))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", ["residual", "block", "traversal"])
def test_states_that_allow_nothing_leave_the_joint_distribution_the_targets(rule):
    """A node has three children of two allowed tokens; or the draft knows no processor."""
    hot = SamplerConfig(temperature=1.0, processors=(strict(),))
    rows = [testing.Row((0, 1), hot, hot), testing.Row((2,), hot, SamplerConfig(temperature=0.8))]
    drafter = None if rule == "block" else standalone(testing.toy_model(3), Tree((0, 0, 0, 1)))
    assert testing.certify_rule(to_rule(rule), rows=rows, drafter=drafter) < 1e-6


@pytest.mark.exhaustive
def test_a_certificate_blames_the_processor_that_forbids_every_token():
    message = "processor 'strict' forbids every token of the target, after the prompt"
    with pytest.raises(CertificateError, match=message):
        testing.certify("match", processors=[strict(text_length=6)])


def test_a_processor_that_forgets_the_drafts_is_found():
    """The same processor, whose nodes all have the state before the window."""
    start, _, after = per_token(init, apply, advance)
    stale = lambda params, state, logits, drafted, is_before: (
        logits - COST * (state["pairs"][state["last"]])
    )
    forgetful = Processor("stale", start, stale, after)
    config = SamplerConfig(temperature=1.0, processors=(forgetful,))
    with pytest.raises(CertificateError, match="has probability"):
        testing.certify_rule(to_rule("residual"), rows=[testing.Row((0, 1, 0), config, config)])


@pytest.mark.exhaustive
def test_rounds_and_the_loop_are_certified_with_it():
    run = run_of(processors=(REPEATS,))
    run._enumerate(run.main, 2)
    run._loop(run.main)
    assert "repeats" in str(run.certificate(None))


def test_of_a_tree_each_node_follows_its_own_path():
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(1, 4, V)).astype(np.float32)
    prompt, drafted = [1, 2, 1], [2, 3, 2]  # two children of the root, and one of the first
    paths = [[], [2], [3], [2, 2]]
    is_before = np.asarray([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]], bool)[None]
    config = SamplerConfig(temperature=1.0, processors=(REPEATS,))
    sampler = make_sampler(config, 1, V).start(jnp.asarray([prompt]), jnp.asarray([3]), V)
    x = process(jnp.asarray(logits), sampler, jnp.asarray([drafted]), jnp.asarray(is_before))
    for node, path in enumerate(paths):
        text = prompt + path
        pairs = [*zip(text, text[1:])]
        cost = [COST * pairs.count((text[-1], v)) for v in range(V)]
        np.testing.assert_allclose(x[0, node], logits[0, node] - cost, rtol=1e-6)


def of_name(name, apply=apply, advance=advance):
    return Processor(name, *per_token(init, apply, advance))


NARROW = of_name("narrow", apply=lambda state, logits: logits[:2])
GROWS = of_name("grows", advance=lambda state, token: (state, token))
REFUSED = [
    (dict(processors=REPEATS), "expected a tuple of spec_jax.Processor"),
    (dict(processors=(len,)), "expected a tuple of spec_jax.Processor"),
    (dict(processors=(REPEATS, of_name("repeats"))), "two processors are named 'repeats'"),
    (dict(processors=(of_name("penalties"),)), "two processors are named 'penalties'"),
    (dict(processors=(NARROW,)), r"processor 'narrow' returns logits of shape .*; expected"),
    (dict(processors=(GROWS,)), "a processor changes its state"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_processor_is_refused_by_name(mocks, options, message):
    with pytest.raises(ConfigError, match=message):
        sampler = SamplerConfig(temperature=1.0, **options)
        make(mocks).generate([1, 2], 4, sampler=sampler)
