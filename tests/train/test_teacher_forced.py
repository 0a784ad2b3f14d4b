"""Rounds of trained heads of every kind, repeated teacher-forced by the passes that train them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiny_heads import BLOCKS, CONFIG, TARGET, UNROLLED

from spec_jax.drafters import registry
from spec_jax.drafters.eagle.model import PEagleConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.evaluation import teacher_forced
from spec_jax.loading import random_head
from spec_jax.train.objective import Batch, target_view
from spec_jax.train.step import TrainState, train_step

K = 4
OPTIONS = {"mtp": {"num_steps": K, "labels": "target"}, "dflash2": {"base_weight": 1.0}}
HEADS = {"eagle-3": UNROLLED["eagle-3, reduced, normed"], "mtp": UNROLLED["mtp"]}
HEADS |= {name: BLOCKS[name] for name in ("dspark", "dflash2")}
HEADS |= {"p-eagle": PEagleConfig.of_target(CONFIG, max_draft=K)}
PROMPTS = [np.random.default_rng(n).integers(0, 31, n).tolist() for n in (3, 9, 5, 12)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HEADS)
def test_teacher_forced_rounds_are_the_decoders(name):
    """Drafts reached and accepted, by position, though one side never decodes and the other never
    reads a true token after a round's start; of a head that is right now and then, after some
    steps on what the target writes itself."""
    config, options = HEADS[name], {"num_steps": K, "num_anchors": 16} | OPTIONS.get(name, {})
    head, objective = random_head(config, jax.random.key(3)), registry.objective_of(config)
    params, constants = objective.split(head.params)
    plain = SpeculativeDecoder(TARGET).generate(PROMPTS, 40)
    text = jnp.asarray([[*prompt, *row.tokens][:43] for prompt, row in zip(PROMPTS, plain)])
    view = target_view(TARGET.params, text, model=TARGET.model, taps=config.taps)
    loss = objective.bind(config, TARGET.model, objective.known(options), constants)
    optimizer = optax.adam(1e-2)
    state, losses = TrainState.create(params, optimizer), []

    @jax.jit
    def step(state, key):
        batch = Batch(text, text >= 0, key, view)
        return train_step(state, batch, TARGET.params, objective=loss, optimizer=optimizer)

    for i in range(100):
        state, metrics = step(state, jax.random.key(i))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    head = dataclasses.replace(head, params={**state.params, **constants})
    assert teacher_forced.has_drafts(TARGET, head)
    assert not teacher_forced.has_drafts(TARGET, None)  # drafts without a model
    num_draft = getattr(config, "max_draft", K)
    rows, stats = teacher_forced.decode(
        TARGET, head, PROMPTS, num_draft=num_draft, max_new_tokens=40, batch=4
    )
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    reached, accepted = teacher_forced.unrolled(TARGET, head, PROMPTS, rows, num_draft=num_draft)
    assert tuple(reached) == stats.reached_at and tuple(accepted) == stats.accepted_at
    assert accepted[1] > 0  # a second draft was right
