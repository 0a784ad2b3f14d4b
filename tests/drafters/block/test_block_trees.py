"""Trees of block drafters: from marginals and from steps, against brute force."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import block_heads
from support.block_drafts import HEADS, TARGET, exact, features_of, head_of, tensors_of
from support.tiny_models import LLAMA

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context, Prompt
from spec_jax.drafters.block.model import block_drafter
from spec_jax.drafters.block.steps import without_step
from spec_jax.errors import ConfigError
from spec_jax.loading import load_draft
from spec_jax.models import transformer
from spec_jax.sampling import make_sampler
from spec_jax.tree import DynamicTree, Tree

TEXT = np.random.default_rng(5).integers(0, LLAMA.vocab_size, 8)
N = 6  # tokens before the pending one
V, DEPTH, BEST = LLAMA.vocab_size, 3, 7


def oracle(config):
    """log q of each token at each depth after each token, f64[DEPTH,V,V], and of the first."""
    tensors, embed = exact(tensors_of(config)), exact(TARGET.params["embed"])
    ids = np.full(config.block_size, config.mask_token_id)
    ids[0] = TEXT[N]
    features = exact(features_of(config, TEXT[None])[0])[:N]
    x = block_heads.block_states(tensors, config, features, ids, embed)
    x = x if config.is_anchor_first else x[1:]
    unembed = exact(TARGET.params["head"])
    scores = lambda k, t: block_heads.step(tensors, config, x[k], t, embed, unembed)[0]
    logits = np.array([[scores(k, t) for t in range(V)] for k in range(DEPTH)])
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def propose(config, tree, num_draft, model, temperature=0.0, head=None):
    drafter = block_drafter(config, model, tree)
    params = {"head": (head or head_of(config)).params, "target": TARGET.params}
    tokens, length = jnp.asarray(TEXT[None], jnp.int32), jnp.asarray([N])
    sampler = make_sampler(SamplerConfig(temperature=temperature), 1, V)

    @jax.jit
    def run():
        state = drafter.init(params, 1, 24)
        features = features_of(config, TEXT[None])[:, :N]
        state = drafter.prefill(params, state, Prompt(tokens[:, :N], length, None, features))
        has_probs = temperature > 0
        request = jnp.zeros(1, jnp.uint32)
        context = Context(tokens, length, sampler, request, False, has_probs, tree is None)
        return drafter.propose(params, state, context, num_draft)[0]

    return run()


@pytest.mark.representatives("dspark")
@pytest.mark.parametrize("name", ["dflash", "dspark", "treeflash"])
def test_a_dynamic_tree_has_the_likeliest_paths_of_the_draft(name):
    config, model = HEADS[name], transformer.model(LLAMA, HEADS[name].taps)
    found = propose(config, DynamicTree(BEST, DEPTH, top_k=BEST), BEST, model)
    paths = [()]
    for token, parent in zip(found.tokens[0].tolist(), found.parents[0].tolist()):
        paths.append((*paths[parent], token))
    logq, score = oracle(config), {}
    for depth in range(1, DEPTH + 1):
        for path in itertools.product(range(V), repeat=depth):
            before = score.get(path[:-1], 0.0)
            score[path] = before + logq[depth - 1, (TEXT[N], *path)[depth - 1], path[-1]]
    assert set(paths[1:]) == set(sorted(score, key=score.get, reverse=True)[:BEST])


@pytest.mark.exhaustive
def test_children_of_a_static_tree_are_drawn_from_what_the_tree_reports():
    """The distribution of a node is the step's after its token, at the draft's temperature."""
    config, tree = HEADS["dspark"], Tree((0, 0, 1, 1, 3))
    model = transformer.model(LLAMA, config.taps)
    found = propose(config, tree, tree.num_nodes, model, temperature=0.7)
    logq = oracle(config) / 0.7
    logq -= np.log(np.exp(logq).sum(-1, keepdims=True))
    tokens = [TEXT[N], *found.tokens[0].tolist()]
    for node, depth in ((0, 0), (1, 1), (3, 2)):
        expected = np.exp(logq[depth, tokens[node]])
        np.testing.assert_allclose(found.probs[0, node], expected, atol=1e-4)


@pytest.mark.exhaustive
def test_a_mask_from_the_padding_of_the_embedding_is_read_and_never_drafted():
    """The mask's id, the last one, is no token of this target."""
    config = HEADS["dspark"]
    whole, padded = (
        propose(config, None, 3, transformer.model(LLAMA, config.taps, n)).logits
        for n in (V, V - 2)
    )
    assert config.mask_token_id == V - 1 and np.isneginf(padded[..., V - 2 :]).all()
    np.testing.assert_allclose(padded[:, 0, : V - 2], whole[:, 0, : V - 2], atol=1e-5)


@pytest.mark.exhaustive
def test_a_head_without_its_step_drafts_as_with_a_step_that_adds_nothing(tmp_path):
    """Also when it was written and read, and with the slot of its pending token."""
    config, model = HEADS["dspark"], transformer.model(LLAMA, HEADS["dspark"].taps)
    head = head_of(config)
    without_step(head).save(tmp_path, TARGET)
    alone = load_draft(tmp_path, TARGET)
    step = {name: 0 * w for name, w in head.params["step"].items()}
    idle = dataclasses.replace(head, params={**head.params, "step": step})
    found = propose(alone.config, None, 3, model, head=alone).logits
    np.testing.assert_allclose(found, propose(config, None, 3, model, head=idle).logits, atol=1e-6)
    assert alone.method == "dflash"
    with pytest.raises(ConfigError, match="no step of DSpark or TreeFlash"):
        without_step(alone)
    assert jnp.abs(found - propose(config, None, 3, model, head=head).logits).max() > 0.1
