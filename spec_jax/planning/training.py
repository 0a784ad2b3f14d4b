"""The training programs that a plan compiles: one step of a language model, or of a head."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec_jax.drafters import registry
from spec_jax.drafters.standalone import objective as standalone
from spec_jax.models import transformer
from spec_jax.models.families import AnyConfig
from spec_jax.models.params import init_params, placement, table_placement
from spec_jax.planning.programs import Traced, without_weights
from spec_jax.planning.work import Setting
from spec_jax.sharding import FULLY_SHARDED, SHARDED, named, place
from spec_jax.train.objective import Batch, with_view
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.placement import Placement, device_bytes, follow_params
from spec_jax.train.step import TrainState, train_step

_OPTIMIZER = dict(
    steps=1000, warmup=10, decay_share=0.1, lr=1e-3, matrix_lr=1e-2, weight_decay=0.1, clip=1.0
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What is trained, and on what mesh. Weights and their updates are float32.

    Attributes:
      target: the config of the language model that is trained, or of a head's target.
      head: the config of the head that is trained, by the objective of its kind; None: the model.
      batch: B, windows over all devices.
      length: W, tokens of a window.
      mesh: sizes of the mesh, such as "data:8".
      is_fully_sharded: weights and the optimizer's states are split over the data axis too.
      dtype: in which a head and its target compute; a language model computes in float32.
      num_steps: K of a loss with training-time test; None: the loss's default.
      is_remat: the backward pass computes a head's activations again instead of storing them.
      has_document_masks: a head's windows hold several documents, each by itself.
    """

    target: AnyConfig
    head: Any = None
    batch: int = 8
    length: int = 2048
    mesh: str = "data:1,tensor:1"
    is_fully_sharded: bool = False
    dtype: str = "bfloat16"
    num_steps: int | None = None
    is_remat: bool = True
    has_document_masks: bool = False
    program: ClassVar[str] = "train"


def train_memory(job: TrainJob) -> dict[str, int]:
    """Counts what a training step holds by its shapes; nothing is traced or compiled.

    Args:
      job: what is trained.

    Returns:
      Bytes on each device, activations and logits left out: of "state", the weights that are
      trained and what the optimizer keeps of each; of their "gradients"; and "frozen", the weights
      of a head's target.

    Raises:
      ConfigError: the mesh does not divide the heads.
    """
    mesh = Setting(mesh=job.mesh).abstract_mesh
    over = mesh, FULLY_SHARDED if job.is_fully_sharded else SHARDED
    where = placement("the target", job.target, *over)
    frozen = 0
    if job.head is None:
        trained = without_weights("model", job.target, "float32").params
    else:
        frozen = device_bytes(without_weights("target", job.target, job.dtype).params, where)
        head = without_weights("head", job.head, "float32")
        table = head.kind.head.table(job.head)
        split = registry.objective_of(job.head).split
        trained, _ = split(head.params)
        where, _ = split(table_placement("the head", registry.layer_of(job.head), table, *over))
    optimizer = make_optimizer("adamw", **_OPTIMIZER)
    state = jax.eval_shape(lambda params: TrainState.create(params, optimizer), trained)
    lies = follow_params(state, state.params, where, NamedSharding(mesh, PartitionSpec()))
    gradients = device_bytes(trained, where)
    return {"state": device_bytes(state, lies), "gradients": gradients, "frozen": frozen}


def trace_train(job: TrainJob, mesh: Mesh) -> Traced:
    """Traces one training step, as ``experiments.train_lm`` or ``experiments.train_head`` runs it.

    A head's step is compiled together with the target's pass over its windows, which
    ``train_head`` runs as a program of its own.

    Args:
      job: what is trained.
      mesh: the devices.

    Raises:
      ConfigError: the mesh does not divide the batch or the heads, or the head has no such
        objective.
    """
    where = Placement.of(mesh, job.is_fully_sharded)
    where.check_batch("batch", job.batch)
    optimizer = make_optimizer("adamw", **_OPTIMIZER)
    rows = named(("batch",), (job.batch, job.length), mesh)
    windows = jax.ShapeDtypeStruct((job.batch, job.length), jnp.int32, sharding=rows)
    if job.head is None:
        model = without_weights("model", job.target, "float32").on_mesh(mesh, where.axis_rules)
        trained = model.params
        frozen = None
        batch = windows

        def init():
            return init_params(job.target, jax.random.key(0))

        loss = functools.partial(standalone.lm_loss, config=job.target)
        step = functools.partial(train_step, objective=loss, optimizer=optimizer)
    else:
        target = without_weights("target", job.target, job.dtype).on_mesh(mesh, where.axis_rules)
        head = without_weights("head", job.head, "float32").on_mesh(mesh, where.axis_rules)
        objective = registry.objective_of(job.head)
        trained, constants = objective.split(head.params)
        constants = {name: jnp.zeros(x.shape, x.dtype) for name, x in constants.items()}
        fresh = functools.partial(head.kind.head.init_params, job.head, dtype="float32")

        def init():
            return objective.split(fresh(jax.random.key(0)))[0]

        model = transformer.model(job.target, job.head.taps)
        steps = {} if job.num_steps is None else {"num_steps": job.num_steps}
        options = steps | {"is_remat": job.is_remat}
        loss = objective.bind(job.head, model, objective.known(options), constants)
        step = functools.partial(
            train_step,
            objective=with_view(loss, job.target, job.head.taps),
            optimizer=optimizer,
            dtype=None if job.dtype == "float32" else job.dtype,
        )
        frozen = target.params
        is_predicted = jax.ShapeDtypeStruct(windows.shape, jnp.bool_, sharding=rows)
        begins = windows if job.has_document_masks else None
        key = jax.eval_shape(lambda: jax.random.key(0))
        batch = Batch(windows, is_predicted, key, begins=begins)

    def make():
        return TrainState.create(init(), optimizer)

    shardings = where.state_shardings(jax.tree.map(lambda x: x.sharding, trained), make)
    state = place(jax.eval_shape(make), shardings)
    lowered = where.jit_step(step, shardings).lower(state, batch, frozen)
    return Traced(lowered, {"trained": state.params, "frozen": frozen}, state, [], {})
