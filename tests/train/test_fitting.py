"""``new_head`` begins with the target's weights; ``fit_head`` follows the objective's own loss."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.eagle_heads import TARGET
from support.tiny_models import random_weights

import spec_jax
from docs.examples import my_model
from spec_jax.data.batches import Corpus, window_batches
from spec_jax.drafters.eagle.objective import eagle3_loss
from spec_jax.errors import ConfigError, TrainingError
from spec_jax.models import transformer
from spec_jax.train.objective import Batch, target_view

TEXT = Corpus("ids", np.random.RandomState(0).randint(0, TARGET.vocab_size, 400).astype(np.int32))


@pytest.fixture(scope="module")
def target():
    model = transformer.model(TARGET)
    return spec_jax.LoadedModel("tiny", model, random_weights(TARGET), config=TARGET)


def test_a_new_head_begins_with_the_targets_last_layer_and_keeps_frequent_tokens(target):
    head = spec_jax.new_head(target, "eagle3", TEXT, draft_vocab_size=20)
    last = target.params["layers"][str(TARGET.num_hidden_layers - 1)]
    np.testing.assert_array_equal(head.params["o"], last["o"])
    kept = np.arange(20) + np.asarray(head.params["d2t"])
    counts = np.bincount(TEXT.tokens, minlength=TARGET.vocab_size)
    assert counts[kept].min() >= np.delete(counts, kept).max()
    other = spec_jax.new_head(target, "eagle3", is_warm_start=False)
    assert not np.array_equal(other.params["o"], last["o"])
    blocks = [spec_jax.new_head(target, name) for name in ("dflash", "dspark", "treeflash")]
    for layer in (layer for block in blocks for layer in block.params["layers"].values()):
        np.testing.assert_array_equal(layer["o"], last["o"])
    parallel = spec_jax.new_head(target, "peagle", num_layers=2)
    np.testing.assert_array_equal(parallel.params["embed"], target.params["embed"])
    np.testing.assert_array_equal(parallel.params["layers"]["1"]["o"], last["o"])
    for one in (head, other, parallel, *blocks):
        one.check_params()


def test_what_cannot_be_trained_is_refused_before_it_is_compiled(target):
    head = spec_jax.new_head(target, "eagle3")
    short, other = Corpus("short", TEXT.tokens[:99]), Corpus("other", TEXT.tokens + 9)
    foreign = spec_jax.LoadedModel("foreign", my_model.make().model, my_model.make().params)
    fit = functools.partial(spec_jax.fit_head, target, head)
    new = functools.partial(spec_jax.new_head, target)
    refused = {
        "objective is 'eagle4' .*; expected one of": lambda: new("eagle4"),
        "text= says which": lambda: new("eagle3", draft_vocab_size=9),
        "draft_vocab_size is 0; expected an integer of 1": lambda: new(draft_vocab_size=0),
        "text is a count, which counting uses up": lambda: new(
            text=itertools.count(), draft_vocab_size=9
        ),
        "head new eagle3 is for a target of width .*; foreign is": lambda: spec_jax.fit_head(
            foreign, head, TEXT, 1, length=10
        ),
        "batch is 0": lambda: fit(TEXT, 1, batch=0, length=10),
        "expected one that trains eagle heads": lambda: fit(TEXT, 1, length=10, objective="mtp"),
        "steps": lambda: fit(TEXT, 0),
        "length is 2; expected 3 to 256": lambda: fit(TEXT, 1, length=2),
        "expected at least 200, a window": lambda: fit(short, 1, length=200),
        "tokenised for another model": lambda: fit(other, 1, length=20),
    }
    for message, call in refused.items():
        with pytest.raises(ConfigError, match=message):
            call()


@pytest.mark.exhaustive
def test_fitting_follows_the_objective_on_the_windows_of_each_step(target):
    """Two steps of plain gradient descent, against gradients taken here."""
    head, seen = spec_jax.new_head(target, "eagle3"), []
    before = jax.tree.map(np.asarray, head.params)
    options = dict(evaluate=lambda one: seen.append(one) or {"seen": len(seen)}, eval_every=1)
    fitted = spec_jax.fit_head(
        target, head, TEXT, 2, batch=3, length=12, optimizer=optax.sgd(0.5), seed=5, **options
    )
    batches = window_batches([TEXT], [1.0], seed=5, batch=3, length=12)

    @jax.jit
    def gradient(params, tokens):
        view = target_view(
            target.params, tokens, model=transformer.model(TARGET), taps=head.config.taps
        )
        window = Batch(tokens, jnp.ones(tokens.shape, bool), jax.random.key(0), view)
        loss = lambda params: eagle3_loss(
            params, window, target.params, config=head.config, model=target.model, num_steps=3
        )
        return jax.value_and_grad(loss, has_aux=True)(params)

    params = before
    for number in range(2):
        (loss, _), grads = gradient(params, jnp.asarray(batches[number]["tokens"]))
        np.testing.assert_allclose(fitted.log[number + 1]["loss"], loss, rtol=1e-5)
        params = jax.tree.map(lambda w, g: w - 0.5 * g, params, grads)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(same, fitted.head.params, params)
    jax.tree.map(np.testing.assert_array_equal, head.params, before)
    assert [line.get("seen") for line in fitted.log] == [1, 2, 3]
    jax.tree.map(np.testing.assert_array_equal, seen[0].params, before)
    jax.tree.map(np.testing.assert_array_equal, seen[-1].params, fitted.head.params)


@pytest.mark.exhaustive
def test_a_loss_that_is_not_finite_ends_the_training(target):
    head = spec_jax.new_head(target, "eagle3")
    with pytest.raises(TrainingError, match="at step 2: lower the rates, or leave that data out"):
        spec_jax.fit_head(
            target, head, TEXT, 3, batch=3, length=12, optimizer=optax.sgd(float("inf"))
        )


def test_a_fit_is_plotted_as_loss_and_what_evaluations_returned():
    import matplotlib

    matplotlib.use("Agg")
    log = [
        {"step": 0, "tau": 1.0, "texts": ["a"]},
        {"step": 1, "loss": 4.0, "accept": [0.5]},
        {"step": 2, "loss": 3.0, "accept": [0.5], "tau": 1.5, "texts": ["b"]},
    ]
    fitted = spec_jax.Fitted(None, log)
    assert repr(fitted) == "Fitted(None, loss 3 at step 2)"
    left, right = fitted.plot().axes
    assert (left.get_ylabel(), right.get_ylabel()) == ("loss", "tau")
    np.testing.assert_array_equal(left.lines[0].get_xydata(), [[1, 4], [2, 3]])
    np.testing.assert_array_equal(right.lines[0].get_xydata(), [[0, 1], [2, 1.5]])
