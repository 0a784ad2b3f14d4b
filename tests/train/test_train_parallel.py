"""P-EAGLE's objective scores what is drafted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import parallel_heads
from scipy.special import softmax
from support.parallel_heads import HEADS, IDS, head_of, tensors_of
from support.tiny_heads import TARGET

from spec_jax.drafters.eagle.objective import PEAGLE
from spec_jax.train.objective import Batch, target_view

W, K = 20, 4
TEXT = jnp.asarray(np.random.default_rng(5).integers(0, 31, (2, W)), jnp.int32)


@pytest.mark.representatives("p-eagle")
@pytest.mark.parametrize("name", ["p-eagle", "norm of each state", "norm over all states"])
def test_a_loss_is_the_weighted_mean_over_drafts_of_whole_passes(name):
    """By loops over passes of independent arithmetic, each of true pairs and masks: of two turns,
    of drafts past the end, of a row without any, and of tokens that cannot be drafted."""
    config = dataclasses.replace(HEADS[name], max_draft=K)
    mask = np.zeros(TEXT.shape, bool)
    mask[0, 3:8] = mask[0, 11:] = True
    view = target_view(TARGET.params, TEXT, model=TARGET.model, taps=config.taps)
    batch = Batch(TEXT, jnp.asarray(mask), jax.random.key(0), view)
    params, decay, floor = head_of(config).params, 0.6, 0.3
    options = dict(config=config, model=TARGET.model, has_every_anchor=True)
    run = jax.jit(functools.partial(PEAGLE.loss, **options, decay=decay, floor=floor))
    loss, figures = run(params, batch, TARGET.params)
    exact = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    tensors, embed, features = exact(
        (tensors_of(config), TARGET.params["embed"], batch.view.features[0])
    )
    ids = np.arange(31) if config.layer.vocab_size == 31 else IDS
    p = softmax(exact(TARGET.model.unembed(TARGET.params, batch.view.hidden[0])), axis=-1)
    text = np.asarray(TEXT[0])
    sums, count = np.zeros(K), np.zeros(K)
    reached, hits = np.zeros(K), np.zeros(K)
    for a in range(1, W - 1):  # the pending token
        q = parallel_heads.scores(tensors, config, features[:a], text[1 : a + 1], embed, K)
        q = softmax(q, axis=-1)
        is_anchor, is_chain = a % K == 1 and mask[0, a] and mask[0, a + 1], True
        for k in range(min(K, W - 1 - a)):
            label, of_target = text[a + 1 + k], p[a + k]
            if not mask[0, a + 1 : a + 2 + k].all() or k and not is_anchor:
                break
            known, rest = of_target.argmax() in ids, of_target[ids] / of_target[ids].sum()
            sums[k] += (rest * np.log(rest / q[k])).sum() if known else 0.0
            count[k] += 1
            if is_anchor:
                reached[k] += is_chain
                is_chain &= ids[q[k].argmax()] == label
                hits[k] += is_chain
    assert count.min() > 0 and count[0] > count[1] >= count[3]
    shares = np.maximum(decay ** np.arange(K), floor)
    np.testing.assert_allclose(figures["loss_by_step"].value, sums / count, rtol=1e-4)
    np.testing.assert_allclose(loss, (shares * sums / count).sum() / shares.sum(), rtol=1e-4)
    np.testing.assert_array_equal(figures["teacher_forced_accept"].count, reached)
    np.testing.assert_array_equal(figures["teacher_forced_accept"].total, hits)
    nothing, _ = run(params, batch.replace(mask=jnp.zeros(TEXT.shape, bool)), TARGET.params)
    assert float(nothing) == 0.0
