"""Mamba-2: state-space layers, which keep a state instead of a cache of all tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from spec_jax.config.checks import check
from spec_jax.models.caches.state import StateCache
from spec_jax.models.checks import check_ranges, require
from spec_jax.models.config import EPS_RANGE, AnyConfig, RopeConfig
from spec_jax.models.families.registry import Family, register
from spec_jax.models.layers import Window, check_one_document, linear, rms_norm
from spec_jax.models.specs import ParamSpec, linear_specs, norm_spec, outer_specs
from spec_jax.models.ssm import Inputs, MixerConfig, convolve, latest_seen, read, read_chain, write
from spec_jax.sharding import constrain


def time_limits(value: Any) -> tuple[float, float]:
    """Reads ``time_step_limit`` of a config.json, with infinity in any of its spellings.

    Raises:
      ConfigError: it is not a pair of a smaller and a larger number.
    """

    def plain(x):
        return x.get("__float__") if isinstance(x, Mapping) else x

    try:
        low, high = (float(plain(x)) for x in ((0.0, math.inf) if value is None else value))
    except (TypeError, ValueError, OverflowError):
        low = 1.0
        high = 0.0
    check(0 <= low < high, "time_step_limit", value, "two numbers, ascending from 0")
    return low, high


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Mamba2Config(AnyConfig):
    """The shape of a Mamba-2 model. Field names are Hugging Face's."""

    saved_as: ClassVar[tuple[str, str]] = ("mamba2", "Mamba2ForCausalLM")
    # Nothing is rotated: the state knows the order of its tokens.
    rope: ClassVar[RopeConfig] = RopeConfig()
    rotary_dim: ClassVar[int] = 0
    # A state never runs full; this only bounds the tokens that are kept as output.
    max_position_embeddings: ClassVar[int] = 1 << 20

    num_heads: int
    head_dim: int
    state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    expand: float = 2
    layer_norm_epsilon: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    use_conv_bias: bool = True
    use_bias: bool = False
    residual_in_fp32: bool = True

    def __post_init__(self):
        check_ranges(self, layer_norm_epsilon=EPS_RANGE)
        self.settle(time_step_limit=time_limits(self.time_step_limit))
        width = int(self.expand * self.hidden_size)
        made = f"num_heads {self.num_heads} of head_dim {self.head_dim} make {self.mixer.width}"
        asked = f"expand {self.expand} of hidden_size {self.hidden_size} asks for {width}"
        require(self.mixer.width == width, f"{made}; {asked}")

    @property
    def mixer(self) -> MixerConfig:
        """The shape of each layer's mixer."""
        return MixerConfig(
            self.hidden_size,
            self.num_heads,
            self.head_dim,
            self.state_size,
            self.n_groups,
            self.conv_kernel,
            self.layer_norm_epsilon,
            self.time_step_limit,
            self.use_conv_bias,
            self.use_bias,
        )

    @property
    def rms_norm_eps(self) -> float:
        """Epsilon of the norms, under the name that other families use."""
        return self.layer_norm_epsilon

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Mamba2Config:
        """See ``AnyConfig.from_hf``; "swish" is another name of the activation."""
        is_swish = hf.get("hidden_act") == "swish"
        return super().from_hf({**hf, "hidden_act": "silu"} if is_swish else hf)


def mixer_table(config: MixerConfig, prefix: str) -> dict[str, ParamSpec]:
    """Returns the declared weights of one mixer.

    Args:
      config: the shape of the mixer.
      prefix: of their external names, with its last dot.
    """
    D = config.hidden_size
    N = config.num_heads
    C = config.conv_dim
    width = config.width
    table: dict[str, ParamSpec] = {}

    axes = ("embed", "state_inputs")
    bias = config.has_bias
    linear_specs(table, "in", D, width + C + N, axes, f"{prefix}in_proj", has_bias=bias)
    axes = ("state_heads", "embed")
    hf = f"{prefix}out_proj"
    linear_specs(table, "out", width, D, axes, hf, has_bias=bias, init="residual")
    shape = (C, 1, config.conv_kernel)
    axes = ("channels", "one", "reach")
    table["conv"] = ParamSpec(shape, axes, f"{prefix}conv1d.weight", init="conv")
    if config.has_conv_bias:
        table["conv_bias"] = ParamSpec((C,), ("channels",), f"{prefix}conv1d.bias", init="zeros")
    for name, hf, init in (
        ("time_bias", "dt_bias", "time step"),
        ("decay", "A_log", "decay"),
        ("skip", "D", "ones"),
    ):
        table[name] = ParamSpec((N,), ("state_heads",), f"{prefix}{hf}", init=init)
    table["gate_norm"] = norm_spec(width, f"{prefix}norm", "state_heads")
    return table


