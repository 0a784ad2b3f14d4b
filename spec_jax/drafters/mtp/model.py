"""Multi-token-prediction modules: decoder layers, trained with the target, that draft for it.

A module joins a state with the embedding of the token after it, each normalised, and runs one
decoder layer. ``drafters/common`` drafts with modules: ``head.py`` with one module for every step,
``sequential.py`` with one module for each step.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from spec_jax.config.checks import check_integer, check_name
from spec_jax.contracts import Cache, Drafter, Head, Model
from spec_jax.drafters.common.head import head_drafter
from spec_jax.drafters.common.sequential import sequential_drafter
from spec_jax.drafters.common.shape import HeadShape
from spec_jax.models.checks import require
from spec_jax.models.cpu_layout import matmul
from spec_jax.models.families import AnyConfig, family_of, layer_kinds, module_layer
from spec_jax.models.layers import (
    Window,
    centred_norms,
    constrain_logits,
    embed_tokens,
    linear,
    rms_norm,
)
from spec_jax.models.params import init_table
from spec_jax.models.specs import ParamSpec, linear_specs, norm_spec
from spec_jax.sharding import constrain
from spec_jax.show.summary import short_repr
from spec_jax.tree import AnyTree, check_children

PROTOCOLS = ("recycled", "sequential")
ORDERS = ("embedding-first", "hidden-first")


@dataclasses.dataclass(frozen=True)
class MtpConfig(HeadShape):
    """The shape of MTP modules, the meaning of their tensors and how they draft.

    Attributes:
      layer: each module's one layer.
      target_hidden_size: D of the target.
      target_vocab_size: V.
      taps: the one state of the target that the first module reads, see
        ``transformer.forward``: L+1 after the final norm, L before it.
      num_modules: how many modules there are.
      protocol: "recycled", one module for every step, or "sequential", one a step.
      order: which half of the joining map's input comes first.
      recycles_normed: the next step or module reads the state after the module's output norm,
        which is always scored.
      has_zero_centred_norms: norms scale by 1 + weight.
      has_own_embed: each module has an embedding; otherwise they share the target's.
      has_own_head: each module has an output head; otherwise they share the target's.
    """

    layer: AnyConfig
    target_hidden_size: int
    target_vocab_size: int
    taps: tuple[int, ...]
    num_modules: int = 1
    protocol: str = "recycled"
    order: str = "embedding-first"
    recycles_normed: bool = True
    has_zero_centred_norms: bool = False
    has_own_embed: bool = False
    has_own_head: bool = False

    __repr__ = short_repr()

    def __post_init__(self):
        for name, known in (("protocol", PROTOCOLS), ("order", ORDERS)):
            check_name(name, getattr(self, name), known)
        count = check_integer("num_modules", self.num_modules, 1)
        message = "recycled drafting uses one module: set it to 1, or protocol to 'sequential'"
        is_used = count == 1 or self.protocol == "sequential"
        require(is_used, f"num_modules is {count}, but {message}")
        layers = self.num_layers
        require(layers == 1, f"a module has {layers} layers; expected 1")
        is_tap = isinstance(self.taps, tuple) and len(self.taps) == 1 and type(self.taps[0]) is int
        require(is_tap, f"taps are {self.taps!r}; expected a tuple of the one state that is read")
        self.check_shape()
        D = self.layer.hidden_size
        width = self.target_hidden_size
        require(D == width, f"the modules' width is {D}; the target's is {width}")
        U = self.layer.vocab_size
        V = self.target_vocab_size
        require(U == V, f"the modules' vocabulary has {U} ids; the target's has {V}")

    @property
    def name(self) -> str:
        """For reports."""
        return f"mtp-{self.protocol}"

    @classmethod
    def of_target(cls, target: AnyConfig, **changes: Any) -> MtpConfig:
        """Returns the config of modules with the target's layer, which read its last state.

        Args:
          target: the target's config.
          **changes: fields that differ from this.
        """
        layer = module_layer(target)
        sizes = {"target_hidden_size": target.hidden_size, "target_vocab_size": target.vocab_size}
        taps = (target.num_hidden_layers + 1,)
        usual = {
            "has_zero_centred_norms": getattr(target, "has_zero_centred_norms", False),
            "recycles_normed": family_of(target).recycles_normed,
        }
        return cls(**{"layer": layer, **sizes, "taps": taps, **usual, **changes})


def mtp_table(config: MtpConfig) -> dict[str, ParamSpec]:
    """Returns the weights of one module by name, with their names in DeepSeek's checkpoints."""
    D = config.layer.hidden_size
    V = config.target_vocab_size
    prefix = "model.layers.{i}."
    names = {"embed_norm": "enorm", "hidden_norm": "hnorm"}
    table = {ours: norm_spec(D, prefix + name) for ours, name in names.items()}
    linear_specs(table, "fc", 2 * D, D, ("features", "embed"), f"{prefix}eh_proj")
    table["norm"] = norm_spec(D, f"{prefix}shared_head.norm")
    if config.has_own_embed:
        table["embed"] = ParamSpec((V, D), ("vocab", "embed"), f"{prefix}embed_tokens.weight")
    if config.has_own_head:
        linear_specs(table, "head", D, V, ("embed", "vocab"), f"{prefix}shared_head.head")
    (layer,) = family_of(config.layer).layer_tables(config.layer)
    return table | layer


def mtp_tables(config: MtpConfig) -> dict[str, dict[str, ParamSpec]]:
    """Returns the weights of all modules, ``{"0": {...}, "1": {...}}``."""
    return {str(i): mtp_table(config) for i in range(config.num_modules)}


