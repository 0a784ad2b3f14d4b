"""Stop strings that hold special tokens, which the text leaves out."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny_tokenizers import SPECIAL, byte_fallback, bytes_alone

from spec_jax.decoding import Finish
from spec_jax.engine.text import TextTracker

START, END = (bytes_alone().token_id(text) for text in SPECIAL)
STOPS = ["</s>", "ab</s>", "</s>b", "a<s></s>", ["b</s>", "aa"], ["bb", "<s>a"], "</s></s>", "s>"]


def follow(tokenizer, prompt, ids, stops, steps):
    """What becomes of a row that is polled after so many tokens each, and its pieces."""
    tracker = TextTracker(tokenizer, prompt, stops, has_pieces=True)
    n, ending, sent = 0, Finish.RUNNING, ""
    while n < len(ids) and ending == Finish.RUNNING:
        n = min(n + next(steps), len(ids))
        end = Finish.LENGTH if n == len(ids) else Finish.RUNNING
        ending, piece = tracker.look(ids[:n], end)
        sent += piece
    return *tracker.result(ids[:n], Finish.LENGTH), sent


def expected_of(tokenizer, ids, stops):
    """The same, by looking at the whole text after each token."""
    texts = [tokenizer.special_texts.get(i) or tokenizer.decode([i]) for i in ids]
    is_special = [i in tokenizer.special_texts for i in ids]
    for n in range(1, len(ids) + 1):
        # For each character of the text with special tokens: how many plain ones are before it.
        plain = "".join(x for x, left_out in zip(texts[:n], is_special) if not left_out)
        shown, before, count = "".join(texts[:n]), [], 0
        for text, left_out in zip(texts[:n], is_special):
            before += [count] * len(text) if left_out else range(count, count + len(text))
            count += 0 if left_out else len(text)
        holds = lambda stop: any(text in stop for text in SPECIAL)
        places = [before[shown.find(s)] for s in stops if holds(s) and s in shown]
        places += [plain.find(s) for s in stops if not holds(s) and s in plain]
        if places:
            return n, plain[: min(places)], Finish.STOP_STRING
    return len(ids), plain, Finish.LENGTH


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_special_token_is_matched_by_its_id_alone_and_within_a_string(stop):
    tokenizer, rng = bytes_alone(), np.random.default_rng(0)
    stops, ends = [stop] if isinstance(stop, str) else stop, set()
    for _ in range(60):
        ids = rng.choice([97, 98, START, END], 12).tolist()
        expected = expected_of(tokenizer, ids, stops)
        for most in (1, 5, 12):
            steps = iter(lambda: int(rng.integers(1, most + 1)), None)
            *found, sent = follow(tokenizer, [98], ids, stops, steps)
            assert tuple(found) == expected and sent == expected[1]
        ends.add(expected[2])
    assert (Finish.STOP_STRING in ends) == (stop != "s>")


def test_a_special_token_ends_a_row_whose_last_character_is_unfinished_or_a_byte():
    for tokenizer, token in (
        (bytes_alone(), 0xC3),
        (byte_fallback(), byte_fallback().token_id("<0x0A>")),
    ):
        a, end = (tokenizer.token_id(x) for x in ("a", "</s>"))
        for steps in (1, 9):
            found = follow(
                tokenizer, [a], [a, token, end, a, a], ["</s>"], iter(lambda: steps, None)
            )
            text = "a" if token == 0xC3 else "a\n"
            assert found == (3, text, Finish.STOP_STRING, text)


def test_bytes_after_a_special_token_do_not_change_what_ended_with_it():
    tokenizer = byte_fallback()
    ids = [tokenizer.token_id(x) for x in ("a", "<0xC3>", "<0xA9>", "</s>", "<0xA9>", "a")]
    for steps in (1, 3, 6):  # the later byte makes the first two invalid in the whole text
        found = follow(tokenizer, ids[:1], ids, ["é</s>"], iter(lambda: steps, None))
        assert found == (4, "a", Finish.STOP_STRING, "a")
