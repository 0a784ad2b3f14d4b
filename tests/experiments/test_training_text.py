"""The text of the training experiments: all of it is used or accounted for, some is held out."""

import json

import numpy as np
import pytest
from support.chat_templates import CHATML, MISTRAL, TALK, THINKING, byte_level, talk
from support.files import write_lines

from configs import train_head_default
from experiments.training import text as texts
from spec_jax.data.batches import Corpus
from spec_jax.data.conversations import Encoder, read_documents
from spec_jax.errors import ConfigError

LENGTH = 258


def load(path, folder, template=CHATML, prompts="", **changes):
    data = train_head_default.get_config().data
    data.update(text=str(path), **changes)
    return texts.load(data, byte_level(template), folder, prompts)


def passage(seed, size):
    """A text of lines that no other seed has."""
    rng = np.random.default_rng(seed)
    lines = (f"line {i}: {' '.join(map(str, rng.integers(0, 99, 9)))}\n" for i in range(size))
    return "".join(lines)[:size]


def check_accounts(corpus, length=LENGTH):
    found = texts.usage(corpus, length)
    assert found["tokens_used"] == found["windows"] * length
    assert found["tokens_read"] == found["tokens_used"] + sum(found["tokens_left_out"].values())
    assert found["tokens_left_out"]["short tail"] < length
    return found


def test_texts_are_packed_anew_for_other_variables_of_the_template(tmp_path):
    rows = [{"messages": talk(f"two and {i}?", "That is four.")} for i in range(12)]
    write_lines(tmp_path / "rows.jsonl", rows)
    packed = lambda **changes: load(tmp_path / "rows.jsonl", tmp_path / "data", THINKING, **changes)
    plain, _ = packed()
    shown, _ = packed(chat_template_kwargs='{"tools": [{"name": "add"}]}')
    assert len(shown.tokens) > len(plain.tokens)
    np.testing.assert_array_equal(packed()[0].tokens, plain.tokens)
    for text, words in (("{", "is not JSON"), ("[]", "expected a JSON object")):
        with pytest.raises(ConfigError, match=f"chat_template_kwargs .*{words}"):
            packed(chat_template_kwargs=text)
    with pytest.raises(ConfigError, match="does not read the variable 'think'"):
        packed(chat_template_kwargs='{"think": false}')


def test_variables_of_the_template_are_for_conversations_among_texts_or_prompts(tmp_path):
    (tmp_path / "book.txt").write_text(passage(0, 400))
    text, asked = tmp_path / "book.txt", tmp_path / "asked.jsonl"
    write_lines(asked, [{"messages": talk("two?")}])
    quick = dict(template=THINKING, chat_template_kwargs='{"enable_thinking": false}')
    for path in ("stdlib", text):
        with pytest.raises(ConfigError, match="False}, and there is no conversation to render"):
            load(path, tmp_path / "data", **quick)
    load(text, tmp_path / "data", prompts=str(asked), **quick)
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": TALK}])
    tokenizer = byte_level(THINKING).with_chat_template_kwargs({"think": False})
    with pytest.raises(ConfigError, match="conversation, but .*'think'.*; it reads .*tools$"):
        next(read_documents([path], Encoder(tokenizer)))


def test_a_single_file_is_split_without_overlap(tmp_path):
    text = passage(0, 90_000)
    (tmp_path / "book.txt").write_text(text)
    train, held_out = load(tmp_path / "book.txt", tmp_path / "data")
    decode = lambda x: byte_level(CHATML).backend.decode(x.tokens.tolist())
    assert decode(train) + decode(held_out) == text
    assert len(decode(held_out)) == pytest.approx(16_384, abs=1000)
    assert "the last 16384 characters of" in held_out.notes[0] and train.notes == ()
    check_accounts(train)
    lines = texts.usage_lines(check_accounts(held_out))
    assert f"tokens read {len(held_out.tokens):,}, used " in lines[0]


def test_a_folder_of_every_kind_is_read_and_what_is_left_out_is_said(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "book.md").write_text(passage(1, 20_000))
    (folder / "code.py").write_text(passage(2, 20_000))
    (folder / "empty.txt").write_text("")
    odd = [{"role": "user", "content": "twice"}, *TALK]
    rows = [
        {"messages": TALK},
        {"question": "Q", "answer": "A"},
        {"messages": odd},
        {"instruction": "I", "input": "x", "output": "O"},
        {"data": ["u", "a"]},
        {"conversations": [{"from": "human", "value": "u"}]},
        {"text": "t"},
        {"messages": talk("u", "a", "and?")},
        "plain",
    ]
    write_lines(folder / "rows.jsonl", rows)
    train, held_out = load(folder, tmp_path / "data", MISTRAL, max_length=8000)
    found = check_accounts(train)
    assert found["documents"] == 7
    assert found["left_out"] == dict(
        no_answer=1, empty=1, refused=1, messages_after_the_last_answer=1, too_long=2
    )
    assert found["tokens_left_out"]["too long"] > 30_000
    text = "\n".join(texts.usage_lines(found))
    assert "conversations that the chat template refuses 1" in text
    assert "the first refusal: " in text and "rows.jsonl:3: " in text and "take turns" in text
    assert not set(train.tokens.tolist()) - set(range(330))
    assert check_accounts(held_out)["documents"] == 1


