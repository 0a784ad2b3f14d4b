"""The checkpoint formats of MTP modules: how they name tensors, and what they mean by them."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import WeightsError
from spec_jax.models.checks import is_integer, require, shown, stated_object
from spec_jax.models.config import check_sees_all, text_part
from spec_jax.models.families import AnyConfig, family_of_type, module_layer
from spec_jax.models.specs import ParamSpec

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# The key of config.json, used by this project alone, for fields that no project has a key for.
_OWN_KEY = "mtp_config"
_OWN_FIELDS = ("protocol", "taps", "recycles_normed")


class MtpFormat(NamedTuple):
    """A project's convention for the files of MTP modules.

    Attributes:
      start: how the names of the modules' tensors begin.
      prefix: how the names of a module's layer begin; ``{i}`` is the module's number.
      names: the names of tensors outside of the layer, by our name; None: those of ``mtp_table``.
      order: which half of the joining map's input comes first.
      why_order: the reason for the order, for the note on it.
      is_zero_centred: norms scale by 1 + weight.
      is_single: it has names for one module only.
      has_own_ends: modules may have an embedding and an output head of their own.
      name: the key in ``FORMATS``.
      first: the number of the first module.
    """

    start: str
    prefix: str
    names: tuple[str, str, str, str] | None
    order: str
    why_order: str
    is_zero_centred: bool = False
    is_single: bool = False
    has_own_ends: bool = False
    name: str = ""
    first: int = 0

    def tensor(self, ours: str, spec: ParamSpec, index: int, expert: int = 0) -> str:
        """Returns the external name of a weight of module ``index``, counted from 0."""
        name = spec.hf_name.replace("model.layers.{i}.", self.prefix)
        if self.names and ours in _OUTER:
            name = self.names[_OUTER.index(ours)] + ".weight"
        return name.format(i=self.first + index, e=expert)

    def number(self, tensor: str) -> int | None:
        """Returns the module, counted from 0, that a tensor belongs to; None for the target's."""
        if self.is_single:
            return 0 if tensor.startswith(self.start) else None
        match = re.match(re.escape(self.start) + r"([0-9]{1,9})\.", tensor)
        index = -1 if match is None else int(match[1]) - self.first
        return index if index >= 0 else None


_OUTER = ("embed_norm", "hidden_norm", "fc", "norm")
_QWEN3_NEXT = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
FORMATS = {
    "DeepSeek": MtpFormat(
        start="model.layers.",
        prefix="model.layers.{i}.",
        names=None,
        order="embedding-first",
        why_order="as the released eh_proj expects; the paper prints the hidden state first",
        has_own_ends=True,
    ),
    "Qwen3-Next": MtpFormat(
        start="mtp.",
        prefix="mtp.layers.{i}.",
        names=tuple(f"mtp.{name}" for name in _QWEN3_NEXT),
        order="embedding-first",
        why_order="as Qwen3-Next's modules are run",
        is_zero_centred=True,
        is_single=True,
    ),
    "MiMo": MtpFormat(
        start="model.mtp_layers.",
        prefix="model.mtp_layers.{i}.",
        names=tuple(f"model.mtp_layers.{{i}}.{name}" for name in _MIMO),
        order="hidden-first",
        why_order="as MiMo's own code joins them",
    ),
}


