"""EAGLE heads against an independent NumPy computation, and in the loop against plain decoding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.eagle_heads import (
    CONFIGS,
    D2T,
    HOT,
    LAYER,
    PROMPTS,
    TARGET,
    D,
    NumpyHead,
    U,
    V,
    head_of,
    np_draft,
    prefill,
    propose,
    run,
    system_of,
)
from support.tiny_models import plain, random_tensor, random_weights

from spec_jax import decoding
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.drafters.eagle.model import EagleConfig, eagle, eagle_head, head_table, init_head
from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.rules import make_rule
from spec_jax.testing import (
    CertificateError,
    Row,
    certify_decoder,
    certify_rule,
    reference_distribution,
    toy_model,
    toy_params,
)
from spec_jax.testing.oracles import toy_logits
from spec_jax.tree import Tree

# ---------------------------------------------- the target's distribution, by enumeration

# Heads for toy targets of four ids, whose features are their logits. Version 3 drafts three.
TOY_LAYER = dataclasses.replace(
    LAYER, vocab_size=4, hidden_size=4, num_attention_heads=2, num_key_value_heads=1, head_dim=4
)
TOY = EagleConfig(3, dataclasses.replace(TOY_LAYER, vocab_size=3), 4, 4, (0,))
TOY_1 = EagleConfig(1, TOY_LAYER, 4, 4, (0,), fc_bias=True)
TOY_ROWS = [
    Row((0, 3), SamplerConfig(temperature=0.7), SamplerConfig(temperature=1.0)),
    Row((2,), SamplerConfig(temperature=1.0, top_k=3), SamplerConfig(temperature=1.5)),
    Row(
        (1, 1, 2),
        SamplerConfig(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.4),
        SamplerConfig(temperature=1.0, presence_penalty=0.5),
    ),
]


def toy_head(config=TOY):
    """Parameters of target and head, and the distribution of the head's drafts by ``NumpyHead``."""
    target = {**toy_params(4, 0), "embed": jnp.asarray(random_tensor("embed", (4, 4), 0))}
    head = head_of(config)
    params = {"target": target, "draft": {"head": head, "target": target}}

    def draft_distribution(row, output, drafted):
        tokens = [*row.prompt, *output]
        reference = NumpyHead(config, head, target["embed"])
        for t in range(1, len(tokens)):
            x = reference.feed(reference.join(toy_logits(target, tokens[:t])), tokens[t])
        for token in drafted:
            x = reference.feed(reference.recycle(x), token)
        history = [*output, *drafted]
        logits = reference.logits(x, np.eye(4))
        return reference_distribution(logits, row.draft, row.prompt, history)

    return params, draft_distribution


def certify_head(strategy, shape=None, params=None, config=TOY):
    own, draft_distribution = toy_head(config)
    options = dict(vocab_size=4, num_tokens=3, rows=TOY_ROWS)
    options |= dict(drafter=eagle(config, toy_model(4), shape))
    options |= dict(draft_distribution=draft_distribution, params=params or own, batch=32)
    return certify_rule(
        make_rule(SpeculativeConfig(rejection_sampling_strategy=strategy)), **options
    )


@pytest.mark.representatives("residual-chain")
@pytest.mark.parametrize("shape", [None, Tree((0, 0, 1))], ids=["chain", "tree"])
@pytest.mark.parametrize("strategy", ["residual", "traversal"])
def test_a_reduced_vocabulary_matches_target_distribution_by_enumeration(strategy, shape):
    assert certify_head(strategy, shape) <= 1e-6


@pytest.mark.exhaustive
def test_version_1_matches_target_distribution_by_enumeration():
    assert certify_head("block", config=TOY_1) <= 1e-6


def test_mutation_offsets_taken_for_ids_are_caught_by_enumeration():
    params, _ = toy_head()
    as_ids = jnp.asarray(np.subtract(params["draft"]["head"]["d2t"], range(3)))
    params["draft"]["head"]["d2t"] = as_ids  # position i then scores id d2t[i]
    with pytest.raises(CertificateError):
        certify_head("residual", params=params)


@pytest.mark.exhaustive
def test_decoding_with_a_reduced_vocabulary_matches_target_distribution():
    params, _ = toy_head()
    options = dict(params=params, row=TOY_ROWS[2], trials=4_800, batch=24, num_tokens=3, alpha=1e-7)
    certify_decoder(
        make_rule(SpeculativeConfig(rejection_sampling_strategy="residual")),
        eagle(TOY, toy_model(4)),
        **options,
    )


# --------------------------------------------------------------------------- the drafter


@pytest.mark.representatives(
    "eagle-1",
    "eagle-3",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "narrow",
)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_recycled_steps_are_the_published_architecture(name):
    config = CONFIGS[name]
    system, params = system_of(config)
    state = prefill(system, params, PROMPTS, 8)
    proposal = propose(system, params, state)
    for row, prompt in enumerate(PROMPTS):
        pending = int(state.tokens[row, len(prompt)])
        drafts, logits = np_draft(config, params, prompt, pending, 3)
        assert proposal.tokens[row].tolist() == drafts
        np.testing.assert_allclose(proposal.logits[row], logits, rtol=0, atol=1e-5)


