"""What a block drafter computes, against independent arithmetic, and the law of its cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import block_heads
from support.block_drafts import HEADS, TARGET, exact, features_of, head_of, tensors_of
from support.prefix_rounds import TEXT, N, Rounds, check_two_rounds
from support.tiny_models import LLAMA, QWEN3_NEXT

from spec_jax.drafters.block.config import DFlashConfig
from spec_jax.drafters.block.model import block_drafter, block_states, inject
from spec_jax.drafters.block.steps import step_logits
from spec_jax.loading import random_head
from spec_jax.models.caches.kv import KVCache
from spec_jax.planning import roofline
from spec_jax.planning.work import Setting


@pytest.mark.representatives("dflash", "dflash2", "dspark", "treeflash")
@pytest.mark.parametrize("name", HEADS)
def test_two_rounds_draft_what_independent_arithmetic_drafts(name):
    config = HEADS[name]
    rounds = Rounds(block_drafter, head_of(config))
    tensors, embed = exact(tensors_of(config)), exact(TARGET.params["embed"])
    unembed, features = exact(TARGET.params["head"]), exact(rounds.features[0])

    def expected(n):
        ends = (embed, unembed, config.max_draft)
        return block_heads.chain(tensors, config, features[:n], TEXT[n], *ends)[1]

    check_two_rounds(rounds, config.max_draft, expected)


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
        of = config.block_size, config, TARGET.model
        return block_states(params, TEXT[6:7], cache, *of)[0]

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
    rounds = Rounds(block_drafter, head_of(HEADS[name]))
    state, sizes = rounds.prefilled(N), (2, HEADS[name].max_draft)
    short, whole = (rounds.propose(state, jnp.asarray(N), k)[0].logits for k in sizes)
    np.testing.assert_allclose(short, whole[:, :2], atol=1e-5)


def test_a_head_for_a_mixture_has_layers_of_the_size_that_a_token_reads():
    layer = DFlashConfig.of_target(QWEN3_NEXT).layer
    assert layer.intermediate_size == 2 * 6  # of the experts of a token


def test_passes_of_a_round_of_treeflash_are_planned():
    """Injection of K + 1 states, one block, and the step of every draft, which scores its state.

    Others are compared with their programs in ``tests/experiments/test_passes.py``.
    """
    config, setting = HEADS["treeflash"], Setting(batch=2, context=100)
    K, (D, B) = config.max_draft, (LLAMA.hidden_size, setting.batch)
    _, inject, block, step = roofline.round_work(LLAMA, config, K, setting).passes
    weights = tensors_of(config)
    size = lambda *parts: sum(w.size for n, w in weights.items() if any(p in n for p in parts))
    maps = size("q_proj", "k_proj", "v_proj", "o_proj", "mlp.")
    seen = 2 * D * config.layer.num_hidden_layers * setting.context
    assert inject.work.flops == 2 * B * (K + 1) * size("fc.", "k_proj", "v_proj")
    assert block.work.flops == 2 * B * config.block_size * (maps + seen)
    scored = size("ug.weight", "d.weight") + D * LLAMA.vocab_size
    assert (step.count, step.work.flops) == (K, 2 * B * scored)
