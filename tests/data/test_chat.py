"""Chat templates: what they render, where they are stored, what they may not do."""

import datetime
import json

import pytest
import tokenizers

from spec_jax.data.chat import ChatTemplate
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2?"},
    {"role": "assistant", "content": "Yes & no."},
]
TURNS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def template(source, **variables):
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>", **variables})


def word_tokenizer(**config):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    return Tokenizer(backend, config)


def test_special_tokens_and_messages_are_variables():
    assert template(TURNS).render(MESSAGES[:2], add_generation_prompt=True) == (
        "<s>[system] Be brief.</s>[user] 1 < 2?</s>[assistant] "
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[1].content | tojson }}", '"1 < 2?"'),
        ('{{ {"b": "é", "a": 1} | tojson(sort_keys=true) }}', '{"a": 1, "b": "é"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("  {% if true %}\n  y\n  {% endif %}\n", "  y\n"),
        ("{{ tools is none }}{{ documents is none }}{{ unknown }}", "TrueTrue"),
        ("{% set n = namespace(i=1) %}{% set n.i = n.i + 1 %}{{ n.i }}", "2"),
        ("{{ dict(a=1).a }}{{ dict.fromkeys(['k'], 0) }}", "1{'k': 0}"),
        ("{{ strftime_now('%d %b %Y') }}", "05 Mar 2024"),
        ("{{ greeting }}", "hi"),
    ],
)
def test_templates_have_what_they_expect(source, expected):
    now = datetime.datetime(2024, 3, 5)
    found = ChatTemplate({"default": source}, {"greeting": "hi"}, now=now)
    assert found.render(MESSAGES) == expected


def test_absent_values_are_absent_and_reasoning_has_every_name():
    source = "{% for m in messages %}{{ m.keys() | sort | join(',') }};{% endfor %}"
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        {"role": "assistant", "content": "a", "reasoning": "r", "thinking": None},
    ]
    assert template(source).render(messages) == (
        "role,tool_calls;content,reasoning,reasoning_content,role,thinking;"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "refuses the conversation"),
        ("{{ 1 + 'a' }}", "refuses the conversation"),
        ("{{ messages.append(1) }}", "refuses the conversation"),
        ("{{ dict.update(messages[0], {'role': 'x'}) }}", "refuses the conversation"),
        ("{{ ''.__class__.__mro__ }}", "refuses the conversation"),
        ("{% set n = namespace() %}{% set n._i = 1 %}", "may not hold '_i'"),
        ("\n{% if %}", "cannot be read: line 2"),
        ("{% generation %}", "cannot be read: line 1"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_a_clear_error(source, message):
    with pytest.raises(ConfigError, match=message):
        template(source).render(MESSAGES)


@pytest.mark.parametrize("messages", [[], ["hi"], [{"role": object()}], [{"role": {1}}]])
def test_messages_that_are_none_are_clear_errors(messages):
    with pytest.raises(ConfigError, match="message"):
        template(TURNS).render(messages)


def test_a_template_cannot_change_the_callers_messages():
    messages = [{"role": "user", "content": ["a"]}]
    template("{% for m in messages %}{% set c = m.content %}{% endfor %}").render(messages)
    assert messages == [{"role": "user", "content": ["a"]}]


def test_generation_blocks_give_their_spans_and_leave_the_text():
    marked = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    plain = marked.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    messages = [*MESSAGES, *MESSAGES[1:], {"role": "assistant", "content": ""}]
    text, spans = template(marked).render_spans(messages)
    assert text == template(marked).render(messages) == template(plain).render(messages)
    answers = ["Yes & no.</s>", "Yes & no.</s>", "</s>"]
    assert [text[begin:end] for begin, end in spans] == answers
    assert template(marked).has_generation() and not template(plain).has_generation()
    assert not template("{# {% generation %} #}").has_generation()
    assert template(plain).render_spans(messages) == (text, [])


def test_generation_blocks_in_macros_and_captured_text_are_found():
    source = (
        "{% macro turn(m) %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endmacro %}"
        "{% set all %}{% for m in messages %}{{ turn(m) }}{% endfor %}{% endset %}start {{ all }}"
    )
    text, spans = template(source).render_spans(MESSAGES)
    assert [text[begin:end] for begin, end in spans] == [m["content"] for m in MESSAGES]


def test_private_characters_in_a_message_are_kept():
    source = "{% generation %}{{ messages[0].content }}{% endgeneration %}!"
    content = "\ue000a\ue001"
    found = template(source).render_spans([{"role": "user", "content": content}])
    assert found == (content + "!", [(0, 3)])


def test_a_block_whose_place_is_lost_is_an_error():
    source = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
    assert template(source).render(MESSAGES) == "a"
    with pytest.raises(ConfigError, match="after the block's end"):
        template(source).render_spans(MESSAGES)


def test_special_tokens_come_from_every_form_of_the_config():
    tokenizer = word_tokenizer(
        bos_token="<s>", eos_token={"__type": "AddedToken", "content": "</s>"}, pad_token=None,
        add_bos_token=True, image_token="<img>", extra_special_tokens={"end_token": "<end>"},
        chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}"
        "{{ end_token }}{{ add_bos_token }}",
    )  # fmt: skip
    assert ChatTemplate.from_tokenizer(tokenizer).render(MESSAGES) == "<s></s><img><end>"
    ours = ChatTemplate.from_tokenizer(tokenizer, variables={"eos_token": "E", "pad_token": "P"})
    assert ours.render(MESSAGES) == "<s>EP<img><end>"


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


