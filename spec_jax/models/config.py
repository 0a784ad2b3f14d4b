"""Configs of models, as Hugging Face's config.json states them.

``ModelConfig`` is the config of Llama's family. The other parts serve the configs of all families.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from spec_jax.config.checks import check, is_count
from spec_jax.errors import ConfigError
from spec_jax.models.checks import (
    as_declared,
    check_fields,
    check_known,
    check_nulls,
    check_ranges,
    check_sizes,
    check_supported,
    is_integer,
    is_number,
    require,
    shown,
    stated_flag,
    stated_object,
    stop_tokens,
)
from spec_jax.show.summary import short_repr

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ALIASES = {"mimo": "qwen2", "mistral": "llama"}  # the same layers under another name
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
# What a key that is left out means to the class of this model type in transformers, where it is not
# what the fields of ``ModelConfig`` have; and the key for which that class refuses null.
_LEFT_OUT = {
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": _QWEN,
    "mimo": _QWEN,
    "qwen3": {"head_dim": 128, **_QWEN},
}
_FLAGGED = ("mimo", "qwen2", "qwen3", "qwen3_moe")  # types that have ``use_sliding_window``
_WINDOWED = ("mimo", "mistral", "qwen2", "qwen3")
_NO_SLIDING = "layers of model_type {} with a sliding window are not supported"
_IS_OFF = "use_sliding_window is not true"
_NO_NULL = {"mistral": "num_key_value_heads", "qwen3": "head_dim"}
ATTENTIONS = ("auto", "xla")
"""How a cache is attended over. "xla": in blocks of slots, up to the last one of the longest row.
"auto": likewise off a CPU where there are many slots; else all slots, or on a CPU a prefix. It also
uses splash attention on a TPU, for whole sequences of 1,024 tokens or more, as in training.
"""
_OURS = ("scan_layers", "attention", "max_pass")  # fields that no file has
FULL = "full_attention"
SLIDING = "sliding_attention"
T = TypeVar("T")


def with_attention(config: T, attention: str | None) -> T:
    """Returns the config of a model or of a layer with this attention; None: as it is.

    Raises:
      ConfigError: There is no such attention, or layers of this kind do not know it.
    """
    if attention is None or (attention == "auto" and not hasattr(config, "attention")):
        return config
    if hasattr(config, "attention"):
        return dataclasses.replace(config, attention=attention)
    kind = type(config).__name__
    raise ConfigError(f"attention is {attention!r}; layers of a {kind} know 'auto' alone")


_LENGTH = "original_max_position_embeddings"
_MSCALES = ("mscale", "mscale_all_dim")
_ROPE_FIELDS = {  # those that each rope_type uses, beside the type and the base
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": (
        "factor",
        _LENGTH,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        *_MSCALES,
        "truncate",
    ),
}
EPS_RANGE = (0, 1)  # of the epsilon of a norm
# What float32 frequencies can be computed from.
_ROPE_RANGES = {
    "rope_theta": (2, 1e30),
    "factor": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0, 1e6),
    "mscale_all_dim": (0, 1e6),
}


def largest_pass(config: Any) -> float:
    """Returns the most tokens that a pass of a model or a head feeds; it may be infinite.

    Args:
      config: of the model or the head; None if it has none.
    """
    layer = getattr(config, "layer", config)
    return math.inf if getattr(layer, "sliding_window", None) is None else layer.max_pass


def check_layers(kinds: Sequence[Any], count: Any) -> None:
    """Checks that ``layer_types`` names as many layers as ``num_hidden_layers`` says.

    Raises:
      ConfigError: it does not.
    """
    message = f"layer_types names {len(kinds)} layers; expected num_hidden_layers, which is {count}"
    require(not is_integer(count, 1) or len(kinds) == count, message)


NO_WINDOWS = {"layer_types": None, "sliding_window": None, "use_sliding_window": False}
"""What a config.json says of layers that see all tokens."""


def windows_of(hf: Mapping[str, Any], *, is_head: bool = False) -> dict[str, Any]:
    """Returns the fields ``sliding_window`` and ``layer_types`` of ``ModelConfig``.

    Args:
      hf: the object of config.json.
      is_head: it describes the layers of a head, which may have windows whatever their model type.
        Types with the key ``use_sliding_window`` have them where it is true.

    Raises:
      ConfigError: layers of this type have no windows, a layer is of another kind, or the size of
        the windows is missing or wrong.
    """
    kind = hf.get("model_type")
    kinds = hf.get("layer_types")
    is_mistral = kind == "mistral" and not is_head
    size = hf.get("sliding_window", 4096 if is_mistral else None)
    L = hf.get("num_hidden_layers")
    L = L if is_integer(L, 1, 10_000) else 1  # it is refused elsewhere
    check(kinds is None or isinstance(kinds, (list, tuple)), "layer_types", kinds, "a list")
    if kinds is not None and not is_head:  # a file of a head may list the target's layers
        check_layers(kinds, hf.get("num_hidden_layers"))
    others = ", ".join(sorted({str(kind) for kind in kinds or ()} - {FULL, SLIDING}))
    require(not others, f"layer_types names {others:.80}, which is not supported")
    has_flag = kind in _FLAGGED or hf.get("use_sliding_window") is not None
    is_on = stated_flag(hf, "use_sliding_window")
    if is_mistral:  # it has no other key
        slides = [size is not None] * L
    elif kinds is not None:
        slides = [kind == SLIDING for kind in kinds]
        is_on |= is_head or kind not in _FLAGGED
        require(is_on or not any(slides), f"layer_types names {SLIDING}, and {_IS_OFF}")
    elif has_flag:
        first = hf.get("max_window_layers", 0 if is_head else 28)
        check(not is_on or is_integer(first, 0), "max_window_layers", first, "an integer from 0")
        slides = [is_on and i >= first for i in range(L)]
    else:
        slides = [size is not None and is_head] * L
    longest = hf.get("max_position_embeddings")
    is_long = is_integer(size, 1) and is_integer(longest, 1) and size >= longest
    if not any(slides) or is_long:  # no token is out of sight
        return {"sliding_window": None, "layer_types": ()}
    require(is_head or kind in _WINDOWED, _NO_SLIDING.format(shown(kind)))
    check(is_integer(size, 1), "sliding_window", size, "a positive integer")
    return {
        "sliding_window": size,
        "layer_types": tuple(SLIDING if is_sliding else FULL for is_sliding in slides),
    }


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The rotary position embedding; fields are those of Hugging Face's ``rope_parameters``."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    __repr__ = short_repr()

    def __post_init__(self):
        check_known("rope_type", self.rope_type, _ROPE_FIELDS)
        check_ranges(self, **_ROPE_RANGES)
        check_fields(self)
        if self.original_max_position_embeddings is not None:
            check_sizes(self, _LENGTH)
        low = self.low_freq_factor
        high = self.high_freq_factor
        said = f"low_freq_factor is {low} and high_freq_factor {high}"
        is_fit = self.rope_type != "llama3" or low < high
        require(is_fit, f"{said}; expected the first to be smaller")
        has_length = self.original_max_position_embeddings is not None
        is_known = has_length or self.rope_type not in ("llama3", "yarn")
        require(is_known, f"rope_type {self.rope_type!r} needs {_LENGTH}")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> RopeConfig:
        """Reads a parsed config.json, in either spelling.

        A key that is left out has the default of its field. Null is an error, except for
        ``beta_fast`` and ``beta_slow`` of YaRN, whose defaults it means.

        Args:
          hf: has ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``.

        Raises:
          ConfigError: the variant or a parameter is not supported, or one is missing.
        """
        raw = {}
        for name in ("rope_scaling", "rope_parameters"):
            raw.update(stated_object(hf, name))
        if "rope_theta" in hf:
            raw.setdefault("rope_theta", hf["rope_theta"])
        kinds = [raw.pop(name) for name in ("rope_type", "type") if name in raw] or ["default"]
        raw["rope_type"] = next((kind for kind in kinds if kind is not None), None)
        if is_number(raw.get("partial_rotary_factor")) and raw["partial_rotary_factor"] == 1:
            del raw["partial_rotary_factor"]
        if raw["rope_type"] in ("llama3", "yarn") and hf.get(_LENGTH) is not None:
            raw[_LENGTH] = hf[_LENGTH]  # at the top it takes precedence
        if raw["rope_type"] == "yarn":
            # Without an original length, the maximum length of the model is meant.
            raw.setdefault(_LENGTH, hf.get("max_position_embeddings"))
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(raw) - known)
        kind = f"rope_type {shown(raw['rope_type'])}"
        listed = ", ".join(unknown)
        require(not unknown, f"rope parameters {listed:.80} are not supported for {kind}")
        is_scaled = raw["rope_type"] in [*_ROPE_FIELDS][1:]
        require(not is_scaled or raw.get("factor") is not None, f"{kind} needs a factor")
        names = ("rope_theta", "truncate")
        names += ("low_freq_factor", "high_freq_factor") if raw["rope_type"] == "llama3" else ()
        check_nulls(cls, {name: raw[name] for name in names if name in raw})

        stated = {n: x for n, x in raw.items() if n == "rope_type" or x is not None}
        return cls(**as_declared(cls, stated))

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields that this ``rope_type`` uses, as ``rope_parameters`` holds them."""
        fields = ("rope_type", "rope_theta", *_ROPE_FIELDS[self.rope_type])
        return {n: getattr(self, n) for n in fields if getattr(self, n) is not None}

    def spellings(self) -> dict[str, Any]:
        """Returns the keys of both spellings, so that loaders of either kind read them."""
        both = self.to_hf()
        scaling = {n: v for n, v in both.items() if n != "rope_theta"} | {"type": self.rope_type}
        return {
            "rope_parameters": both,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_type == "default" else scaling,
        }


