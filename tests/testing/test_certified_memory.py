"""The certificate of drafters that remember: calls with the same prompts and seeds."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from conformance.rounds import run_of
from support.remembering import HostMemories

import spec_jax
from spec_jax import decoding, rng, testing
from spec_jax.config import SpeculativeConfig, SuffixConfig
from spec_jax.drafters.suffix import History, suffix
from spec_jax.rules import make_rule
from spec_jax.testing import CertificateError
from spec_jax.testing.certificate.states import a_memory_each, certify_memory

V, REMEMBERED, ROWS = 3, 31, 1024


RULE = make_rule(SpeculativeConfig("suffix", rejection_sampling_strategy="residual"))


def certified(memory: str):
    """The p-value of a suffix or a host drafter."""
    if memory == "suffix":
        drafter = suffix(V, SuffixConfig(history_tokens=REMEMBERED))
    else:
        drafter = HostMemories(ROWS, V).drafter
    system = decoding.System(testing.toy_model.__wrapped__(V), drafter, RULE, 2)
    past = History(REMEMBERED) if memory == "suffix" else None
    params = {"target": testing.toy_params(V, 0), "draft": None}
    return certify_memory(system, params, past, rows=ROWS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("memory", ["suffix", "host"])
def test_a_memory_whose_updates_are_not_in_the_noise_is_refused(memory, monkeypatch):
    keys = rng.keys
    without = lambda seed, stream, position, node=None, update_counts=None: keys(
        seed, stream, position, node
    )
    monkeypatch.setattr(rng, "keys", without)
    with pytest.raises(CertificateError, match="in call [23] with the same prompts and seeds"):
        certified(memory)


@pytest.mark.exhaustive
@pytest.mark.landing("host")
@pytest.mark.parametrize("memory", ["suffix", "host"])
def test_a_memory_whose_updates_are_counted_is_certified(memory):
    assert certified(memory)[0] > 1e-4


@pytest.mark.exhaustive
def test_a_suffix_drafter_is_certified_with_its_memory():
    drafter = suffix(V, SuffixConfig(history_tokens=REMEMBERED))
    run = run_of(make=drafter, params=History(REMEMBERED), num_rows=None)
    assert "a memory" in dict(run.steps)
    run._memory()
    run._loop(run.main)
    (check,) = (c for c in run.checks if "from whose outputs suffix" in c.what)
    assert check.p_value > 1e-4 and check.trials > 5_000


@pytest.mark.exhaustive
def test_a_drafter_that_remembers_and_does_not_say_so_is_refused():
    seen = []

    def last_of_all(prefix, k, seed):
        """Drafts whatever any row had last."""
        seen.append(prefix[-1])
        return seen[-2:][:1] * k

    drafter = spec_jax.host_drafter(last_of_all)._replace(vocab_size=V)
    with pytest.raises(CertificateError, match="remembers other outputs, it must say"):
        spec_jax.certify(drafter=drafter, trials=500)


def test_the_drafts_of_each_row_come_from_its_own_memory():
    """So that a test of many rows is as sharp as one of a single row with one memory."""
    drafter = a_memory_each(suffix(V, SuffixConfig(history_tokens=REMEMBERED)))
    memories = [History(REMEMBERED) for _ in range(2)]
    memories[0].add([0, 1, 2, 2])
    memories[1].add([0, 1, 0, 0])
    params = jax.tree.map(lambda *x: np.stack(x), *[memory.params for memory in memories])
    tokens, length = np.array([[0, 1]] * 2, np.int32), np.array([1, 1], np.int32)
    system = decoding.System(testing.toy_model(V), drafter, RULE, 2)
    context = system.context(tokens, length, None, np.zeros(2, np.uint32), None)
    proposal, _ = drafter.propose(params, (), context, 2)
    assert np.asarray(proposal.tokens).tolist() == [[2, 2], [0, 0]]
    assert np.asarray(drafter.memory.read(params, ())).tolist() == [1, 1]
