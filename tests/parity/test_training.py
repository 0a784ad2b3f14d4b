"""Twenty optimizer steps of every objective of heads, against an independent torch training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from needs import torch, transformers
from oracles import torch_training as oracle
from support.tiny_models import random_tensor

from spec_jax.drafters.eagle.model import EagleConfig, head_table
from spec_jax.drafters.eagle.objective import eagle1_loss, eagle3_loss
from spec_jax.drafters.mtp.model import MtpConfig, mtp_table
from spec_jax.drafters.mtp.objective import mtp_loss
from spec_jax.loading import load_model
from spec_jax.models.families import read_config
from spec_jax.train.objective import Batch, target_view
from spec_jax.train.step import TrainState, train_step

V, B, W = 23, 2, 11
TAPS = (0, 2, 3)  # before the first layer, before the final norm, after it
OPTIONS = {
    "plain": {},
    "norms": dict(norm_output=True, norm_before_residual=True, fc_norm=True),
    "one norm before fc": dict(norm_before_fc=True),
}
STEPS = 20
RATES = [1e-2 * min(1, (i + 1) / 5) for i in range(STEPS)]


def save_target(path, **options):
    """A random target of two layers."""
    sizes = dict(vocab_size=V, hidden_size=16, intermediate_size=20, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5)
    sizes |= dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))
    config = transformers.LlamaConfig(**sizes, initializer_range=0.3, **options)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for name, x in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(x, 0.5, 1.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied"])
def target(request, tmp_path_factory):
    path = save_target(tmp_path_factory.mktemp("target"), tie_word_embeddings=request.param)
    return path, load_model(path)


def drawn(table, seed=0):
    return {name: random_tensor(name, spec.shape, seed) for name, spec in table.items()}


def eagle_head(directory, draft_vocab_size=None, **options):
    config = EagleConfig.of_target(
        read_config(directory), draft_vocab_size=draft_vocab_size, **options
    )
    head = drawn(head_table(config))
    if draft_vocab_size is not None:
        ids = np.sort(np.random.RandomState(3).permutation(V)[:draft_vocab_size])
        head["d2t"] = ids - np.arange(draft_vocab_size)
    return head, config.layer


def batches():
    draw = np.random.RandomState(7)
    return [(draw.randint(0, V, (B, W)), draw.random_sample((B, W)) < 0.8) for _ in range(STEPS)]


def ours(target, head, config, objective):
    """Losses before each step, and the trained weights."""
    rate = lambda i: jnp.asarray(RATES)[i]
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(rate, b1=0.9, b2=0.95, eps=oracle.EPS, weight_decay=0.0),
    )
    constants = {name: jnp.asarray(head[name]) for name in head if name == "d2t"}
    params = {name: jax.tree.map(jnp.asarray, w) for name, w in head.items() if name != "d2t"}
    view = jax.jit(functools.partial(target_view, model=target.model, taps=config.taps))
    with_constants = lambda head, *args: objective({**head, **constants}, *args)
    step = jax.jit(functools.partial(train_step, objective=with_constants, optimizer=optimizer))
    state, losses = TrainState.create(params, optimizer), []
    for tokens, mask in batches():
        tokens = jnp.asarray(tokens, jnp.int32)
        batch = Batch(tokens, jnp.asarray(mask), jax.random.key(1), view(target.params, tokens))
        state, metrics = step(state, batch, target.params)
        losses.append(float(metrics["loss"]))
    return losses, state.params


def check(found, expected):
    losses, params = found
    np.testing.assert_allclose(losses, expected[0], atol=1e-4, rtol=0)
    assert np.ptp(losses) > 1e-2
    for path, weight in jax.tree_util.tree_leaves_with_path(params):
        theirs = functools.reduce(lambda tree, key: tree[key.key], path, expected[1])
        np.testing.assert_allclose(weight, theirs, atol=2e-3, err_msg=str(path))


def test_eagle1_follows_torch(target):
    path, model = target
    head, layer = eagle_head(path, version=1, fc_bias=True)
    config = EagleConfig.of_target(model.config, 1, fc_bias=True)
    objective = functools.partial(eagle1_loss, config=config, model=model.model)
    expected = oracle.eagle1_losses(path, head, layer, batches(), lrs=RATES)
    check(ours(model, head, config, objective), expected)


# Every option with nine ids, one step and four; with all ids the plain head unrolled, others not.
EAGLE3 = [(name, 9, steps) for name in OPTIONS for steps in (1, 4)]
EAGLE3 += [(name, None, 4 if name == "plain" else 1) for name in OPTIONS]


@pytest.mark.parametrize(("name", "draft_vocab_size", "num_steps"), EAGLE3)
def test_eagle3_follows_torch(target, name, draft_vocab_size, num_steps):
    path, model = target
    options = dict(taps=TAPS, **OPTIONS[name])
    head, layer = eagle_head(path, draft_vocab_size, **options)
    config = EagleConfig.of_target(model.config, 3, draft_vocab_size, **options)
    objective = functools.partial(
        eagle3_loss, config=config, model=model.model, num_steps=num_steps, is_remat=num_steps == 4
    )
    expected = oracle.eagle3_losses(
        path, head, layer, batches(), lrs=RATES, num_steps=num_steps, **options
    )
    check(ours(model, head, config, objective), expected)


@pytest.mark.parametrize("protocol", ["recycled", "sequential"])
def test_mtp_follows_torch(target, protocol):
    path, model = target
    count = 1 if protocol == "recycled" else 3
    config = MtpConfig.of_target(model.config, num_modules=count, protocol=protocol)
    head = {str(i): drawn(mtp_table(config), i) for i in range(count)}
    objective = functools.partial(mtp_loss, config=config, model=model.model, num_steps=3)
    follow = {"recycled": oracle.mtp_recycled_losses, "sequential": oracle.mtp_sequential_losses}
    expected = follow[protocol](path, head, config.layer, batches(), lrs=RATES)
    check(ours(model, head, config, objective), expected)
