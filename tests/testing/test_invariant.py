"""Plain decoding through the verify pass: the same bits as speculative decoding, in any dtype."""

import pytest

from spec_jax import SpeculativeConfig, SpeculativeDecoder, load_draft, load_model
from spec_jax.data import python_source
from spec_jax.errors import ConfigError
from spec_jax.testing import invariant_pair, mock_model


@pytest.mark.exhaustive
def test_plain_decoding_through_the_verify_pass_is_bitwise_equal_in_bfloat16():
    """A tree of the draft model's, where the caches have 640 slots, of which usual attention reads
    a varying prefix; a chain of EAGLE-3's stands in docs/audit.md, which runs.
    """
    target = load_model("zoo/target", "bfloat16")
    config = SpeculativeConfig("standalone", tree=(3, 2, 1))
    pair = invariant_pair(SpeculativeDecoder(target, load_draft("zoo/draft", target), config))
    texts = (target.tokenizer.encode(text) for _, text in python_source.documents("held_out"))
    prompts = [ids[:440] for ids in texts if len(ids) >= 440][:2]
    one, other = ([d.generate(x, 32, stop_tokens=[]).tokens for x in prompts] for d in pair)
    assert one == other and len(one) == 2
    assert pair[0].stats.tau > 1.5 and pair[1].stats.tau == 1


def test_a_decoder_without_one_width_has_no_invariant_pair():
    target, draft = mock_model(), mock_model(seed=1)
    plain = SpeculativeDecoder(target)
    adaptive = SpeculativeDecoder(target, draft, SpeculativeConfig(is_adaptive=True))
    for decoder, why in ((plain, "drafts nothing"), (adaptive, "chooses K while decoding")):
        with pytest.raises(ConfigError, match=why):
            invariant_pair(decoder)
