"""Conversations and texts as documents: what is marked, what is read, what is held out."""

import collections
import random

import numpy as np
import pytest
from support import chat_templates as chat
from support.files import write_lines

from spec_jax.data.chat import ChatTemplate
from spec_jax.data.conversations import Document, Encoder, read_documents, token_mask
from spec_jax.data.records import Conversation, Text
from spec_jax.data.splits import HeldOut
from spec_jax.data.tokens import END_OF_TEXT
from spec_jax.errors import ConfigError
from spec_jax.models.tokenizer import Tokenizer


def encode(tokenizer, messages, tools=None) -> list[Document]:
    return Encoder(tokenizer).conversation(Conversation(messages, tools, "here:1"))


def marked(tokenizer, document) -> list[str]:
    """The texts of the stretches of marked tokens."""
    edges = np.flatnonzero(np.diff(document.mask, prepend=False, append=False)).reshape(-1, 2)
    decode = lambda ids: tokenizer.backend.decode(list(ids), skip_special_tokens=False)
    return [decode(document.ids[begin:end]) for begin, end in edges]


def text_of(tokenizer, document) -> str:
    return tokenizer.backend.decode(list(document.ids), skip_special_tokens=False)


@pytest.mark.parametrize("trim", [False, True], ids=["offsets", "trimmed offsets"])
@pytest.mark.parametrize(
    ("template", "before", "after", "is_trimmed"),
    [
        (chat.CHATML, "", "<|im_end|>", False),
        (chat.LLAMA3, "", "<|eot_id|>", True),
        (chat.MISTRAL, " ", "</s>", False),
        (chat.GENERATION, "", "<|im_end|>\n", False),
        (chat.TOOLS, "", "<|im_end|>", False),
    ],
    ids=["ChatML", "Llama 3", "Mistral", "generation", "tools"],
)
def test_every_answer_is_marked_with_the_token_that_ends_it(
    template, before, after, is_trimmed, trim
):
    tokenizer = chat.byte_level(template, trim=trim)
    (document,) = encode(tokenizer, chat.TALK)
    expected = [a.strip() if is_trimmed else a for a in chat.ANSWERS]
    assert marked(tokenizer, document) == [before + a + after for a in expected]
    assert document.ids.dtype == np.int32 and document.mask.dtype == bool
    assert len(document.ids) == len(document.mask) and document.source == "here:1"


@pytest.mark.parametrize("template", [chat.CHATML, chat.LLAMA3, chat.MISTRAL, chat.GENERATION])
def test_the_tokens_are_those_of_the_text_with_special_tokens_once(template):
    tokenizer = chat.byte_level(template)
    (document,) = encode(tokenizer, chat.TALK)
    text = ChatTemplate.from_tokenizer(tokenizer).render(chat.TALK)
    start, end = tokenizer.token_id("<s>"), tokenizer.token_id(END_OF_TEXT)
    assert tokenizer.encode(text)[0] == start  # what the tokenizer would add a second time
    assert text_of(tokenizer, document) == text + END_OF_TEXT
    assert document.ids[-1] == end and not document.mask[[0, -1]].any()
    assert list(document.ids).count(start) == text.startswith("<s>")


@pytest.mark.parametrize("template", [chat.CHATML, chat.GENERATION], ids=["prefixes", "blocks"])
def test_what_follows_the_last_answer_is_left_out(template):
    tokenizer = chat.byte_level(template)
    (whole,) = encode(tokenizer, chat.TALK + chat.talk("bye", "x")[:1])
    (same,) = encode(tokenizer, chat.TALK)
    np.testing.assert_array_equal(whole.ids, same.ids)
    np.testing.assert_array_equal(whole.mask, same.mask)


def test_an_opening_turn_of_the_assistant_is_context_only():
    tokenizer = chat.byte_level(chat.LLAMA3)
    (document,) = encode(tokenizer, chat.talk("Hello!", "two?", "four", first="assistant"))
    assert marked(tokenizer, document) == ["four<|eot_id|>"]
    assert "Hello!" in text_of(tokenizer, document)
    assert encode(tokenizer, chat.talk("Hello!", "two?", first="assistant")) == []
    assert encode(tokenizer, chat.TALK[:1]) == [] == encode(tokenizer, [])


