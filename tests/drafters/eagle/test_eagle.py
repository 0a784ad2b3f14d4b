"""EAGLE heads against an independent NumPy computation, and in the loop against plain decoding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import LLAMA, plain, random_tensor, random_weights

from spec_jax import decoding
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Context
from spec_jax.drafters.eagle.model import EagleConfig, eagle, eagle_head, head_table, init_head
from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.rules import make_rule
from spec_jax.sampling import make_sampler
from spec_jax.testing import (
    CertificateError,
    Row,
    certify_decoder,
    certify_rule,
    reference_distribution,
    toy_model,
    toy_params,
)
from spec_jax.testing.oracles import toy_logits
from spec_jax.tree import Tree

V, U, D, SLOTS = 31, 20, 16, 64
TARGET = dataclasses.replace(LLAMA, max_position_embeddings=256)
LAYER = dataclasses.replace(TARGET, num_hidden_layers=1)
SMALL = dataclasses.replace(LAYER, vocab_size=U)
NARROW = dataclasses.replace(SMALL, hidden_size=12)
TAPS = (0, 1, 2)
CONFIGS = {
    "eagle-1": EagleConfig(1, LAYER, D, V, (3,), fc_bias=True),
    "eagle-3": EagleConfig(3, SMALL, D, V, TAPS),
    "eagle-3 whole vocabulary": EagleConfig(3, LAYER, D, V, TAPS),
    "fc_norm": EagleConfig(3, SMALL, D, V, TAPS, fc_norm=True),
    "norm_before_fc": EagleConfig(3, SMALL, D, V, TAPS, norm_before_fc=True),
    "norm_before_residual": EagleConfig(3, SMALL, D, V, TAPS, norm_before_residual=True),
    "norm_output": EagleConfig(3, SMALL, D, V, TAPS, norm_output=True),
    "own_embed": EagleConfig(3, SMALL, D, V, TAPS, own_embed=True),
    "narrow": EagleConfig(3, NARROW, D, V, TAPS, own_embed=True),
}
D2T = np.sort(np.random.RandomState(0).permutation(V)[:U]) - np.arange(U)  # offsets
TOY_IDS = np.asarray([0, 1, 3])


def head_of(config):
    head = {
        name: jnp.asarray(random_tensor(f"{name} norm" if "norm" in name else name, spec.shape, 0))
        for name, spec in head_table(config).items()
    }
    if config.layer.vocab_size < config.target_vocab_size:
        ids = TOY_IDS if config.target_vocab_size == 4 else D2T + np.arange(U)
        head["d2t"] = jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
    return head


def system_of(config, strategy="greedy", num_draft=3):
    target = transformer.model(TARGET, config.taps)
    rule = make_rule(SpeculativeConfig(rejection_sampling_strategy=strategy))
    params = {"target": random_weights(TARGET)}
    params["draft"] = {"head": head_of(config), "target": params["target"]}
    return decoding.System(target, eagle(config, target), rule, num_draft), params


# ------------------------------------------------------------------------ NumPy reference


def np_norm(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + LAYER.rms_norm_eps) * w


def np_rope(x, position):
    half = x.shape[-1] // 2
    angle = position * LAYER.rope.rope_theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )


class NumpyHead:
    """A head fed one pair at a time; keys and values in a list."""

    def __init__(self, config, head, embed):
        self.c, self.w = config, {k: np.asarray(v, np.float64) for k, v in head.items()}
        self.embed, self.keys, self.values = np.asarray(embed, np.float64), [], []
        if config.own_embed:
            self.embed = self.w["embed"]

    def join(self, feature):
        if self.c.version == 1:
            return feature
        if self.c.fc_norm:
            parts = feature.reshape(len(self.c.taps), -1)
            parts = [np_norm(x, self.w[f"fc_norm_{i}"]) for i, x in enumerate(parts)]
            feature = np.concatenate(parts)
        if self.c.norm_before_fc:
            feature = np_norm(feature, self.w["input_norm"])
        return feature @ self.w["fc"]

    def feed(self, state, token):
        w, e, position = self.w, self.embed[token], len(self.keys)
        if self.c.version == 1:
            x = start = np.concatenate([e, state]) @ w["fc"] + w["fc_bias"]
        else:
            normed = np_norm(state, w["hidden_norm"])
            x = np.concatenate([np_norm(e, w["embed_norm"]), normed])
            start = normed if self.c.norm_before_residual else state
        layer = self.c.layer
        N, G, H = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
        q = np_rope((x @ w["q"]).reshape(N, H), position)
        self.keys.append(np_rope((x @ w["k"]).reshape(G, H), position))
        self.values.append((x @ w["v"]).reshape(G, H))
        out = []
        for n in range(N):
            g = n // (N // G)
            scores = np.array([k[g] @ q[n] for k in self.keys]) / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            out.append(sum(p * v[g] for p, v in zip(weights / weights.sum(), self.values)))
        x = start + np.concatenate(out) @ w["o"]
        h = np_norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        return x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]

    def logits(self, x, target_head):
        if self.c.version == 1:
            return x @ target_head
        own = np_norm(x, self.w["norm"]) @ self.w["head"]
        full = np.full(self.c.target_vocab_size, -np.inf)
        ids = np.arange(len(own)) + self.w.get("d2t", np.zeros(len(own)))
        full[ids.astype(int)] = own
        return full

    def recycle(self, x):
        return np_norm(x, self.w["norm"]) if self.c.norm_output else x


@functools.partial(jax.jit, static_argnames="target")
def features_of(target, params, tokens):
    return target.forward(params, tokens).features[0]


def np_draft(config, params, prompt, pending, num_draft):
    """Greedy drafts and their logits after a prompt, every pair fed afresh."""
    target = transformer.model(TARGET, config.taps)
    padded = jnp.asarray([[*prompt, *[0] * (SLOTS - len(prompt))]])  # one compiled shape
    features = features_of(target, params["target"], padded)
    head = NumpyHead(config, params["draft"]["head"], params["target"]["embed"])
    target_head = np.asarray(params["target"]["head"], np.float64)
    for feature, token in zip(np.asarray(features, np.float64), [*prompt[1:], pending]):
        x = head.feed(head.join(feature), token)
    drafts, rows = [], []
    for i in range(num_draft):
        rows.append(head.logits(x, target_head))
        drafts.append(int(rows[-1].argmax()))
        if i + 1 < num_draft:
            x = head.feed(head.recycle(x), drafts[-1])
    return drafts, np.stack(rows)


# ------------------------------------------------------------- the law, by enumeration

# Heads for toy targets of four ids, whose features are their logits. Version 3 drafts three.
TOY_LAYER = dataclasses.replace(
    LAYER, vocab_size=4, hidden_size=4, num_attention_heads=2, num_key_value_heads=1, head_dim=4
)
TOY = EagleConfig(3, dataclasses.replace(TOY_LAYER, vocab_size=3), 4, 4, (0,))
TOY_1 = EagleConfig(1, TOY_LAYER, 4, 4, (0,), fc_bias=True)
TOY_ROWS = [
    Row((0, 3), SamplerConfig(temperature=0.7), SamplerConfig(temperature=1.0)),
    Row((2,), SamplerConfig(temperature=1.0, top_k=3), SamplerConfig(temperature=1.5)),
    Row(
        (1, 1, 2), SamplerConfig(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.4),
        SamplerConfig(temperature=1.0, presence_penalty=0.5),
    ),
]  # fmt: skip


def toy_head(config=TOY):
    """Parameters of target and head, and the law of the head's drafts by ``NumpyHead``."""
    target = {**toy_params(4, 0), "embed": jnp.asarray(random_tensor("embed", (4, 4), 0))}
    head = head_of(config)
    params = {"target": target, "draft": {"head": head, "target": target}}

    def draft_distribution(row, output, drafted):
        tokens = [*row.prompt, *output]
        reference = NumpyHead(config, head, target["embed"])
        for t in range(1, len(tokens)):
            x = reference.feed(reference.join(toy_logits(target, tokens[:t])), tokens[t])
        for token in drafted:
            x = reference.feed(reference.recycle(x), token)
        history = [*output, *drafted]
        logits = reference.logits(x, np.eye(4))
        return reference_distribution(logits, row.draft, row.prompt, history)

    return params, draft_distribution


