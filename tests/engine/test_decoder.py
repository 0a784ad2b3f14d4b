"""Text in, text out; bad input; statistics."""

from __future__ import annotations

import asyncio
import dataclasses
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import LLAMA, random_weights

from spec_jax import testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.decoding import Kind, loop
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.queue import DecodeQueue
from spec_jax.engine.stats import Stats, predicted_speedup, row_stats
from spec_jax.errors import ConfigError, InvalidDraftError, PromptError, WeightsError
from spec_jax.loading import LoadedModel, load_model
from spec_jax.models import transformer
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.rules import make_rule

GREEDY = make_rule(SpeculativeConfig(rejection_sampling_strategy="greedy"))
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


def test_pieces_of_text_join_to_the_text(speculative):
    pieces: dict[int, list[str]] = {}
    options = dict(
        stop="park", on_token=lambda row, piece: pieces.setdefault(row, []).append(piece)
    )
    rows = speculative.generate(PROMPTS, 40, **options)
    for row, generation in enumerate(rows):
        assert "".join(pieces[row]) == generation.text
        assert len(pieces[row]) > 2
    early, sent = rows[0].text[:12], []
    row = speculative.generate(PROMPTS[0], 40, stop=early, on_token=sent.append)
    assert row.text == "".join(sent) == ""


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


def test_seeds_reproduce_and_differ(stories):
    d = SpeculativeDecoder(stories, target_sampler=SamplerConfig(temperature=1.0, seed=5))
    a, b = d.generate([PROMPTS[0]] * 2, 20)
    assert a.tokens != b.tokens
    assert d.generate([PROMPTS[0]] * 2, 20, seeds=[6, 6])[0].tokens == b.tokens


# -------------------------------------------------------------------------- bad input


INVALID_PROMPTS = [
    ([], "empty"),
    ([[1, 2], []], "empty"),
    ([1, 512], "id 512"),
    ([-1], "id -1"),
    ([1] * 500, "maximum length of the target is 512"),
    ("a\ud800b", "character 2 of the prompt is half of a surrogate pair"),
]


@pytest.mark.parametrize("prompt, message", INVALID_PROMPTS)
def test_bad_prompts_are_refused_before_any_work(speculative, prompt, message):
    with pytest.raises(PromptError, match=message):
        speculative.generate(prompt, 60)


def test_no_prompt_and_no_room_are_refused(speculative):
    with pytest.raises(ConfigError, match="max_new_tokens is 0; expected"):
        speculative.generate("A", 0)
    with pytest.raises(ConfigError, match="stop string is empty"):
        speculative.generate("A", 5, stop="")
    with pytest.raises(ConfigError, match="rounds_per_sync is 0"):
        speculative.generate("A", 5, rounds_per_sync=0)
    with pytest.raises(PromptError, match="integer ids"):
        speculative.generate([0.5, 1.5], 5)
    with pytest.raises(ConfigError, match="2 seeds for 1 rows"):
        speculative.generate("A", 5, seeds=[1, 2])


def test_text_without_a_tokenizer_is_refused():
    d = SpeculativeDecoder(testing.mock_model())
    with pytest.raises(PromptError, match="no tokenizer"):
        d.generate("hello")
    with pytest.raises(ConfigError, match="no tokenizer"):
        d.generate([1], stop="x")


def test_vocabularies_that_differ_are_refused(stories):
    with pytest.raises(ConfigError, match="target mock-0 has 4 tokens, draft mock-0 has 5"):
        SpeculativeDecoder(testing.mock_model(4), testing.mock_model(5))
    backend = type(stories.tokenizer.backend).from_str(stories.tokenizer.backend.to_str())
    backend.add_tokens(["<other>"])
    other = dataclasses.replace(stories, name="other", tokenizer=Tokenizer(backend))
    with pytest.raises(ConfigError, match="different tokens"):
        SpeculativeDecoder(stories, other)


