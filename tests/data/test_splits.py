"""What is held out: of many records a share, of few whole ones, of one text its end."""

import itertools

import pytest

from spec_jax.data.records import Conversation, Text
from spec_jax.data.splits import ENOUGH, HeldOut, rank
from spec_jax.errors import ConfigError


def sides(records, held_out):
    """The parts of both splits, of which each is text."""
    return [
        [part for record in records if (part := held_out.part(record, split)) is not None]
        for split in ("train", "held_out")
    ]


def texts(count, size):
    return [Text(f"{i}\n" + "line\n" * (size // 5), f"{i}.txt") for i in range(count)]


def talk(i, size):
    messages = [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "a" * size}]
    return Conversation(messages, None, f"a:{i}")


def test_a_smaller_share_is_nested_in_a_larger_one():
    records = [Text(str(i), "") for i in range(500)]
    found = [{r.text for r in sides(records, HeldOut(share))[1]} for share in (0, 0.05, 0.3, 1)]
    assert found[0] < found[1] < found[2] < found[3] and len(found[3]) == 500


def test_of_many_records_the_share_is_held_out_and_only_the_first_are_read():
    records = texts(3000, 400)
    stream = iter(records)
    found = HeldOut.of(stream, 0.05)
    assert found[:3] == HeldOut(0.05)[:3] and len(list(stream)) > 1000
    train, held_out = sides(records, found)
    assert 90 < len(held_out) < 210 and len(train) + len(held_out) == 3000
    assert HeldOut.of(records[::-1], 0.05) == found


@pytest.mark.parametrize("count", [4, 8, 30])
def test_of_few_records_some_are_held_out_whole(count):
    records = texts(count, 20_000) + [
        Text("", "empty"),
        talk("without an answer", 0)._replace(messages=[{"role": "user", "content": "x" * 10**6}]),
    ]
    found = HeldOut.of(records, 1e-9)
    train, held_out = sides(records[:count], found)
    assert len(held_out) == 1 and len(train) == count - 1 and not set(train) & set(held_out)
    assert HeldOut.of(reversed(records), 1e-9)[:3] == found[:3]
    assert found.note == f"1 of {count} records are held out, chosen by their contents"


@pytest.mark.parametrize("size", [200, 180_000, 3_000_000])
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_of_a_single_text_the_end_is_held_out(size, share):
    (record,) = records = texts(1, size)
    ((train,), (held_out,)) = sides(records, HeldOut.of(records, share))
    assert train.text + held_out.text == record.text  # nothing twice, nothing lost
    assert train.text.endswith("\n")
    expected = max(share * size, min(ENOUGH, size / 4))
    assert 0.9 * expected - 5 < len(held_out.text) <= expected + 5


def test_a_long_text_beside_small_ones_is_cut_and_they_are_trained_on():
    records = [*texts(1, 10**6), Text("small", "s"), talk(1, 100)]
    train, held_out = sides(records, HeldOut.of(records, 0.0001))
    assert len(train) == 3 and len(held_out) == 1 and held_out[0].source == "0.txt"


def test_conversations_are_never_cut():
    for sizes in itertools.product([1, 100, 30_000], repeat=3):
        records = [talk(i, size) for i, size in enumerate(sizes)]
        train, held_out = sides(records, HeldOut.of(records, 0.0001))
        assert train and held_out and len(train) + len(held_out) == 3
        if sorted(sizes)[1] == 30_000:  # two large ones: one on each side
            assert max(len(r.messages[1]["content"]) for r in held_out) == 30_000
            assert max(len(r.messages[1]["content"]) for r in train) == 30_000
    one = HeldOut.of(records[:1], 0.02)
    assert sides(records[:1], one) == [records[:1], []] and "single conversation" in one.note


def test_equal_records_are_on_one_side():
    records = texts(3, 9000) * 2
    train, held_out = sides(records, HeldOut.of(records, 0.02))
    assert not {rank(r) for r in train} & {rank(r) for r in held_out} and held_out


def test_nothing_is_held_out_by_a_share_of_0_and_a_bad_one_is_refused():
    assert sides(texts(2, 9000), HeldOut.of(texts(2, 9000), 0))[1] == []
    with pytest.raises(ConfigError, match="held_out_share is 1.0; expected a number in"):
        HeldOut.of([], 1.0)
