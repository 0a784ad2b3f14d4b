"""Conversations as prompts: the target's chat template, in code as in experiments."""

from __future__ import annotations

import dataclasses

import pytest
from support.chat_templates import CHATML, LLAMA3, THINKING, byte_level

from spec_jax import DecodeQueue, SamplerConfig, SpeculativeDecoder, testing
from spec_jax.data.questions import Question
from spec_jax.data.records import Conversation
from spec_jax.errors import ConfigError, PromptError
from spec_jax.evaluation.prompts import PromptEncoder

HELLO = [{"role": "user", "content": "What is two and two?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *HELLO,
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "And a café?"},
]


@pytest.fixture(scope="module")
def decoder():
    tokenizer = byte_level(CHATML)
    target = testing.mock_model(tokenizer.vocab_size, contexts=7)
    return SpeculativeDecoder(dataclasses.replace(target, tokenizer=tokenizer))


def with_tokenizer(decoder, tokenizer):
    return SpeculativeDecoder(dataclasses.replace(decoder.target, tokenizer=tokenizer))


def test_a_conversation_is_the_templates_text_without_a_second_start(decoder):
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is two and two?<|im_end|>"
        "\n<|im_start|>assistant\nfour<|im_end|>\n<|im_start|>user\nAnd a café?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = decoder.encode(TALK)
    backend = decoder.target.tokenizer.backend
    assert backend.decode(ids, skip_special_tokens=False) == text
    assert decoder.target.tokenizer.encode(text)[1:] == ids  # which puts <s> in front


def test_one_conversation_gives_one_generation_and_several_a_list(decoder):
    one = decoder.generate(messages=TALK, max_new_tokens=6)
    both = decoder.generate(messages=[TALK, HELLO], max_new_tokens=6)
    assert one.tokens == decoder.generate(decoder.encode(TALK), 6).tokens == both[0].tokens
    (alone,) = decoder.generate(messages=[HELLO], max_new_tokens=6)
    assert len(both) == 2 and both[1].tokens == alone.tokens


def test_streams_and_queues_take_conversations(decoder):
    text = decoder.generate(messages=HELLO, max_new_tokens=6).text
    assert "".join(decoder.stream(messages=HELLO, max_new_tokens=6)) == text
    for prompts in ([HELLO], enumerate([HELLO])):
        queue = DecodeQueue(decoder, prompts, batch=1, max_prompt_tokens=64, max_new_tokens=6)
        assert [(i, row.text) for i, row in queue] == [(0, text)]
    refused = DecodeQueue(decoder, enumerate([TALK[:3]]), batch=1, max_prompt_tokens=64)
    with pytest.raises(PromptError, match="prompt 0: the last message is the assistant's"):
        next(refused)


def test_experiments_encode_a_conversation_likewise(decoder):
    prompt = Question("talk", turns=(tuple(TALK),))
    assert PromptEncoder(decoder.target)(prompt) == decoder.encode(TALK)


SCHEMA = {"type": "function", "function": {"name": "add"}}
QUICK = {"enable_thinking": False}


def test_variables_of_the_template_reach_it_from_calls_queues_and_experiments(decoder):
    decoder, text = with_tokenizer(decoder, byte_level(THINKING)), "<|im_start|>assistant\n"
    target, decode = decoder.target, decoder.target.tokenizer.backend.decode
    plain, quick = decoder.encode(HELLO), decoder.encode(HELLO, QUICK)
    assert decode(quick[len(plain) :], skip_special_tokens=False) == "<think>\n\n</think>\n\n"
    assert decode(plain, skip_special_tokens=False).endswith(text)
    tools = {**QUICK, "tools": [SCHEMA]}
    shown = decode(decoder.encode(HELLO, tools), skip_special_tokens=False)
    assert shown.startswith(
        '<|im_start|>system\n[{"type": "function", "function": {"name": "add"}}]'
    )
    row = decoder.generate(messages=HELLO, chat_template_kwargs=QUICK, max_new_tokens=6)
    assert row.trace.prompt == tuple(quick)
    options = dict(batch=1, max_prompt_tokens=64, max_new_tokens=6, chat_template_kwargs=QUICK)
    assert dict(DecodeQueue(decoder, [HELLO], **options))[0].tokens == row.tokens
    by_default = target.with_chat_template_kwargs(QUICK)
    question = Question("talk", turns=(tuple(HELLO),))
    assert PromptEncoder(by_default)(question) == quick != PromptEncoder(target)(question)
    (prompt,) = PromptEncoder(by_default).every(Conversation(HELLO, None, "here"))
    assert prompt == quick


