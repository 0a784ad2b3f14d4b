"""Any Python function as a drafter inside the compiled loop."""

import asyncio
import dataclasses
import functools
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_tokenizers import bytes_alone

import spec_jax
from spec_jax import SamplerConfig, testing
from spec_jax.contracts import Context
from spec_jax.errors import InvalidDraftError
from spec_jax.overlap.overlap import Devices
from spec_jax.sampling import make_sampler

B, K, V, M = 3, 3, 4, 12


@functools.partial(jax.jit, static_argnames=("drafter", "num_draft", "has_probs"))
def propose(tokens, length, seeds, *, drafter, num_draft=K, has_probs=True):
    """What a drafter without parameters or state proposes for ragged rows."""
    sampler = make_sampler(SamplerConfig(), len(tokens), V).replace(seed=seeds)
    options = dict(is_coupled=False, has_probs=has_probs, has_logits=False)
    context = Context(tokens, length, sampler, seeds, **options)
    return drafter.propose(None, (), context, num_draft)[0]


def rows(seed=0):
    rng = np.random.default_rng(seed)
    tokens, length = rng.integers(0, V, (B, M)), rng.integers(0, M, B)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32), jnp.uint32([5, 6, 7])


def test_the_seed_is_the_rows_own_and_the_positions():
    """Not the slot's, nor the batch's; and the function gets the prefix with the pending token."""
    asked = {}

    def listen(prefix, k, seed):
        assert k == K and isinstance(seed, int) and 0 <= seed < 2**32
        asked[prefix] = seed
        return []

    host = spec_jax.host_drafter(listen)
    tokens, length, seeds = rows()
    length = jnp.int32([4, 7, 7])
    jax.block_until_ready(propose(tokens, length, seeds, drafter=host))
    first = dict(asked)
    assert set(first) == {
        tuple(np.asarray(tokens)[b, : n + 1].tolist()) for b, n in enumerate(np.asarray(length))
    }
    asked.clear()
    order = jnp.int32([2, 0, 1])
    jax.block_until_ready(propose(tokens[order], length[order], seeds[order], drafter=host))
    assert asked == first and len(set(first.values())) == B
    asked.clear()
    jax.block_until_ready(propose(tokens, length + 1, seeds, drafter=host))
    assert len(set(asked.values()) | set(first.values())) == 2 * B


def test_equal_options_share_a_drafter_and_no_drafts_call_nothing():
    refuse = lambda prefix, k, seed: pytest.fail("it was called")
    host = spec_jax.host_drafter(refuse)
    assert host is spec_jax.host_drafter(refuse)
    proposal = propose(*rows(), drafter=host, num_draft=0)
    assert proposal.tokens.shape == (B, 0) and not proposal.n_draft.any()


FAIR = np.full((1, V), 0.25)
ANSWER = {}  # what the function returns: one program for all of the cases


def answer(prefix, k, seed):
    if "raise" in ANSWER:
        raise KeyError(ANSWER["raise"])
    return ANSWER["value"]


FAULTY = [  # whether it reports probabilities, its answer
    (False, [0] * 4, r"at most 3 integer ids, got \[0, 0, 0, 0\]"),
    (False, [0.5], r"integer ids, got \[0.5\]"),
    (False, [[1], [2, 3]], "inhomogeneous"),
    (False, None, "integer ids, got None"),
    (False, "ab", "integer ids, got 'ab'"),
    (True, [1], r"expected a pair of ids and probabilities, got \[1\]"),
    (True, ([1, 2], FAIR), r"shape \(1, 4\); expected \(2, 4\)"),
    (True, ([1], FAIR[0]), r"shape \(4,\); expected \(1, 4\)"),
    (True, ([1], FAIR / 2), "sum to 0.5"),
    (True, ([1], [[-0.5, 0.5, 0.5, 0.5]]), "the least is -0.5"),
    (True, ([1], FAIR * np.nan), "sum to nan"),
    (True, ([1], [[1, 0, 0, 0]]), "token 1 has probability 0"),
]


@pytest.mark.parametrize("is_sampled, value, words", FAULTY, ids=[row[-1] for row in FAULTY])
def test_every_row_of_a_faulty_answer_is_refused_and_its_error_found(is_sampled, value, words):
    ANSWER.clear()
    ANSWER["value"] = value
    options = {"is_sampled": True, "vocab_size": V} if is_sampled else {}
    host = spec_jax.host_drafter(answer, **options)
    tokens, length, seeds = rows()
    proposal = propose(tokens, length, seeds, drafter=host)
    assert proposal.n_draft.tolist() == [-1] * B and not proposal.tokens.any()
    for row, n in zip(np.asarray(tokens), np.asarray(length)):
        error = host.host.find_error(tuple(row[: n + 1].tolist()), 0)
        with pytest.raises(ValueError, match=words):
            raise error
    ANSWER["value"] = ([], []) if is_sampled else []  # what is mended is forgotten
    jax.block_until_ready(propose(tokens, length, seeds, drafter=host))
    assert host.host.find_error((), M) is None