def certify_head(strategy, shape=None, params=None, config=TOY):
    own, draft_distribution = toy_head(config)
    return certify_rule(
        make_rule(SpeculativeConfig(rejection_sampling_strategy=strategy)), vocab_size=4,
        num_tokens=3, rows=TOY_ROWS, drafter=eagle(config, toy_model(4), shape),
        draft_distribution=draft_distribution, params=params or own, batch=32,
    )


@pytest.mark.representatives("residual-chain")
@pytest.mark.parametrize("shape", [None, Tree((0, 0, 1))], ids=["chain", "tree"])
@pytest.mark.parametrize("strategy", ["residual", "traversal"])
def test_enumerated_law_under_a_reduced_vocabulary_is_the_targets(strategy, shape):
    assert certify_head(strategy, shape) <= 1e-6


@pytest.mark.exhaustive
def test_enumerated_law_under_version_1_is_the_targets():
    assert certify_head("block", config=TOY_1) <= 1e-6


def test_mutation_offsets_taken_for_ids_are_caught_by_enumeration():
    params, _ = toy_head()
    as_ids = jnp.asarray(np.subtract(params["draft"]["head"]["d2t"], range(3)))
    params["draft"]["head"]["d2t"] = as_ids  # position i then scores id d2t[i]
    with pytest.raises(CertificateError):
        certify_head("residual", params=params)


