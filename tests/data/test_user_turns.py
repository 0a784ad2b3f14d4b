"""Prompts that a model writes itself: where a turn begins, and which turns are used."""

import json
import random

import pytest
import tokenizers
from support import chat_templates as chat

from spec_jax.data.conversations import Encoder
from spec_jax.data.first_words import load_words
from spec_jax.data.records import Conversation, Text, parse_record
from spec_jax.data.user_turns import Opening, choose
from spec_jax.errors import ConfigError
from spec_jax.models.tokenizer import Tokenizer

TURN = "What is two and two?"
ENDS = {"ChatML": "<|im_end|>", "Llama 3": "<|eot_id|>", "generation": "<|im_end|>"}


@pytest.mark.parametrize("name", [*ENDS, "Mistral"])
def test_a_turn_stands_where_the_template_has_the_user_speak(name):
    tokenizer = chat.byte_level(chat.TEMPLATES[name])
    opening = Opening.of(tokenizer, (1,))
    prompt = Encoder(tokenizer).prompt(Conversation(chat.talk(TURN), None, ""))
    assert opening.prompt(TURN, tokenizer) == prompt
    assert prompt[: len(opening.ids)] == opening.ids
    assert parse_record(opening.row(3, TURN), "").messages == chat.talk(TURN)
    if name == "Mistral":
        assert (opening.stop, opening.stop_tokens) == (("[/INST]",), (1,))
    else:
        assert opening.stop == () and {*opening.stop_tokens} == {1, tokenizer.token_id(ENDS[name])}


def test_without_a_template_a_text_begins():
    tokenizer = chat.byte_level()
    opening = Opening.of(tokenizer, (1,))
    assert opening.ids == tokenizer.encode("") == [0]
    row = parse_record(opening.row(3, TURN), "here")
    assert row == Text(TURN, "here")
    assert opening.prompt(TURN, tokenizer) == Encoder(tokenizer).prompt(row)


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ messages[0].content | upper }}", "writes the words of the user 0 times"),
        ("u:{{ messages[0].content }}{{ messages[0].content }}", "the user 2 times"),
        ("{{ messages[0].content }}!", "1 times, after ''"),
        ("{{ raise_exception('no user') }}", "refuses the conversation: no user"),
    ],
)
def test_a_template_that_does_not_write_what_the_user_says_is_refused(template, words):
    with pytest.raises(ConfigError, match=words):
        Opening.of(chat.byte_level(template), (1,))


def turns_of(tokenizer, opening, *texts):
    """Turns that ended, but for those whose text ends in three dots."""
    end = opening.stop_tokens[0]
    found = []
    for index, text in enumerate(texts):
        is_ended = not text.endswith("...")
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids + [end] * is_ended
        reason = "stop_token" if is_ended else "length"
        row = dict(prompt_ids=opening.ids, response_ids=ids, finish_reason=reason)
        found.append(row | {"index": index})
    return found


def test_noise_and_repeats_are_left_out_and_counted():
    tokenizer = chat.byte_level(chat.CHATML)
    opening = Opening.of(tokenizer, (1,))
    other = "user: that is a café, and assistant system two"
    texts = [
        TURN,
        "",
        "a",
        "is a café " * 9,
        f"{TURN}<|im_start|>",
        other,
        " what  IS two and two?",
    ]
    turns = turns_of(tokenizer, opening, *texts, "What is ...", TURN)
    random.Random(0).shuffle(turns)
    found = choose(turns, opening, tokenizer, 4)
    assert found.texts == {0: TURN, 5: other} and [*found.texts] == [0, 5]
    left = {"short": 2, "repetitive": 1, "tags": 1, "unfinished": 1, "duplicate": 2}
    assert found.left_out == left
    assert found.samples["duplicate"] == ["what  IS two and two?", TURN]
    said = found.sentences()
    assert said[0] == "the target wrote 9 prompts; 2 are used"
    assert "left out 11.1%, with a tag of the chat template: 'What is two and two?<|im" in said[-2]