def test_rewritten_earlier_turns_give_a_document_a_turn():
    tokenizer = chat.byte_level(chat.REASONING)
    messages = [dict(m) for m in chat.TALK]
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            m["reasoning_content"] = f"reason {i}"
    documents = encode(tokenizer, messages)
    assert len(documents) == 3
    template = ChatTemplate.from_tokenizer(tokenizer)
    for turn, document in zip((1, 3, 5), documents):
        answer = f"<think>\nreason {turn}\n</think>\n\n{messages[turn]['content']}<|im_end|>"
        assert marked(tokenizer, document) == [answer]
        prompt = template.render(messages[:turn], add_generation_prompt=True)
        assert text_of(tokenizer, document) == prompt + answer + "\n" + END_OF_TEXT
    # Two answers after the last user's message are seen as they were written.
    tail = messages[:2] + [{"role": "tool", "content": "4"}, messages[3]]
    (document,) = encode(tokenizer, tail)
    assert [m.count("reason") for m in marked(tokenizer, document)] == [1, 1]


def test_an_answer_that_does_not_begin_with_its_prompt_is_refused(tmp_path):
    tokenizer = chat.byte_level(chat.REASONING).with_chat_template_kwargs({"is_open": True})
    with pytest.raises(ConfigError, match=r"here:1: .*turn 2 .*'\\n</think>.* has 'Hm'.*blocks"):
        encode(tokenizer, chat.TALK)
    file = write_lines(tmp_path / "a.jsonl", [{"messages": chat.TALK}, {"text": "fine"}])
    counts = collections.Counter()
    found = list(read_documents([file], Encoder(tokenizer), counts=counts))
    assert len(found) == counts["documents"] == counts["refused"] == counts["texts"] == 1


def test_what_the_template_raises_names_the_line_and_is_counted(tmp_path):
    encoder = Encoder(chat.byte_level(chat.MISTRAL))
    odd = [chat.TALK[0], *chat.TALK]
    file = write_lines(tmp_path / "a.jsonl", [{"messages": chat.TALK}, {"messages": odd}])
    counts, notes = collections.Counter(), []
    found = read_documents([file], encoder, counts=counts, notes=notes)
    assert len(list(found)) == 1
    assert "a.jsonl:2: " in notes[0] and "must take turns" in notes[0]
    assert counts["refused"] == 1 and counts["conversations"] == 2
    file = write_lines(tmp_path / "b.jsonl", [{"messages": odd}])
    with pytest.raises(ConfigError, match=r"no document.*refused 1.*must take turns"):
        list(read_documents([file], encoder))


def test_generation_blocks_that_mark_nothing_are_refused():
    with pytest.raises(ConfigError, match="here:1: .*hold no answer"):
        encode(chat.byte_level("{% generation %}{% endgeneration %}x"), chat.TALK)


def test_tools_reach_the_template():
    tokenizer = chat.byte_level(
        [{"name": "default", "template": chat.CHATML}, {"name": "tool_use", "template": chat.TOOLS}]
    )
    call = {"function": {"name": "add", "arguments": {"a": "<2>"}}}
    messages = [chat.TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "4"}, chat.TALK[1]]
    (document,) = encode(tokenizer, messages, tools=[{"name": "add"}])
    assert marked(tokenizer, document) == [
        '<tool>{"name": "add", "arguments": {"a": "<2>"}}<|im_end|>',
        chat.ANSWERS[0] + "<|im_end|>",
    ]
    assert '{"name": "add"}\n<|im_end|>' in text_of(tokenizer, document)


def test_marks_are_the_tokens_that_hold_a_marked_character():
    draw = random.Random(0)
    for _ in range(200):
        edges = sorted(draw.choices(range(30), k=9))
        offsets = [pair for pair in zip(edges, edges[1:]) if pair[0] < pair[1]]
        spans = [sorted(draw.choices(range(31), k=2)) for _ in range(2)]
        chars = {c for begin, end in spans for c in range(begin, end)}
        expected = [bool(chars & set(range(*pair))) for pair in offsets]
        assert token_mask(offsets, spans).tolist() == expected
    assert token_mask([], [(0, 3)]).tolist() == []
    # a token of spaces whose offsets were trimmed to nothing, and bytes of one character
    assert token_mask([(0, 2), (5, 5), (5, 6)], [(3, 4)]).tolist() == [False, True, False]
    assert token_mask([(0, 1), (0, 1), (1, 2)], [(0, 1)]).tolist() == [True, True, False]


