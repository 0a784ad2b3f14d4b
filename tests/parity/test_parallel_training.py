"""P-EAGLE trained here and by the ``speculators`` package: the same losses and the same head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from speculators_models import load_theirs, torch
from support.parallel_heads import TARGET, head_of, new
from support.tiny_models import LLAMA

from spec_jax import load_draft, load_model
from spec_jax.drafters.eagle.objective import PEAGLE
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.train.anchors import draw_anchors
from spec_jax.train.objective import Batch, target_view
from spec_jax.train.step import TrainState, train_step

# What the package and those that it imports warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

W, K, A, STEPS, LR = 18, 4, 5, 8, 0.05
CASES = {
    "llama": new(max_draft=K, norm_before_residual=True),
    "qwen3": new(layer=dict(model_type="qwen3"), max_draft=K, fc_norm=True),
}
TEXT = np.random.default_rng(5).integers(0, 31, (STEPS, 2, W))
MASK = np.random.default_rng(6).random((2, W)) < 0.9
SHARES = np.maximum(0.7 ** np.arange(K), 0.4)


def rows_of(anchors, is_kept, mask):
    """Pair, depth and whether it counts, of each row of their pass over one window."""
    T = W - 2
    rows = [(t, 0, mask[t + 2]) for t in range(T)]
    for a in anchors[is_kept]:
        deep = range(1, min(K, W - 1 - a))
        rows += [(a - 1, d, mask[a + 1 : a + 2 + d].all()) for d in deep]
    return (np.array(column) for column in zip(*rows))


def their_loss(monkeypatch, model, batch):
    """By their pass and their divergence, with the masks that we draw."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    divergence, _ = resolve_loss_config("kl_div", "eager")["kl_div"]
    drawn = draw_anchors(batch.key, batch.mask, A)
    sums, counts = [0.0] * K, np.zeros(K)
    for b, (anchors, is_kept) in enumerate(zip(*map(np.asarray, drawn))):
        pair, depth, is_counted = rows_of(anchors, is_kept, MASK[b])
        sample = torch.tensor(pair), torch.tensor(depth)
        monkeypatch.setattr(core, "generate_cod_sample_indices", lambda s=sample, **options: s)
        found = []

        def losses(logits, targets, found=found):
            found.append(divergence(logits, targets))
            return found[-1]

        tensor = lambda x: torch.tensor(np.asarray(x))[None]
        T, view = W - 2, batch.view
        ids, hidden = tensor(batch.tokens[b, 1 : 1 + T]).long(), tensor(view.hidden[b, 1 : 1 + T])
        options = dict(loss_config={"kl": (losses, 1.0)}, num_depths=K)
        options |= dict(verifier_last_hidden_states=hidden)
        model(tensor(view.features[b, :T]), ids, torch.zeros_like(ids), **options)
        for d in range(K):
            chosen = is_counted & (depth == d)
            counts[d] += chosen.sum()
            sums[d] = sums[d] + found[0][0, torch.tensor(chosen)].sum()
    assert counts.min() > 0
    return sum(w * s / n for w, s, n in zip(SHARES / SHARES.sum(), sums, counts))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_over_steps_are_those_of_their_training(tmp_path, name, monkeypatch):
    """Embedding, masked state and output head are trained too; the result is read from their
    file."""
    config, head = CASES[name], head_of(CASES[name])
    save_pretrained(tmp_path / "target", TARGET.params, LLAMA)
    target = load_model(tmp_path / "target")
    head.save(tmp_path / "ours", target, format="speculators")
    model = load_theirs(tmp_path / "ours", "peagle").train()
    model.load_verifier_weights()
    model.verifier_norm = torch.nn.Identity()  # the states that it is given are normalised
    weights = [w.requires_grad_() for n, w in model.named_parameters() if "verifier" not in n]
    descent = torch.optim.SGD(weights, lr=LR)

    optimizer, (params, constants) = optax.sgd(LR), PEAGLE.split(head.params)
    options = {"num_anchors": A, "floor": 0.4}
    loss = PEAGLE.bind(config, target.model, options, constants)
    step = jax.jit(functools.partial(train_step, objective=loss, optimizer=optimizer))
    state, ours, expected = TrainState.create(params, optimizer), [], []
    for i in range(STEPS):
        tokens = jnp.asarray(TEXT[i], jnp.int32)
        view = target_view(TARGET.params, tokens, model=TARGET.model, taps=config.taps)
        batch = Batch(tokens, jnp.asarray(MASK), jax.random.key(i), view)
        state, metrics = step(state, batch, target.params)
        ours.append(float(metrics["loss"]))
        descent.zero_grad()
        value = their_loss(monkeypatch, model, batch)
        value.backward()
        descent.step()
        expected.append(float(value))
    assert expected[-1] < 0.95 * expected[0]
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
    del model.verifier_norm
    model.save_pretrained(tmp_path / "theirs")
    trained = load_draft(tmp_path / "theirs", target)
    assert trained.config == config
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), trained.params, head.params)
    assert min(jax.tree.leaves(moved)) > 1e-4  # all of it is trained
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4)
    jax.tree.map(close, state.params, trained.params)
