"""EAGLE heads: a decoder layer, or a few, that drafts from the target's states.

Pair t joins the target's state at token t with the embedding of token t + 1, and the head predicts
token t + 2 from it. ``drafters/common/head.py`` drafts with it, and ``parallel.py`` with P-EAGLE.

Source: EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840; P-EAGLE, arXiv 2602.01469.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from spec_jax.contracts import Drafter, Head, Model
from spec_jax.drafters.common.head import head_drafter
from spec_jax.drafters.common.shape import HeadShape
from spec_jax.drafters.common.vocabulary import draft_ids
from spec_jax.errors import ConfigError
from spec_jax.models import families
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.checks import check, is_integer, require
from spec_jax.models.config import ModelConfig
from spec_jax.models.cpu_layout import matmul
from spec_jax.models.families.llama import decoder_layer, layer_table
from spec_jax.models.layers import (
    Window,
    attention,
    constrain_logits,
    embed_tokens,
    linear,
    mlp,
    rms_norm,
)
from spec_jax.models.params import check_weights, init_table
from spec_jax.models.specs import ParamSpec, linear_specs, norm_spec
from spec_jax.sharding import constrain, pin_tpu_layout, shard_map_over
from spec_jax.show.summary import short_repr
from spec_jax.tree import AnyTree, check_children


@dataclasses.dataclass(frozen=True)
class EagleConfig(HeadShape):
    """The shape of a head and the meaning of its tensors.

    Attributes:
      version: 1 (features and embedding joined by one linear map, no norms, the target's output
        head) or 3 (several states joined, normalised inputs, its own output head).
      layer: the head's one layer; its ``vocab_size`` is U, the size of the draft vocabulary.
      target_hidden_size: D of the target.
      target_vocab_size: V.
      taps: the target's states that it reads, see ``transformer.forward``; for version 1 the state
        after the final norm.
      fc_bias: the joining linear map has a bias.
      fc_norm: each tapped state has its own norm before they are joined.
      norm_before_fc: one norm over all tapped states before they are joined.
      norm_before_residual: the residual stream starts from the normalised state.
      norm_output: the recycled state is normalised, as the scored one always is.
      own_embed: the head has its own embedding, which it needs if its width is not the target's;
        otherwise it shares the target's.
    """

    is_parallel: ClassVar[bool] = False

    version: int
    layer: ModelConfig
    target_hidden_size: int
    target_vocab_size: int
    taps: tuple[int, ...]
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embed: bool = False

    __repr__ = short_repr()

    def __post_init__(self):
        check(self.version in (1, 3), "version", self.version, "1 or 3")
        self.check_shape()
        is_deep = self.num_layers == 1 or self.is_parallel
        require(is_deep, f"the head has {self.num_layers} layers; expected 1")
        windows = self.layer.windows
        require(len(set(windows)) == 1, f"windows are {windows}; expected one for all layers")
        is_old = self.version == 1
        options = (self.fc_norm, self.norm_before_fc, self.norm_before_residual, self.norm_output)
        require(not (is_old and any(options)), "norms are options of version 3")
        has_both = self.fc_norm and self.norm_before_fc
        require(not has_both, "fc_norm and norm_before_fc are both on; expected one of them")
        require(not is_old or len(self.taps) == 1, f"version 1 reads one state, not {self.taps}")
        U = self.layer.vocab_size
        V = self.target_vocab_size
        require(U <= V, f"the draft vocabulary {U} is larger than the target's {V}")
        D = self.layer.hidden_size
        width = self.target_hidden_size
        require(not is_old or U == V, f"version 1 scores by the target's head: {V} ids, not {U}")
        has_width = D == width or (self.own_embed and not is_old)
        shared = "target's head that scores it" if is_old else "embedding that it shares"
        require(has_width, f"the head's width is {D}; the {shared} has {width}")

    @property
    def name(self) -> str:
        """For reports."""
        return f"eagle-{self.version}"

    @classmethod
    def of_target(
        cls,
        target: ModelConfig,
        version: int = 3,
        draft_vocab_size: int | None = None,
        num_layers: int = 1,
        **changes: Any,
    ) -> Self:
        """Returns the config of a head with the target's layer and width.

        Version 1 reads the state after the final norm. Version 3 reads the three published states:
        after the second layer, in the middle, and before the last three layers. A target of fewer
        than seven layers is read after a sixth, a half and five sixths of its layers, rounded,
        without duplicates.

        Args:
          target: the target's config.
          version: 1 or 3.
          draft_vocab_size: U; by default the target's V.
          num_layers: of the head; P-EAGLE alone may have several.
          **changes: fields that differ from this.

        Raises:
          ConfigError: the target has layers of another kind than attention.
        """
        if not isinstance(target, ModelConfig):
            raise ConfigError(
                f"a head has attention layers; the target's {type(target).__name__} has none to "
                "copy: give the head's own as `layer`"
            )
        L = target.num_hidden_layers
        V = target.vocab_size
        usual = (2, L // 2, L - 3) if L >= 7 else sorted({round(L * i / 6) for i in (1, 3, 5)})
        U = V if draft_vocab_size is None else draft_vocab_size
        size = {"num_hidden_layers": num_layers, "vocab_size": U, "tie_word_embeddings": False}
        size |= {"sliding_window": None, "layer_types": ()}
        if type(target) is not ModelConfig:  # a family whose config inherits: the head's is Llama's
            sizes = {f.name: getattr(target, f.name) for f in dataclasses.fields(ModelConfig)}
            target = ModelConfig(**sizes | {"model_type": "llama"})
        layer = dataclasses.replace(target, **size, scan_layers=False)
        taps = (L + 1,) if version == 1 else tuple(usual)
        values = {"layer": layer, "target_hidden_size": target.hidden_size, "taps": taps}
        return cls(version, **{**values, "target_vocab_size": V, **changes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PEagleConfig(EagleConfig):
    """The shape of a P-EAGLE head: EAGLE-3's layer, usual ones after it, and a pair for masks.

    Attributes:
      mask_token_id: the id whose embedding stands for a token that is not known.
      max_draft: the largest K, as many drafts as the head was trained for; None: it is not known.
    """

    is_parallel: ClassVar[bool] = True

    mask_token_id: int
    max_draft: int | None = None

    __repr__ = short_repr()

    def __post_init__(self):
        super().__post_init__()
        require(self.version == 3, f"version is {self.version!r}; P-EAGLE extends version 3")
        V = self.target_vocab_size
        is_mask = is_integer(self.mask_token_id, 0, V - 1)
        require(is_mask, f"mask_token_id is {self.mask_token_id!r}; there are {V} embeddings")
        is_count = self.max_draft is None or is_integer(self.max_draft, 1)
        check(is_count, "max_draft", self.max_draft, "a positive integer or None")

    @property
    def name(self) -> str:
        """For reports."""
        return "p-eagle"

    @classmethod
    def of_target(
        cls,
        target: ModelConfig,
        version: int = 3,
        draft_vocab_size: int | None = None,
        num_layers: int = 4,
        **changes: Any,
    ) -> Self:
        """Returns the config of a head with the target's layer and width, see ``EagleConfig``.

        It has an embedding of its own, whose last row is the mask's, and drafts 8 tokens.
        """
        own = {"own_embed": True, "mask_token_id": target.vocab_size - 1, "max_draft": 8}
        return super().of_target(target, version, draft_vocab_size, num_layers, **own | changes)


def head_table(config: EagleConfig) -> dict[str, Any]:
    """Returns the weights of a head by name; if U < V there is also ``d2t``, i32[U].

    The first layer's are apart from those of the layers after it. In a checkpoint, of the former
    "model.layers.{i}." is the prefix of its format, see ``formats``.
    """
    D = config.layer.hidden_size
    Dt = config.target_hidden_size
    E = len(config.taps)
    is_old = config.version == 1
    size_in = D + Dt if is_old else E * Dt
    table: dict[str, Any] = {}
    linear_specs(table, "fc", size_in, D, ("features", "embed"), "fc")
    if config.own_embed:
        size = (config.target_vocab_size, D)
        table["embed"] = ParamSpec(size, ("vocab", "embed"), "embed_tokens.weight")
    if config.fc_bias:
        table["fc_bias"] = ParamSpec((D,), ("embed",), "fc.bias", init="zeros")
    if config.fc_norm:
        table |= {f"fc_norm_{i}": norm_spec(Dt, f"fc_norm.{i}") for i in range(E)}
    if config.norm_before_fc:
        table["input_norm"] = norm_spec(E * Dt, "input_norm")
    layer = layer_table(config.layer)
    del layer["attention_norm"]
    if not is_old:
        for name in ("q", "k", "v"):
            layer[name] = layer[name]._replace(shape=(2 * D, layer[name].shape[1]))
        table["embed_norm"] = norm_spec(D, "model.layers.{i}.input_layernorm")
        table["hidden_norm"] = norm_spec(D, "model.layers.{i}.hidden_norm")
        table["norm"] = norm_spec(D, "norm")
        linear_specs(table, "head", D, config.layer.vocab_size, ("embed", "vocab"), "lm_head")
    if config.is_parallel:
        axes = ("one", "one", "features")
        table["mask_hidden"] = ParamSpec((1, 1, size_in), axes, "mask_hidden")
        if later := range(1, config.layer.num_hidden_layers):
            table["layers"] = {str(i): layer_table(config.layer) for i in later}
    return table | layer


def check_head(config: EagleConfig, params: dict, owner: str = "") -> None:
    """Checks that the weights are those of the config.

    Args:
      config: the head's shape.
      params: its weights.
      owner: the beginning of the message.

    Raises:
      WeightsError: a weight is missing or has another shape; it is named.
    """
    table = head_table(config)
    U = config.layer.vocab_size
    if U < config.target_vocab_size:
        table = table | {"d2t": jax.ShapeDtypeStruct((U,), jnp.int32)}
    check_weights(params, table, owner)


def init_head(
    config: EagleConfig, key: jax.Array, dtype: DTypeLike = jnp.float32
) -> dict[str, Any]:
    """Returns random weights of a head; a reduced vocabulary holds the target's first ids.

    Args:
      config: the head's shape.
      key: one PRNG key, consumed.
      dtype: the dtype of the weights.
    """
    params = init_table(head_table(config), key, dtype)
    if config.layer.vocab_size < config.target_vocab_size:
        params["d2t"] = jnp.zeros((config.layer.vocab_size,), jnp.int32)
    return params


def norm_features(head: dict, features: jax.Array, config: EagleConfig) -> jax.Array:
    """Returns the inputs dtype[B,T,E] of ``fc`` from the tapped states dtype[B,T,E], version 3."""
    eps = config.layer.rms_norm_eps
    if config.fc_norm:
        states = jnp.split(features, len(config.taps), axis=-1)
        states = [rms_norm(x, head[f"fc_norm_{i}"], eps) for i, x in enumerate(states)]
        features = constrain(jnp.concatenate(states, axis=-1), "batch")
    return rms_norm(features, head["input_norm"], eps) if config.norm_before_fc else features


def join_features(head: dict, features: jax.Array, config: EagleConfig) -> jax.Array:
    """Returns the states dtype[B,T,D] of pairs from the tapped states dtype[B,T,E]."""
    if config.version == 1:
        return features  # joined with the embedding instead
    return constrain(linear(norm_features(head, features, config), head, "fc"), "batch")


def forward(
    head: dict,
    embed: jax.Array,
    state: jax.Array,
    tokens: jax.Array,
    cache: KVCache | None,
    *,
    config: EagleConfig,
    window_offset: int | jax.Array = 0,
    window_mask: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """Runs the head over pairs of a state and the token after it.

    Args:
      head: the weights of ``head_table``.
      embed: dtype[V,D], the target's embedding or the head's own.
      state: dtype[B,T,D], from ``join_features``, or a state that this function returned.
      tokens: i32[B,T], the token after each state.
      cache: a cache of the head's layers, or None.
      config: the head's shape.
      window_offset: slots of the window that earlier calls since the last commit filled.
      window_mask: bool[B|1,T,W], what of the window each pair sees, see ``Window.after``.
      positions: i32[B,T], rotary positions, likewise.

    Returns:
      dtype[B,T,D], the residual stream, and the cache with the window written.
    """
    layer = config.layer
    eps = config.layer.rms_norm_eps
    e = embed_tokens(embed, tokens)
    window = Window.after(
        layer, cache, *tokens.shape, window_offset, positions, window_mask=window_mask
    )
    windows = [window.within(size) for size in layer.windows]
    if config.version == 1:
        both = constrain(jnp.concatenate([e, state], axis=-1), "batch")  # its halves split alike
        x = constrain(linear(both, head, "fc"), "batch")
        h, cache = attention(head, x, cache, 0, windows[0], layer)
        return constrain(mlp(head, x + h, layer), "batch"), cache
    normed = rms_norm(state, head["hidden_norm"], eps)
    both = jnp.concatenate([rms_norm(e, head["embed_norm"], eps), normed], axis=-1)
    h, cache = attention(head, both, cache, 0, windows[0], layer)
    x = normed if config.norm_before_residual else state
    x = constrain(mlp(head, x + h, layer), "batch")
    for i in range(1, layer.num_hidden_layers):
        x, cache = decoder_layer(head["layers"][str(i)], x, cache, i, windows[i], layer)
    return x, cache


def recycle(head: dict, x: jax.Array, config: EagleConfig) -> jax.Array:
    """Returns the state of the next pair, in place of the target's, from dtype[...,D]."""
    return rms_norm(x, head["norm"], config.layer.rms_norm_eps) if config.norm_output else x


