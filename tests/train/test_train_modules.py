"""Published MTP modules are trained further: of every family, in place, beside a frozen target."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_models
from support.files import VOCAB, head_training, held_out, pieces_of, tokenizer_of, write_lines
from support.mtp_modules import modules_of, write_with_modules

from experiments import train_head
from experiments.training.head import HeadExperiment
from spec_jax import SpeculativeConfig, SpeculativeDecoder, load_draft, load_model
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.drafters.mtp.objective import mtp_loss
from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.train.objective import Batch, target_view
from spec_jax.train.step import TrainState, train_step

TARGETS = [tiny_models.QWEN35, tiny_models.QWEN35_MOE, tiny_models.QWEN3_NEXT_TARGET]
TARGETS += [tiny_models.GLM4_MOE, tiny_models.DEEPSEEK_TARGET]


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS, ids=lambda config: type(config).__name__)
def test_a_few_steps_lower_the_loss_of_a_module_and_move_all_of_it(target):
    config, params = MtpConfig.of_target(target), tiny_models.random_weights(target)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (2, 12)), jnp.int32)
    view = target_view(params, tokens, model=transformer.model(target), taps=config.taps)
    batch = Batch(tokens, jnp.ones(tokens.shape, bool), jax.random.key(0), view)
    model = transformer.model(target, config.taps)
    loss = functools.partial(mtp_loss, config=config, model=model, num_steps=2)
    optimizer = optax.adam(1e-2)
    step = jax.jit(functools.partial(train_step, objective=loss, optimizer=optimizer))
    first = modules_of(config)
    state, losses = TrainState.create(first, optimizer), []
    for _ in range(8):
        state, metrics = step(state, batch, params)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    still = [n for n, w in state.params["0"].items() if np.array_equal(w, first["0"][n])]
    assert still == [n for n in still if n == "router_bias"]  # which moves a choice alone


@pytest.mark.exhaustive
def test_a_module_is_trained_in_place_and_its_exports_draft_alike(tmp_path):
    """From the target's own directory into a copy of it, and into one for the module alone."""
    texts, source = held_out(2), tmp_path / "target"
    config = dataclasses.replace(tiny_models.QWEN35, vocab_size=VOCAB, max_position_embeddings=64)
    source.mkdir()
    write_with_modules(source, config, tokenizer_of(texts))
    pieces = pieces_of(texts, 4000)
    write_lines(tmp_path / "texts.jsonl", ({"text": piece} for piece in pieces))
    write_lines(tmp_path / "prompts.jsonl", ({"prompt": piece[:9]} for piece in pieces[:3]))
    options = head_training(tmp_path, "mtp")
    options.head.init_from, options.export_with_target = options.target, True
    options.optimizer.update({"name": "adamw", "lr": 1e-2, "warmup": 1})
    options.steps, options.eval.every, options.export_dtype = 12, 0, "float32"
    before = HeadExperiment(options, tmp_path / "before")
    first = before.evaluate(before.init_state())
    train_head.train(options, tmp_path / "run")
    target = load_model(source)
    alone = load_draft(tmp_path / "run" / "export", target)
    whole = load_model(tmp_path / "run" / "model")
    inside = load_draft(tmp_path / "run" / "model", whole)
    assert alone.config == inside.config == load_draft(source, target).config
    jax.tree.map(np.testing.assert_array_equal, alone.params, inside.params)
    jax.tree.map(np.testing.assert_array_equal, whole.params, target.params)
    after = before.evaluate(before.init_state().replace(params=inside.params))
    assert after["held_out_loss"] < first["held_out_loss"] - 0.05
    drafts = SpeculativeConfig("mtp", 2, rejection_sampling_strategy="greedy")
    texts, plain = [], SpeculativeDecoder(target).generate([5, 9, 2], 12).tokens
    for draft in (alone, inside):
        row = SpeculativeDecoder(target, draft, drafts).generate([5, 9, 2], 12)
        texts.append((row.tokens, row.trace.rejected))
    assert texts[0] == texts[1] and texts[0][0] == plain

    options.head.init_from, options.head.protocol = "", "sequential"
    with pytest.raises(ConfigError, match="holds MTP modules with another protocol"):
        HeadExperiment(options, tmp_path / "other")
    options.objective = "eagle3"
    with pytest.raises(ConfigError, match="export_with_target is True; expected False, unless for"):
        train_head.train(options, tmp_path / "other")
