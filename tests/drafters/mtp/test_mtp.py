"""MTP modules against an independent NumPy computation, a fresh prefill and plain decoding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import (
    DEEPSEEK,
    LLAMA,
    QWEN3,
    QWEN3_NEXT,
    plain,
    random_tensor,
    random_weights,
)

from spec_jax import decoding
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Context
from spec_jax.drafters.common import sequential
from spec_jax.drafters.mtp.model import MtpConfig, init_mtp, mtp, mtp_table
from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.rules import make_rule
from spec_jax.sampling import make_sampler
from spec_jax.testing import certify_decoder, toy_model, toy_params

V, D, SLOTS, K = 31, 16, 64, 3
TARGET = dataclasses.replace(LLAMA, max_position_embeddings=256)
of_target = lambda **changes: MtpConfig.of_target(TARGET, **changes)
CONFIGS = {
    "recycled": of_target(),
    "hidden-first": of_target(order="hidden-first"),
    "recycled before the norm": of_target(recycles_normed=False),
    "zero-centred, own ends": of_target(
        has_zero_centred_norms=True, has_own_embed=True, has_own_head=True
    ),
    "sequential": of_target(protocol="sequential", num_modules=K),
    "sequential before the norm": of_target(
        protocol="sequential", num_modules=K, recycles_normed=False, order="hidden-first",
        taps=(TARGET.num_hidden_layers,),
    ),
}  # fmt: skip
KINDS = {"qwen3": QWEN3, "deepseek": DEEPSEEK, "qwen3-next": QWEN3_NEXT}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [2]]
HOT = SamplerConfig(temperature=3.0)  # coupled noise then often gives both the same token


def modules_of(config):
    def tensor(name, spec, seed):
        value = random_tensor(name, spec.shape, seed)
        return jnp.asarray(value - 1 if "norm" in name and config.has_zero_centred_norms else value)

    table = mtp_table(config)
    return {
        str(i): {name: tensor(name, spec, i) for name, spec in table.items()}
        for i in range(config.num_modules)
    }


def system_of(config, strategy="greedy", num_draft=K):
    target = transformer.model(TARGET, config.taps)
    rule = make_rule(SpeculativeConfig(rejection_sampling_strategy=strategy))
    params = {"target": random_weights(TARGET)}
    params["draft"] = {"head": modules_of(config), "target": params["target"]}
    return decoding.System(target, mtp(config, target), rule, num_draft), params


@pytest.mark.exhaustive
@pytest.mark.parametrize("protocol", ["recycled", "sequential"])
def test_decoded_law_under_modules_passes_chi_square(protocol):
    """A toy target of four ids, whose features are its logits."""
    layer = dataclasses.replace(TARGET, vocab_size=4, hidden_size=4, head_dim=4)
    modules = 2 if protocol == "sequential" else 1
    config = MtpConfig.of_target(layer, protocol=protocol, num_modules=modules)
    target = {**toy_params(4, 0), "embed": jnp.asarray(random_tensor("embed", (4, 4), 0))}
    certify_decoder(
        make_rule(SpeculativeConfig(rejection_sampling_strategy="residual")),
        mtp(config, toy_model(4)), trials=4_800, batch=24, num_tokens=3, alpha=1e-7,
        params={"target": target, "draft": {"head": modules_of(config), "target": target}},
    )


# ------------------------------------------------------------------------ NumPy reference


def np_norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + TARGET.rms_norm_eps) * w


def np_rope(x):
    """Of [T,N,H], row t at position t."""
    half = TARGET.head_dim // 2
    speed = TARGET.rope.rope_theta ** (-np.arange(half) / half)
    angle = np.arange(len(x))[:, None, None] * speed
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )


class NumpyModule:
    """A module over whole sequences, without a cache."""

    def __init__(self, config, module, target):
        as64 = lambda tree: {k: np.asarray(v, np.float64) for k, v in tree.items()}
        self.c, self.w = config, as64(module)
        if config.has_zero_centred_norms:
            self.w = {k: 1 + w if "norm" in k else w for k, w in self.w.items()}
        self.w.setdefault("embed", np.asarray(target["embed"], np.float64))
        self.w.setdefault("head", np.asarray(target["head"], np.float64))

    def rows(self, states, tokens):
        w, T, H = self.w, len(tokens), TARGET.head_dim
        e, h = np_norm(w["embed"][tokens], w["embed_norm"]), np_norm(states, w["hidden_norm"])
        x = np.concatenate([e, h] if self.c.order == "embedding-first" else [h, e], -1) @ w["fc"]
        a = np_norm(x, w["attention_norm"])
        q, k, v = (np.reshape(a @ w[n], (T, -1, H)) for n in "qkv")
        q, k = np_rope(q), np_rope(k)
        k, v = (np.repeat(z, q.shape[1] // k.shape[1], axis=1) for z in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), v).reshape(T, -1)
        x = x + out @ w["o"]
        h = np_norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        return x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]

    def logits(self, x):
        return np_norm(x, self.w["norm"]) @ self.w["head"]

    def recycle(self, x):
        return np_norm(x, self.w["norm"]) if self.c.recycles_normed else x


@functools.partial(jax.jit, static_argnames="target")
def features_of(target, params, tokens):
    return target.forward(params["target"], tokens).features


def np_draft(config, params, tokens, num_draft=K):
    """Greedy drafts and their logits behind tokens of which the last is pending."""
    fed = jnp.asarray([[*tokens[:-1], *[0] * (SLOTS - len(tokens) + 1)]])
    features = features_of(transformer.model(TARGET, config.taps), params, fed)
    features = np.asarray(features[0, : len(tokens) - 1], np.float64)
    modules = [
        NumpyModule(config, module, params["target"])
        for module in params["draft"]["head"].values()
    ]
    tokens, n, logits = list(tokens), len(features), []
    states = features
    for step in range(1, num_draft + 1):
        if config.protocol == "recycled":
            x = modules[0].rows(states, tokens[1:])
            logits.append(modules[0].logits(x[-1]))
            states = np.concatenate([states, modules[0].recycle(x[-1:])])
        else:
            states = features  # row t of module m joins row t of the one before with token t + m
            for m in range(1, step + 1):
                x = modules[m - 1].rows(states, tokens[m : m + n])
                states = modules[m - 1].recycle(x)
            logits.append(modules[step - 1].logits(x[-1]))
        tokens.append(int(logits[-1].argmax()))
    return tokens[-num_draft:], np.stack(logits)


# ------------------------------------------------------------------------------- the loop


@functools.partial(jax.jit, static_argnames="system")
def propose(system, params, state):
    """The greedy drafts of every row."""
    greedy = make_sampler(SamplerConfig(), len(state.finish), V)
    context = Context(
        state.tokens, state.length, greedy, state.counts, state.sampler.seed,
        is_coupled=False, has_probs=True, has_logits=True,
    )
    return system.drafter.propose(params["draft"], state.draft, context, system.num_draft)[0]


def prefill(system, params, new, sampler=None, prompts=PROMPTS):
    sampler = make_sampler(sampler or SamplerConfig(), len(prompts), V)
    lengths = jnp.asarray([len(p) for p in prompts])
    tokens = jnp.asarray([[*p, *[0] * (16 - len(p))] for p in prompts])
    return decoding.prefill(
        params, tokens, lengths, lengths + jnp.asarray(new), jnp.full((len(prompts), 1), -1),
        sampler, sampler, system=system, slots=SLOTS,
    )


def run(system, params, state, rounds):
    none = jnp.zeros(len(state.finish), jnp.int32)
    return decoding.generate(params, state, none, jnp.int32(rounds), system=system)


@functools.partial(jax.jit, static_argnames="system")
def fresh_draft(system, params, state):
    """The drafter's state behind the same tokens, all fed at once."""
    features = features_of(system.target, params, state.tokens)
    pending = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)[:, 0]
    draft = system.drafter.init(params["draft"], len(pending), SLOTS)
    return system.drafter.prefill(
        params["draft"], draft, state.tokens, state.length, pending, features
    )


