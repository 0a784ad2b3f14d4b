"""The second published shape of a decoder: its config, N=1, its limit, and models not loaded."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
from support.tiny_models import LLAMA

from spec_jax import (
    AsyncSpecConfig,
    ModelNotLoaded,
    SamplerConfig,
    SpeculativeConfig,
    SpeculativeDecoder,
    Stats,
)
from spec_jax.errors import ConfigError, PromptError
from spec_jax.testing import mock_model

WARM, COOL = SamplerConfig(1.0, seed=5), SamplerConfig(0.2, seed=5)
PROMPT, NEW = [1, 2, 3], 40


@pytest.fixture(scope="module")
def pair():
    return mock_model(12, 0), mock_model(12, 1)


def tokens(decoder, **options):
    return decoder.generate(PROMPT, NEW, **options).tokens


@pytest.mark.parametrize("sampler", [SamplerConfig(), WARM], ids=["greedy", "sampled"])
def test_n1_is_plain_decoding_and_drafts_nothing(pair, sampler):
    plain = SpeculativeDecoder(pair[0], target_sampler=sampler)
    options = dict(target_sampler=sampler)
    decoders = [
        SpeculativeDecoder.new_n1(*pair, SpeculativeConfig(), **options),
        SpeculativeDecoder.new_n1(pair[0], **options),
        SpeculativeDecoder(*pair, AsyncSpecConfig(4, None, sampler, force_n1=True)),
        SpeculativeDecoder.new_n1(*pair, AsyncSpecConfig(4, None, sampler)),
        SpeculativeDecoder(pair[0], None, AsyncSpecConfig(4, None, sampler, force_n1=True)),
    ]
    for decoder in decoders:
        assert tokens(decoder) == tokens(plain) and decoder.num_draft == 0
        s = decoder.stats
        assert s.drafted == s.rejected == s.n1_fallbacks == 0 and s.rounds == NEW - 1
        assert s.elapsed_s == s.prefill_s + s.decode_s > 0


def test_rejections_and_fallbacks_add_up():
    one = Stats(1, 1, reached_at=(3, 1), accepted_at=(0, 0), n1_fallbacks=2)
    assert one.rejected == 4 and (one + one).n1_fallbacks == 4
    assert {"rejected", "elapsed_s", "n1_fallbacks"} <= set(one.to_dict())


def test_the_configs_max_tokens_and_max_length_count_prompt_and_output_of_each_row(pair):
    decoder = SpeculativeDecoder(*pair, AsyncSpecConfig(3, max_tokens=20))
    prompts = [[1], [1, 2, 3, 4], list(range(12))]
    assert [len(row.tokens) for row in decoder.generate(prompts)] == [19, 16, 8]
    assert [len(row.tokens) for row in decoder.generate(prompts, max_length=13)] == [12, 9, 1]
    assert [len(row.tokens) for row in decoder.generate(prompts, 5)] == [5, 5, 5]
    with pytest.raises(PromptError, match="max_tokens of the decoder's config is 20"):
        decoder.generate([1] * 20)


INVALID = [
    ({"spec_k": 0}, "spec_k is 0; expected an integer of 1"),
    ({"max_tokens": 1}, "max_tokens is 1; expected an integer of 2"),
    ({"force_n1": 1}, "force_n1 is 1"),
    ({"target_sampler": None}, "target_sampler is None; expected a SamplerConfig"),
    ({"draft_sampler": {"temperatur": 1}}, "'temperatur' .did you mean temperature"),
    ({"k": 3}, "unknown key 'k' .did you mean spec_k.. in AsyncSpecConfig; known"),
]


@pytest.mark.parametrize(("values", "message"), INVALID, ids=str)
def test_slips_in_the_config_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        AsyncSpecConfig.from_dict(values)


def test_the_config_comes_from_plain_values():
    values = {"spec_k": "3", "target_sampler": {"temperature": 1, "seed": 5}, "max_tokens": 43.0}
    assert AsyncSpecConfig.from_dict(values) == AsyncSpecConfig(3, None, WARM, False, 43)


def test_models_that_are_not_loaded_are_named(pair):
    for model, message in [
        ("zoo/target", "'zoo/target'.*call load_(model|draft)"),
        (pathlib.Path("x"), "call load_(model|draft)"),
        (LLAMA, "ModelConfig"),
        (pair[0].model, "Model"),
        (dataclasses.replace(pair[0], params=None), "mock-0 has no weights"),
    ]:
        with pytest.raises(ModelNotLoaded, match=f"target (is )?.*{message}"):
            SpeculativeDecoder(model)
        with pytest.raises(ModelNotLoaded, match=f"draft (is )?.*{message}"):
            SpeculativeDecoder(pair[0], model)
    with pytest.raises(ModelNotLoaded, match="target is None"):
        SpeculativeDecoder(None)
