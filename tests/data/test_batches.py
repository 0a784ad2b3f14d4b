"""Training windows by step, the draft vocabulary, and data that cannot be used."""

import tracemalloc

import numpy as np
import pytest

from spec_jax.data.batches import Corpus, count_tokens, draft_vocabulary, window_batches
from spec_jax.errors import ConfigError

A = Corpus("a", np.arange(1000, dtype=np.int32))
B = Corpus("b", np.arange(5000, 5300, dtype=np.int32), np.arange(300) % 2 == 0)
SIZE = dict(batch=4, length=10)


def drawn(ds, steps):
    return [tuple(window) for step in steps for window in ds[step]["window"].tolist()]


def test_a_batch_is_a_function_of_seed_and_step():
    one, two = (window_batches([A, B], [3, 1], seed=1, **SIZE) for _ in range(2))
    other = window_batches([A, B], [3, 1], seed=2, **SIZE)
    for step in (40, 0, 7):  # in any order, by any object
        np.testing.assert_array_equal(one[step]["tokens"], two[step]["tokens"])
    assert drawn(one, range(9)) != drawn(other, range(9))


def test_an_epoch_draws_every_window_once_and_the_next_in_another_order():
    ds = window_batches([A], [1], seed=0, **SIZE)
    first, second = drawn(ds, range(25)), drawn(ds, range(25, 50))
    assert sorted(first) == sorted(second) == [(0, i) for i in range(100)]
    assert first != second


def test_windows_hold_their_text_and_mask_in_the_asked_shares():
    ds = window_batches([A, B], [3, 1], seed=0, **SIZE)
    of_b = 0
    for step in range(30):
        batch = ds[step]
        for tokens, mask, (text, index) in zip(*(batch[n] for n in ("tokens", "mask", "window"))):
            part = slice(index * 10, index * 10 + 10)
            np.testing.assert_array_equal(tokens, (A, B)[text].tokens[part])
            np.testing.assert_array_equal(mask, B.mask[part] if text else np.ones(10, bool))
            of_b += text
    assert of_b == 30


def test_a_window_says_where_the_documents_of_its_tokens_begin():
    """By a loop over documents, of which some are cut by windows and the tail is another one."""
    starts = np.asarray([0, 3, 4, 12, 25])
    text = Corpus("c", A.tokens[:30], starts=starts)
    owner = [sum(start <= i for start in starts) for i in range(30)]
    for index in range(3):
        own = owner[index * 10 : index * 10 + 10]
        expected = [own.index(number) for number in own]
        np.testing.assert_array_equal(text.window(index, 10)["begins"], expected)
    assert not A.window(1, 10)["begins"].any()
    late = Corpus("late", A.tokens[:30], starts=starts[2:])  # what is before is a document too
    assert late.window(0, 10)["begins"].tolist() == [0] * 4 + [4] * 6


def test_memory_does_not_grow_with_the_corpus():
    """Of a corpus whose tokens all are one number in memory."""

    def peak_bytes(num_tokens):
        text = Corpus("file", np.broadcast_to(np.int32(7), num_tokens))
        tracemalloc.start()
        ds = window_batches([text], [1], seed=0, batch=8, length=256)
        assert all((ds[step]["tokens"] == 7).all() for step in range(50))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(1 << 28) < peak_bytes(1 << 20) + 30_000_000


TEXTS = [
    ([], [], "0 texts have 0 shares"),
    ([A], [-1], "share of a is -1"),
    ([A], [0], "every share is 0"),
    ([Corpus("short", A.tokens[:9])], [1], "short has 9 tokens; expected at least 10"),
    ([Corpus("c", A.tokens, np.zeros(1000, bool))], [1], "no token of c is to be predicted"),
]


@pytest.mark.parametrize(("texts", "shares", "message"), TEXTS)
def test_texts_that_cannot_be_drawn_from_are_refused(texts, shares, message):
    with pytest.raises(ConfigError, match=message):
        window_batches(texts, shares, seed=0, **SIZE)


def test_counts_are_of_what_is_predicted():
    text = Corpus("t", np.asarray([3, 3, 1, 0, 3]), np.asarray([1, 0, 1, 1, 1], bool))
    np.testing.assert_array_equal(count_tokens(text, 5, chunk=2), [1, 1, 0, 2, 0])
    with pytest.raises(ConfigError, match="t holds id 3; the target has ids 0 to 2"):
        count_tokens(text, 3)


def test_the_draft_vocabulary_is_the_most_frequent_as_offsets():
    d2t = draft_vocabulary(np.asarray([5, 0, 9, 1, 5, 2]), 3)
    np.testing.assert_array_equal(np.arange(3) + d2t, [0, 2, 4])
    np.testing.assert_array_equal(draft_vocabulary(np.ones(4), 4), np.zeros(4))
    for size in (0, 7):
        with pytest.raises(ConfigError, match=f"draft vocabulary is {size}; expected 1 to 6"):
            draft_vocabulary(np.zeros(6), size)


def test_ids_are_those_that_were_given_or_are_refused():
    def broken():
        yield np.asarray([1])
        raise TypeError("of the caller")

    for ids in (np.asarray([1, 2**32 + 5]), np.asarray([2**32 - 1], np.uint32), [[2, -(2**40)]]):
        with pytest.raises(ConfigError, match="t holds id -?[0-9]+; ids have 32 bits"):
            Corpus.of_tokens("t", ids)
    np.testing.assert_array_equal(Corpus.of_tokens("t", [[1, 2], [3]]).tokens, [1, 2, 3])
    for ids in (3, "text", [[[1, 2], [3]]], [np.ones(2)]):
        with pytest.raises(ConfigError, match="expected a Corpus, an array"):
            Corpus.of_tokens("t", ids)
    with pytest.raises(TypeError, match="^of the caller$"):
        Corpus.of_tokens("t", broken())
