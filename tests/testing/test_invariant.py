"""Plain decoding through the verify pass: the same bits as speculative decoding, in any dtype."""

import pytest

from spec_jax import SpeculativeConfig, SpeculativeDecoder, load_draft, load_model
from spec_jax.data import python_source
from spec_jax.errors import ConfigError
from spec_jax.testing import invariant_pair, mock_model

CASES = {
    "standalone": ("zoo/draft", SpeculativeConfig("standalone", 5)),
    "eagle3": ("zoo/eagle3", SpeculativeConfig("eagle", 5)),
    "tree": ("zoo/draft", SpeculativeConfig("standalone", tree=(3, 2, 1))),
    "dynamic-tree": ("zoo/eagle3", SpeculativeConfig("eagle", 15, tree_depth=4, tree_top_k=4)),
}


def decode_all(name, dtype, num_prompts, num_tokens, length, *, has_usual=False):
    """Returns the outputs of the pair, and of usual plain decoding, one row a call."""
    target = load_model("zoo/target", dtype)
    draft, config = CASES[name]
    decoder = SpeculativeDecoder(target, load_draft(draft, target), config)
    decoders = [*invariant_pair(decoder), *[SpeculativeDecoder.new_n1(target)] * has_usual]
    texts = [text for _, text in python_source.documents("held_out")]
    ids = [target.tokenizer.encode(text) for text in texts]
    windows = (row[i : i + length] for i in range(0, 10**5, length) for row in ids)
    prompts = [row for row in windows if len(row) == length][:num_prompts]
    return [
        [d.generate(p, num_tokens, stop_tokens=[]).tokens for p in prompts] for d in decoders
    ], decoders


@pytest.mark.exhaustive
def test_plain_decoding_through_the_verify_pass_is_bitwise_equal_in_bfloat16():
    """A tree of the draft model's; a chain of EAGLE-3's stands in docs/audit.md, which runs."""
    (speculative, plain), decoders = decode_all("tree", "bfloat16", 2, 32, 60)
    assert speculative == plain
    assert decoders[0].stats.tau > 1.5 and decoders[1].stats.tau == 1


@pytest.mark.measure
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_no_row_of_a_long_run_differs_from_its_invariant_twin(name, dtype):
    """Also where the caches have 640 slots, of which usual attention reads a varying prefix."""
    (speculative, plain, usual), decoders = decode_all(name, dtype, 12, 96, 440, has_usual=True)
    parted = sum(a != b for a, b in zip(speculative, usual))
    rates = [f"{d.stats.tokens_per_s:.0f}" for d in decoders]
    print(f"{name} {dtype}: {parted} of 12 rows part from usual plain decoding; tok/s {rates}")
    assert speculative == plain


def test_a_decoder_without_one_width_has_no_invariant_pair():
    target, draft = mock_model(), mock_model(seed=1)
    plain = SpeculativeDecoder(target)
    adaptive = SpeculativeDecoder(target, draft, SpeculativeConfig(is_adaptive=True))
    for decoder, why in ((plain, "drafts nothing"), (adaptive, "chooses K while decoding")):
        with pytest.raises(ConfigError, match=why):
            invariant_pair(decoder)