def rows_of(state):
    return [t[: n + 1].tolist() for t, n in zip(np.asarray(state.tokens), np.asarray(state.length))]


@pytest.mark.representatives("recycled", "sequential", "zero-centred, own ends")
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_the_published_architecture(name):
    config = CONFIGS[name]
    system, params = system_of(config)
    state = prefill(system, params, 8)
    proposal = propose(system, params, state)
    for row, tokens in enumerate(rows_of(state)):
        drafts, logits = np_draft(config, params, tokens)
        assert proposal.tokens[row].tolist() == drafts
        np.testing.assert_allclose(proposal.logits[row], logits, rtol=0, atol=1e-5)


def after_ten_rounds(system, params):
    """Rows of which the second finishes early, by rounds that keep, cut and replace drafts."""
    state, chunk = run(system, params, prefill(system, params, [45, 6, 45], HOT), 10)
    assert chunk.rounds == 10
    kind = np.asarray(state.kind)
    assert all((kind == k).any() for k in (decoding.Kind.CORRECTED, decoding.Kind.ACCEPTED))
    assert state.finish.tolist() == [decoding.Finish.RUNNING, decoding.Finish.LENGTH, 0]
    return state


@pytest.mark.representatives("sequential")
@pytest.mark.parametrize("name", ["recycled", "sequential", "sequential before the norm"])
def test_drafts_after_ten_rounds_are_those_after_a_fresh_prefill(name):
    system, params = system_of(CONFIGS[name], "match")
    state = after_ten_rounds(system, params)
    proposal = propose(system, params, state)
    fresh = state.replace(draft=fresh_draft(system, params, state))
    expected = propose(system, params, fresh)
    assert proposal.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(proposal.logits, expected.logits, rtol=0, atol=1e-5)
    for row, tokens in enumerate(rows_of(state)):
        assert proposal.tokens[row].tolist() == np_draft(CONFIGS[name], params, tokens)[0]