def test_text_is_marked_after_its_first_token_to_a_separator():
    tokenizer = chat.byte_level()
    (document,) = Encoder(tokenizer).text(Text("two and two", "t"))
    assert not document.mask[0] and document.mask[1:].all()
    assert text_of(tokenizer, document) == "<s>two and two" + END_OF_TEXT
    assert Encoder(tokenizer).text(Text("", "t")) == []
    plain = chat.byte_level(special=("<s>", "</s>"))
    for text in ("two", "two</s>"):  # which may end with one
        (document,) = Encoder(plain).text(Text(text, "t"))
        assert text_of(plain, document) == "<s>two</s>"
    other = Tokenizer(plain.backend, {"eos_token": "<end>"})
    with pytest.raises(ConfigError, match=r"'<end>' to separate documents; set eos_token in"):
        Encoder(other).text(Text("two", "t"))
    with pytest.raises(ConfigError, match="no token"):
        Encoder(chat.byte_level(special=("<s>",))).text(Text("two", "t"))


def test_all_documents_of_a_conversation_are_on_one_side(tmp_path):
    lines = [{"messages": chat.talk(f"{i}", "a", f"again {i}", "b")} for i in range(40)]
    file = write_lines(tmp_path / "a.jsonl", lines)
    encoder = Encoder(chat.byte_level(chat.REASONING))
    sides, counts = [], collections.Counter()
    for split in ("train", "held_out"):
        found = read_documents([file], encoder, split=split, held_out=HeldOut(0.3), counts=counts)
        sides.append(collections.Counter(d.source for d in found))
    assert not sides[0].keys() & sides[1].keys()
    assert set(sides[0].values()) | set(sides[1].values()) == {2}
    assert counts["several"] == 40 and counts["documents"] == 80


def test_long_documents_are_whole_or_left_out_and_what_gives_none_is_counted(tmp_path):
    encoder = Encoder(chat.byte_level(chat.CHATML))
    lines = [
        {"messages": chat.talk("a", "long " * 50)},
        {"messages": chat.talk("long " * 90, "b", "more")},
        {"messages": chat.talk("a", "b")},
        {"messages": chat.TALK[:1]},
        {"conversations": []},
        {"text": ""},
        {"text": "word " * 200},
    ]
    file = write_lines(tmp_path / "a.jsonl", lines)
    counts = collections.Counter()
    whole = list(read_documents([file], encoder, counts=counts))
    lengths = [len(d.ids) for d in whole]
    assert [d.source[-1] for d in whole] == ["1", "2", "3", "7"] and min(lengths) < 70
    seen = dict(conversations=5, texts=2, no_answer=2, empty=1, messages_after_the_last_answer=1)
    assert {k: v for k, v in counts.items() if v} == seen | {"documents": 4}
    counts = collections.Counter()
    (short,) = read_documents([file], encoder, max_length=70, counts=counts)
    np.testing.assert_array_equal(short.ids, whole[2].ids)
    left_out = {"too_long": 3, "too_long_tokens": sum(lengths) - len(short.ids)}
    assert {k: v for k, v in counts.items() if v} == seen | {"documents": 1} | left_out


def test_a_corpus_without_a_usable_document_is_an_error(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"messages": chat.TALK[:1]}, {"conversations": []}])
    encoder = Encoder(chat.byte_level(chat.CHATML))
    with pytest.raises(ConfigError, match="no document for train .conversations 2, no_answer 2"):
        list(read_documents([file], encoder))
    with pytest.raises(ConfigError, match="no document for held_out .other_split 2"):
        list(read_documents([file], encoder, split="held_out"))
    with pytest.raises(ConfigError, match="no file gave no document"):
        list(read_documents([], encoder))


@pytest.mark.parametrize("arguments", [{"split": "test"}, {"max_length": 1}])
def test_bad_arguments_are_errors_at_once(arguments):
    with pytest.raises(ConfigError, match="; expected|, or None"):
        read_documents([], Encoder(chat.byte_level()), **arguments)
