"""Text in, text out; bad input; statistics."""

from __future__ import annotations

import asyncio
import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.decoding import Kind, loop
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.queue import DecodeQueue
from spec_jax.engine.stats import Stats, predicted_speedup, row_stats
from spec_jax.errors import ConfigError, InvalidDraftError, PromptError
from spec_jax.loading import load_model

PROMPTS = ["Once upon a time", "Tom and Lily went to the park.", "A dog"]


@pytest.fixture(scope="module")
def speculative(stories):
    config = SpeculativeConfig("ngram", num_speculative_tokens=3)
    return SpeculativeDecoder(stories, config=config)


@pytest.fixture(scope="module")
def plain_rows(stories):
    return SpeculativeDecoder(stories).generate(PROMPTS, 60)


def test_text_is_the_known_story(plain_rows):
    assert plain_rows[0].text.startswith(
        ", there was a little girl named Lily. She loved to play outside in the park."
    )


def test_one_prompt_gives_one_generation_and_ids_equal_text(stories, speculative, plain_rows):
    one = speculative.generate(PROMPTS[0], 60)
    ids = speculative.generate(stories.tokenizer.encode(PROMPTS[0]), 60)
    assert one.text == ids.text == plain_rows[0].text
    assert one.tokens == plain_rows[0].tokens


@pytest.mark.parametrize("stop", ["park", [". She", "Lily"], "zzz"])
def test_stop_strings_cut_text_and_counts(speculative, plain_rows, stop):
    rows = speculative.generate(PROMPTS, 60, stop=stop)
    stops = [stop] if isinstance(stop, str) else stop
    for row, plain in zip(rows, plain_rows):
        at = [plain.text.find(s) for s in stops if s in plain.text]
        if not at:
            assert row.text == plain.text and row.finish_reason != "stop_string"
            continue
        assert row.text == plain.text[: min(at)]
        assert row.finish_reason == "stop_string"
        assert row.tokens == plain.tokens[: len(row.tokens)]
        s = row.stats
        assert s.emitted == len(row.tokens) == s.first + s.accepted + s.corrected + s.bonus


def test_statistics_add_up_over_calls(speculative):
    speculative.reset_stats()
    first = speculative.generate(PROMPTS, 20)
    second = speculative.generate(PROMPTS[:1], 20)
    total = speculative.stats
    assert total.emitted == sum(len(g.tokens) for g in [*first, *second])
    assert total.first == 4 and total.decode_s > 0 and total.prefill_s > 0
    assert total.rounds == total.corrected + total.bonus
    values = total.to_dict()
    assert values["tau"] == total.tau and values["accepted"] == total.accepted
    speculative.reset_stats()
    assert speculative.stats == Stats()


def test_the_resolved_config_is_visible(stories):
    config = SpeculativeConfig("ngram")
    greedy = SpeculativeDecoder(stories, config=config)
    sampled = SpeculativeDecoder(stories, config=config, target_sampler=SamplerConfig(1.0))
    own = SpeculativeDecoder(stories, stories, target_sampler=SamplerConfig(1.0))
    strategies = [d.config.rejection_sampling_strategy for d in (greedy, sampled, own)]
    assert strategies == ["greedy", "match", "residual"]
    assert SpeculativeDecoder(stories).config is None


# -------------------------------------------------------------------------- bad input


CALLS = [
    lambda decoder, **limit: decoder.generate([1, 2], **limit),
    lambda decoder, **limit: decoder.stream([1, 2], **limit),
    lambda decoder, **limit: asyncio.run(decoder.generate_async([1, 2], **limit)),
    lambda decoder, **limit: decoder.warmup(2, **limit),
    lambda decoder, **limit: DecodeQueue(decoder, [[1, 2]], batch=1, max_prompt_tokens=2, **limit),
]


@pytest.mark.parametrize(
    "call", CALLS, ids=["generate", "stream", "generate_async", "warmup", "queue"]
)
def test_a_limit_that_may_count_either_way_is_refused_with_both_names(decoder, call, request):
    both = r"max_new_tokens, which counts the output alone.*max_length, which counts prompt and"
    with pytest.raises(ConfigError, match=f"max_tokens is ambiguous here; name {both}"):
        call(decoder, max_tokens=16)
    name = {"queue": "DecodeQueue"}.get(request.node.callspec.id, request.node.callspec.id)
    unexpected = rf"^{name}\(\) got an unexpected keyword argument"
    with pytest.raises(TypeError, match=rf"{unexpected} 'max_lenght' \(did you mean max_length\?"):
        call(decoder, max_lenght=16)
    with pytest.raises(TypeError, match=rf"{unexpected} 'temperature'; pass sampler=Sampler"):
        call(decoder, temperature=0.5)
    with pytest.raises(ConfigError, match="max_new_tokens is 5 .* max_length 16 .*name one"):
        call(decoder, max_new_tokens=5, max_length=16)
    with pytest.raises(PromptError, match="2 tokens leaves no room for output: max_length is 2"):
        call(decoder, max_length=2)