def test_fewer_drafts_than_k_and_none_are_drafts_too():
    ANSWER.clear()
    host = spec_jax.host_drafter(answer, is_sampled=True, vocab_size=V)
    ANSWER["value"] = ([2], FAIR)
    proposal = propose(*rows(), drafter=host)
    assert proposal.n_draft.tolist() == [1] * B and proposal.tokens[:, 0].tolist() == [2] * B
    np.testing.assert_array_equal(proposal.probs[0], [FAIR[0], [0] * V, [0] * V])
    ANSWER["value"] = ([], np.zeros((0, V)))
    assert not propose(*rows(), drafter=host).n_draft.any()
    ANSWER["value"] = ([], [])
    assert not propose(*rows(), drafter=host).n_draft.any()


# ------------------------------------------------------------------------- inside the loop


def raise_late(prefix, k, seed):
    """Raises in rows that begin with 1, once their output has two tokens."""
    if prefix[0] == 1 and len(prefix) > 4:
        return {}["no such prefix"]
    return [0] * k


def run_queue(decoder, prompts):
    prompts, done = [*prompts[1:], prompts[0], *[[2]] * 50], []
    try:
        for index, row in spec_jax.DecodeQueue(decoder, prompts, batch=2, max_new_tokens=8):
            done.append((index, row.finish_reason))
    finally:
        assert (2, "invalid_draft") in done and 3 <= len(done) < 9, done


RUNS = {
    "alone": lambda decoder, prompts: decoder.generate(prompts[0], 8),
    "batch": lambda decoder, prompts: decoder.generate(prompts, 8),
    "stream": lambda decoder, prompts: list(decoder.stream(prompts, 8)),
    "async": lambda decoder, prompts: asyncio.run(decoder.generate_async(prompts, 8)),
    "queue": run_queue,
    "devices of its own": lambda decoder, prompts: decoder.generate(prompts, 8),
}


@pytest.mark.representatives("alone", "batch", "stream", "async", "queue")
@pytest.mark.parametrize("name", RUNS)
def test_an_exception_of_the_function_is_the_cause_and_the_runtime_logs_nothing(name, capfd):
    config = spec_jax.SpeculativeConfig(num_speculative_tokens=K)
    first, second = jax.devices()[:2]
    options = {"devices": Devices(draft=first, target=second)} if "devices" in name else {}
    target = dataclasses.replace(testing.mock_model(V), tokenizer=bytes_alone())
    host = spec_jax.host_drafter(raise_late)
    decoder = spec_jax.SpeculativeDecoder(target, drafter=host, config=config, **options)
    message = "drafter 'host' raised KeyError: 'no such prefix'"
    with pytest.raises(InvalidDraftError, match=message) as caught:
        RUNS[name](decoder, [[1, 2, 3], [2, 3], [0]])
    cause = caught.value.__cause__
    assert type(cause) is KeyError
    assert traceback.extract_tb(cause.__traceback__)[-1].name == "raise_late"
    reasons = [row.finish_reason for row in caught.value.generations]
    assert reasons[0] == "invalid_draft" and set(reasons[1:]) <= {"length"}
    assert capfd.readouterr().err == ""


def test_ids_out_of_range_name_their_row_and_no_older_exception():
    ANSWER.clear()
    config = spec_jax.SpeculativeConfig(num_speculative_tokens=K)
    decoder = spec_jax.SpeculativeDecoder(
        testing.mock_model(V), drafter=spec_jax.host_drafter(answer), config=config
    )
    ANSWER["raise"] = "no such prefix"
    with pytest.raises(InvalidDraftError, match=r"no such prefix', in rows \[0\] \(row 0 after 4 "):
        decoder.generate([1, 2, 3], max_new_tokens=4)
    ANSWER.clear()
    for ids in ([V], [-1], [2**40]):
        ANSWER["value"] = ids
        with pytest.raises(InvalidDraftError, match="outside of the vocabulary") as caught:
            decoder.generate([1, 2, 3], max_new_tokens=4)
        assert caught.value.__cause__ is None
    ANSWER["value"] = [1]
    assert len(decoder.generate([1, 2, 3], max_new_tokens=4).tokens) == 4
