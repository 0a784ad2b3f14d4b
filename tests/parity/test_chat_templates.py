"""Chat templates and marks of the assistant's tokens agree with transformers'."""

import dataclasses
import json

import pytest
from needs import transformers
from support.chat_templates import (
    GENERATION,
    TEMPLATES,
    THINKING,
    TOOLS,
    byte_level,
    metaspace,
    talk,
)

from spec_jax import testing
from spec_jax.data.chat import ChatTemplate
from spec_jax.data.conversations import Encoder
from spec_jax.data.records import Conversation
from spec_jax.engine.request import encode
from spec_jax.models.tokenizer import Tokenizer

CALL = {"function": {"name": "add", "arguments": {"a": "<2> & 'é'", "n": None}}}
SCHEMA = {"type": "function", "function": {"name": "add", "description": 'a < b, "é"'}}
SYSTEM = {"role": "system", "content": "Be <brief> & kind.\n"}
TALKS = {
    "one turn": talk("What is two?", "That is four."),
    "turns": talk(" What is 2? ", "two, \n\n is it", "a café 数 🙂?", " A café 🙂 \n", "x", ""),
    "system": [SYSTEM, *talk("two?", "four")],
    "open": talk("two?", "four", "and three?"),
    "twice": [*talk("a", "b"), *talk("c", first="assistant")],
    "reasoning": [
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "four", "reasoning": "it is", "name": None},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes", "thinking": "hm", "reasoning_content": None},
    ],
    "tools": [
        {"role": "user", "content": "two and two?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ],
}


def both(tokenizer, folder):
    """Our tokenizer as saved and read again, and transformers' of the same files."""
    tokenizer.save(folder)
    return Tokenizer.from_directory(folder), transformers.AutoTokenizer.from_pretrained(folder)


def outcome(render):
    """What is rendered, or None where the template refuses."""
    try:
        return render()
    except Exception as error:  # theirs are of many types
        assert not isinstance(error, AttributeError), error
        return None


@pytest.mark.parametrize("tools", [None, [SCHEMA]], ids=["plain", "with tools"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_renderings_agree(tmp_path, template, tools):
    ours, theirs = both(byte_level(TEMPLATES[template]), tmp_path)
    renderer = ChatTemplate.from_tokenizer(ours)
    n_rendered = 0
    for name, messages in TALKS.items():
        for prompt in (False, True):
            found = outcome(
                lambda: renderer.render(messages, tools=tools, add_generation_prompt=prompt)
            )
            options = dict(tools=tools, add_generation_prompt=prompt, tokenize=False)
            expected = outcome(lambda: theirs.apply_chat_template(messages, **options))
            assert found == expected, (name, prompt)
            n_rendered += found is not None
    assert n_rendered >= 8


SOURCES = [
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% endfor %}",
    "  {%- if true %}  \n\n  a\n  {% endif %}  b  \n{# c #}\n d\n\n",
    "{{ tools is none }}{{ documents is none }}{{ no_such }}{{ pad_token }}{{ image_token }}",
    "{{ bos_token ~ eos_token }}{{ dict(a=1) }}{{ dict.fromkeys('ab') }}",
    "{% set n = namespace(i=0, self=2) %}{% for m in messages %}{% set n.i = n.i + 1 %}"
    "{% endfor %}{{ n.i }}{{ n.self }}",
    "{{ messages[0].content.split(' ')[-1][::-1] }}{{ extra }}{{ messages[-1]['role'][:3] }}",
    "{{ strftime_now('%Y') | length }}",
    "{{ raise_exception('no') }}",
    "{{ messages.append(messages[0]) }}",
    "{{ messages[0].content.__class__ }}",
    "{% set n = namespace() %}{% set n._x = 1 %}",
    "{{ missing.attribute }}",
    "{{ messages[0].content + 1 }}",
    "{% generation %}{{ messages[0].content }}",
]


@pytest.mark.parametrize("source", SOURCES)
def test_the_language_of_templates_agrees(tmp_path, source):
    tokenizer = byte_level(source, pad_token=None, image_token="<img>", model_max_length=99)
    ours, theirs = both(tokenizer, tmp_path)
    for messages in (TALKS["system"], TALKS["tools"]):
        more = {"extra": "E"} if "extra" in source else {}  # ours refuses what is not read
        given = ours.with_chat_template_kwargs(more)
        found = outcome(lambda: ChatTemplate.from_tokenizer(given).render(messages))
        expected = outcome(lambda: theirs.apply_chat_template(messages, tokenize=False, **more))
        assert found == expected


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("tools", [None, [SCHEMA]], ids=["plain", "with tools"])
def test_ids_agree_for_the_same_variables(tmp_path, variables, tools):
    ours, theirs = both(byte_level(THINKING), tmp_path)
    more = variables if tools is None else {**variables, "tools": tools}
    target = dataclasses.replace(testing.mock_model(ours.vocab_size), tokenizer=ours)
    for messages in (TALKS["open"], [SYSTEM, *TALKS["open"]]):
        options = dict(add_generation_prompt=True, return_dict=False, tools=tools, **variables)
        expected = theirs.apply_chat_template(messages, **options)
        assert encode(target, messages, more) == expected


# Where several tokens hold the last character of a block, theirs marks the first only, ours all
# of them; a SentencePiece-like tokenizer has two tokens for a newline behind a special token.
SHORT_BLOCKS = GENERATION.replace(
    "<|im_end|>\n{% endgeneration %}", "<|im_end|>{% endgeneration %}{{ '\\n' }}"
)


@pytest.mark.parametrize(
    ("make", "template"),
    [(byte_level, GENERATION), (byte_level, SHORT_BLOCKS), (metaspace, SHORT_BLOCKS)],
    ids=["bytes", "bytes, short", "metaspace, short"],
)
@pytest.mark.parametrize("talk_name", ["one turn", "turns", "twice", "system"])
def test_marks_of_generation_blocks_agree(tmp_path, make, template, talk_name):
    ours, theirs = both(make(template), tmp_path)
    messages = TALKS[talk_name]
    expected = theirs.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    (document,) = Encoder(ours).conversation(Conversation(messages, None, "here"))
    assert document.ids[:-1].tolist() == expected["input_ids"]
    assert document.mask[:-1].tolist() == [bool(x) for x in expected["assistant_masks"]]
    assert 0 < document.mask.sum() < len(document.mask) and not document.mask[-1]


STORED = [
    "{{ messages[0].content }}{{ bos_token }}",
    [{"name": "default", "template": "D{{ eos_token }}"}, {"name": "tool_use", "template": TOOLS}],
    {"default": "D", "rag": "R"},
]


@pytest.mark.parametrize("stored", STORED)
def test_stored_templates_are_read_alike(tmp_path, stored):
    tokenizer = byte_level()
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer_config.json"

    def agree():
        ours = Tokenizer.from_directory(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        expected = theirs.chat_template
        expected = {"default": expected} if isinstance(expected, str) else expected
        assert ours.chat_templates == expected
        for tools in (None, [SCHEMA]):
            ours_text = ChatTemplate.from_tokenizer(ours).render(TALKS["system"], tools=tools)
            assert ours_text == theirs.apply_chat_template(
                TALKS["system"], tools=tools, tokenize=False
            )
        return theirs

    config = {**tokenizer.config, "tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps({**config, "chat_template": stored}))
    theirs = agree()
    theirs.save_pretrained(tmp_path)  # what transformers writes, we read
    agree()
    Tokenizer.from_directory(tmp_path).save(tmp_path)  # and what we write, transformers reads
    agree()
    file.write_text(json.dumps({**config, "chat_template": "of the config"}))
    (tmp_path / "chat_template.jinja").write_text("of the\r\nfile\n")
    agree()