UNREAD = [
    ({"enable_thinkng": False}, r"read .* 'enable_thinkng' \(did you mean enable_thinking\?\); it"),
    (
        {"messages": HELLO},
        "does not read the variable 'messages'.*; it reads enable_thinking, tools",
    ),
    ({"tools": ["add"]}, r"tools of the chat template are \['add'\]; expected objects"),
    ({"documents": [{"text": "x"}]}, "does not read the variable 'documents'"),
    ({"enable_thinking": {3}}, "a variable holds what JSON cannot"),
    (["enable_thinking"], r"chat_template_kwargs is \['enable_thinking'\]; expected an object"),
]


@pytest.mark.parametrize(("variables", "words"), UNREAD, ids=lambda x: "")
def test_variables_without_an_effect_are_refused(decoder, variables, words):
    decoder = with_tokenizer(decoder, byte_level(THINKING))
    with pytest.raises(ConfigError, match=words):
        decoder.encode(HELLO, variables)


def test_variables_for_a_prompt_that_is_no_conversation_are_refused(decoder):
    for prompt in ("Hi", [1, 2]):
        with pytest.raises(ConfigError, match="is no conversation; give messages"):
            decoder.generate(prompt, chat_template_kwargs=QUICK)
    with pytest.raises(ConfigError, match="mock-0 has no tokenizer, so it has no chat template"):
        testing.mock_model().with_chat_template_kwargs(QUICK)


def test_the_sampling_of_generation_config_json_is_a_choice(decoder):
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1}
    warm = dataclasses.replace(decoder.target, generation_config=stated)
    sampler = SamplerConfig(0.6, top_k=50, top_p=0.95, repetition_penalty=1.1)
    assert SpeculativeDecoder(warm).target_sampler == SamplerConfig()  # it is not the default
    assert SpeculativeDecoder(warm, target_sampler="model").target_sampler == sampler
    cold = dataclasses.replace(decoder.target, generation_config={"temperature": 0.6})
    by_file = SpeculativeDecoder(cold, target_sampler=sampler)
    row = decoder.generate(messages=HELLO, max_new_tokens=6)
    assert by_file.generate(messages=HELLO, max_new_tokens=6, sampler="model") == row
    options = dict(batch=1, max_prompt_tokens=64, max_new_tokens=6)
    assert dict(DecodeQueue(by_file, [HELLO], sampler="model", **options))[0] == row
    with pytest.raises(ConfigError, match="mock-0 has no generation_config.json"):
        decoder.generate(messages=HELLO, sampler="model")
    with pytest.raises(ConfigError, match="sampler is 'file'; expected a SamplerConfig"):
        decoder.generate(messages=HELLO, sampler="file")


ARGUMENTS = [
    ({"prompts": "Hi", "messages": HELLO}, PromptError, "prompts and messages are both given"),
    ({}, PromptError, "both missing; expected one of them"),
    ({"messages": "Hi"}, PromptError, "messages is 'Hi'; expected a list of objects"),
    ({"messages": ["Hi"]}, PromptError, r"messages is \['Hi'\]; expected a list of objects"),
    ({"messages": [HELLO, "Hi"]}, PromptError, "expected a list of objects"),
    ({"messages": TALK[:3]}, PromptError, "last message is the assistant's"),
    ({"messages": [{"content": "Hi"}]}, ConfigError, "a message has the role None"),
    (
        {"messages": []},
        PromptError,
        r"messages is \[\], a batch without rows; expected at least one conversation",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), ARGUMENTS, ids=lambda x: "")
def test_what_is_no_conversation_is_refused(decoder, arguments, error, message):
    with pytest.raises(error, match=message):
        decoder.generate(**arguments)


def test_a_target_without_a_template_says_what_to_give(decoder):
    with pytest.raises(
        ConfigError, match="has no chat template, which messages need; pass plain text"
    ):
        with_tokenizer(decoder, byte_level()).generate(messages=HELLO)
    with pytest.raises(PromptError, match="mock-0 has no tokenizer: give the prompt as ids"):
        SpeculativeDecoder(testing.mock_model()).generate(messages=HELLO)
    with pytest.raises(ConfigError, match="must take turns"):
        strict = "{{ raise_exception('must take turns') }}"
        with_tokenizer(decoder, byte_level(strict)).generate(messages=HELLO)


def test_a_start_that_the_template_writes_is_written_once(decoder):
    ids = with_tokenizer(decoder, byte_level(LLAMA3, bos_token="<s>")).encode(HELLO)
    assert ids.count(decoder.target.tokenizer.token_id("<s>")) == 1
