"""Drafts of the target's own first layers: what they are, and which targets have them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import decoders
from support.tiny_models import LLAMA, random_weights

import spec_jax
from spec_jax import LoadedModel, SpeculativeConfig, SpeculativeDecoder, testing
from spec_jax.drafters import registry
from spec_jax.drafters.early_exit import ExitConfig, early_exit
from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.overlap import overlap
from spec_jax.planning.roofline import memory, round_work

CONFIG = dataclasses.replace(LLAMA, num_hidden_layers=3)
TARGET = LoadedModel("target", transformer.model(CONFIG), random_weights(CONFIG, 2), config=CONFIG)
K, N = 3, 2


def decoder(draft="self:2", **options):
    config = SpeculativeConfig("self", num_speculative_tokens=K, **options)
    return SpeculativeDecoder(TARGET, spec_jax.load_draft(draft, TARGET), config)


def first_layers(num_layers):
    """The model that these layers are by themselves: its config and weights."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=num_layers)
    layers = {str(i): TARGET.params["layers"][str(i)] for i in range(num_layers)}
    return config, {**TARGET.params, "layers": layers}


@functools.partial(jax.jit, static_argnames="system")
def drafts(params, state, *, system):
    rows = (state.tokens, state.length, state.sampler, state.sampler.seed, None)
    context = system.context(*rows, params["target"], state.target)._replace(has_logits=True)
    return system.drafter.propose(params["draft"], state.draft, context, K)[0]


def test_drafts_are_those_of_a_model_of_these_layers_without_a_cache():
    """After rounds of mixed acceptance, of rows of several lengths."""
    one = decoder()
    system, params = one.system(), one.params(batch=3)
    state = decoders.prefill(system, params, [[1, 2, 3], [4, 5, 6, 7, 8], [9]], 30)
    config, weights = first_layers(N)
    logits_of = jax.jit(functools.partial(transformer.logits, weights, config=config))
    rows, counts = np.arange(3), set()
    for _ in range(4):
        proposal = drafts(params, state, system=system)
        texts, length = np.array(state.tokens), np.asarray(state.length)
        for k in range(K):
            expected = logits_of(texts)[rows, length + k]
            np.testing.assert_allclose(proposal.logits[:, k], expected, atol=1e-4)
            texts[rows, length + k + 1] = proposal.tokens[:, k]
        state, _ = decoders.run(system, params, state, 1)
        counts |= set((np.asarray(state.length) - length).tolist())
    assert len(counts) > 1


def test_a_name_says_the_layers_and_without_a_number_they_are_a_quarter():
    deep = dataclasses.replace(CONFIG, num_hidden_layers=30)
    assert [ExitConfig.of_target(deep, n).num_layers for n in ("", "8")] == [7, 8]
    alone = SpeculativeDecoder(TARGET, config=SpeculativeConfig("self", 2))
    assert alone.draft.config == ExitConfig(CONFIG, 1) and alone.draft.num_params == 0


@pytest.mark.parametrize("name", ["self:0", "self:3", "self:x", "self:-1"])
def test_there_is_no_draft_of_no_layer_or_of_all(name):
    with pytest.raises(ConfigError, match="expected 'self:N' with N from 1 to 2"):
        spec_jax.load_draft(name, TARGET)


def test_a_deeper_targets_draft_is_refused_and_so_are_options_of_weights():
    deep = dataclasses.replace(CONFIG, num_hidden_layers=6)
    config = SpeculativeConfig("self", 2)
    of_another = dataclasses.replace(decoder().draft, config=ExitConfig(deep, 5))
    with pytest.raises(ConfigError, match="the first 5 layers are to draft; the target has 3"):
        SpeculativeDecoder(TARGET, of_another, config)
    for options, message in (
        ({"method": "eagle"}, "has no weights; method is for others"),
        ({"norm_output": True}, "has no weights; norm_output is for others"),
        ({"dtype": "int7"}, "dtype"),
        ({"max_length": -3}, "max_length is -3"),
    ):
        with pytest.raises(ConfigError, match=message):
            spec_jax.load_draft("self:1", TARGET, **options)
    assert spec_jax.load_draft("self:1", TARGET, max_length=8).max_length == 8


def test_a_target_that_cannot_stop_early_has_no_such_drafts():
    mock = testing.mock_model(8)
    with pytest.raises(ConfigError, match="has no config"):
        SpeculativeDecoder(mock, config=SpeculativeConfig("self", 2))
    blind = lambda params, tokens, cache, *, window_offset=0: None
    with pytest.raises(ConfigError, match="takes no num_layers"):
        early_exit(mock.model._replace(forward=blind), 1)


def test_drafts_that_read_the_targets_cache_do_not_run_ahead_of_it():
    with pytest.raises(ConfigError, match="reads the target's states"):
        overlap.check(decoder().system())


def test_a_round_is_planned_as_passes_of_the_layers():
    """Each reads their weights, the norm and the output head; no memory is added."""
    draft = registry.config_of_target("self:2", CONFIG)
    model, _ = first_layers(N)
    ours, theirs = (round_work(CONFIG, x, K).passes for x in (draft, model))
    assert [one.work for one in ours[2:]] == [one.work for one in theirs[2:]]
    assert [(one.name, one.count) for one in ours] == [
        ("verify", 1),
        ("draft", 1),
        ("draft", K - 1),
    ]
    assert memory(CONFIG, draft) == memory(CONFIG)
