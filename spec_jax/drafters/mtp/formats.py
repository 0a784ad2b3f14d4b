"""The checkpoint formats of MTP modules, of DeepSeek-V3, Qwen3-Next and MiMo.

The target's tensors in the same directory are only read to compare a module's embedding and output
head with them. ``protocol``, ``taps`` and ``recycles_normed`` are stated under a key that servers
do not read, ``mtp_config``. Where a format has the other order, the halves of the joining map
change places in writing: what is read back computes the same.

Layers of DeepSeek-V3 and Qwen3-Next are written under their families' names. Layers of Llama,
Qwen2 and Qwen3 get MiMo's names where the hidden state is joined first and DeepSeek's where the
embedding is. Servers know MiMo's names with a Qwen2 layer alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
from jax.sharding import Mesh, Sharding

from spec_jax.drafters.formats import End, Field, Format, HeadFormats, Reading
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import WeightsError
from spec_jax.models.checks import check, is_integer, naming, require, shown
from spec_jax.models.config import NO_WINDOWS, ModelConfig, text_part, windows_of
from spec_jax.models.families import AnyConfig, family_of, family_of_type, module_layer
from spec_jax.models.float8 import block_of, dequantised
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.parts import Tensor
from spec_jax.sharding import AxisRules, named

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
TARGET_EMBED = "model.embed_tokens.weight"
_TARGET_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpFormat(Format):
    """A project's convention for the files of MTP modules.

    Attributes:
      start: how the names of the modules' tensors begin.
      order: which half of the joining map's input comes first.
      why_order: the reason for the order, for the note on it.
      is_zero_centred: norms scale by 1 + weight.
      is_single: it has names for one module only.
      has_own_ends: modules may have an embedding and an output head of their own.
    """

    start: str
    order: str
    why_order: str
    is_zero_centred: bool = False
    is_single: bool = False
    has_own_ends: bool = False

    def number(self, tensor: str, first: int) -> int | None:
        """Returns the module, counted from 0, that a tensor belongs to; None for the target's."""
        if self.is_single:
            return 0 if tensor.startswith(self.start) else None
        match = re.match(re.escape(self.start) + r"([0-9]{1,9})\.", tensor)
        index = -1 if match is None else int(match[1]) - first
        return index if index >= 0 else None


_OUTER = ("embed_norm", "hidden_norm", "fc", "norm")
_QWEN3_NEXT = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
FORMATS = {
    "DeepSeek": MtpFormat(
        start="model.layers.",
        layer="model.layers.{i}.",
        order="embedding-first",
        why_order="as the released eh_proj expects; the paper prints the hidden state first",
        has_own_ends=True,
        is_after=True,
    ),
    "Qwen3-Next": MtpFormat(
        start="mtp.",
        layer="mtp.layers.{i}.",
        names={ours: f"mtp.{name}.weight" for ours, name in zip(_OUTER, _QWEN3_NEXT)},
        order="embedding-first",
        why_order="as Qwen3-Next's modules are run",
        is_zero_centred=True,
        is_single=True,
    ),
    "MiMo": MtpFormat(
        start="model.mtp_layers.",
        layer="model.mtp_layers.{i}.",
        names={ours: f"model.mtp_layers.{{i}}.{name}.weight" for ours, name in zip(_OUTER, _MIMO)},
        order="hidden-first",
        why_order="as MiMo's own code joins them",
    ),
}


def _count(reading: Reading) -> int:
    """How many modules there are, as config.json or the tensors say."""
    for name in _COUNTS:
        value = 0 if reading.hf.get(name) is None else reading.hf[name]
        check(is_integer(value, 0), name, value, "how many modules are stored")
    num_stored = len(set(_numbers(reading).values()))
    count = next((reading.hf[name] for name in _COUNTS if reading.hf.get(name)), num_stored)
    why = f"as config.json or the tensors say; {num_stored} are stored"
    return reading.decide("num_modules", count, why)


