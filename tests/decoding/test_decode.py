"""The loop against independent plain decoding, and its invariants."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import MIXED_SAMPLERS as MIXED
from support.decoders import plain_tokens, run, start
from support.tiny_models import large_weights

from spec_jax import decoding, testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.decoding import Finish, Kind
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.sampling import make_sampler
from spec_jax.testing.conformance import outputs

V, TOY, NEW = 37, 11, 12
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 5, 6], [9]]
COLD = [dataclasses.replace(config, temperature=0.0) for config in MIXED]


def _model(name, seed, layers, **options):
    config = ModelConfig(
        vocab_size=V,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **options,
    )
    return large_weights(name, config, seed)


@pytest.fixture(scope="module")
def target():
    return _model("target", 0, 2)


@pytest.fixture(scope="module")
def draft():
    return _model("draft", 1, 1)


@functools.partial(jax.jit, static_argnames="config")
def _last_logits(params, tokens, length, config):
    return transformer.logits(params, tokens, config=config)[0, length - 1]


def plain(model, prompt, config):
    """Plain decoding without a cache, a loop or our sampling."""

    def logits_of(history):
        padded = jnp.asarray([history + [0] * (24 - len(history))])
        return np.asarray(_last_logits(model.params, padded, len(history), model.config))

    return plain_tokens(logits_of, prompt, NEW, config)


@pytest.fixture(scope="module")
def plain_mixed(target):
    return [plain(target, p, c) for p, c in zip(PROMPTS, MIXED)]


@pytest.fixture(scope="module")
def plain_greedy(target):
    return [plain(target, p, c) for p, c in zip(PROMPTS, COLD)]


def decoder(target, draft=None, strategy=None, K=3, method="standalone", **kwargs):
    config = SpeculativeConfig(
        method, num_speculative_tokens=K, rejection_sampling_strategy=strategy
    )
    return SpeculativeDecoder(target, draft, config, **kwargs)


def tokens_of(rows):
    return [list(row.tokens) for row in rows]


def test_plain_decoding_emits_the_oracles_stream(target, plain_mixed, plain_greedy):
    for samplers, expected in ((COLD, plain_greedy), (MIXED, plain_mixed)):
        d = SpeculativeDecoder(target, target_sampler=samplers)
        assert tokens_of(d.generate(PROMPTS, NEW)) == expected


@pytest.mark.parametrize("strategy", ["residual", "match"])
def test_a_row_does_not_depend_on_the_others(target, draft, strategy):
    d = decoder(target, draft, strategy, target_sampler=MIXED)

    def decode(prompts, samplers, seeds=None):
        return tokens_of(d.generate(prompts, NEW, sampler=samplers, seeds=seeds))

    together = decode(PROMPTS, MIXED)
    for others in ([0, 0, 2], [2, 2, 2]):
        alike = [[rows[i] for i in others] for rows in (PROMPTS, MIXED, together)]
        assert decode(*alike[:2]) == alike[2]
    one = [dataclasses.replace(config, temperature=1.0) for config in MIXED[2:] * 3]
    there, back = decode(PROMPTS, one, [5, 6, 7]), decode(PROMPTS[::-1], one, [7, 6, 5])
    assert there == back[::-1]


def test_a_round_commits_what_it_emits_and_finished_rows_change_nothing(target, draft):
    d = decoder(target, draft, "residual", target_sampler=MIXED)
    system = d.system()
    state = start(d, PROMPTS, NEW, decode_sampler(MIXED))
    state = state.replace(limit=state.prompt_length + jnp.asarray([NEW, 4, 9]))
    for _ in range(NEW):
        before, state = state, round_of(d.params(), state, system)
        emitted = np.asarray((state.kind > 0).sum(1) - (before.kind > 0).sum(1))
        moved = np.asarray(state.length - before.length)
        np.testing.assert_array_equal(emitted, moved)
        active = np.asarray(before.is_active)
        assert (emitted[active] >= 1).all() and (emitted[active] <= 4).all()
        assert (emitted[~active] == 0).all()
        for name in ("tokens", "kind", "offered"):
            a, b = (np.asarray(getattr(s, name))[~active] for s in (before, state))
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.asarray((state.kind > 0).sum(1)), [NEW, 4, 9])
    np.testing.assert_array_equal(np.asarray(state.finish), Finish.LENGTH)


round_of = jax.jit(decoding.decode_round, static_argnums=2)


def decode_sampler(configs):
    return make_sampler(configs, len(configs), V)


def test_stop_token_inside_a_block_cuts_what_follows(target, plain_greedy):
    stop, samplers = plain_greedy[0][5], [*COLD[:2], MIXED[2]]
    d = decoder(target, target, "match", target_sampler=samplers)
    row = d.generate(PROMPTS, NEW, stop_tokens=[stop])[0]
    assert row.finish_reason == "stop_token"
    tokens, counts = list(row.tokens), row.stats
    assert tokens == plain_greedy[0][: plain_greedy[0].index(stop) + 1]
    assert counts.emitted == len(tokens)
    assert counts.emitted == counts.first + counts.accepted + counts.corrected + counts.bonus


def _toy(seed):
    return testing.mock_model(TOY, seed)


def test_a_row_in_which_every_token_is_forbidden_stops_with_a_reason():
    bans = SamplerConfig(temperature=1.0, logit_bias=tuple((i, -np.inf) for i in range(TOY)))
    rows = SpeculativeDecoder(_toy(0)).generate([[1], [2]], 4, sampler=[bans, SamplerConfig()])
    assert (rows[0].tokens, rows[0].finish_reason) == ((), "nan_target")
    assert len(rows[1].tokens) == 4


def _faulty():
    """Drafts ones; at length 4 of rows that begin with 1, what its parameters say."""
    honest = testing.scripted_drafter(lambda t, length, K: jnp.ones((t.shape[0], K), jnp.int32))

    def propose(params, state, context, num_draft):
        proposal, state = honest.propose(params, state, context, num_draft)
        is_bad = (context.length == 4) & (context.tokens[:, 0] == 1)
        token = jnp.where(is_bad[:, None], params["token"], proposal.tokens)
        n_draft = jnp.where(is_bad, params["n_draft"], proposal.n_draft)
        return proposal.replace(tokens=token, n_draft=n_draft), state

    return honest._replace(propose=propose)


FAULTY, FAULTY_PROMPTS = _faulty(), [[1, 1, 1, 1], [2, 1, 1, 1]]


@pytest.mark.parametrize("token, n_draft", [(1, -1), (1, 3), (-1, 2), (TOY, 2), (2**30, 2)])
def test_a_faulty_draft_stops_its_row_alone(token, n_draft):
    target = _toy(0)
    config = SpeculativeConfig(num_speculative_tokens=2, rejection_sampling_strategy="match")
    d = SpeculativeDecoder(target, config=config, drafter=FAULTY)
    state = start(d, FAULTY_PROMPTS, 8, make_sampler(SamplerConfig(), 2, TOY))
    draft = {"token": jnp.int32(token), "n_draft": jnp.int32(n_draft)}
    state, _ = run(d.system(), {**d.params(), "draft": draft}, state, 99)
    plain = SpeculativeDecoder(target).generate(FAULTY_PROMPTS, 8)
    assert state.finish.tolist() == [Finish.INVALID_DRAFT, Finish.LENGTH]
    stopped, complete = map(tuple, outputs(state))
    assert stopped == plain[0].tokens[: len(stopped)] and complete == plain[1].tokens


def test_every_kind_is_recorded_where_it_happened():
    """Two rounds by hand: the script is right once, then wrong."""
    target = _toy(0)
    plain = SpeculativeDecoder(target).generate([0, 1], 6).tokens

    def propose(tokens, length, K):
        right = jnp.asarray([0, 1, *plain, 0, 0])
        window = right[length[:, None] + 1 + jnp.arange(K)]
        is_wrong = (length == 5)[:, None] & (jnp.arange(K) == 1)
        return jnp.where(is_wrong, (window + 1) % TOY, window)

    d = SpeculativeDecoder(
        target,
        config=SpeculativeConfig(num_speculative_tokens=2),
        drafter=testing.scripted_drafter(propose),
    )
    state = start(d, [[0, 1]], 6, make_sampler(SamplerConfig(), 1, TOY))
    state, _ = decoding.generate(
        d.params(), state, jnp.zeros(1, jnp.int32), jnp.int32(9), system=d.system()
    )
    assert np.asarray(state.tokens)[0, 2:8].tolist() == list(plain)
    kinds = "FIRST ACCEPTED ACCEPTED BONUS ACCEPTED CORRECTED".split()
    assert [Kind(k).name for k in state.kind[0, 2:8].tolist()] == kinds
    assert np.asarray(state.offered)[0, 2:8].tolist() == [-1, 2, -1, -1, 2, -1]
    assert np.asarray(state.rejected)[0, 2:8].tolist() == [-1] * 5 + [(plain[5] + 1) % TOY]
