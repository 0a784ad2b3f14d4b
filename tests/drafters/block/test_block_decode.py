"""Decoding with block drafters, with heads whose drafts are accepted 0 to K times."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from support.block_drafts import HEADS, TARGET, head_of
from support.tiny_models import LLAMA

from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.config import SamplerConfig
from spec_jax.drafters.block.config import DSparkConfig, TreeFlashConfig
from spec_jax.errors import ConfigError
from spec_jax.models import transformer

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5], [4], [11, 2, 11]]
SAMPLERS = [SamplerConfig(), SamplerConfig(temperature=1.0, seed=3)] * 2
V, D, K = LLAMA.vocab_size, LLAMA.hidden_size, 4


def bigrams(kind):
    """A head whose step alone predicts the next token from the last one, as the target would."""
    if kind == "dspark":
        config = DSparkConfig.of_target(LLAMA, block_size=K, markov_rank=V)
        head = head_of(config)
        alone = transformer.forward(TARGET.params, jnp.arange(V)[:, None], config=LLAMA)
        table = transformer.model(LLAMA).unembed(TARGET.params, alone.hidden[:, 0])
        changes = {"norm": jnp.zeros(D), "step": {"embed": jnp.eye(V), "out": table}}
    else:
        config = TreeFlashConfig.of_target(LLAMA, block_size=K + 1)
        head, F = head_of(config), LLAMA.intermediate_size
        ug = jnp.zeros((2 * D, 2 * F)).at[:D, :D].set(jnp.eye(D))
        bias = jnp.zeros(2 * F).at[F:].set(30.0)  # the gate is open, whatever it reads
        step = {"norm": jnp.ones(D), "ug": ug, "ug_bias": bias, "down": 30 * jnp.eye(F, D)}
        changes = {"norm": TARGET.params["final_norm"], "step": step}
    return dataclasses.replace(head, params=head.params | changes)


# Options, a mesh, and how many of the counts 0 to K of accepted drafts must occur.
WAYS = {
    "chain": ({"num_speculative_tokens": K}, None, K + 1),
    "static tree": ({"tree": (2, 1, 1, 1)}, None, K + 1),
    "dynamic tree": ({"num_speculative_tokens": 8, "tree": {"depth": K, "top_k": 3}}, None, 3),
    "adaptive": ({"adaptive": {"buckets": (0, K)}}, None, 1),
    "mesh": ({"num_speculative_tokens": K}, "data:2,tensor:2", K + 1),
}


@pytest.mark.representatives("chain-dspark")
@pytest.mark.parametrize("kind", ["dspark", "treeflash"])
@pytest.mark.parametrize("way", WAYS)
def test_it_decodes_as_plain_decoding_does_whatever_is_accepted(kind, way):
    options, mesh, count = WAYS[way]
    config = SpeculativeConfig(kind, rejection_sampling_strategy="match", **options)
    decoder = SpeculativeDecoder(TARGET, bigrams(kind), config, mesh=mesh)
    fast, slow = (
        d.generate(PROMPTS, 30, sampler=SAMPLERS) for d in (decoder, SpeculativeDecoder(TARGET))
    )
    assert [row.tokens for row in fast] == [row.tokens for row in slow]
    lengths = decoder.stats.lengths
    assert len(lengths) == K + 1 and min(lengths[:count]) > 0, lengths


def test_it_samples_with_block_verification_and_dflash_drafts_the_likeliest():
    """Rule and draft temperature where nothing says otherwise; of trees the usual rule."""
    ways = {}
    for kind in ("dflash", "dspark"):
        decoder = SpeculativeDecoder(TARGET, head_of(HEADS[kind]), SpeculativeConfig(kind, 2))
        rules = [decoder.system(SamplerConfig(temperature=t)).rule.name for t in (0.0, 1.0)]
        ways[kind] = (*rules, decoder.system().drafter.draft_temperature)
    assert ways == {"dflash": ("greedy", "block", 0.0), "dspark": ("greedy", "block", None)}
    tree = SpeculativeConfig("dspark", tree=(2, 1))
    decoder = SpeculativeDecoder(TARGET, head_of(HEADS["dspark"]), tree)
    assert decoder.system(SamplerConfig(temperature=1.0)).rule.name == "residual"


def test_a_tree_deeper_than_a_block_is_refused_where_it_is_made():
    with pytest.raises(ConfigError, match="5 drafts in a row are more than 4"):
        config = SpeculativeConfig("dspark", tree=(1,) * 5)
        SpeculativeDecoder(TARGET, head_of(HEADS["dspark"]), config)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "treeflash"])
def test_a_head_without_a_confidence_refuses_to_stop_by_it(kind):
    config = SpeculativeConfig(kind, 2, confidence_threshold=0.4)
    with pytest.raises(ConfigError, match=f"confidence_threshold is 0.4; this '{kind}' head"):
        SpeculativeDecoder(TARGET, head_of(HEADS[kind]), config)


@pytest.mark.exhaustive
def test_where_all_candidates_are_banned_others_are_drafted():
    """Drafts come from the block's own scores then, and the texts do not end."""
    banned = tuple((i, -float("inf")) for i in range(3, LLAMA.vocab_size))
    decoder = SpeculativeDecoder(TARGET, head_of(HEADS["dflash2"]), SpeculativeConfig("dflash2", K))
    row = decoder.generate(PROMPTS[0], 20, sampler=SamplerConfig(logit_bias=banned, seed=3))
    assert (row.finish_reason, len(row.tokens)) == ("length", 20) and max(row.tokens) < 3


@pytest.mark.exhaustive
def test_dflash_drafts_the_likeliest_tokens_of_a_sampled_row_by_itself():
    decoder = SpeculativeDecoder(TARGET, head_of(HEADS["dflash"]), SpeculativeConfig("dflash", K))
    warm = SamplerConfig(temperature=1.0, seed=3)
    alone, cold, hot = (
        [row.tokens for row in decoder.generate(PROMPTS, 20, sampler=warm, draft_sampler=draft)]
        for draft in (None, SamplerConfig(seed=3), warm)
    )
    assert alone == cold != hot


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [None, "data:2,tensor:2"])
def test_pairs_of_candidates_decode_as_plain_decoding_does(mesh):
    """With a token that target and draft both like, so that some drafts are right."""
    samplers = [dataclasses.replace(sampler, logit_bias=((5, 7.0),)) for sampler in SAMPLERS]
    config = SpeculativeConfig("dflash2", K, rejection_sampling_strategy="match")
    head = head_of(dataclasses.replace(HEADS["dflash2"], selector_top_k=25))
    decoder = SpeculativeDecoder(TARGET, head, config, mesh=mesh)
    fast, slow = (
        d.generate(PROMPTS, 40, sampler=samplers) for d in (decoder, SpeculativeDecoder(TARGET))
    )
    assert [row.tokens for row in fast] == [row.tokens for row in slow]
    assert min(decoder.stats.lengths) > 0, decoder.stats.lengths
