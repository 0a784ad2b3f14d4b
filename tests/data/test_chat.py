"""Chat templates: what they render, where they are stored, what they may not do."""

import datetime
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import pytest
import tokenizers

from spec_jax.data import chat, template_process
from spec_jax.data.chat import ChatTemplate
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2?"},
    {"role": "assistant", "content": "Yes & no."},
]
DEEP = json.loads("[" * 300 + "]" * 300)
TURNS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def template(source, **variables):
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>", **variables})


def word_tokenizer(**config):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    return Tokenizer(backend, config)


def test_all_templates_of_a_process_show_one_date(monkeypatch):
    """A run over midnight, whose prompts are made by several of them."""
    dated = word_tokenizer(chat_template="{{ strftime_now('%d %b %Y') }}")
    made = [ChatTemplate.from_tokenizer(dated)]
    days = iter(range(1, 9))
    clock = mock.Mock(now=lambda: datetime.datetime(1999, 1, next(days)), wraps=datetime.datetime)
    monkeypatch.setattr(chat.datetime, "datetime", clock)
    made += [ChatTemplate.from_tokenizer(dated), ChatTemplate(dated.chat_templates)]
    assert len({template.now for template in made}) == 1


def test_special_tokens_and_messages_are_variables():
    assert template(TURNS).render(MESSAGES[:2], add_generation_prompt=True) == (
        "<s>[system] Be brief.</s>[user] 1 < 2?</s>[assistant] "
    )


def test_absent_values_are_absent_and_reasoning_has_every_name():
    source = "{% for m in messages %}{{ m.keys() | sort | join(',') }};{% endfor %}"
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        {"role": "assistant", "content": "a", "reasoning": "r", "thinking": None},
    ]
    assert template(source).render(messages) == (
        "role,tool_calls;content,reasoning,reasoning_content,role,thinking;"
    )


REFUSED = [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages[9].content }}", "refuses the conversation"),
    ("{{ messages.append(1) }}", "refuses the conversation"),
    ("{{ ''.__class__.__mro__ }}", "refuses the conversation"),
    ("{% set n = namespace() %}{% set n._i = 1 %}", "may not hold '_i'"),
    ("\n{% if %}", "cannot be read: line 2"),
    ("{% generation %}", "cannot be read: line 1"),
    ("{% " + "x" * 10**6 + " %}", "^.{,2100}$"),  # what it holds is cut in messages
    ("{{ 9 ** (9 ** 9) }}", r"\*\* makes a value of size"),
    ("{{ 'x' * 10 ** 10 }}{{ [0] * 10 ** 10 }}", r"\* makes a value of size 1e\+10"),
    ("{{ '%-*d' % (10 ** 10, 1) }}", "% makes a value of size"),
    ("{{ range(10 ** 9) | list }}", "Range too big"),
    ("{{ 'x' | center(10 ** 11) }}", "takes more than 512 MiB of memory"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
    ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "more than 16777216 characters"),
    ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "cannot be read: line"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be read: maximum recursion"),
]


@pytest.mark.parametrize(("source", "message"), REFUSED)
def test_what_a_template_refuses_may_not_do_or_would_use_up_is_a_clear_error(source, message):
    with pytest.raises(ConfigError, match=message):
        template(source).render(MESSAGES)


SLOW = "{% for i in range(99999) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"  # seconds


def test_a_process_renders_until_it_is_ended(monkeypatch):
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.3)
    process = template_process.TemplateProcess()
    now = "2024-03-05"
    request = {"source": "{{ x }}", "variables": {"x": "é\ud800"}, "now": now}
    try:
        assert process.ask(request) == {"text": "é\ud800"}
        first = process._process
        assert process.ask(request)["text"] and process._process is first
        with pytest.raises(ConfigError, match=r"takes more than 0\.3 seconds; check the template"):
            process.ask({**request, "source": SLOW, "variables": {}})
        first = process._process
        assert first is None and process.ask(request)["text"]
        process._process.kill()  # by anybody
        process._process.wait()
        assert process.ask(request)["text"]
    finally:
        process.close()