@pytest.mark.exhaustive
def test_decoded_law_under_a_reduced_vocabulary_passes_chi_square():
    params, _ = toy_head()
    certify_decoder(
        make_rule(SpeculativeConfig(rejection_sampling_strategy="residual")),
        eagle(TOY, toy_model(4)), params=params, row=TOY_ROWS[2], trials=4_800, batch=24,
        num_tokens=3, alpha=1e-7,
    )


# --------------------------------------------------------------------------- the drafter

HOT = SamplerConfig(temperature=3.0)  # coupled noise then often gives both the same token


@functools.partial(jax.jit, static_argnames="system")
def propose(system, params, state):
    """The greedy drafts of every row."""
    greedy = make_sampler(SamplerConfig(), len(state.finish), V)
    context = Context(
        state.tokens, state.length, greedy, state.counts, state.sampler.seed,
        is_coupled=False, has_probs=True, has_logits=True,
    )
    return system.drafter.propose(params["draft"], state.draft, context, system.num_draft)[0]


def prefill(system, params, prompts, new, sampler=None, seeds=None):
    sampler = make_sampler(sampler or SamplerConfig(), len(prompts), V, seeds)
    lengths = jnp.asarray([len(p) for p in prompts])
    tokens = jnp.asarray([[*p, *[0] * (16 - len(p))] for p in prompts])
    return decoding.prefill(
        params, tokens, lengths, lengths + new, jnp.full((len(prompts), 1), -1), sampler, sampler,
        system=system, slots=SLOTS,
    )


PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7]]


@pytest.mark.representatives(
    "eagle-1", "eagle-3", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output",
    "narrow",
)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_recycled_steps_are_the_published_architecture(name):
    config = CONFIGS[name]
    system, params = system_of(config)
    state = prefill(system, params, PROMPTS, 8)
    proposal = propose(system, params, state)
    for row, prompt in enumerate(PROMPTS):
        pending = int(state.tokens[row, len(prompt)])
        drafts, logits = np_draft(config, params, prompt, pending, 3)
        assert proposal.tokens[row].tolist() == drafts
        np.testing.assert_allclose(proposal.logits[row], logits, rtol=0, atol=1e-5)


def run(system, params, state, rounds):
    none = jnp.zeros(len(state.finish), jnp.int32)
    return decoding.generate(params, state, none, jnp.int32(rounds), system=system)


def fresh_drafts(name, params, chunk):
    """What NumPy drafts behind every row's tokens so far."""
    rows = [np.asarray(chunk.tokens)[i, : int(n)].tolist() for i, n in enumerate(chunk.total)]
    return [np_draft(CONFIGS[name], params, row[:-1], row[-1], 3)[0] for row in rows]


@pytest.mark.representatives("eagle-3")
@pytest.mark.parametrize("name", ["eagle-1", "eagle-3", "norm_output"])
def test_drafts_after_ten_rounds_are_those_after_a_fresh_prefill(name):
    system, params = system_of(CONFIGS[name], "match")
    state, chunk = run(system, params, prefill(system, params, PROMPTS[:2], 45, HOT), 10)
    assert chunk.rounds == 10
    kind = np.asarray(state.kind)
    assert (kind == decoding.Kind.CORRECTED).any()
    assert (kind == decoding.Kind.ACCEPTED).any()
    assert propose(system, params, state).tokens.tolist() == fresh_drafts(name, params, chunk)


