"""Conversations as prompts: the target's chat template, in code as in experiments."""

from __future__ import annotations

import dataclasses

import pytest
from support.chat_templates import CHATML, LLAMA3, THINKING, decoder_of

from spec_jax import DecodeQueue, SamplerConfig, SpeculativeDecoder
from spec_jax.data.questions import Question
from spec_jax.data.records import Conversation
from spec_jax.evaluation.prompts import PromptEncoder

HELLO = [{"role": "user", "content": "What is two and two?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *HELLO,
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "And a café?"},
]


@pytest.fixture
def decoder():
    return decoder_of(CHATML)


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


def test_experiments_encode_a_conversation_likewise(decoder):
    prompt = Question("talk", turns=(tuple(TALK),))
    assert PromptEncoder(decoder.target)(prompt) == decoder.encode(TALK)


SCHEMA = {"type": "function", "function": {"name": "add"}}
QUICK = {"enable_thinking": False}


def test_variables_of_the_template_reach_it_from_calls_queues_and_experiments():
    decoder, text = decoder_of(THINKING), "<|im_start|>assistant\n"
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


def test_a_start_that_the_template_writes_is_written_once():
    decoder = decoder_of(LLAMA3, bos_token="<s>")
    ids = decoder.encode(HELLO)
    assert ids.count(decoder.target.tokenizer.token_id("<s>")) == 1
