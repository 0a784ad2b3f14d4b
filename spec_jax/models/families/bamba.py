"""Bamba, a hybrid: some layers attend, the others are Mamba-2; each has a feed-forward part."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from spec_jax.config.checks import check
from spec_jax.models.checks import check_sizes, is_integer, require
from spec_jax.models.config import PartialRotary
from spec_jax.models.families.mamba2 import init_states, mixer, mixer_table, time_limits
from spec_jax.models.families.registry import Family, LayerKind, register
from spec_jax.models.layers import attention, mlp, pre_norm_layer
from spec_jax.models.specs import ParamSpec, attention_specs, layer_specs, mlp_specs, outer_specs
from spec_jax.models.ssm import MixerConfig


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class BambaConfig(PartialRotary):
    """The shape of a Bamba model. Field names are Hugging Face's."""

    saved_as: ClassVar[tuple[str, str]] = ("bamba", "BambaForCausalLM")
    has_qk_norm: ClassVar[bool] = False

    intermediate_size: int
    attn_layer_indices: tuple[int, ...]
    mamba_n_heads: int
    num_key_value_heads: int | None = None
    mamba_d_head: int | None = None
    mamba_d_state: int = 256
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    max_position_embeddings: int = 262144
    mlp_bias: bool = False

    def __post_init__(self):
        width = self.mamba_expand * self.hidden_size
        D = self.hidden_size
        N = self.num_attention_heads
        others = {}
        if self.num_key_value_heads is None:
            others["num_key_value_heads"] = N
        if self.mamba_d_head in (None, "auto"):
            check_sizes(self, "mamba_n_heads")
            others["mamba_d_head"] = width // self.mamba_n_heads
        others["time_step_limit"] = time_limits(self.time_step_limit)
        self.settle("num_key_value_heads", "mamba_d_head", **others)
        made = f"mamba_n_heads {self.mamba_n_heads} of {self.mamba_d_head} make {self.mixer.width}"
        asked = f"mamba_expand {self.mamba_expand} of hidden_size {D} asks for {width}"
        require(self.mixer.width == width, f"{made}; {asked}")
        require(D % N == 0, f"num_attention_heads {N} must divide hidden_size {D}")
        self.settle_heads()
        L = self.num_hidden_layers
        layers = self.attn_layer_indices
        is_list = isinstance(layers, (list, tuple)) and all(map(is_integer, layers))
        stated = list(layers) if is_list else layers
        expected = f"some of the layers 0 to {L - 1}, and not all of them"
        is_fit = is_list and set() < set(layers) < set(range(L))
        check(is_fit, "attn_layer_indices", stated, expected)
        object.__setattr__(self, "attn_layer_indices", tuple(sorted(set(layers))))

    @property
    def mixer(self) -> MixerConfig:
        """The shape of the mixer of each state-space layer."""
        return MixerConfig(
            self.hidden_size,
            self.mamba_n_heads,
            self.mamba_d_head,
            self.mamba_d_state,
            self.mamba_n_groups,
            self.mamba_d_conv,
            self.rms_norm_eps,
            self.time_step_limit,
            self.mamba_conv_bias,
            self.mamba_proj_bias,
        )

    @property
    def head_dim(self) -> int:
        """H, the width of a query, key or value."""
        return self.hidden_size // self.num_attention_heads

    @property
    def has_output_bias(self) -> bool:
        """Whether o_proj has a bias."""
        return self.attention_bias

    def is_attention(self, index: int) -> bool:
        """Whether a layer attends."""
        return index in self.attn_layer_indices


def layer_tables(config: BambaConfig) -> list[dict[str, ParamSpec]]:
    """Returns the declared weights of every layer."""
    prefix = "model.layers.{i}."
    feed = mlp_specs(config, f"{prefix}feed_forward.")
    mixers = {
        True: attention_specs(config, f"{prefix}self_attn."),
        False: mixer_table(config.mixer, f"{prefix}mamba."),
    }
    norms = ("input_layernorm", "pre_ff_layernorm")
    kinds = {kind: layer_specs(config, mixer, feed, norms) for kind, mixer in mixers.items()}
    return [kinds[config.is_attention(i)] for i in range(config.num_hidden_layers)]


_ATTENTION = LayerKind(pre_norm_layer(attention, mlp))
_STATE = LayerKind(pre_norm_layer(mixer, mlp), init_states)

register(
    Family(
        config=BambaConfig,
        model_types=("bamba",),
        kinds=lambda config: [
            _ATTENTION if config.is_attention(i) else _STATE
            for i in range(config.num_hidden_layers)
        ],
        layer_tables=layer_tables,
        outer_table=lambda config: outer_specs(config, norm="model.final_layernorm"),
        can_scan=True,
        has_panels=True,
    )
)