def score(params: dict, x: jax.Array, config: EagleConfig, target: Model) -> jax.Array:
    """Returns logits f32[...,U] over the draft vocabulary for residual streams dtype[...,D].

    Ids that only pad the target's embedding get -inf.
    """
    head = params["head"]
    if config.version == 1:
        return target.unembed(params["target"], x)
    normed = rms_norm(x, head["norm"], config.layer.rms_norm_eps)
    logits = constrain_logits(matmul(normed, head["head"])).astype(jnp.float32)
    if target.num_tokens is None:
        return logits
    ids = draft_ids(head)
    ids = jnp.arange(logits.shape[-1]) if ids is None else ids
    return jnp.where(ids <= target.last_id, logits, -jnp.inf)


def unembed(params: dict, x: jax.Array, config: EagleConfig, target: Model) -> jax.Array:
    """Returns logits f32[...,V], -inf outside of the draft vocabulary, see ``score``."""
    logits = score(params, x, config, target)
    ids = draft_ids(params["head"])
    if ids is None:
        return logits

    def spread(logits, ids):
        # In one matrix, else a TPU's scatter pads each group of rows to its tiles' 128 lanes.
        rows = logits.reshape(-1, logits.shape[-1])
        empty = jnp.full((len(rows), config.target_vocab_size), -jnp.inf)
        rows = empty.at[:, ids].set(rows, indices_are_sorted=True, unique_indices=True)
        # Else it would slice the rows that a device samples as the scatter lays them, padded too.
        hold = jax.lax.optimization_barrier
        rows = jax.lax.platform_dependent(pin_tpu_layout(rows), tpu=hold, default=lambda x: x)
        return rows.reshape(*logits.shape[:-1], -1)

    return shard_map_over(spread, (P("batch"), P()), P("batch"))(logits, ids)


