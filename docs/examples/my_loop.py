"""A training loop of your own for a head: your jit, optimizer and mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from spec_jax.drafters import registry
from spec_jax.train.objective import Batch, with_view


def train(target, head, batches, mesh=None):
    """Returns the head after a step for each array i32[B,T] of ``batches``."""
    objective = registry.objective_of(head.config)
    params, constants = objective.split(head.params)
    loss = objective.bind(head.config, target.model, {}, constants)
    loss = with_view(loss, target.model, head.config.taps)  # computes the target's states, too
    optimizer = optax.adamw(1e-3)

    @jax.jit
    def step(params, state, frozen, tokens, key):
        batch = Batch(tokens, jnp.ones(tokens.shape, bool), key)
        (value, figures), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, frozen)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rows = whole = None
    if mesh is not None:  # of spec_jax.make_mesh, or any of automatic axes
        rows = NamedSharding(mesh, PartitionSpec("data"))
        whole = NamedSharding(mesh, PartitionSpec())
    params, frozen = jax.device_put((params, target.params), whole)
    state = optimizer.init(params)
    for number, tokens in enumerate(batches):
        tokens = jax.device_put(tokens, rows)
        params, state, value = step(params, state, frozen, tokens, jax.random.key(number))
    return dataclasses.replace(head, params={**params, **constants})