def test_a_conversation_with_tools_takes_the_template_for_tools():
    found = ChatTemplate.from_tokenizer(word_tokenizer(chat_template=NAMED))
    assert found.render(MESSAGES) == "plain"
    assert found.render(MESSAGES, tools=[{"name": "f"}]) == "tools"
    named = ChatTemplate.from_tokenizer(word_tokenizer(chat_template=NAMED), name="tool_use")
    assert named.render(MESSAGES) == "tools"
    single = ChatTemplate.from_tokenizer(word_tokenizer(chat_template="{{ tools | length }}"))
    assert single.render(MESSAGES, tools=[{"name": "f"}]) == "1"


def test_absent_templates_are_named():
    with pytest.raises(ConfigError, match="has no chat template; expected"):
        ChatTemplate.from_tokenizer(word_tokenizer())
    with pytest.raises(ConfigError, match="'rag'; expected name to be one of 'default', 'tool_use"):
        ChatTemplate.from_tokenizer(word_tokenizer(chat_template=NAMED), name="rag")
    with pytest.raises(ConfigError, match="'default'; expected name to be one of 'tool_use'"):
        ChatTemplate.from_tokenizer(word_tokenizer(chat_template=NAMED[1:]))


@pytest.mark.parametrize("stored", ["one", NAMED, {"default": "a", "rag": "b"}, NAMED[1:]])
def test_saved_templates_load_as_they_were(tmp_path, stored):
    tokenizer = word_tokenizer(chat_template=stored, bos_token="<s>")
    word_tokenizer(chat_template={"default": "old", "stale": "old"}).save(tmp_path)
    tokenizer.save(tmp_path)
    loaded = Tokenizer.from_directory(tmp_path)
    assert loaded.chat_templates == tokenizer.chat_templates != {}
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "bos_token" in loaded.config


def test_template_files_go_before_the_config(tmp_path):
    word_tokenizer().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": NAMED}))
    assert Tokenizer.from_directory(tmp_path).chat_templates["tool_use"] == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "file"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(WeightsError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_without_templates_saves_none(tmp_path):
    word_tokenizer(chat_template="old").save(tmp_path)
    word_tokenizer().save(tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*.*")) == [
        "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert "chat_template" not in Tokenizer.from_directory(tmp_path).config


@pytest.mark.parametrize("stored", [3, [1], {"default": None}, [{"name": "x"}]])
def test_templates_of_another_form_are_clear_errors(stored):
    with pytest.raises(WeightsError, match="expected a text"):
        _ = word_tokenizer(chat_template=stored).chat_templates


def test_a_templates_name_cannot_leave_the_folder(tmp_path):
    with pytest.raises(WeightsError, match="file's name"):
        word_tokenizer(chat_template={"../../evil": "x"}).save(tmp_path / "a")
    assert not list(tmp_path.rglob("*evil*"))