def from_fields(cls: type[T], hf: Mapping[str, Any]) -> T:
    """Builds a config dataclass from the fields of the same names in a parsed config.json.

    A null is None, false or zero; it never stands for a default that is something else. Fields that
    are ours keep their defaults.

    Args:
      cls: the dataclass. A field ``rope`` is read from either spelling of the rotary embedding.
      hf: the object of config.json.

    Raises:
      ConfigError: a field is missing or wrong.
    """
    names = [field.name for field in dataclasses.fields(cls) if field.name not in _OURS]
    check_nulls(cls, {name: hf[name] for name in names if name in hf})
    read = {n: hf[n] for n in names if n != "rope" and hf.get(n) is not None}

    def is_needed(field):
        return field.default is field.default_factory is dataclasses.MISSING

    needed = {field.name for field in filter(is_needed, dataclasses.fields(cls))}
    missing = sorted(needed - set(read))
    verb = "is" if len(missing) == 1 else "are"
    require(not missing, f"{', '.join(missing)} {verb} missing")
    read = as_declared(cls, read)
    try:
        return cls(**read, **({"rope": RopeConfig.from_hf(hf)} if "rope" in names else {}))
    except TypeError as error:
        raise ConfigError(f"a value has a wrong type: {error}") from error


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a config.json says of the language model, also where images are beside it.

    ``text_config`` then has its keys. Stop tokens and ``tie_word_embeddings`` of the whole model
    take precedence over those in it.

    Raises:
      ConfigError: ``text_config`` is no object.
    """
    text = stated_object(hf, "text_config")
    outer = {n: hf[n] for n in ("eos_token_id", "tie_word_embeddings") if hf.get(n) is not None}
    return {**hf, **text, **outer} if text else hf


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class AnyConfig:
    """Base of the configs of all families; fields have Hugging Face's names.

    A family's config is a frozen dataclass that also has, as fields, properties or class variables:
    ``max_position_embeddings``, ``rms_norm_eps`` of the final norm, ``rope`` (a ``RopeConfig``) and
    ``rotary_dim``, the number of dimensions of a head that are rotated. Those of families that use
    ``layers.attention``, ``layers.mlp`` or ``KVCache`` have the fields that these read, too.
    """

    saved_as: ClassVar[tuple[str, str]]  # its model_type, and the class in transformers
    supported: ClassVar[Mapping[str, Any]] = {}  # of keys that are no fields: the only value

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    scan_layers: bool = False  # ours: layers that repeat are stacked, and scanned

    __repr__ = short_repr()

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Builds the config from a parsed config.json.

        Raises:
          ConfigError: a key has a value that is not supported, or a field is missing or wrong.
        """
        check_supported(hf, hidden_act="silu", **cls.supported)
        return from_fields(cls, hf)

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json that transformers loads as the same model."""
        return self.as_hf(*self.saved_as)

    def settle(self, *sizes: str, may_be_0: str = "", **others: Any) -> None:
        """Checks the fields that families share, and fills those that others decide.

        Args:
          *sizes: fields that are positive integers unless they are None, beside those that are
            declared as integers.
          may_be_0: of those, one that may also be 0.
          **others: values that replace those of fields.

        Raises:
          ConfigError: a field is wrong.
        """
        for name, value in others.items():
            object.__setattr__(self, name, value)
        names = [field.name for field in dataclasses.fields(self) if field.type == "int"]
        stated = [name for name in sizes if getattr(self, name) is not None]
        check_sizes(self, *(name for name in names if name != may_be_0), *stated)
        if may_be_0:
            value = getattr(self, may_be_0)
            check(is_count(value), may_be_0, value, "an integer of 0 or more")
        check_fields(self)
        check_ranges(self, rms_norm_eps=EPS_RANGE)
        X = getattr(self, "num_experts", None)
        if X and self.num_experts_per_tok > X:
            raise ConfigError(f"num_experts_per_tok is {self.num_experts_per_tok} of {X} experts")
        object.__setattr__(self, "eos_token_id", stop_tokens(self.eos_token_id))

    def as_hf(self, model_type: str, architecture: str, *left_out: str) -> dict[str, Any]:
        """Returns the fields as a config.json holds them.

        Args:
          model_type: the key of this name.
          architecture: the class in transformers.
          *left_out: fields that are not stated.
        """
        left_out += ("rope", *_OURS)
        stated = {n: x for n, x in dataclasses.asdict(self).items() if n not in left_out}
        hf = {n: list(x) if isinstance(x, tuple) else x for n, x in stated.items()}
        if self.rotary_dim:
            part = {n: hf[n] for n in ("partial_rotary_factor",) if n in hf}
            hf["rope_parameters"] = self.rope.to_hf() | part
        eos = self.eos_token_id
        return hf | {
            "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None),
            "hidden_act": "silu",
            "model_type": model_type,
            "architectures": [architecture],
        }


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class AttentionConfig(AnyConfig):
    """Base of the configs of models that attend with a rotary embedding."""

    num_attention_heads: int
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()


class EqualHeads(AttentionConfig):
    """Mixin of configs whose queries, keys and values are all ``head_dim`` wide."""

    @property
    def key_dim(self) -> int:
        """The width of a key."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """The width of a value."""
        return self.head_dim

    def settle_heads(self) -> None:
        """Checks how many heads there are, and fills ``head_dim`` where it is None.

        Raises:
          ConfigError: a head is too many, or the width is no multiple.
        """
        D = self.hidden_size
        N = self.num_attention_heads
        G = self.num_key_value_heads
        require(N % G == 0, f"num_attention_heads {N} is not a multiple of num_key_value_heads {G}")
        if self.head_dim is None:
            why = f"is not a multiple of num_attention_heads {N}, and head_dim is not given"
            require(D % N == 0, f"hidden_size {D} {why}")
            object.__setattr__(self, "head_dim", D // N)


class PartialRotary(EqualHeads):
    """Mixin of configs whose heads rotate only the first part of their dimensions.

    The config has ``head_dim``, ``partial_rotary_factor`` and ``rope``.
    """

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def settle_heads(self) -> None:
        """Also checks that the rotated part is neither empty, odd nor larger than the head."""
        super().settle_heads()
        H = self.rotary_dim
        turned = f"partial_rotary_factor {self.partial_rotary_factor} turns {H} of {self.head_dim}"
        is_fit = 0 < H <= self.head_dim and H % 2 == 0
        require(is_fit, f"{turned} dimensions; expected an even number")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """See ``AnyConfig.from_hf``; the factor may also stand among the rotary parameters."""
        hf = dict(hf)
        part = "partial_rotary_factor"
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(hf.get(name), Mapping) and part in hf[name]:
                hf[part] = hf[name][part]
                hf[name] = {n: x for n, x in hf[name].items() if n != part}
        return super().from_hf(hf)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class ModelConfig(EqualHeads):
    """The shape of a Llama, Qwen2 or Qwen3 model. Field names are Hugging Face's.

    ``scan_layers`` is ours. False unrolls the layers with separate weights, which is faster on a
    CPU and on a GPU; True scans over the stacked weights of layers that repeat (see
    ``models/runs.py``), which compiles in seconds for a TPU.
    ``attention`` is ours too: how a cache is attended over, see ``ATTENTIONS``; and ``max_pass``:
    maximum tokens of a row that a pass feeds to the cache of layers with a sliding window. Files
    have neither: ``LoadedModel.from_params`` makes a model of a config with another value.
    ``layer_types`` says which layers have one; it is empty if all or none have, as
    ``sliding_window`` says.

    A subclass for another family sets ``architectures``: its model types, and the name of each
    one's class in transformers.
    """

    architectures: ClassVar[Mapping[str, str]] = MODEL_TYPES

    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    model_type: str = "llama"
    max_position_embeddings: int = 2048
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    attention: str = "auto"
    max_pass: int = 512

    def __post_init__(self):
        check_known("model_type", self.model_type, self.architectures)
        check_known("attention", self.attention, ATTENTIONS)
        others = {}
        if self.num_key_value_heads is None:
            others["num_key_value_heads"] = self.num_attention_heads
        self.settle("num_key_value_heads", "head_dim", "sliding_window", **others)
        L = self.num_hidden_layers
        usual = FULL if self.sliding_window is None else SLIDING
        kinds = tuple(self.layer_types or [usual] * L)
        check_layers(kinds, L)
        expected = f"{FULL} or, with sliding_window, {SLIDING}"
        check(set(kinds) <= {FULL, usual}, "layer_types", kinds, expected)
        can_slide = SLIDING not in kinds or self.model_type in MODEL_TYPES
        require(can_slide, _NO_SLIDING.format(repr(self.model_type)))
        object.__setattr__(self, "layer_types", kinds if len(set(kinds)) > 1 else ())
        if SLIDING not in kinds:
            object.__setattr__(self, "sliding_window", None)
        if self.model_type == "qwen2":  # whatever the field says
            object.__setattr__(self, "attention_bias", True)
        self.settle_heads()
        require(
            self.head_dim % 2 == 0,
            f"head_dim {self.head_dim} is odd; rotary embedding needs it even",
        )

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return self.model_type == "qwen3"

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions of a head that are rotated: all."""
        return self.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, how many tokens a token sees, itself included; None means all."""
        size = self.sliding_window
        each = [size if kind == SLIDING else None for kind in self.layer_types]
        return tuple(each) if each else (size,) * self.num_hidden_layers

    @property
    def has_output_bias(self) -> bool:
        """Whether o_proj has a bias: Llama's ``attention_bias`` includes it, Qwen2's does not."""
        return self.attention_bias and self.model_type != "qwen2"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Builds the config from a parsed config.json.

        Raises:
          ConfigError: the model type, activation or attention variant is not supported.
        """
        kind = hf.get("model_type")
        kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
        check_known("model_type", kind, [*cls.architectures, *ALIASES])
        hf = {**_LEFT_OUT.get(hf["model_type"], {}), **hf}
        hf |= windows_of(hf)
        name = _NO_NULL.get(hf["model_type"])
        require(
            name is None or hf[name] is not None, f"{name} is null; expected a positive integer"
        )
        return super().from_hf({**hf, "model_type": kind})

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json that transformers loads as the same model.

        Raises:
          ConfigError: no model type there has such layers with a sliding window.
        """
        kind = self.model_type
        has_window = self.sliding_window is not None
        is_mistral = kind == "llama" and has_window
        is_like = None not in self.windows and not (self.attention_bias or self.mlp_bias)
        message = "a Llama model with a sliding window is saved as mistral, in which all layers "
        require(
            is_like or not is_mistral, message + "have it and none has biases; this one differs"
        )
        left_out = ["layer_types"]
        if not has_window:
            left_out.append("sliding_window")
        if kind != "llama":
            left_out.append("mlp_bias")
        if kind == "qwen2":
            left_out.append("attention_bias")
        architecture = self.architectures[kind]
        if is_mistral:
            kind, architecture = "mistral", "MistralForCausalLM"
        hf = self.as_hf(kind, architecture, *left_out)
        if has_window and not is_mistral:
            kinds = [FULL if size is None else SLIDING for size in self.windows]
            hf |= {"use_sliding_window": True, "layer_types": kinds}
        return hf