def test_prompts_shorter_than_the_modules_leave_the_first_slots_unseen():
    """A row of two tokens in all, beside long ones: modules 2 and 3 have fewer rows than slots."""
    system, params = system_of(CONFIGS["sequential"])
    state = prefill(system, params, 8, prompts=[[5], [5, 6], [7, 8, 9]])
    proposal = propose(system, params, state)
    for row, tokens in enumerate(rows_of(state)):
        np.testing.assert_allclose(
            proposal.logits[row], np_draft(CONFIGS["sequential"], params, tokens)[1],
            rtol=0, atol=1e-5,
        )  # fmt: skip


@pytest.mark.representatives("sequential-match")
@pytest.mark.parametrize("strategy", ["greedy", "match"])
@pytest.mark.parametrize("name", ["recycled", "sequential"])
def test_emits_exactly_the_plain_tokens(name, strategy):
    sampler = SamplerConfig(temperature=0.0 if strategy == "greedy" else 1.0)
    system, params = system_of(CONFIGS[name], strategy)
    fast, chunk = run(system, params, prefill(system, params, 30, sampler), 99)
    system, params = plain(TARGET, params)
    slow, steps = run(system, params, prefill(system, params, 30, sampler), 99)
    np.testing.assert_array_equal(fast.tokens, slow.tokens)
    assert chunk.rounds <= steps.rounds


def test_a_round_without_drafts_keeps_the_modules_in_step():
    system, params = system_of(CONFIGS["sequential"])
    idle = system._replace(num_draft=0)
    state, _ = run(idle, params, prefill(idle, params, 30), 6)
    drafts = propose(system, params, state).tokens
    for row, tokens in enumerate(rows_of(state)):
        assert drafts[row].tolist() == np_draft(CONFIGS["sequential"], params, tokens)[0]


