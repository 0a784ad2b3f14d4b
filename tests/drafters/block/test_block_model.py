"""What a block drafter computes, against independent arithmetic, and the law of its cache."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import block_heads
from support.block_drafts import HEADS, TARGET, exact, features_of, head_of, tensors_of
from support.tiny_models import LLAMA

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context
from spec_jax.drafters.block.config import DFlashConfig
from spec_jax.drafters.block.model import block_drafter, block_states, inject
from spec_jax.drafters.block.steps import step_logits
from spec_jax.errors import ConfigError
from spec_jax.loading import random_head
from spec_jax.models import transformer
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.families.qwen3_next import Qwen3NextConfig
from spec_jax.planning import roofline
from spec_jax.planning.work import Setting
from spec_jax.sampling import make_sampler

TEXT = np.random.default_rng(5).integers(0, LLAMA.vocab_size, 14)
N = np.arange(1, 7)  # one row a prompt's length
MORE = 1 + N % 4  # and what each commits after it


def parts(name, **changes):
    config = dataclasses.replace(HEADS[name], **changes)
    drafter = block_drafter(config, transformer.model(LLAMA, config.taps))
    return config, drafter, {"head": head_of(config).params, "target": TARGET.params}


def proposer(drafter, params, num_draft):
    B = len(N)
    tokens = jnp.asarray(np.tile(TEXT, (B, 1)), jnp.int32)
    sampler = make_sampler(SamplerConfig(), B, LLAMA.vocab_size)

    @jax.jit
    def propose(state, length):
        request = jnp.zeros(B, jnp.uint32)
        context = Context(tokens, length, sampler, request, False, False, True)
        return drafter.propose(params, state, context, num_draft)

    return propose


def prefilled(config, drafter, params, lengths, *chunk):
    tokens = jnp.asarray(np.tile(TEXT, (len(N), 1)), jnp.int32)
    T = int(max(lengths))
    state = drafter.init(params, len(N), 20)
    features = features_of(config, tokens)[:, :T]
    return drafter.prefill(
        params, state, tokens[:, :T], jnp.asarray(lengths), None, features, *chunk
    )


def committed(config, drafter, params, state, lengths, more):
    at = lengths[:, None] + np.arange(4)
    features = features_of(config, TEXT[None])[0][at]
    return drafter.commit(
        params, state, jnp.asarray(TEXT[at + 1]), jnp.asarray(more), features, None
    )


@pytest.mark.representatives("dflash", "dflash2", "dspark", "treeflash")
@pytest.mark.parametrize("name", HEADS)
def test_two_rounds_draft_what_independent_arithmetic_drafts(name):
    """After prefill, and after a commit of any number of tokens; one row a prefix."""
    config, drafter, params = parts(name)
    K = config.max_draft
    tensors, embed = exact(tensors_of(config)), exact(TARGET.params["embed"])
    unembed, features = exact(TARGET.params["head"]), exact(features_of(config, TEXT[None])[0])
    propose = proposer(drafter, params, K)

    def check(proposal, lengths):
        for b, n in enumerate(lengths):
            drafts, logits, _ = block_heads.chain(
                tensors, config, features[:n], TEXT[n], embed, unembed, K
            )
            assert proposal.tokens[b].tolist() == drafts
            np.testing.assert_allclose(proposal.logits[b], logits, atol=2e-4)

    state = prefilled(config, drafter, params, N)
    proposal, state = propose(state, jnp.asarray(N))
    check(proposal, N)
    ids = np.r_[TEXT[N[-1]], np.full(config.block_size - 1, config.mask_token_id)]
    here, late = (
        block_heads.block_states(tensors, config, features[: N[-1]], ids, embed, shift)
        for shift in (0, 1)
    )
    assert np.abs(here - late).max() > 1e-2  # one position further is another block
    state = committed(config, drafter, params, state, N, MORE)
    check(propose(state, jnp.asarray(N + MORE))[0], N + MORE)
    fresh = prefilled(config, drafter, params, N + MORE, 3)  # in chunks of three
    for ours, theirs in zip(state.keys + state.values, fresh.keys + fresh.values):
        shape = (len(N), -1, *ours.shape[-2:])
        for b, n in enumerate(N + MORE):
            np.testing.assert_allclose(
                ours.reshape(shape)[b, :, :n], theirs.reshape(shape)[b, :, :n], atol=1e-5
            )
    np.testing.assert_array_equal(state.length, fresh.length)


@pytest.mark.exhaustive
def test_a_new_head_of_dflash_2_drafts_as_its_layers_do_alone():
    """Its convolutions pass each token on as it is, and its scores of pairs add nothing."""
    config = HEADS["dflash2"]
    new = random_head(config, jax.random.key(3)).params
    for layer in new["layers"].values():
        for name in ("attention_conv", "mlp_conv"):
            first, *others = layer[f"{name}_base"].transpose(1, 0, 2)
            assert (first == 1).all() and not np.any(others) and not layer[name].any()
    own = {field.name for field in dataclasses.fields(DFlashConfig)}
    plain = DFlashConfig(**{name: value for name, value in vars(config).items() if name in own})
    pick = lambda layer: {name: w for name, w in layer.items() if "_conv" not in name}
    layers = {i: pick(layer) for i, layer in new["layers"].items()}
    features, n = features_of(config, TEXT[None]), jnp.asarray([6])

    def states(head, config):
        params = {"head": head, "target": TARGET.params}
        cache = KVCache.create(config.layer, 1, 20, jnp.float32)
        cache = inject(head, cache, features[:, :6], n, config)
        return block_states(params, TEXT[6:7], cache, config.block_size, config)[0]

    expected = jax.jit(states, static_argnums=1)({**new, "layers": layers}, plain)
    found = jax.jit(states, static_argnums=1)(new, config)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    before, base = TEXT[None, :5], jnp.asarray(np.random.default_rng(2).normal(size=(1, 5, 31)))
    logits = step_logits({"head": new}, base, found, jnp.asarray(before), config, None)
    best = np.argsort(-np.asarray(base), axis=-1)[..., : config.selector_top_k]
    take = lambda x: np.take_along_axis(np.asarray(x), best, axis=-1)
    np.testing.assert_array_equal(take(logits), take(base))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HEADS)
def test_distributions_do_not_depend_on_k(name):
    """Where a layer looks ahead the whole block is fed; a causal block may be shorter."""
    config, drafter, params = parts(name)
    state = prefilled(config, drafter, params, N)
    short, whole = (
        proposer(drafter, params, k)(state, jnp.asarray(N))[0].logits for k in (2, config.max_draft)
    )
    np.testing.assert_allclose(short, whole[:, :2], atol=1e-5)


def test_a_head_for_a_mixture_has_layers_of_the_size_that_a_token_reads():
    sizes = dict(vocab_size=31, hidden_size=16, num_attention_heads=4, num_key_value_heads=2)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)
    target = Qwen3NextConfig(
        **sizes, **experts, head_dim=8, shared_expert_intermediate_size=6, num_hidden_layers=2
    )
    assert DFlashConfig.of_target(target).layer.intermediate_size == 12
    unknown = types.SimpleNamespace(**vars(target) | {"num_experts_per_tok": None})
    message = "a SimpleNamespace has no intermediate_size to copy: give the head's own as `layer`"
    with pytest.raises(ConfigError, match=message):
        DFlashConfig.of_target(unknown)


@pytest.mark.parametrize("name", ["dflash", "dspark", "treeflash"])
def test_passes_of_a_round_are_planned(name):
    """Injection of K + 1 states, one block, and the step of every draft."""
    config, setting = HEADS[name], Setting(batch=2, context=100)
    K, (D, B) = config.max_draft, (LLAMA.hidden_size, setting.batch)
    _, inject, block, *step = roofline.round_work(LLAMA, config, K, setting).passes
    weights = tensors_of(config)
    size = lambda *parts: sum(w.size for n, w in weights.items() if any(p in n for p in parts))
    maps = size("q_proj", "k_proj", "v_proj", "o_proj", "mlp.")
    output, seen = D * LLAMA.vocab_size, 2 * D * config.layer.num_hidden_layers * setting.context
    assert inject.work.flops == 2 * B * (K + 1) * size("fc.", "k_proj", "v_proj")
    scored = 0 if name == "treeflash" else K * output  # its steps score the states
    assert block.work.flops == 2 * B * (config.block_size * (maps + seen) + scored)
    if name == "dflash":
        assert step == []
    else:
        read = size("markov_w2", "confidence_head.proj.weight", "ug.weight", "d.weight")
        scored = output if name == "treeflash" else 0
        assert (step[0].count, step[0].work.flops) == (K, 2 * B * (read + scored))
