"""What a step of a head for the zoo's target costs to compile and to run, by window.

XLA_FLAGS='' pytest -q -s -m measure tests/train/test_training_cost.py
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax.drafters import registry
from spec_jax.loading import load_draft, load_model
from spec_jax.train.objective import Batch, target_view
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.step import TrainState, train_step

RATES = dict(steps=1000, warmup=20, decay_share=0.6, lr=3e-3, matrix_lr=0.02)


HEADS = {
    "eagle3": lambda target: load_draft("zoo/eagle3", target),
    "dspark": lambda target: spec_jax.new_head(target, "dspark", taps=(2, 5, 8), markov_rank=128),
}


@pytest.mark.measure
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("windows, tokens", [(8, 256), (4, 512), (2, 1024), (1, 2048)])
def test_compile_time_of_a_step_is_measured_by_window(windows, tokens, name):
    target = load_model("zoo/target")
    head = HEADS[name](target)
    objective = registry.objective_of(head.config, name)
    params, constants = objective.split(jax.tree.map(jnp.array, head.params))
    rng, shape = np.random.default_rng(0), (windows, tokens + 2)
    ids, mask = jnp.asarray(rng.integers(0, 2048, shape), jnp.int32), rng.random(shape) < 0.8
    view = functools.partial(target_view, model=target.model, taps=head.config.taps)
    batch = Batch(ids, jnp.asarray(mask), jax.random.key(0), jax.jit(view)(target.params, ids))
    options = {"num_steps": 7, "num_anchors": 320 // windows}
    loss = objective.bind(head.config, target.model, objective.known(options), constants)
    optimizer = make_optimizer("muon", **RATES, weight_decay=0.0, clip=0.5)
    step = functools.partial(train_step, objective=loss, optimizer=optimizer)
    state = TrainState.create(params, optimizer)
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch, target.params)
    jax.config.update("jax_enable_compilation_cache", False)
    begin = time.process_time()
    compiled = lowered.compile()
    compile_s, times = time.process_time() - begin, []
    jax.config.update("jax_enable_compilation_cache", True)
    for _ in range(6):
        begin = time.process_time()
        state, metrics = compiled(state, batch, target.params)
        jax.block_until_ready(state)
        times.append(time.process_time() - begin)
    assert np.isfinite(metrics["loss"])
    temporary = compiled.memory_analysis().temp_size_in_bytes
    print(
        f"{name}, {windows} x {tokens}: {compile_s:.1f} CPU-s to compile, "
        f"{temporary / 1e6:.0f} MB of temporaries, {np.median(times[1:]) * 1e3:.0f} CPU-ms a step"
    )
