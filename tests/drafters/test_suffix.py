"""Suffix decoding: counts by hand, past outputs, and exactness."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.config import SuffixConfig
from spec_jax.contracts import Context
from spec_jax.drafters.suffix import GAP, History, suffix

VOCAB, WIDTH, PAST, K = 4, 20, 12, 5
FOLLOWS = (SuffixConfig(), SuffixConfig(max_depth=3, max_factor=1.5, max_offset=0.6, min_prob=0.3))


def test_past_outputs_are_kept_whatever_thread_they_come_from():
    history, threads, each = History(8000), 4, 300

    def add(number):
        for _ in range(each):
            history.add([number])
            assert history.params is not None

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(add, range(threads)))
    kept = np.asarray(history.params["tokens"])
    assert np.bincount(kept[kept >= 0]).tolist() == [each] * threads


def counts_after(texts, path):
    """How often each token followed ``path`` in the texts."""
    counts = {}
    for text in texts:
        for start in range(len(text) - len(path)):
            if text[start : start + len(path)] == path:
                token = text[start + len(path)]
                counts[token] = counts.get(token, 0) + 1
    return counts


def best_by_hand(texts, history, follow):
    """(score, matched tokens, drafts) of the best match, longer matches winning ties."""
    best = (np.float32(0), 0, [])
    for size in range(1, min(follow.max_depth, len(history)) + 1):
        path = history[-size:]
        if not counts_after(texts, path):
            break
        score, prob, drafts = np.float32(0), np.float32(1), []
        while len(drafts) < min(K, int(np.floor(follow.max_factor * size + follow.max_offset))):
            counts = counts_after(texts, path + drafts)
            if not counts:
                break
            token = min(counts, key=lambda t: (-counts[t], t))
            prob = prob * np.float32(counts[token]) / np.float32(sum(counts.values()))
            if prob < np.float32(follow.min_prob):
                break
            score, drafts = score + prob, [*drafts, token]
        if score >= best[0]:
            best = (score, size, drafts)
    return best


@functools.cache
def proposer(follow):
    drafter = suffix(VOCAB, follow)

    @jax.jit
    def propose(past, tokens, length):
        context = Context(tokens, length, None, None, False, False, False)
        proposal, _ = drafter.propose(past, (), context, K)
        return proposal.tokens, proposal.n_draft

    return propose


def drafted(histories, outputs, follow):
    """Drafts of a batch of rows, all with the same past outputs."""
    tokens = np.full((len(histories), WIDTH), VOCAB - 1, np.int32)  # what is stale behind a row
    for row, history in enumerate(histories):
        tokens[row, : len(history)] = history
    past = History(PAST)
    for output in outputs:
        past.add(output)
    length = jnp.asarray([len(h) - 1 for h in histories], jnp.int32)
    found, n = map(np.asarray, proposer(follow)(past.params, jnp.asarray(tokens), length))
    assert not found[np.arange(K) >= n[:, None]].any()
    return [row[:m].tolist() for row, m in zip(found, n)]


streams = lambda most: st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=most)


@settings(max_examples=150)
@given(
    st.lists(streams(WIDTH - 2), min_size=3, max_size=3),
    st.lists(streams(5), max_size=4),
    st.sampled_from(FOLLOWS),
)
def test_drafts_are_those_of_counting_by_hand(histories, outputs, follow):
    kept = [t for output in outputs for t in [GAP, *output]][-PAST:]
    kept = [int(t) for t in kept]
    texts, current = [], []
    for token in [*kept, GAP]:
        if token == GAP:
            texts.append(current)
        current = [] if token == GAP else [*current, token]
    expected = []
    for history in histories:
        own, past = (best_by_hand(t, history, follow) for t in ([history], texts))
        expected.append((past if past[:2] > own[:2] else own)[2])
    assert drafted(histories, outputs, follow) == expected


HISTORIES = [
    ([1, 2, 0, 1, 2], [], [0, 1]),  # two tokens matched: two are drafted
    ([1, 2, 0, 2, 0, 2], [], [0, 2]),
    ([0, 1, 0, 1, 0, 2, 0], [], [1]),  # "0 1" twice, "0 2" once
    ([0, 1, 2], [], []),
    ([1], [[1, 2, 2]], [2]),  # from a past output
    ([0, 1], [[2, 0], [1, 2]], [2]),  # a match does not reach over a gap
    ([0, 1], [[0, 1], [2]], []),  # nor does what is copied
]


@pytest.mark.parametrize("history, outputs, expected", HISTORIES)
def test_the_most_frequent_continuation_is_followed(history, outputs, expected):
    assert drafted([history], outputs, SuffixConfig()) == [expected]


def test_the_oldest_outputs_are_forgotten_first():
    past = History(7)
    for output in ([1, 2, 3], [], [4, 5], [6]):
        past.add(output)
    assert past.params["tokens"].tolist() == [2, 3, GAP, 4, 5, GAP, 6]
    past.add(range(9))
    assert past.params["tokens"].tolist() == [2, 3, 4, 5, 6, 7, 8]
    empty = History(0)
    empty.add([1])
    assert empty.params is None and empty.num_updates == 0
