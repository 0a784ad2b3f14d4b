"""The programs that a plan compiles: the library's own, traced with shapes in place of arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spec_jax import decoding
from spec_jax.config import SamplerConfig, SpeculativeConfig, TreeConfig
from spec_jax.decoding.loop import prefill_target
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters import registry
from spec_jax.drafters.loaded import LoadedHead
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.meshes import parse_mesh
from spec_jax.models import transformer
from spec_jax.models.chunks import CHUNK
from spec_jax.models.families import AnyConfig
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.params import init_params
from spec_jax.planning.roofline import Setting
from spec_jax.sampling import make_sampler
from spec_jax.sharding import named, state_axes
from spec_jax.tree import DynamicTree, Tree

_NUM_STOPS = 2  # stop tokens of a row
_PROMPT = 16  # width of the prompts that the shapes of the state are taken from


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
