"""Decoding with block drafters, with heads whose drafts are accepted 0 to K times."""

import pytest
from support import parallel_heads
from support.block_drafts import HEADS, TARGET, head_of
from support.tiny_models import LLAMA

from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.config import SamplerConfig

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5], [4], [11, 2, 11]]
K = 4


def test_it_samples_with_block_verification_and_dflash_drafts_the_likeliest():
    """Rule and draft temperature where nothing says otherwise; of trees the usual rule."""
    ways = {}
    heads = {kind: head_of(HEADS[kind]) for kind in ("dflash", "dspark")}
    heads["peagle"] = parallel_heads.head_of(parallel_heads.HEADS["p-eagle"])
    for kind, head in heads.items():
        decoder = SpeculativeDecoder(TARGET, head, SpeculativeConfig(kind, 2))
        rules = [decoder.system(SamplerConfig(temperature=t)).rule.name for t in (0.0, 1.0)]
        ways[kind] = (*rules, decoder.system().drafter.defaults.draft_temperature)
    cold, own = ("greedy", "block", 0.0), ("greedy", "block", None)
    assert ways == {"dflash": cold, "dspark": own, "peagle": cold}
    tree = SpeculativeConfig("dspark", tree=(2, 1))
    decoder = SpeculativeDecoder(TARGET, head_of(HEADS["dspark"]), tree)
    assert decoder.system(SamplerConfig(temperature=1.0)).rule.name == "residual"


@pytest.mark.exhaustive
def test_where_all_candidates_are_banned_others_are_drafted():
    """Drafts come from the block's own scores then, and the texts do not end."""
    banned = tuple((i, -float("inf")) for i in range(3, LLAMA.vocab_size))
    decoder = SpeculativeDecoder(TARGET, head_of(HEADS["dflash2"]), SpeculativeConfig("dflash2", K))
    row = decoder.generate(PROMPTS[0], 20, sampler=SamplerConfig(logit_bias=banned, seed=3))
    assert (row.finish_reason, len(row.tokens)) == ("length", 20) and max(row.tokens) < 3