def test_of_a_text_that_ended_nothing_is_left_to_continue():
    tokenizer = chat.byte_level()
    opening = Opening.of(tokenizer, (1,))
    found = choose(turns_of(tokenizer, opening, TURN, f"{TURN}..."), opening, tokenizer, 4)
    assert found.texts == {1: f"{TURN}..."} and found.left_out == {"ended": 1}


def test_first_words_that_end_in_new_lines_are_split_as_before_a_word():
    """As GPT-2 does, where two new lines at the end of a text are one token."""
    own = chat.byte_level(chat.CHATML)
    known = json.loads(own.backend.to_str())
    known["model"]["vocab"]["ĊĊ"] = own.vocab_size
    known["model"]["merges"].append(["Ċ", "Ċ"])
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(known)), own.config)
    opening = Opening.of(tokenizer, (1,), ("write\n\n",))
    (start,) = opening.starts
    text = tokenizer.backend.encode(opening.before + "write\n\n", add_special_tokens=False).ids
    assert text[-1] == own.vocab_size and start[-1] == start[-2] != text[-1]
    assert opening.prompt("write\n\ntwo", tokenizer)[: len(start)] == start


@pytest.mark.parametrize("make", [chat.byte_level, chat.metaspace])
@pytest.mark.parametrize("template", ["ChatML", "Mistral"])
def test_turns_go_on_from_first_words(template, make):
    tokenizer = make(chat.TEMPLATES[template])
    words = ("what is", "write\n")
    opening = Opening.of(tokenizer, (1,), words)
    prefixes = [opening.begin(index)[0] for index in range(8)]
    assert {*prefixes} == {*words}
    for prefix, start in zip(words, opening.starts):
        assert tokenizer.decode(start, has_special=True).endswith(prefix)
        assert opening.prompt(f"{prefix} two", tokenizer)[: len(start)] == start
    texts = [f"{prefix} two and {index}?" for index, prefix in enumerate(prefixes)]
    turns = []
    for index, text in enumerate(texts):
        start = opening.begin(index)[1]
        whole = tokenizer.backend.encode(opening.before + text, add_special_tokens=False).ids
        ids = [*whole[len(start) :], opening.stop_tokens[0]]
        row = dict(index=index, prompt_ids=start, response_ids=ids, finish_reason="stop_token")
        turns.append(row)
    assert choose(turns, opening, tokenizer, 4).texts == dict(enumerate(texts))
    turns[0]["response_ids"] = [opening.stop_tokens[0]]  # nothing after its prefix
    assert choose(turns, opening, tokenizer, 1).left_out == {"short": 1}
    longest = max(len(turn["response_ids"]) for turn in turns)
    assert choose(turns, opening, tokenizer, longest).texts  # with its prefix a turn is longer
    with pytest.raises(ConfigError, match="turn 0 does not begin with 'how': .* other first words"):
        choose(turns, Opening.of(tokenizer, (1,), ("how",)), tokenizer, 4)


def test_a_text_without_a_template_has_no_first_words():
    tokenizer = chat.byte_level()
    opening = Opening.of(tokenizer, (1,), ("What is",))
    assert opening.begin(0) == ("", opening.ids)


def test_first_words_hold_no_tag():
    with pytest.raises(ConfigError, match="first words 'a <.im_end.>' hold a tag"):
        Opening.of(chat.byte_level(chat.CHATML), (1,), ("What is", "a <|im_end|>"))


def test_first_words_are_a_list_or_a_file(tmp_path):
    english = load_words("english")
    assert len({*english}) == len(english) > 200 and "from typing import List\n\n\ndef" in english
    file = tmp_path / "words.txt"
    text = "\ufeffSchreibe \r\n\nWas ist\\nein\n\\n\nWas ist\\nein\n"
    file.write_text(text, encoding="utf-8", newline="")
    assert load_words(str(file)) == ("Schreibe", "Was ist\nein")
    assert load_words("") == ()
    opening = Opening.of(chat.byte_level(chat.CHATML), (1,), english)
    assert {opening.begin(index)[0] for index in range(4000)} == {*english}
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no entries"):
        load_words(str(file))
    with pytest.raises(ConfigError, match="'inglish' cannot be read .*give 'english', a file"):
        load_words("inglish")