def fresh_drafts(name, params, chunk):
    """What NumPy drafts behind every row's tokens so far."""
    rows = [np.asarray(chunk.tokens)[i, : int(n)].tolist() for i, n in enumerate(chunk.total)]
    return [np_draft(CONFIGS[name], params, row[:-1], row[-1], 3)[0] for row in rows]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["eagle-1", "eagle-3", "norm_output"])
def test_drafts_after_ten_rounds_are_those_after_a_fresh_prefill(name):
    system, params = system_of(CONFIGS[name], "match")
    state, chunk = run(system, params, prefill(system, params, PROMPTS[:2], 45, HOT), 10)
    assert chunk.rounds == 10
    kind = np.asarray(state.kind)
    assert (kind == decoding.Kind.CORRECTED).any()
    assert (kind == decoding.Kind.ACCEPTED).any()
    assert propose(system, params, state).tokens.tolist() == fresh_drafts(name, params, chunk)


@pytest.mark.exhaustive
def test_mutation_provisional_entries_that_are_kept_are_found():
    """The refresh advances the length and the last state, but what drafting wrote stays."""
    system, params = system_of(CONFIGS["eagle-3"], "match")

    def commit(params, state, tokens, n, features, path):
        true = system.drafter.commit(params, state, tokens, n, features, path)
        return true.replace(cache=state.cache.commit(n))

    mutant = system._replace(drafter=system.drafter._replace(commit=commit))
    state, _ = run(mutant, params, prefill(mutant, params, PROMPTS[:2], 45, HOT), 10)
    fresh, _ = run(system, params, prefill(system, params, PROMPTS[:2], 45, HOT), 10)
    a, b = propose(mutant, params, state), propose(system, params, fresh)
    assert not np.allclose(np.exp(a.logits), np.exp(b.logits), atol=1e-3)


@pytest.mark.representatives("eagle-3-match")
@pytest.mark.parametrize("strategy", ["greedy", "match"])
@pytest.mark.parametrize("name", ["eagle-1", "eagle-3"])
def test_emits_exactly_the_plain_tokens(name, strategy):
    sampler = SamplerConfig(temperature=0.0 if strategy == "greedy" else 1.0)
    system, params = system_of(CONFIGS[name], strategy)
    fast, chunk = run(system, params, prefill(system, params, PROMPTS, 30, sampler), 99)
    system, params = plain(TARGET, params)
    slow, steps = run(system, params, prefill(system, params, PROMPTS, 30, sampler), 99)
    np.testing.assert_array_equal(fast.tokens, slow.tokens)
    assert chunk.rounds <= steps.rounds


def test_a_round_without_drafts_keeps_the_head_in_step():
    system, params = system_of(CONFIGS["eagle-3"])
    idle = system._replace(num_draft=0)
    state, chunk = run(idle, params, prefill(idle, params, PROMPTS, 30), 6)
    assert propose(system, params, state).tokens.tolist() == fresh_drafts("eagle-3", params, chunk)


CHANGES = [
    ({"version": 2}, "version is 2"),
    ({"fc_norm": True, "norm_before_fc": True}, "both on; expected one of them"),
    ({"taps": ()}, "taps are empty"),
    ({"target_hidden_size": 24}, "width is 16; the embedding .* has 24"),
    (
        {"version": 1, "taps": (3,), "layer": LAYER, "target_hidden_size": 24, "own_embed": True},
        "width is 16; the target's head .* has 24",
    ),
    ({"target_vocab_size": 12}, "draft vocabulary 20 is larger than the target's 12"),
    ({"layer": TARGET}, "2 layers; expected 1"),
    ({"version": 1}, "reads one state"),
    ({"version": 1, "taps": (3,)}, "31 ids, not 20"),
    ({"version": 1, "taps": (3,), "norm_output": True}, "options of version 3"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=str)
def test_a_head_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIGS["eagle-3"], **change)


def test_ids_that_pad_the_targets_embedding_are_not_drafted():
    config = CONFIGS["eagle-3 whole vocabulary"]
    padded = transformer.model(TARGET, config.taps, num_tokens=27)
    params = {"head": head_of(config), "target": random_weights(TARGET)}
    logits = eagle_head(config, padded).unembed(params, jnp.ones((1, D)))
    assert np.isneginf(logits[0, 27:]).all() and np.isfinite(logits[0, :27]).all()


def test_random_heads_have_the_declared_shapes():
    for config in CONFIGS.values():
        head = jax.eval_shape(functools.partial(init_head, config), jax.random.key(0))
        assert {k for k in head if k != "d2t"} == set(head_table(config))
        assert ("d2t" in head) is (config.layer.vocab_size < V)


def test_mutation_offsets_taken_for_ids_are_found():
    config = CONFIGS["eagle-3"]
    system, params = system_of(config)
    state = prefill(system, params, PROMPTS, 8)
    right = propose(system, params, state).tokens
    as_ids = jnp.asarray(D2T - np.arange(U), jnp.int32)  # position i then scores id D2T[i]
    params["draft"]["head"] = {**params["draft"]["head"], "d2t": as_ids}
    wrong = propose(system, params, state).tokens
    assert right.tolist() != wrong.tolist()
