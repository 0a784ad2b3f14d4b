"""A run of the training loop in seconds, in this process or in one that is to be killed."""

import functools
import pathlib
import time

import jax
import numpy as np

from spec_jax.data.batches import Corpus, window_batches
from spec_jax.drafters.standalone import objective
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Log
from spec_jax.train.loop import train_loop
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.step import TrainState, train_step

CONFIG = ModelConfig(
    vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
)
STEPS = 40


def optimizer(**changes):
    usual = dict(
        steps=STEPS, warmup=2, decay_share=0.5, lr=1e-2, matrix_lr=0.0, weight_decay=0.1, clip=1.0
    )
    return make_optimizer("adamw", **usual | changes)


def fresh(**changes) -> TrainState:
    params = transformer.init_params(CONFIG, jax.random.key(0))
    return TrainState.create(params, optimizer(**changes))


def batches():
    text = np.random.default_rng(0).integers(0, 17, 400).astype(np.int32)
    return window_batches([Corpus("digits", text)], [1.0], seed=0, batch=2, length=9)


@functools.cache
def step_fn():
    loss = functools.partial(objective.lm_loss, config=CONFIG)
    step = functools.partial(train_step, objective=loss, optimizer=optimizer())
    return jax.jit(step, donate_argnums=0)


def run(folder, *, num_steps=STEPS, pause_s=0.0, on_step=lambda step: None, **options):
    """Runs or resumes; returns the state, whether it was done, and the folder's checkpoints."""
    found = batches()

    def batch_at(step):
        on_step(step)
        time.sleep(pause_s)
        return found[step]["tokens"]

    folder = pathlib.Path(folder)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        state = checkpoints.restore(fresh())
        with Log(folder, int(state.step), num_steps) as log:
            settings = dict(checkpoints=checkpoints, log=log)
            settings |= dict(tokens_per_step=lambda batch: batch.size, log_every=1)
            settings |= dict(checkpoint_every_s=0.0)
            usual = dict(step_fn=step_fn(), batch_at=batch_at, num_steps=num_steps, **settings)
            return train_loop(state, **usual | options)


def main(folder) -> None:
    """What a process that is to be killed does."""
    state, is_done = run(folder, pause_s=0.05)
    if is_done:
        leaves = jax.tree.leaves(jax.device_get(state))
        np.savez(pathlib.Path(folder) / "final.npz", *leaves)