def test_text_that_cannot_be_split_says_what_to_give(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": TALK}])
    with pytest.raises(ConfigError, match="a.jsonl:1 is a conversation, but the tokenizer has no"):
        load(path, tmp_path / "data", None)
    with pytest.raises(ConfigError, match="of a single conversation nothing can be held out"):
        load(path, tmp_path / "data")
    short = Corpus("text", np.arange(200, dtype=np.int32))
    with pytest.raises(ConfigError, match="has 200 tokens; expected at least 258, a window: give"):
        texts.check_held_out(short, LENGTH, train_head_default.get_config().data)


def test_texts_are_known_by_their_tokens_their_marks_and_their_documents():
    tokens, mask, starts = np.arange(9, dtype=np.int32), np.arange(9) > 1, np.asarray([0, 4, 9])
    known = [
        json.dumps(texts.fingerprint([Corpus("text", *parts)]))
        for parts in ((tokens, mask, starts), (tokens, mask, starts + [0, 1, 0]))
        + ((tokens + (tokens == 8), mask, starts), (tokens, mask & (tokens < 8), starts))
    ]
    assert len({*known}) == 4


def test_prompts_end_where_answers_begin_or_anywhere_in_a_text(tmp_path):
    rows = [{"messages": talk(f"question {i}", f"answer {i}", "more", "yes")} for i in range(400)]
    _, held_out = load(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "data", max_length=99)
    decode = lambda ids: byte_level(CHATML).backend.decode(ids, skip_special_tokens=False)
    found = texts.held_out_prompts(held_out, 9, 64)
    assert len(found) == 9 and all(decode(ids).endswith("assistant\n") for ids in found)
    assert len({json.dumps(ids) for ids in found}) == 9
    text = Corpus("text", np.arange(1000, dtype=np.int32), None, np.asarray([0, 30, 1000]))
    found = texts.held_out_prompts(text, 4, 100)
    assert found[0] == list(range(15)) and [len(x) for x in found[1:]] == [100] * 3
    assert not set(found[1]) & set(found[2]) and max(found[3]) < 999
    assert len(texts.held_out_prompts(text, 99, 100)) == 10


def test_responses_without_text_are_split_by_their_prompts(tmp_path):
    rows = [
        {"prompt_ids": [1, 2, i], "response_ids": [60 + i, 99, *range(40, 40 + i)]}
        for i in (*range(30), *range(30))
    ]
    write_lines(tmp_path / "responses.jsonl", rows)
    options = dict(responses=str(tmp_path / "responses.jsonl"), held_out_share=0.01)
    data = train_head_default.get_config().data
    data.update(text="", **options)
    total = sum(len(row["prompt_ids"] + row["response_ids"]) for row in rows)
    for enough in (1, 90, total):
        split = texts.load(data, byte_level(CHATML), tmp_path, enough=enough)
        prompts = []
        for corpus in split:
            documents = np.split(corpus.tokens, corpus.starts[1:-1])
            prompts.append([ids.tolist()[2] for ids in documents])
            np.testing.assert_array_equal(corpus.mask[corpus.starts[:-1] + 3], True)
            assert not any(corpus.mask[corpus.starts[:-1] + i].any() for i in range(3))
            assert corpus.counts["documents"] == len(documents)
        train, held_out = map(set, prompts)
        assert not train & held_out and train | held_out == set(range(30))
        assert sorted(prompts[0] + prompts[1]) == sorted([*range(30), *range(30)])
        held = len(split[1].tokens)
        assert held >= min(enough, total // 8) and held < total // 4
        found = texts.held_out_prompts(split[1], 99, 64)
        assert sorted(found) == sorted([1, 2, i] for i in prompts[1])


def test_of_marked_prompts_what_all_have_alike_stays_unmarked(tmp_path):
    prompts = [[1, 2, 5, 6, 3, 4], [1, 2, 7, 3, 4], [1, 2, 3, 4], [9, 9, 9]]
    answers = [[8, 8], [8], [8], []]
    rows = [dict(prompt_ids=x, response_ids=y) for x, y in zip(prompts, answers)]
    write_lines(tmp_path / "responses.jsonl", rows)
    usual = texts.load_responses(tmp_path / "responses.jsonl", byte_level())
    corpus = texts.with_prompts(usual)
    assert np.array_equal(corpus.tokens, usual.tokens) and corpus.starts is usual.starts
    assert corpus.tokens[corpus.mask].tolist() == [5, 6, 8, 8, 7, 8, 8]


@pytest.mark.parametrize(
    "target, responses, text",
    [("zoo/target", "a.jsonl", "stdlib"), ("chat", "a.jsonl", ""), ("chat", None, "stdlib")],
)
def test_responses_of_another_target_than_the_zoos_are_read_alone(target, responses, text):
    config = train_head_default.get_config()
    config.target = target
    config.data.responses = responses
    assert texts.sources(config) == text
    config.data.text = "own.jsonl"
    assert texts.sources(config) == "own.jsonl"