ELSEWHERE = {  # what other libraries call an option, and the option that is named
    "eos_token_id": r"\(did you mean stop_tokens\?\)$",
    "stop_token_ids": r"\(did you mean stop_tokens\?\)$",
    "stop_strings": r"\(did you mean stop\?\)$",
    "num_return_sequences": r"\(did you mean num_samples\?\)$",
    "n": r"\(did you mean num_samples\?\)$",
    "max_completion_tokens": r"\(did you mean max_new_tokens\?\)$",
    "input_ids": r"\(did you mean prompts\?\)$",
    "streamer": r"\(did you mean on_token\?\)$",
    "do_sample": r"; pass sampler=SamplerConfig\(temperature=1.0\)",
    "ignore_eos": r"; pass stop_tokens=\(\)",
    "logits_processor": r"; pass sampler=SamplerConfig\(processors=",
    "min_new_tokens": "; there is no minimum",
    "num_beams": "; there is no beam search",
    "assistant_model": r"; give the draft to SpeculativeDecoder\(target, draft\)$",
}


def test_options_of_other_libraries_lead_to_those_of_this_one(decoder):
    for name, words in ELSEWHERE.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}' ?{words}"):
            decoder.generate([1, 2], **{name: 1})


def test_drafts_of_ids_that_only_pad_the_embedding_are_an_error_that_names_the_range():
    model = dataclasses.replace(
        testing.mock_model(8), model=testing.toy_model(8)._replace(num_tokens=6)
    )
    fill = lambda tokens, length, K: jnp.full((len(length), K), 6, jnp.int32)
    with pytest.raises(InvalidDraftError, match=r"vocabulary 0\.\.5, .* in rows \[0\]"):
        SpeculativeDecoder(model, drafter=testing.scripted_drafter(fill)).generate([1, 2], 30)


# ------------------------------------------------------------------------- statistics


def test_counts_of_a_hand_written_record():
    """first | 2 accepted, corrected | bonus of an empty draft | 2 accepted, cut."""
    k = Kind
    kind = np.array(
        [k.FIRST, k.ACCEPTED, k.ACCEPTED, k.CORRECTED, k.BONUS, k.ACCEPTED, k.ACCEPTED], np.int8
    )
    offered = np.array([-1, 3, -1, -1, 0, 3, -1], np.int8)
    expected = np.array([np.nan, 0.9, 0.8, 0.5, np.nan, 0.7, 0.6], np.float32)
    s = row_stats(kind, offered, 3, expected)
    assert (s.emitted, s.first, s.accepted, s.corrected, s.bonus) == (7, 1, 4, 1, 1)
    assert (s.rounds, s.drafted, s.lengths) == (3, 5, (1, 0, 2, 0))
    assert s.accepted_at == (2, 2, 0) and s.reached_at == (2, 2, 1) and s.drafted_at == (2, 2, 1)
    assert s.cut_at == (0, 0, 1) and s.offered_at == (2, 2, 2)
    assert s.tau == 2 and s.acceptance_by_position == (1, 1, 0)
    np.testing.assert_allclose(s.expected_by_position, (0.8, 0.7, 0.5), rtol=1e-6)
    both = s + s
    assert both.emitted == 14 and both.reached_at == (4, 4, 2)
    assert (s + Stats()) == s


def test_statistics_that_do_not_add_up_are_an_error():
    with pytest.raises(AssertionError, match="emitted 3 != first 1"):
        Stats(emitted=3, first=1, accepted=1)


def test_predicted_speedup_is_leviathans_formula():
    a, c, k = 0.8, 0.1, 6
    closed = (1 - a ** (k + 1)) / ((1 - a) * (c * k + 1))
    assert abs(predicted_speedup([a] * k, c) - closed) < 1e-12
    assert abs(closed - 2.47) < 0.005  # the published optimum for these rates
    assert predicted_speedup([float("nan")], 0.0) == 1.0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("programs_kept")
def test_other_weights_need_no_other_programs():
    """As reinforcement learning needs it: sample, update the weights, sample again."""
    target, draft = (load_model(f"zoo/{name}") for name in ("target", "draft"))
    decoder = SpeculativeDecoder(target, draft, SpeculativeConfig("standalone", 2))
    before = decoder.generate("def f(", 8).tokens
    scaled = jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, target.params)
    decoder.warmup(4, 8)
    programs = (loop.prefill_target, loop.generate)
    compiled = [program.num_programs() for program in programs]
    other = decoder.with_params(target=scaled)
    tokens = other.generate("def f(", 8).tokens
    assert [program.num_programs() for program in programs] == compiled
    fresh = dataclasses.replace(target, params=scaled)
    assert tokens == SpeculativeDecoder(fresh).generate("def f(", 8).tokens
    assert decoder.generate("def f(", 8).tokens == before
    assert other.target.params is not target.params and other.with_params(draft=draft.params)
    frozen = decoder.with_params(target=flax.core.freeze(scaled))  # of flax, with the same names
    assert frozen.generate("def f(", 8).tokens == tokens