# Of the packages, only these modules are imported: a process with the threads of jax is not forked.
_FORKS = """
import os, pathlib, signal, sys, types
root = pathlib.Path(sys.argv[1])
for name in ("spec_jax", "spec_jax.data"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]
from spec_jax.data import template_process

def render(source):
    request = {"source": source, "variables": {}, "now": "2024-03-05"}
    return template_process.ask(request)["text"], template_process._shared._process.pid

text, first = render("a")
with template_process._shared._lock:  # as where another thread renders at this moment
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for that thread, which it does not have
        text, process = render("b")
        template_process._shared.close()
        os._exit(0 if text == "b" and process != first else 1)
assert os.waitpid(child, 0)[1] == 0, "the child needs its parent's process"
assert render("c") == ("c", first)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_has_one_of_its_own():
    root = pathlib.Path(template_process.__file__).parents[2]
    command = [sys.executable, "-c", _FORKS, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (sys, "path", [], "No module named 'jinja2'.*that can import jinja2"),
        (sys, "executable", None, r"is embedded\): expected sys\.executable, None, to be"),
        (sys, "executable", "", r"is embedded\): expected sys\.executable, '', to be"),
    ],
)
def test_a_python_that_cannot_render_says_so(monkeypatch, owner, name, value, message):
    process = template_process.TemplateProcess()
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ConfigError, match=message):
        process.ask({"source": "a", "variables": {}, "now": "2024-03-05"})


def test_the_time_has_its_zone_where_templates_run():
    zone = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
    now = datetime.datetime(2024, 3, 5, 6, 7, 8, 9, tzinfo=zone)
    found = ChatTemplate({"default": "{{ strftime_now('%c %f %z %Z') }}"}, now=now)
    assert found.render(MESSAGES) == now.strftime("%c %f %z %Z")


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
    config = dict(bos_token="<s>", eos_token={"__type": "AddedToken", "content": "</s>"})
    config |= dict(pad_token=None, add_bos_token=True, image_token="<img>")
    names = ("bos_token", "eos_token", "pad_token", "image_token", "end_token", "add_bos_token")
    source = "".join(f"{{{{ {name} }}}}" for name in names)
    config |= dict(extra_special_tokens={"end_token": "<end>"}, chat_template=source)
    tokenizer = word_tokenizer(**config)
    assert ChatTemplate.from_tokenizer(tokenizer).render(MESSAGES) == "<s></s><img><end>"
    tokenizer = tokenizer.with_chat_template_kwargs({"eos_token": "E", "pad_token": "P"})
    assert ChatTemplate.from_tokenizer(tokenizer).render(MESSAGES) == "<s>EP<img><end>"


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


def test_a_conversation_with_tools_takes_the_template_for_tools():
    found = ChatTemplate.from_tokenizer(word_tokenizer(chat_template=NAMED))
    assert found.render(MESSAGES) == "plain"
    assert found.render(MESSAGES, tools=[{"name": "f"}]) == "tools"
    single = ChatTemplate.from_tokenizer(word_tokenizer(chat_template="{{ tools | length }}"))
    assert single.render(MESSAGES, tools=[{"name": "f"}]) == "1"


@pytest.mark.parametrize("stored", [None, "one", NAMED, {"default": "a", "rag": "b"}, NAMED[1:]])
def test_saved_templates_load_as_they_were(tmp_path, stored):
    tokenizer = word_tokenizer(bos_token="<s>", **({"chat_template": stored} if stored else {}))
    word_tokenizer(chat_template={"default": "old", "stale": "old"}).save(tmp_path)
    tokenizer.save(tmp_path)
    loaded = Tokenizer.from_directory(tmp_path)
    assert loaded.chat_templates == tokenizer.chat_templates
    assert bool(loaded.chat_templates) == (stored is not None)
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


def stored(chat_template):
    """Makes a template of what is stored."""
    return lambda: ChatTemplate.from_tokenizer(word_tokenizer(**chat_template))


NO_MESSAGES = [[], ["hi"], *([{"role": role}] for role in (object(), {1}, DEEP))]
NO_TEXT = [3, [1], {"default": None}, [{"name": "x"}]]
INVALID = [
    *((lambda m=m: template(TURNS).render(m), "message") for m in NO_MESSAGES),
    (stored({}), "has no chat template; expected"),
    (stored({"chat_template": NAMED[1:]}), "no chat template 'default'; it has 'tool_use'"),
    *((stored({"chat_template": x}), "expected a text") for x in NO_TEXT),
]


@pytest.mark.parametrize(("call", "message"), INVALID)
def test_messages_and_stored_templates_that_are_none_are_clear_errors(call, message):
    with pytest.raises((ConfigError, WeightsError), match=message):
        call()


def test_a_templates_name_cannot_leave_the_folder(tmp_path):
    with pytest.raises(WeightsError, match="file's name"):
        word_tokenizer(chat_template={"../../evil": "x"}).save(tmp_path / "a")
    assert not list(tmp_path.rglob("*evil*"))