@pytest.mark.exhaustive
def test_mutation_provisional_entries_that_are_kept_are_found():
    """The refresh advances the length and the last state, but what drafting wrote stays."""
    system, params = system_of(CONFIGS["eagle-3"], "match")

    def commit(params, state, tokens, n, features, path):
        true = system.drafter.commit(params, state, tokens, n, features, path)
        return true.replace(cache=state.cache.commit(n))

    mutant = system._replace(drafter=system.drafter._replace(commit=commit))
    state, _ = run(mutant, params, prefill(mutant, params, PROMPTS[:2], 45, HOT), 10)
    fresh, _ = run(system, params, prefill(system, params, PROMPTS[:2], 45, HOT), 10)
    a, b = propose(mutant, params, state), propose(system, params, fresh)
    assert not np.allclose(np.exp(a.logits), np.exp(b.logits), atol=1e-3)


@pytest.mark.representatives("eagle-1-greedy", "eagle-3-match")
@pytest.mark.parametrize("strategy", ["greedy", "match"])
@pytest.mark.parametrize("name", ["eagle-1", "eagle-3"])
def test_emits_exactly_the_plain_tokens(name, strategy):
    sampler = SamplerConfig(temperature=0.0 if strategy == "greedy" else 1.0)
    system, params = system_of(CONFIGS[name], strategy)
    fast, chunk = run(system, params, prefill(system, params, PROMPTS, 30, sampler), 99)
    system, params = plain(TARGET, params)
    slow, steps = run(system, params, prefill(system, params, PROMPTS, 30, sampler), 99)
    np.testing.assert_array_equal(fast.tokens, slow.tokens)
    assert chunk.rounds <= steps.rounds


def test_a_round_without_drafts_keeps_the_head_in_step():
    system, params = system_of(CONFIGS["eagle-3"])
    idle = system._replace(num_draft=0)
    state, chunk = run(idle, params, prefill(idle, params, PROMPTS, 30), 6)
    assert propose(system, params, state).tokens.tolist() == fresh_drafts("eagle-3", params, chunk)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version is 2"),
        ({"fc_norm": True, "norm_before_fc": True}, "both on; expected one of them"),
        ({"taps": ()}, "taps are empty"),
        ({"target_hidden_size": 24}, "width is 16; the embedding .* has 24"),
        (
            {"version": 1, "taps": (3,), "layer": LAYER, "target_hidden_size": 24,
             "own_embed": True},
            "width is 16; the target's head .* has 24",
        ),
        ({"target_vocab_size": 12}, "draft vocabulary 20 is larger than the target's 12"),
        ({"layer": TARGET}, "2 layers; expected 1"),
        ({"version": 1}, "reads one state"),
        ({"version": 1, "taps": (3,)}, "31 ids, not 20"),
        ({"version": 1, "taps": (3,), "norm_output": True}, "options of version 3"),
    ],
    ids=str,
)
def test_a_head_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIGS["eagle-3"], **change)


def test_ids_that_pad_the_targets_embedding_are_not_drafted():
    config = CONFIGS["eagle-3 whole vocabulary"]
    padded = transformer.model(TARGET, config.taps, num_tokens=27)
    params = {"head": head_of(config), "target": random_weights(TARGET)}
    logits = eagle_head(config, padded).unembed(params, jnp.ones((1, D)))
    assert np.isneginf(logits[0, 27:]).all() and np.isfinite(logits[0, :27]).all()


def test_random_heads_have_the_declared_shapes():
    for config in CONFIGS.values():
        head = jax.eval_shape(functools.partial(init_head, config), jax.random.key(0))
        assert {k for k in head if k != "d2t"} == set(head_table(config))
        assert ("d2t" in head) is (config.layer.vocab_size < V)


def test_mutation_offsets_taken_for_ids_are_found():
    config = CONFIGS["eagle-3"]
    system, params = system_of(config)
    state = prefill(system, params, PROMPTS, 8)
    right = propose(system, params, state).tokens
    as_ids = jnp.asarray(D2T - np.arange(U), jnp.int32)  # position i then scores id D2T[i]
    params["draft"]["head"] = {**params["draft"]["head"], "d2t": as_ids}
    wrong = propose(system, params, state).tokens
    assert right.tolist() != wrong.tolist()