def layer_tables(config: Mamba2Config) -> list[dict[str, ParamSpec]]:
    """Returns the declared weights of every layer."""
    prefix = "backbone.layers.{i}."
    norm = norm_spec(config.hidden_size, f"{prefix}norm")
    table = {"mixer_norm": norm, **mixer_table(config.mixer, f"{prefix}mixer.")}
    return [table] * config.num_hidden_layers


def mixer(
    layer: dict[str, jax.Array],
    x_BTD: jax.Array,
    cache: StateCache | None,
    index: int,
    window: Window,
    config: Any,
) -> tuple[jax.Array, StateCache | None]:
    """Applies the state-space part of a layer to normalised inputs, without the residual.

    Args:
      layer: the layer's weights.
      x_BTD: dtype[B,T,D].
      cache: is read and written; None if the tokens are whole sequences.
      index: the layer's place in the cache.
      window: the tokens' places, and what each of them sees.
      config: of the model; its ``mixer`` is the shape.

    Returns:
      dtype[B,T,D], and the cache with the window written.
    """
    config = config.mixer
    B, T, _ = x_BTD.shape
    N = config.num_heads
    H = config.head_dim
    G = config.n_groups
    Z = config.state_size
    check_one_document(window)
    with jax.named_scope("ssm"):
        whole = StateCache.create(config, 1, B, x_BTD.dtype) if cache is None else cache
        held = whole.layer(index if cache is not None else 0)
        old = held.window
        offset = window.sees.offset

        def put(name, new):
            return write(old and getattr(old, name), new, offset)

        parts = (config.width, config.width + config.conv_dim)
        # Its parts are not split where the mesh splits the whole, so it is gathered once.
        projected = constrain(linear(x_BTD, layer, "in"), "batch", None, None)
        gate, raw, dt = jnp.split(projected, parts, axis=-1)

        raw = put("raw", raw)
        mixed = convolve(held.conv, raw, layer["conv"][:, 0], T, offset, window.sees.inside)
        if config.has_conv_bias:
            mixed += layer["conv_bias"]
        parts = (config.width, config.width + G * Z)
        x, b, c = jnp.split(jax.nn.silu(mixed), parts, axis=-1)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + layer["time_bias"].astype(jnp.float32))
        dt = jnp.clip(dt, *config.time_step_limit)
        x = constrain(x.reshape(B, T, N, H), "batch", None, "state_heads").astype(jnp.float32)
        c = c.reshape(B, T, G, Z)
        inputs = Inputs(
            raw=raw,
            u=put("u", dt[..., None] * x),
            b=put("b", b.reshape(B, T, G, Z).astype(jnp.float32)),
            log_decay=put("log_decay", -dt * jnp.exp(layer["decay"].astype(jnp.float32))),
        )
        y = _read(held.ssm, inputs, c, window)
        y += layer["skip"].astype(jnp.float32)[:, None] * x
        y = y.reshape(B, T, -1) * jax.nn.silu(gate.astype(jnp.float32))
        y = rms_norm(y.reshape(B, T, G, -1), 1.0, config.norm_eps).reshape(B, T, -1)
        out = linear((layer["gate_norm"] * y).astype(x_BTD.dtype), layer, "out")
    return out, cache and whole.with_window(index, inputs)


def _read(state: jax.Array, inputs: Inputs, c: jax.Array, window: Window) -> jax.Array:
    """Returns the outputs of the window's latest T tokens."""
    T = c.shape[1]
    width = inputs.raw.shape[1]
    offset = window.sees.offset
    is_whole = isinstance(offset, int) and offset == 0
    if window.sees.inside is not None:
        is_seen = window.sees.inside
    elif is_whole:
        return read_chain(state, jax.tree.map(lambda x: x[:, :T], inputs), c)
    else:
        is_seen = latest_seen(width, T, offset)
    return read(state, jax.tree.map(lambda x: x[:, : is_seen.shape[2]], inputs), c, is_seen)


def init_states(
    config: Any, batch: int, slots: int, dtype: DTypeLike = jnp.float32, num_layers: int = 1
) -> StateCache:
    """Creates the states of ``num_layers`` layers, as ``LayerKind.init_cache`` does."""
    del slots  # a state has none
    return StateCache.create(config.mixer, num_layers, batch, dtype, config.scan_layers)


def _layer(layer, x_BTD, cache, index, window, config):
    """One layer with its residuals, see ``Family.layer``."""
    norm = layer["mixer_norm"]
    h = rms_norm(x_BTD.astype(norm.dtype), norm, config.rms_norm_eps)
    h, cache = mixer(layer, h, cache, index, window, config)
    return (x_BTD.astype(jnp.float32) if config.residual_in_fp32 else x_BTD) + h, cache


register(
    Family(
        config=Mamba2Config,
        model_types=("mamba2",),
        layer=_layer,
        layer_tables=layer_tables,
        outer_table=lambda config: outer_specs(config, "backbone.embeddings", "backbone.norm_f"),
        init_cache=init_states,
        can_scan=True,
        has_panels=True,
    )
)