def embedding(params: dict, config: EagleConfig, target: Model) -> jax.Array:
    """Returns the embedding dtype[V,D] that a head reads, its own or the target's."""
    is_own = config.own_embed
    return params["head"]["embed"] if is_own else target.embedding(params["target"])


def eagle_head(config: EagleConfig, target: Model) -> Head:
    """Returns the functions of a head, for the target's ``Model`` with the head's taps."""

    def init_cache(params, batch, slots):
        return families.init_cache(config.layer, batch, slots, params["head"]["fc"].dtype)

    def feed(params, state, tokens, cache, window_offset, window_mask):
        embed = embedding(params, config, target)
        window = {"window_offset": window_offset, "window_mask": window_mask}
        return forward(params["head"], embed, state, tokens, cache, config=config, **window)

    return Head(
        name=config.name,
        vocab_size=config.target_vocab_size,
        max_length=config.max_length,
        taps=config.taps,
        width=config.layer.hidden_size,
        init_cache=init_cache,
        join=lambda params, features: join_features(params["head"], features, config),
        feed=feed,
        recycle=lambda params, x: recycle(params["head"], x, config),
        unembed=lambda params, x: unembed(params, x, config, target),
    )


@functools.cache
def eagle(config: EagleConfig, target: Model, tree: AnyTree | None = None) -> Drafter:
    """Returns the drafter of a head.

    Its parameters are ``{"head": the head's, "target": the target's}``. It shares the target's
    embedding, except with ``own_embed``, and in version 1 the target's output head.

    Args:
      config: the head's shape.
      target: the model that it drafts for, with this config's taps.
      tree: the tree that it drafts; None means a chain.

    Raises:
      ConfigError: a node of the tree has more children than the draft vocabulary has tokens.
    """
    check_children(tree, min(config.layer.vocab_size, target.last_id + 1), "the draft")
    return head_drafter(eagle_head(config, target), tree)
