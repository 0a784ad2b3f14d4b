"""The programs that a plan compiles: the library's own, traced with shapes in place of arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec_jax import decoding
from spec_jax.config import SamplerConfig, SpeculativeConfig, TreeConfig
from spec_jax.decoding.loop import prefill_target
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters import registry
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.drafters.standalone import objective as standalone
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.meshes import parse_mesh
from spec_jax.models import transformer
from spec_jax.models.chunks import CHUNK
from spec_jax.models.families import AnyConfig
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.params import init_params, placement, table_placement
from spec_jax.planning.work import Setting
from spec_jax.sampling import make_sampler
from spec_jax.sharding import FULLY_SHARDED, SHARDED, named, place, state_axes
from spec_jax.train.objective import Batch, with_view
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.placement import Placement, device_bytes, follow_params
from spec_jax.train.step import TrainState, train_step
from spec_jax.tree import DynamicTree, Tree

_NUM_STOPS = 2  # stop tokens of a row
_PROMPT = 16  # width of the prompts that the shapes of the state are taken from
_OPTIMIZER = dict(
    steps=1000, warmup=10, decay_share=0.1, lr=1e-3, matrix_lr=1e-2, weight_decay=0.1, clip=1.0
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is decoded, and on what mesh.

    Attributes:
      target: the target's config.
      draft: None for plain decoding; "ngram" or "suffix"; the config of a standalone draft, or of
        a head.
      num_draft: K; 0 without a draft. A static tree says it itself.
      tree: what is drafted; None means a chain.
      batch: B, rows over all devices.
      slots: S, slots of the cache for each row.
      mesh: sizes of the mesh, such as "data:2,tensor:4".
      dtype: of weights and caches.
      sampler: of every row.
      is_draft_replicated: the draft lies whole on every device.
    """

    target: AnyConfig
    draft: Any = None
    num_draft: int = 0
    tree: TreeConfig | None = None
    batch: int = 8
    slots: int = 2048
    mesh: str = "data:1,tensor:1"
    dtype: str = "bfloat16"
    sampler: SamplerConfig = SamplerConfig()
    is_draft_replicated: bool = False
    program: ClassVar[str] = "decode"

    @property
    def method(self) -> str | None:
        """The ``speculative_method``; None for plain decoding."""
        if self.draft is None or (self.num_draft == 0 and self.tree is None):
            return None
        return registry.kind_of_draft(self.draft).name

    @property
    def config(self) -> SpeculativeConfig | None:
        """What the decoder is told; None for plain decoding."""
        if self.method is None:
            return None
        K = {"num_speculative_tokens": self.num_draft} if self.num_draft else {}
        return SpeculativeConfig(self.method, tree=self.tree, **K)

    @property
    def tree_shape(self) -> Tree | DynamicTree | None:
        """The tree that is drafted; None for a chain."""
        return None if self.config is None else self.config.tree_shape

    @property
    def setting(self) -> Setting:
        """What the analytic model is told."""
        return Setting(
            self.batch,
            self.slots,
            self.mesh,
            self.dtype,
            is_sampled=self.sampler.temperature > 0,
            is_draft_replicated=self.is_draft_replicated,
        )

    def decoder(self, mesh: Mesh) -> SpeculativeDecoder:
        """Returns the decoder, with the shapes of weights in their place.

        Raises:
          ConfigError: the parts do not fit each other or the mesh.
        """
        draft = None
        if self.method is not None and not isinstance(self.draft, str):
            draft = without_weights("draft", self.draft, self.dtype)
        return SpeculativeDecoder(
            without_weights("target", self.target, self.dtype),
            draft,
            self.config,
            target_sampler=self.sampler,
            mesh=mesh,
            is_draft_replicated=self.is_draft_replicated,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillJob(Job):
    """Prompts that are fed to a decoder's target: ``batch`` of them, each as long as its cache.

    Attributes:
      prefill_chunk: tokens of a prompt that a pass has at most.
    """

    prefill_chunk: int = CHUNK
    program: ClassVar[str] = "prefill"

    @classmethod
    def before(cls, job: Job) -> PrefillJob:
        """Returns what fills free rows of a job: a prompt for each group of devices.

        Of the draft it keeps what changes the target's program: the states that a head reads.
        """
        values = {field.name: getattr(job, field.name) for field in dataclasses.fields(Job)}
        groups = parse_mesh(job.mesh)["data"]
        head = job.method is not None and registry.kind_of_draft(job.draft).head is not None
        plain = {} if head else {"draft": None, "num_draft": 0, "tree": None}
        return cls(**values | plain | {"batch": groups, "sampler": SamplerConfig()})


def without_weights(role: str, config: Any, dtype: str) -> LoadedModel | LoadedHead:
    """Returns a model or a head of which only the shapes of the weights are known.

    Args:
      role: "target" or "draft", for messages.
      config: of the model or the head.
      dtype: of the weights.
    """
    kind = registry.kind_of_draft(config)
    if kind.head is not None:

        def init():
            return kind.head.init_params(config, jax.random.key(0), jnp.dtype(dtype))

        return LoadedHead(f"the {role}", config, jax.eval_shape(init))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.dtype(dtype)))
    model = transformer.model(config)
    stops = config.eos_token_id
    return LoadedModel(f"the {role}", model, params, config=config, stop_tokens=stops)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A program that is ready to be compiled.

    Attributes:
      lowered: it, for the devices of the mesh.
      params: shapes and shardings of the weights that it reads, each array once.
      state: likewise of what it is given, and returns.
      cache: the arrays of the state that hold keys, values or other states of models.
      copied: which results are such arrays, by number, and how many elements one layer of each has
        on a device.
    """

    lowered: Any
    params: Any
    state: Any
    cache: list[jax.ShapeDtypeStruct]
    copied: dict[int, int]


def trace_prefill(job: PrefillJob, mesh: Mesh) -> Traced:
    """Traces the target's part of ``decoding.prefill``, whose rounds are chunks of the prompts.

    Args:
      job: the prompts.
      mesh: the devices.
    """
    engine = job.decoder(mesh).engine()
    params = jax.tree.map(_shape, engine.params()["target"])
    target = engine.system.target
    rows = named(("batch",), (job.batch,), mesh)
    tokens = jax.ShapeDtypeStruct((job.batch, job.slots), jnp.int32, sharding=rows)
    lengths = jax.ShapeDtypeStruct((job.batch,), jnp.int32, sharding=rows)
    chunk = job.prefill_chunk if job.slots > job.prefill_chunk else None
    args = (params, tokens, lengths)
    options = dict(target=target, slots=job.slots, chunk=chunk)
    with jax.set_mesh(mesh):
        left = jax.eval_shape(functools.partial(prefill_target, **options), *args)
        lowered = prefill_target.lower(*args, **options)
    cache, copied = find_caches(_placed(left[0], mesh))
    return Traced(lowered, params, left, cache, copied)


def trace_decode(job: Job, mesh: Mesh) -> Traced:
    """Traces ``decoding.generate`` for a job.

    Args:
      job: what is decoded.
      mesh: the devices.
    """
    decoder = job.decoder(mesh)
    engine = decoder.engine()
    params = jax.tree.map(_shape, engine.params(job.batch))
    B = job.batch
    X = _NUM_STOPS

    def row(*more):
        return jax.ShapeDtypeStruct((B, *more), jnp.int32)

    sampler = jax.tree.map(_shape, make_sampler(job.sampler, B, job.target.vocab_size))
    prefill = functools.partial(decoding.prefill, system=engine.system, slots=job.slots)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(
            prefill, params, row(_PROMPT), row(), row(), row(X), sampler, sampler
        )
        state = _placed(state, mesh)
        one = jax.ShapeDtypeStruct((), jnp.int32)
        stop = row().update(sharding=named(("batch",), (B,), mesh))
        lowered = decoding.generate.lower(params, state, stop, one, one, system=engine.system)
    weights = {"target": params["target"], "draft": params["draft"]}
    if isinstance(params["draft"], dict) and "head" in params["draft"]:
        weights["draft"] = params["draft"]["head"]  # beside it stands the target, which it shares
    cache, copied = find_caches(state)
    return Traced(lowered, weights, state, cache, copied)


def _placed(state: Any, mesh: Mesh) -> Any:
    """The shapes of a state, split over a mesh."""

    def split(x, axes):
        return x.update(sharding=named(axes, x.shape, mesh))

    return jax.tree.map(split, state, state_axes(state))


def find_caches(state: Any) -> tuple[list[jax.ShapeDtypeStruct], dict[int, int]]:
    """Returns the arrays of a state that hold keys, values or states, see ``Traced``.

    Args:
      state: of decoding, or a cache; shapes with their shardings.
    """
    cache = []
    copied = {}
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    axes = jax.tree.leaves(state_axes(state))
    for number, ((path, x), names) in enumerate(zip(paths, axes)):
        is_model = not isinstance(state, DecodeState) or path[0].name in ("target", "draft")
        if is_model and x.ndim >= 3 and jnp.issubdtype(x.dtype, jnp.floating):
            cache.append(x)
            layer = x.sharding.shard_shape(x.shape)["layers" in names :]
            copied[number] = math.prod(layer)
    return cache, copied


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


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
        loss = functools.partial(standalone.lm_loss, config=job.target)
        step = functools.partial(train_step, objective=loss, optimizer=optimizer)
    else:
        target = without_weights("target", job.target, job.dtype).on_mesh(mesh, where.axis_rules)
        head = without_weights("head", job.head, "float32").on_mesh(mesh, where.axis_rules)
        objective = registry.objective_of(job.head)
        trained, constants = objective.split(head.params)
        constants = {name: jnp.zeros(x.shape, x.dtype) for name, x in constants.items()}
        model = transformer.model(job.target, job.head.taps)
        steps = {} if job.num_steps is None else {"num_steps": job.num_steps}
        options = steps | {"is_remat": job.is_remat}
        loss = objective.bind(job.head, model, objective.known(options), constants)
        step = functools.partial(
            train_step,
            objective=with_view(loss, model, job.head.taps),
            optimizer=optimizer,
            dtype=None if job.dtype == "float32" else job.dtype,
        )
        frozen = target.params
        is_predicted = jax.ShapeDtypeStruct(windows.shape, jnp.bool_, sharding=rows)
        begins = windows if job.has_document_masks else None
        key = jax.eval_shape(lambda: jax.random.key(0))
        batch = Batch(windows, is_predicted, key, begins=begins)

    def make(params):
        return TrainState.create(params, optimizer)

    shardings = where.state_shardings(jax.tree.map(lambda x: x.sharding, trained), make, trained)
    state = place(jax.eval_shape(make, trained), shardings)
    lowered = where.jit_step(step, shardings).lower(state, batch, frozen)
    return Traced(lowered, {"trained": state.params, "frozen": frozen}, state, [], {})