def _numbers(reading: Reading) -> dict[str, int]:
    """The module, counted from 0, that each of the modules' tensors belongs to."""
    fmt = FORMATS[reading.format]
    first = reading.hf["num_hidden_layers"] if fmt.is_after else 0
    numbers = {name: fmt.number(name, first) for name in reading.names}
    return {name: number for name, number in numbers.items() if number is not None}


def _family(reading: Reading) -> Any:
    kind = reading.hf.get("model_type")
    return family_of_type(kind if isinstance(kind, str) else shown(kind), for_modules=True)


def _protocol(reading: Reading) -> tuple[str, str]:
    usual = "recycled" if reading.values["num_modules"] == 1 else "sequential"
    return usual, "one module drafts every token, several draft one each"


def _taps(reading: Reading) -> tuple[tuple[int, ...], str]:
    taps = (reading.target.num_hidden_layers + 1,)
    return taps, "the target's state after its final norm, as servers do; the checkpoint is silent"


def _recycles_normed(reading: Reading) -> tuple[bool, str]:
    why = f"as modules of {reading.hf['model_type']} are run; check the acceptance at draft 2"
    return _family(reading).recycles_normed, why


def _of_format(name: str, why: str) -> Callable[[Reading], tuple[Any, str]]:
    """The default that a format decides."""

    def default(reading):
        fmt = FORMATS[reading.format]
        return getattr(fmt, name), why or fmt.why_order

    return default


_OURS = dict.fromkeys(FORMATS, ("mtp_config",))
FIELDS = (
    Field("taps", "taps", tuple, _taps, places=_OURS),
    Field("num_modules", read=_count),
    Field("protocol", "protocol", str, _protocol, places=_OURS),
    Field("order", default=_of_format("order", "")),
    Field("recycles_normed", "recycles_normed", default=_recycles_normed, places=_OURS),
    Field("has_zero_centred_norms", default=_of_format("is_zero_centred", "as its norms are")),
    Field("has_own_embed"),
    Field("has_own_head"),
)