def test_parts_that_do_not_fit_are_refused(stories):
    ngram = SpeculativeConfig("ngram", rejection_sampling_strategy="logit-comparison")
    with pytest.raises(ConfigError, match="logit-comparison"):
        SpeculativeDecoder(stories, config=ngram)
    with pytest.raises(ConfigError, match="needs a draft"):
        SpeculativeDecoder(stories, config=SpeculativeConfig())
    with pytest.raises(ConfigError, match="'eagle' needs a head"):
        SpeculativeDecoder(stories, config=SpeculativeConfig("eagle"))
    greedy = SpeculativeConfig("ngram", rejection_sampling_strategy="greedy")
    with pytest.raises(ConfigError, match="argmax"):
        SpeculativeDecoder(stories, config=greedy, target_sampler=SamplerConfig(0.5))


INVALID_ARGS = [
    ((SpeculativeConfig("ngram"),), {}, "draft is a SpeculativeConfig"),
    ((), {"config": {"num_speculative_tokens": 2}}, "config is .*SpeculativeConfig"),
    (("zoo/draft",), {}, "draft is 'zoo/draft'.*load_draft"),
    ((), {"target_sampler": SamplerConfig(temperature=1.0), "rule": GREEDY}, "temperature 0"),
]


@pytest.mark.parametrize(("args", "options", "message"), INVALID_ARGS, ids=lambda x: "")
def test_slips_in_the_constructor_are_named(stories, args, options, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(stories, *args, **options)


def test_a_target_that_is_not_loaded_is_named():
    with pytest.raises(ConfigError, match="target is 'zoo/target'.*load_model"):
        SpeculativeDecoder("zoo/target")


INVALID_OPTIONS = [
    ({"stop_tokens": 2}, "stop_tokens is 2; expected a list"),
    ({"stop_tokens": [2.7]}, "a stop token is 2.7"),
    ({"stop_tokens": [2**40]}, "a stop token is"),
    ({"seeds": 3}, "seeds are 3"),
    ({"seeds": [1.5]}, "seeds are"),
    ({"rounds_per_sync": 1.5}, "rounds_per_sync is 1.5"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
]


@pytest.mark.parametrize(("options", "message"), INVALID_OPTIONS, ids=str)
def test_slips_in_a_call_are_named(stories, options, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder(stories).generate("A dog", **options)


CALLS = [
    lambda decoder, **limit: decoder.generate([1, 2], **limit),
    lambda decoder, **limit: decoder.stream([1, 2], **limit),
    lambda decoder, **limit: asyncio.run(decoder.generate_async([1, 2], **limit)),
    lambda decoder, **limit: decoder.warmup(2, **limit),
    lambda decoder, **limit: decoder.output_limits([[1, 2]], **limit),
    lambda decoder, **limit: DecodeQueue(decoder, [[1, 2]], batch=1, max_prompt_tokens=2, **limit),
]


@pytest.mark.parametrize(
    "call", CALLS, ids=["generate", "stream", "generate_async", "warmup", "output_limits", "queue"]
)
def test_a_limit_that_may_count_either_way_is_refused_with_both_names(decoder, call, request):
    both = r"max_new_tokens, which counts the output alone.*max_length, which counts prompt and"
    with pytest.raises(ConfigError, match=f"max_tokens is ambiguous here; name {both}"):
        call(decoder, max_tokens=16)
    name = {"queue": "DecodeQueue"}.get(request.node.callspec.id, request.node.callspec.id)
    unexpected = rf"^{name}\(\) got an unexpected keyword argument"
    with pytest.raises(TypeError, match=rf"{unexpected} 'max_lenght' \(did you mean max_length\?"):
        call(decoder, max_lenght=16)
    for internal in ("token", "part", "total", "has_pieces", "unknow"):
        with pytest.raises(TypeError, match=f"{unexpected} '{internal}'") as raised:
            call(decoder, **{internal: 3})
        assert not re.search(r"mean (token|parts|totals|has_pieces|unknown)\?", str(raised.value))
    hint = "$" if name == "output_limits" else "; pass sampler=SamplerConfig"
    with pytest.raises(TypeError, match=rf"{unexpected} 'temperature'{hint}"):
        call(decoder, temperature=0.5)
    with pytest.raises(ConfigError, match="max_new_tokens is 5 .* max_length 16 .*name one"):
        call(decoder, max_new_tokens=5, max_length=16)
    with pytest.raises(PromptError, match="2 tokens leaves no room for output: max_length is 2"):
        call(decoder, max_length=2)


@pytest.mark.exhaustive
def test_numbers_of_numpy_are_numbers(stories):
    sampler = SamplerConfig(temperature=np.float32(0.5), seed=np.int64(3), top_k=np.int32(4))
    few = SpeculativeDecoder(stories, target_sampler=sampler).generate("A dog", np.int64(3))
    assert len(few.tokens) == 3


def test_a_dtype_that_weights_cannot_have_is_refused():
    with pytest.raises(ConfigError, match="int8"):
        load_model("zoo/draft", "int8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_that_pad_the_embedding_are_never_emitted(temperature):
    """The padding's own logits are the largest; drafting them is an error that names the range."""
    config, used = dataclasses.replace(LLAMA, max_position_embeddings=256), 20
    weights = random_weights(config)
    head = weights["head"].at[:, used:].mul(50.0)
    padded = LoadedModel(
        "padded",
        transformer.model(config, num_tokens=used),
        {**weights, "head": head},
        config=config,
    )
    sampler = SamplerConfig(temperature=temperature)
    draft = dataclasses.replace(padded, name="same")
    plain = SpeculativeDecoder(padded, target_sampler=sampler).generate([1, 2], 30)
    fast = SpeculativeDecoder(
        padded,
        draft,
        SpeculativeConfig(rejection_sampling_strategy="match"),
        target_sampler=sampler,
    ).generate([1, 2], 30)
    assert max(plain.tokens) < used and fast.tokens == plain.tokens
    with pytest.raises(PromptError, match="ids 0 to 19"):
        SpeculativeDecoder(padded).encode([1, used])
    drafter = testing.scripted_drafter(
        lambda tokens, length, K: jnp.full((len(length), K), used, jnp.int32)
    )
    with pytest.raises(InvalidDraftError, match=r"0\.\.19"):
        SpeculativeDecoder(padded, drafter=drafter).generate([1, 2], 30)


def test_an_unknown_model_is_an_error_that_names_the_zoo():
    with pytest.raises(WeightsError, match="zoo/target"):
        load_model("no/such/model")


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


@pytest.mark.exhaustive
def test_expected_acceptance_is_near_the_measured_one():
    target, draft = testing.mock_model(6, 0), testing.mock_model(6, 1)
    options = dict(target_sampler=SamplerConfig(temperature=1.0), has_expected=True)
    d = SpeculativeDecoder(target, draft, SpeculativeConfig(num_speculative_tokens=3), **options)
    d.generate([[i % 6] for i in range(400)], 40)
    measured, expected = d.stats.acceptance_by_position, d.stats.expected_by_position
    for a, e, n in zip(measured, expected, d.stats.reached_at):
        assert abs(a - e) < 5 * 0.5 / np.sqrt(n)


def test_predicted_speedup_is_leviathans_formula():
    a, c, k = 0.8, 0.1, 6
    closed = (1 - a ** (k + 1)) / ((1 - a) * (c * k + 1))
    assert abs(predicted_speedup([a] * k, c) - closed) < 1e-12
    assert abs(closed - 2.47) < 0.005  # the published optimum for these rates
    assert predicted_speedup([float("nan")], 0.0) == 1.0


def test_tokens_of_a_finished_row_hold_their_stop_token(stories, plain_rows):
    token = plain_rows[0].tokens[7]
    row = SpeculativeDecoder(stories).generate(PROMPTS[0], 60, stop_tokens=[token])
    assert row.tokens[-1] == token and row.finish_reason == "stop_token"
    assert jnp.asarray(row.tokens).shape[0] == plain_rows[0].tokens.index(token) + 1


@pytest.mark.exhaustive
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


INVALID_CHANGES = [
    (lambda p: {**p, "more": p["embed"]}, r"params have other names: \['more'\]"),
    (lambda p: {**p, "embed": p["embed"][:-1]}, r"are float32\[2047, 256\]; expected"),
    (lambda p: {**p, "embed": p["embed"].astype("bfloat16")}, "are bfloat16.*; expected fl"),
]


@pytest.mark.parametrize("change, message", INVALID_CHANGES)
def test_other_weights_are_of_the_same_shapes(change, message):
    target = load_model("zoo/target")
    decoder = SpeculativeDecoder(target)
    with pytest.raises(ConfigError, match=message):
        decoder.with_params(target=change(target.params))
    with pytest.raises(ConfigError, match="params of a draft are given; this decoder has none"):
        decoder.with_params(draft=target.params)