def format_of(name: str, num_layers: int) -> MtpFormat:
    """Returns the format of a name, for a target of so many layers.

    Raises:
      ConfigError: another name.
    """
    require(name in FORMATS, f"format is {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]._replace(name=name, first=num_layers if name == "DeepSeek" else 0)


def find_format(directory: pathlib.Path, hf: Mapping[str, Any], names: set[str]) -> MtpFormat:
    """Returns the format of the modules among these tensors.

    Args:
      directory: where they are, for the message.
      hf: the parsed config.json.
      names: the names of the tensors.

    Raises:
      ConfigError: config.json does not say how many layers the target has.
      WeightsError: none of them belongs to an MTP module.
    """
    count = text_part(hf).get("num_hidden_layers")
    for name in ("Qwen3-Next", "MiMo"):
        if any(tensor.startswith(FORMATS[name].start) for tensor in names):
            return format_of(name, count)
    is_count = is_integer(count) and count > 0
    require(is_count, f"num_hidden_layers is {shown(count)}; expected how many the target has")
    fmt = format_of("DeepSeek", count)
    if any(fmt.number(name) is not None for name in names):
        return fmt
    raise WeightsError(
        f"{directory} has no MTP module: no tensor begins with mtp., model.mtp_layers. or "
        f"model.layers.{count}. (config.json has {count} layers). Use load_model for a model, "
        "load_head for an EAGLE head, or load_draft, which detects the kind"
    )


# ------------------------------------------------------------- config.json, read and written


def modules_config(
    hf: Mapping[str, Any],
    fmt: MtpFormat,
    num_stored: int,
    target: AnyConfig,
    overrides: Mapping[str, Any],
    notes: list[str],
) -> MtpConfig:
    """Returns the modules' config, with embedding and head shared unless ``overrides`` differ.

    Args:
      hf: the parsed config.json.
      fmt: the format of the tensors.
      num_stored: number of modules that are stored.
      target: the target's config.
      overrides: fields of ``MtpConfig`` that are given instead of derived.
      notes: a sentence is appended for each choice that the checkpoint leaves open.

    Raises:
      ConfigError: an override does not exist, the modules do not fit the target, or modules of
        such a model are not supported.
    """
    hf = text_part(hf)
    known = [field.name for field in dataclasses.fields(MtpConfig)][3:]  # not the target's sizes
    unknown = sorted(set(overrides) - set(known))
    require(not unknown, f"no option {', '.join(unknown)}; known: {', '.join(known)}")
    for name in _COUNTS:
        value = 0 if hf.get(name) is None else hf[name]
        is_count = is_integer(value) and value >= 0
        require(is_count, f"{name} is {shown(value)}; expected how many modules are stored")
    stated_count = next((hf[name] for name in _COUNTS if hf.get(name)), num_stored)
    count = overrides.get("num_modules", stated_count)
    protocol = "recycled" if count == 1 else "sequential"
    kind = hf.get("model_type")
    kind = kind if isinstance(kind, str) else shown(kind)
    family = family_of_type(kind, for_modules=True)
    taps = (target.num_hidden_layers + 1,)
    by_servers = "as servers do; the checkpoint does not say"
    choices = {
        "num_modules": (count, f"as config.json or the tensors say; {num_stored} are stored"),
        "protocol": (protocol, "one module drafts every token, several draft one each"),
        "order": (fmt.order, fmt.why_order),
        "taps": (taps, f"the target's state after its final norm, {by_servers}"),
        "recycles_normed": (
            family.recycles_normed,
            f"as modules of {kind} are run; check the acceptance at the second draft",
        ),
        "has_zero_centred_norms": (fmt.is_zero_centred, f"as {fmt.name}'s norms are"),
    }
    for name, value in stated_object(hf, _OWN_KEY).items():
        if name in _OWN_FIELDS and value is not None:
            value = tuple(value) if isinstance(value, list) else value
            choices[name] = (value, "config.json says so")
    choices |= {n: (overrides[n], "as the caller says") for n in choices if n in overrides}
    notes += [f"{name} = {value!r}: {why}." for name, (value, why) in choices.items()]
    values = {name: value for name, (value, _) in choices.items()} | dict(overrides)
    kinds = hf.get("layer_types")  # of the target's layers; a module's attends
    if isinstance(kinds, list):
        kinds = [kind for kind in kinds if kind != "linear_attention"]
    check_sees_all({**hf, "layer_types": kinds}, is_head=True)
    layer = module_layer(family.config.from_hf(hf))
    return MtpConfig.of_target(target, layer=layer, **values)


def modules_json(config: MtpConfig, fmt: MtpFormat, num_layers: int) -> dict[str, Any]:
    """Returns the part of the target's config.json that describes the modules.

    Args:
      config: the modules'.
      fmt: the format of the tensors.
      num_layers: the number of layers of the target.
    """
    hf = config.layer.rope.spellings() | config.layer.to_hf()
    hf.pop("layer_types", None)  # of the target's layers, which this file is not about
    hf |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": config.num_modules}
    if fmt.start == "mtp.":
        hf["mtp_num_hidden_layers"] = config.num_modules  # the key of Qwen3.5, the other of -Next
    hf[_OWN_KEY] = {name: getattr(config, name) for name in _OWN_FIELDS}
    if fmt.name == "MiMo" and hf["model_type"] == "qwen2":
        hf |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    return hf