def test_a_row_that_is_admitted_drafts_as_it_did_alone():
    system, params = system_of(CONFIGS["sequential"])
    state, one = prefill(system, params, 8), prefill(system, params, 8, prompts=[[4, 4, 4]])
    expected = propose(system, params, one)
    state = decoding.insert(state, 1, one, system=system)
    proposal = propose(system, params, state)
    assert proposal.tokens[1].tolist() == expected.tokens[0].tolist()
    np.testing.assert_allclose(proposal.logits[1], expected.logits[0], rtol=0, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_modules_of_other_kinds_of_layer_draft_as_after_a_fresh_prefill(name):
    layer = dataclasses.replace(KINDS[name], num_hidden_layers=1, max_position_embeddings=256)
    system, params = system_of(of_target(layer=layer, protocol="sequential", num_modules=K))
    state, _ = run(system, params, prefill(system, params, 20), 3)
    fresh = state.replace(draft=fresh_draft(system, params, state))
    np.testing.assert_allclose(
        propose(system, params, state).logits, propose(system, params, fresh).logits,
        rtol=0, atol=1e-5,
    )  # fmt: skip


# ------------------------------------------------------------------------------- mutations


@pytest.mark.exhaustive
def test_mutation_a_refresh_with_the_wrong_offset_is_found(monkeypatch):
    """In the refresh, module m reads module m - 1 in its own slot, not in the one before."""
    system, params = system_of(CONFIGS["sequential"], "match")
    drafter = mtp.__wrapped__(CONFIGS["sequential"], system.target)

    def commit(*args):
        with monkeypatch.context() as patch:
            patch.setattr(sequential, "_delayed", lambda last, x: x)
            return drafter.commit(*args)

    mutant = system._replace(drafter=drafter._replace(commit=commit))
    state = after_ten_rounds(mutant, params)
    a = propose(mutant, params, state)
    b = propose(system, params, state.replace(draft=fresh_draft(system, params, state)))
    np.testing.assert_allclose(a.logits[:, 0], b.logits[:, 0], rtol=0, atol=1e-5)
    assert not np.allclose(a.logits[:, 1:], b.logits[:, 1:], atol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "change", "first"),
    [
        ("recycled", {"order": "hidden-first"}, 0), ("recycled", {"recycles_normed": False}, 1),
        ("sequential", {"recycles_normed": False}, 1),
    ],
    ids=["order of concatenation", "recycled before the norm", "handed on before the norm"],
)  # fmt: skip
def test_mutation_another_reading_of_the_tensors_is_found(name, change, first):
    config = CONFIGS[name]
    system, params = system_of(config)
    drafter = mtp(dataclasses.replace(config, **change), system.target)
    mutant = system._replace(drafter=drafter)
    wrong = propose(mutant, params, prefill(mutant, params, 8))
    right = propose(system, params, prefill(system, params, 8))
    same = np.isclose(wrong.logits, right.logits, atol=1e-3).all(axis=(0, 2))
    assert same.tolist()[: first + 1] == [True] * first + [False]


# ----------------------------------------------------------------------------- bad configs


def test_more_drafts_than_modules_are_refused_where_they_are_asked_for():
    config = CONFIGS["sequential"]
    message = "num_draft is 4, .* there are 3"
    system, params = system_of(config)
    state = prefill(system, params, 8)
    with pytest.raises(ConfigError, match=message):
        propose(system._replace(num_draft=4), params, state)
    with pytest.raises(ConfigError, match=message):
        run(system._replace(num_draft=4), params, state, 1)
    with pytest.raises(ConfigError, match=message):
        config.check_num_draft(4)
    config.check_num_draft(3)
    CONFIGS["recycled"].check_num_draft(9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": "parallel"}, "protocol is 'parallel'; known: recycled, sequential"),
        ({"order": "both"}, "order is 'both'; known: embedding-first, hidden-first"),
        ({"num_modules": 0}, "num_modules is 0"),
        ({"num_modules": 2}, "num_modules is 2, but recycled drafting uses one"),
        ({"layer": TARGET}, "2 layers; expected 1"),
        ({"taps": (1, 2)}, r"taps are \(1, 2\); expected a tuple of the one state"),
        ({"taps": ()}, "expected a tuple of the one state"),
        ({"target_hidden_size": 24}, "width is 16; the target's is 24"),
        ({"target_vocab_size": 30}, "vocabulary has 31 ids; the target's has 30"),
    ],
    ids=str,
)
def test_modules_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        of_target(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"q_lora_rank": -1}, "q_lora_rank is -1"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 is odd"),
        ({"n_group": 4}, "n_routed_experts 6 cannot be split into n_group 4"),
        ({"topk_group": 5}, "of which topk_group 5 are kept"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; the 2 groups kept have 4"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        ({"n_routed_experts": None}, "intermediate_size is None"),
    ],
    ids=str,
)
def test_deepseek_layers_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DEEPSEEK, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5 of 4"),
        ({"partial_rotary_factor": 0.4}, "turns 3 of 8 dimensions"),
        ({"partial_rotary_factor": 1.5}, "turns 12 of 8 dimensions"),
    ],
    ids=str,
)
def test_qwen3_next_layers_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(QWEN3_NEXT, **change)


def test_random_modules_have_the_declared_shapes():
    for config in CONFIGS.values():
        modules = init_mtp(config, jax.random.key(0))
        table = mtp_table(config)
        assert len(modules) == config.num_modules
        for module in modules.values():
            assert {k: w.shape for k, w in module.items()} == {k: s.shape for k, s in table.items()}
            is_zero = not module["norm"].any()
            assert is_zero is config.has_zero_centred_norms
    assert (modules["0"]["q"] != modules["1"]["q"]).all()
