"""Text that is settled stays, and together it is the final text, by every kind of decoder."""

import codecs

import numpy as np
import pytest
from support.tiny_tokenizers import byte_fallback, bytes_alone, with_decoder
from tokenizers import decoders

from spec_jax import zoo
from spec_jax.decoding.state import Finish
from spec_jax.engine.text import TextTracker
from spec_jax.models.tokenizer import Tokenizer

CASES = 500
TOKENIZERS = {
    "byte level": lambda: Tokenizer.from_directory(zoo.path("zoo/target")),
    "byte fallback": byte_fallback,
    "bytes alone": bytes_alone,
}
SCRIPT = "aé數🎉 ß\u200d👩‍🚀\n�½"


def some_ids(tokenizer, rng) -> list[int]:
    """Pieces of multi-byte text, some of them cut, and any ids between them."""
    ids: list[int] = []
    for _ in range(rng.integers(1, 5)):
        if rng.random() < 0.6:
            text = "".join(rng.choice(list(SCRIPT), rng.integers(1, 5)))
            new = by_bytes(tokenizer, text) if rng.random() < 0.7 else tokenizer.encode(text)
            ids += new[: len(new) - rng.integers(0, 2)]
        else:
            ids += rng.integers(tokenizer.num_ids, size=rng.integers(1, 4)).tolist()
    return ids


def by_bytes(tokenizer, text: str) -> list[int]:
    """A token a byte, whatever the tokenizer itself would merge."""
    if (first := tokenizer.token_id("<0x00>")) is not None:
        return [first + byte for byte in text.encode()]
    return [i for char in text for i in tokenizer.backend.encode(char).ids]


def check_streams(tokenizer, rng) -> None:
    """Raises AssertionError where what is settled changes, or is not the final text's."""
    prompt, ids, more = (some_ids(tokenizer, rng) for _ in range(3))
    whole = tokenizer.decode_after(prompt, [*ids, *more])
    text, sent = tokenizer.decode_after(prompt, ids), ""
    for n in range(len(ids) + 1):
        settled = tokenizer.settled_after(prompt, ids[:n])
        assert settled.startswith(sent)
        sent = settled
    assert text.startswith(sent) and whole.startswith(sent)
    kept = tokenizer.whole_after(prompt, ids)
    assert text.startswith(kept) and kept.startswith(sent)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_is_settled_begins_every_later_text(kind):
    tokenizer, rng = TOKENIZERS[kind](), np.random.default_rng(0)
    for _ in range(CASES):
        check_streams(tokenizer, rng)


@pytest.mark.representatives("True-byte level")
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_long_rows_are_followed_by_their_last_tokens_alone(kind, is_cancelled):
    tokenizer, rng = TOKENIZERS[kind](), np.random.default_rng(2)
    decode, decoded = tokenizer.decode, []

    def counted(ids, **options):
        decoded.append(len(ids))
        return decode(ids, **options)

    end = Finish.CANCELLED if is_cancelled else Finish.LENGTH
    for _ in range(5):
        prompt, ids = some_ids(tokenizer, rng), []
        while len(ids) < 1500:
            ids += some_ids(tokenizer, rng)
        final = tokenizer.whole_after if is_cancelled else tokenizer.decode_after
        expected, tokenizer.decode = final(prompt, ids), counted
        decoded.clear()
        watch, pieces, n = TextTracker(tokenizer, prompt, has_pieces=True), [], 0
        while n < len(ids):
            n = min(n + int(rng.integers(1, 5)), len(ids))
            is_last = n == len(ids)
            pieces.append(watch.look(ids[:n], end if is_last else Finish.RUNNING)[1])
        assert "".join(pieces) == watch.result(ids, end)[1] == expected
        if kind != "byte fallback":  # whose rows are here almost nothing but runs of bytes
            assert sum(decoded) < 120 * len(ids)  # all of it each time: 300 an id


DECODERS = [
    None,
    decoders.BPEDecoder("a"),
    decoders.WordPiece("a"),
    decoders.Metaspace(),
    decoders.CTC(),
    decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]),
    decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "b")]),
    decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
    decoders.Sequence([decoders.ByteLevel(), decoders.Strip("b", 1, 2)]),
]


@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_settled_is_settled_by_every_decoder(decoder):
    tokenizer, rng = with_decoder(decoder) if decoder else no_decoder(), np.random.default_rng(1)
    for _ in range(100):
        check_streams(tokenizer, rng)


def no_decoder() -> Tokenizer:
    backend = byte_fallback().backend
    backend.decoder = None
    return Tokenizer(backend)


def test_bytes_are_settled_as_soon_as_they_can_be():
    """The oracle is Python's own incremental UTF-8 decoder."""
    tokenizer, rng = bytes_alone(), np.random.default_rng(2)
    for _ in range(CASES):
        data = "".join(rng.choice(list(SCRIPT), 6)).encode()
        data = bytes(b for b in data if rng.random() < 0.9)
        oracle = codecs.getincrementaldecoder("utf-8")("replace")
        ids, sent = [], ""
        for byte in data:
            ids.append(byte)
            sent += oracle.decode(bytes([byte]))
            settled = tokenizer.settled_after([65], ids)
            assert settled in (sent, sent.removesuffix("�"))


def test_a_run_of_byte_tokens_waits_for_its_end():
    """One invalid byte would make U+FFFD of the whole run: what the library streams too early."""
    tokenizer = byte_fallback()
    a, invalid = tokenizer.token_id("a"), tokenizer.token_id("<0xFF>")
    run = by_bytes(tokenizer, "é")
    assert tokenizer.settled_after([], [a, *run]) == "a"
    assert tokenizer.settled_after([], [a, *run, a]) == "aéa"
    assert tokenizer.decode_after([], [a, *run, invalid, a]) == "a���a"
    start = tokenizer.token_id("<s>")
    assert tokenizer.settled_after([], [a, *run, start]) == "a"  # which the text leaves out
    assert tokenizer.decode([a, run[0], start, run[1], a]) == "aéa"


def test_a_prompt_that_ends_in_a_long_run_of_bytes_does_not_spoil_the_text():
    tokenizer = byte_fallback()
    prompt, ids = by_bytes(tokenizer, "數" * 5), by_bytes(tokenizer, "數é")
    assert tokenizer.decode_after(prompt, ids) == "數é"


def test_text_that_ends_early_ends_with_a_whole_character():
    for tokenizer in (make() for make in TOKENIZERS.values()):
        first, rest = tokenizer.token_id("a"), by_bytes(tokenizer, "🎉")
        assert tokenizer.whole_after([], [first, *rest]) == "a🎉" and len(rest) > 1
        for cut in range(1, len(rest) + 1):
            assert tokenizer.whole_after([], [first, *rest[:-cut]]) == "a"


def test_the_start_of_a_stop_string_is_held_back_until_it_is_none():
    """Of a text that comes letter by letter, and in which a stop string begins twice."""
    tokenizer = bytes_alone()
    ids = by_bytes(tokenizer, "ababc")
    tracker = TextTracker(tokenizer, [], ["abc"], has_pieces=True)
    sent = [tracker.look(ids[:n], Finish.RUNNING)[1] for n in range(1, len(ids) + 1)]
    assert sent == ["", "", "a", "b", ""]
    assert tracker.result(ids, Finish.RUNNING).text == "ab"
