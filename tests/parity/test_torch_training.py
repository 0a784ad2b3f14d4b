"""The torch oracle of training against transformers' layers and against drafting token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiny_models import random_tensor

from spec_jax.drafters.eagle.model import EagleConfig, head_table
from spec_jax.drafters.mtp.model import MtpConfig, mtp_table
from spec_jax.models.families import read_config

torch = pytest.importorskip("torch", reason="parity needs torch (extra 'parity')")
transformers = pytest.importorskip(
    "transformers", reason="parity needs transformers (extra 'parity')"
)
import oracles.torch_training as oracle  # noqa: E402

transformers.utils.logging.disable_progress_bar()
V, B, W = 23, 2, 11
TAPS = (0, 2, 3)  # before the first layer, before the final norm, after it
OPTIONS = {
    "plain": {},
    "norms": dict(norm_output=True, norm_before_residual=True, fc_norm=True),
    "one norm before fc": dict(norm_before_fc=True),
}


def save_target(path, family="Llama", **options):
    """A random target of two layers."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        rope_parameters=dict(rope_type="default", rope_theta=100.0),
        **options,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, x in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(x, 0.5, 1.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied"])
def directory(request, tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"), tie_word_embeddings=request.param)


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


def mtp_modules(directory, count):
    config = MtpConfig.of_target(read_config(directory))
    return {str(i): drawn(mtp_table(config), i) for i in range(count)}, config.layer


def batch(seed=0):
    """Tokens and a mask with holes; the last token of the first window does not count."""
    draw = np.random.RandomState(seed)
    mask = draw.random_sample((B, W)) < 0.8
    mask[0, -1] = False
    return draw.randint(0, V, (B, W)), mask


def runs(directory):
    """Every kind of training as a function of batches, lrs and options."""
    bind = lambda losses, made, **fixed: (
        lambda batches, lrs, **options: losses(
            directory, *made, batches, lrs=lrs, **{**fixed, **options}
        )
    )
    noise = np.random.RandomState(5).standard_normal((B, W - 2, 16))
    return {
        "eagle-1": bind(oracle.eagle1_losses, eagle_head(directory, version=1, fc_bias=True)),
        "eagle-1, noise": lambda batches, lrs: oracle.eagle1_losses(
            directory,
            *eagle_head(directory, version=1),
            batches,
            lrs=lrs,
            noises=[noise] * len(batches),
        ),
        **{
            f"eagle-3, {name}": bind(
                oracle.eagle3_losses,
                eagle_head(directory, 15, taps=TAPS, **options),
                taps=TAPS,
                num_steps=3,
                **options,
            )
            for name, options in OPTIONS.items()
        },
        "mtp, recycled": bind(oracle.mtp_recycled_losses, mtp_modules(directory, 1)),
        "mtp, sequential": bind(oracle.mtp_sequential_losses, mtp_modules(directory, 3)),
    }


RUNS = [
    "eagle-1",
    "eagle-1, noise",
    *(f"eagle-3, {name}" for name in OPTIONS),
    "mtp, recycled",
    "mtp, sequential",
]


def tensors(params):
    return {name: torch.tensor(x) for name, x in params.items()}


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_layer_and_states_are_those_of_transformers(tmp_path, family):
    directory = save_target(tmp_path, family)
    target = oracle.Target(directory)
    states, logits = target(torch.tensor(batch()[0]))
    config, model = read_config(directory), target.model.model
    assert len(states) == config.num_hidden_layers + 2
    for i, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        p = {n: getattr(attention, f"{n}_proj").weight.T for n in "qkvo"}
        p |= {n: getattr(mlp, f"{n}_proj").weight.T for n in ("gate", "up", "down")}
        if family == "Qwen3":
            p |= {n: getattr(attention, n).weight for n in ("q_norm", "k_norm")}
        p["mlp_norm"] = layer.post_attention_layernorm.weight
        normed = oracle.rms_norm(states[i], layer.input_layernorm.weight, config)
        h, _ = oracle.attend(p, normed, 0, [], config)
        torch.testing.assert_close(
            oracle.mlp(p, states[i] + h, config), states[i + 1], rtol=0, atol=1e-5
        )
    torch.testing.assert_close(model.norm(states[-2]), states[-1], rtol=0, atol=0)
    torch.testing.assert_close(target.unembed(states[-1]), logits, rtol=0, atol=0)


def test_first_step_is_plain_causal():
    assert torch.equal(oracle.visible(5, 1), torch.ones(5, 5).tril().bool())
    later = oracle.visible(5, 3)
    assert torch.equal(later[:, :5], oracle.visible(5, 1))
    assert torch.equal(later[:, 5:], torch.eye(5).bool().repeat(1, 2))


@pytest.mark.parametrize("kind", ["eagle-3", "mtp"])
def test_unrolled_rows_are_those_of_drafting(directory, kind):
    """Row t of step j: the last of a causal pass over t + 1 true pairs and j recycled ones."""
    steps, R = 3, W - 2
    if kind == "eagle-3":
        params, config = eagle_head(directory)
        step = oracle.eagle3_step
    else:
        modules, config = mtp_modules(directory, 1)
        params, step = modules["0"], oracle.mtp_step
    p, draw = tensors(params), torch.Generator().manual_seed(1)
    e = torch.randn(1, W + steps, 16, generator=draw)
    first = torch.randn(1, R, 16, generator=draw)
    state, seen, outs = first, [], []
    for j in range(steps):
        state, seen = step(p, e[:, 1 + j : 1 + j + R], state, j, seen, config)
        outs.append(state)
    for t in range(R):
        states = first[:, : t + 1]
        for j in range(steps):
            out, _ = step(p, e[:, 1 : t + 2 + j], states, 0, [], config)
            torch.testing.assert_close(outs[j][:, t], out[:, -1], rtol=0, atol=1e-5)
            states = torch.cat([states, out[:, -1:]], 1)


@pytest.mark.parametrize("name, weight", [("eagle-3, plain", "decay"), ("mtp, recycled", "beta")])
def test_one_step_ignores_later_steps(directory, name, weight):
    run, batches = runs(directory)[name], [batch()] * 2
    one, _ = run(batches, [1e-3] * 2, num_steps=1)
    weightless, _ = run(batches, [1e-3] * 2, num_steps=4, **{weight: 0.0})
    weighty, _ = run(batches, [1e-3] * 2, num_steps=4)
    np.testing.assert_allclose(one, weightless, rtol=1e-6)
    assert abs(one[0] - weighty[0]) > 1e-3


@pytest.mark.parametrize("name", RUNS)
def test_tokens_that_do_not_count_are_not_predicted(directory, name):
    """A window's last token is predicted or read for nothing else than what it is weighed by."""
    run, (tokens, mask) = runs(directory)[name], batch()
    changed = tokens.copy()
    changed[0, -1] = (tokens[0, -1] + 1) % V
    losses, _ = run([(tokens, mask), (changed, mask)], [0.0] * 2)
    assert losses[0] == losses[1]
    other = mask.copy()
    other[0, -1] = True
    assert run([(tokens, other)], [0.0])[0][0] != losses[0]


@pytest.mark.parametrize("name", RUNS)
def test_losses_fall(directory, name):
    losses, params = runs(directory)[name]([batch()] * 20, [1e-2] * 20)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]
    if "eagle-3" in name:
        assert np.array_equal(params["d2t"], eagle_head(directory, 15)[0]["d2t"])


def test_reduced_vocabulary_is_a_restriction_of_the_target(directory):
    """The first step's loss, row by row over the full vocabulary, impossible ids left out."""
    (tokens, mask), (head, layer) = batch(), eagle_head(directory, 8, taps=TAPS)
    losses, _ = oracle.eagle3_losses(
        directory, head, layer, [(tokens, mask)], lrs=[0.0], taps=TAPS, num_steps=1
    )
    ids, p = [i + d for i, d in enumerate(head["d2t"])], tensors(head)
    target = oracle.Target(directory)
    states, logits = target(torch.tensor(tokens))
    joined = torch.cat([states[i] for i in TAPS], -1) @ p["fc"]
    e = target.embed(torch.tensor(tokens))
    x, _ = oracle.eagle3_step(p, e[:, 1:], joined[:, :-1], 0, [], layer)
    scores = oracle.rms_norm(x, p["norm"], layer) @ p["head"]
    total, left_out = 0.0, 0
    for b in range(B):
        for t in range(W - 2):
            target_logits = logits[b, t + 1].detach().numpy().astype(np.float64)
            if target_logits.argmax() not in ids:
                left_out += mask[b, t + 2]
            elif mask[b, t + 2]:
                q = dict(zip(ids, scores[b, t].log_softmax(-1).tolist()))
                mass = sum(np.exp(target_logits[i]) for i in ids)
                total -= sum(np.exp(target_logits[i]) / mass * q[i] for i in ids)
    assert 0 < left_out < mask[:, 2:].sum()
    np.testing.assert_allclose(losses, total / mask[:, 2:].sum(), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_steps_are_optax_steps(scale):
    """Gradients below the clipping norm and above it."""
    start = {"m": {"a": np.array([0.3, -1.2], np.float32), "b": np.array([[2.0]], np.float32)}}
    lrs, batches = [0.1, 0.02, 0.3], [(np.full((1, 2), i + 1), np.ones((1, 2))) for i in range(3)]

    def loss(p, a, b):
        return scale * (((p["a"] - a[0]) ** 2).sum() + (p["b"] * a[0, 0] ** b - 1).sum() ** 2)

    of_torch = lambda modules, tokens, weight, index: loss(modules["m"], tokens, index)
    losses, out = oracle.train(start, of_torch, batches, lrs, torch.float32)
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(lambda i: jnp.asarray(lrs)[i], 0.9, 0.95, eps=oracle.EPS, weight_decay=0.0),
    )
    p = jax.tree.map(jnp.asarray, start["m"])
    state = optimizer.init(p)
    for index, (tokens, _) in enumerate(batches):
        value, grads = jax.value_and_grad(loss)(p, tokens, index)
        np.testing.assert_allclose(losses[index], value, rtol=1e-5)
        updates, state = optimizer.update(grads, state, p)
        p = optax.apply_updates(p, updates)
    for name in p:
        np.testing.assert_allclose(out["m"][name], p[name], rtol=1e-5)


def test_float64_agrees_with_float32(directory):
    run = runs(directory)["eagle-3, plain"]
    batches = [batch(seed) for seed in range(3)]
    single, _ = run(batches, [1e-3] * 3)
    double, params = run(batches, [1e-3] * 3, dtype=torch.float64)
    np.testing.assert_allclose(single, double, rtol=1e-4)
    assert params["fc"].dtype == np.float64


def test_a_weight_that_no_loss_reads_is_an_error(directory):
    head, layer = eagle_head(directory)
    head["input_norm"] = np.ones(48, np.float32)
    with pytest.raises(ValueError, match="input_norm"):
        options = dict(lrs=[0.0], taps=EagleConfig.of_target(read_config(directory)).taps)
        oracle.eagle3_losses(directory, head, layer, [batch()], **options)


def test_query_and_key_norms_are_read(directory):
    layer = dataclasses.replace(read_config(directory), model_type="qwen3", num_hidden_layers=1)
    config = EagleConfig.of_target(read_config(directory), version=1, layer=layer)
    losses, params = oracle.eagle1_losses(
        directory, drawn(head_table(config)), layer, [batch()] * 2, lrs=[1e-2] * 2
    )
    assert losses[1] < losses[0] and {"q_norm", "k_norm"} <= set(params)