def init_mtp(config: MtpConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """Returns random weights of every module, ``{"0": {...}, "1": {...}}``.

    Args:
      config: the modules' shape.
      key: one PRNG key, consumed.
      dtype: the dtype of the weights.
    """

    table = mtp_table(config)
    one = 0.0 if config.has_zero_centred_norms else 1.0
    keys = jax.random.split(key, config.num_modules)
    return {str(i): init_table(table, k, dtype, one) for i, k in enumerate(keys)}


def _module(params: dict, index: int, config: MtpConfig) -> dict[str, jax.Array]:
    """The weights of one module, with norms as factors."""
    module = params["head"][str(index)]
    return centred_norms(module) if config.has_zero_centred_norms else module


def forward(
    params: dict,
    state: jax.Array,
    tokens: jax.Array,
    cache: Cache | None,
    *,
    config: MtpConfig,
    target: Model,
    index: int = 0,
    window_offset: int | jax.Array = 0,
    window_mask: jax.Array | None = None,
    begins: jax.Array | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Runs one module over states and the tokens after them.

    Args:
      params: ``{"head": the modules', "target": the target's}``.
      state: dtype[B,T,D], from the target or from ``recycle``.
      tokens: i32[B,T], the token that each state is joined with.
      cache: with a layer a module; None: row t of every module is the pair t, all of them.
      config: the modules' shape.
      target: the model that they draft for.
      index: which module, from 0; it sees no slot before this one, see ``common/sequential.py``.
      window_offset: slots of the window that earlier calls since the last commit filled.
      window_mask: bool[B|1,T,W], what of the window each slot sees, see ``Window.after``.
      begins: i32[B,T], of the states' documents, likewise.

    Returns:
      dtype[B,T,D], the residual stream, and the cache with the window written.
    """
    module = _module(params, index, config)
    layer = config.layer
    is_own = config.has_own_embed
    embed = module["embed"] if is_own else target.embedding(params["target"])
    e = rms_norm(embed_tokens(embed, tokens), module["embed_norm"], layer.rms_norm_eps)
    h = rms_norm(state, module["hidden_norm"], layer.rms_norm_eps)
    both = [e, h] if config.order == "embedding-first" else [h, e]
    x = constrain(jnp.concatenate(both, axis=-1), "batch")  # its halves split alike
    x = constrain(linear(x, module, "fc"), "batch")
    masks = dict(window_mask=window_mask, begins=begins)
    window = Window.after(layer, cache, *tokens.shape, window_offset, **masks)
    if index > 0 and cache is not None:
        window = window._replace(sees=window.sees.replace(first=index))
    (kind,) = layer_kinds(layer)
    x, cache = kind.layer(module, x, cache, index, window, layer)
    return constrain(x, "batch"), cache


def recycle(params: dict, x: jax.Array, *, config: MtpConfig, index: int = 0) -> jax.Array:
    """Returns the input of the next step or module from the residual stream dtype[...,D]."""
    if not config.recycles_normed:
        return x
    return rms_norm(x, _module(params, index, config)["norm"], config.layer.rms_norm_eps)


def unembed(
    params: dict, x: jax.Array, *, config: MtpConfig, target: Model, index: int = 0
) -> jax.Array:
    """Returns logits f32[...,V] for a module's residual stream dtype[...,D]."""
    module = _module(params, index, config)
    normed = rms_norm(x, module["norm"], config.layer.rms_norm_eps)
    if not config.has_own_head:
        return target.unembed(params["target"], normed)
    logits = constrain_logits(matmul(normed, module["head"])).astype(jnp.float32)
    return jnp.where(jnp.arange(logits.shape[-1]) <= target.last_id, logits, -jnp.inf)


def mtp_head(config: MtpConfig, target: Model, index: int = 0) -> Head:
    """Returns the functions of a module.

    Args:
      config: the modules' shape.
      target: the model that they draft for.
      index: which module, from 0.
    """
    (kind,) = layer_kinds(config.layer)

    def init_cache(params, batch, slots):
        dtype = params["head"]["0"]["fc"].dtype
        return kind.init_cache(config.layer, batch, slots, dtype, config.num_modules)

    def feed(params, state, tokens, cache, window_offset, window_mask):
        window = {"window_offset": window_offset, "window_mask": window_mask}
        of = {"config": config, "target": target, "index": index}
        return forward(params, state, tokens, cache, **of, **window)

    return Head(
        name=config.name,
        vocab_size=config.target_vocab_size,
        max_length=config.max_length,
        taps=config.taps,
        width=config.layer.hidden_size,
        init_cache=init_cache,
        join=lambda params, features: features,
        feed=feed,
        recycle=functools.partial(recycle, config=config, index=index),
        unembed=functools.partial(unembed, config=config, target=target, index=index),
    )


@functools.cache
def mtp(config: MtpConfig, target: Model, tree: AnyTree | None = None) -> Drafter:
    """Returns the drafter of MTP modules, by the protocol of their config.

    Their parameters are ``{"head": the modules', "target": the target's}``. Modules without an
    embedding or an output head share the target's.

    Args:
      config: the modules' shape and protocol.
      target: the model that they draft for, with this config's taps.
      tree: the tree that they draft; None means a chain.

    Raises:
      ConfigError: a tree for modules that draft one step each, or a node with more children than
        the target has tokens.
    """
    check_children(tree, target.last_id + 1, "the target's")
    if config.protocol == "recycled":
        return head_drafter(mtp_head(config, target), tree)
    advice = "leave the tree out, or read the modules with protocol='recycled'"
    require(tree is None, f"sequential modules draft chains; {advice}")
    return sequential_drafter([mtp_head(config, target, i) for i in range(config.num_modules)])