class MtpFormats(HeadFormats):
    """The formats of MTP modules, with what no table says."""

    fields = FIELDS
    inner = ("mtp_config",)
    tolerance = (0.0, 0.0)

    def formats(self, config: MtpConfig) -> Mapping[str, MtpFormat]:
        """The formats of the layer's family; first those that join in the modules' order."""
        names = family_of(config.layer).mtp_formats
        ordered = sorted(names, key=lambda name: FORMATS[name].order != config.order)
        return {name: FORMATS[name] for name in ordered}

    def column(self, config: MtpConfig, format: str) -> MtpFormat:
        return FORMATS[format]

    def find(self, reading: Reading) -> tuple[str, type]:
        """Also narrows ``reading.hf`` to the part about text, of a model that reads images too."""
        reading.hf = text_part(reading.hf)
        count = reading.hf.get("num_hidden_layers")
        for name in ("Qwen3-Next", "MiMo"):
            if any(tensor.startswith(FORMATS[name].start) for tensor in reading.names):
                return name, MtpConfig
        check(is_integer(count, 1), "num_hidden_layers", count, "how many the target has")
        if any(FORMATS["DeepSeek"].number(name, count) is not None for name in reading.names):
            return "DeepSeek", MtpConfig
        raise WeightsError(
            f"{reading.directory} has no MTP module: no tensor begins with mtp., model.mtp_layers. "
            f"or model.layers.{count}. (config.json has {count} layers). Use load_model for a "
            "model, load_head for an EAGLE head, or load_draft, which detects the kind"
        )

    def settled(self, reading: Reading) -> dict[str, AnyConfig]:
        family = _family(reading)
        kinds = reading.hf.get("layer_types")  # of the target's layers; a module's attends
        if isinstance(kinds, list):
            kinds = [kind for kind in kinds if kind != "linear_attention"]
        windows = windows_of({**reading.hf, "layer_types": kinds}, is_head=True)
        if windows["sliding_window"] is None:
            return {"layer": module_layer(family.config.from_hf(reading.hf))}
        message = f"sliding_window is {shown(windows['sliding_window'])}, which is not supported"
        layers = set(windows["layer_types"])
        require(issubclass(family.config, ModelConfig) and len(layers) == 1, message)
        layer = module_layer(family.config.from_hf(reading.hf | NO_WINDOWS))
        windows["layer_types"] = tuple(layers)
        return {"layer": dataclasses.replace(layer, **windows)}

    def source(self, reading: Reading) -> Mapping[str, Tensor]:
        numbers = _numbers(reading)
        count = reading.config.num_modules
        num_stored = len(set(numbers.values()))
        total = len(reading.names)
        if count > total:  # before a list of their names is made
            message = f"num_modules is {count}; {num_stored} modules are stored, in {total} tensors"
            raise WeightsError(f"{reading.directory}: {message}")
        own = {name: reading.files[name] for name, number in numbers.items() if number < count}
        with naming(reading.directory / "config.json"):
            block = block_of(reading.hf)
        return dequantised(reading.directory, own, block)

    def ends(self, config: MtpConfig, format: str, num_layers: int) -> tuple[End, ...]:
        both = dataclasses.replace(config, has_own_embed=True, has_own_head=True)
        names = self.names(both, format, num_layers)
        modules = range(config.num_modules)
        return tuple(
            End(tuple(names[f"{i}.{end}"][0] for i in modules), end, f"has_own_{end}")
            for end in ("embed", "head")
        )

    def original(
        self, end: End, reading: Reading, target: LoadedModel, mesh: Mesh | None, rules: AxisRules
    ) -> tuple[str, Tensor, Sharding | None, bool] | None:
        """The tensor of the model in the same directory, of which copies are exact."""
        name = targets_end(end.weight, reading.names)
        if name not in reading.files:
            return None
        whole = reading.files[name]
        axes = ("vocab", "embed")
        where = None if mesh is None else named(axes, whole.shape, mesh, rules)
        return name, whole, where, False

    def check(self, config: MtpConfig, format: str, target: AnyConfig) -> None:
        fmt = FORMATS[format]
        count = config.num_modules
        is_held = count == 1 or not fmt.is_single
        require(is_held, f"num_modules is {count}; the format {format} holds one")
        has_ends = config.has_own_embed or config.has_own_head
        message = (
            f"has_own_embed or has_own_head is True; modules in the format {format} share both"
        )
        require(fmt.has_own_ends or not has_ends, message)

    def as_format(self, config: MtpConfig, format: str) -> MtpConfig:
        return dataclasses.replace(config, order=FORMATS[format].order)

    def transformed(
        self, name: str, array: np.ndarray, config: MtpConfig, written: MtpConfig
    ) -> np.ndarray:
        is_other = name.endswith(".fc") and config.order != written.order
        return np.roll(array, config.layer.hidden_size, axis=0) if is_other else array

    def to_json(
        self, config: Any, format: str, target: LoadedModel, num_draft: int, hf: dict[str, Any]
    ) -> dict[str, Any]:
        hf |= config.layer.rope.spellings() | config.layer.to_hf()
        hf.pop("layer_types", None)  # of the target's layers, which this file is not about
        hf |= {"num_hidden_layers": target.config.num_hidden_layers, _COUNTS[0]: config.num_modules}
        if format == "Qwen3-Next":
            hf[_COUNTS[1]] = config.num_modules  # the key of Qwen3.5, the other of -Next
        if format == "MiMo" and hf["model_type"] == "qwen2":
            hf |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        return hf


def targets_end(end: str, names: AbstractSet[str]) -> str:
    """Returns the name of the target's tensor that an "embed" or "head" of modules may copy."""
    return _TARGET_HEAD if end == "head" and _TARGET_HEAD in names else TARGET_EMBED


MTP_FORMATS = MtpFormats()
