"""How checkpoints name the tensors of MTP modules, and what they mean by them."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checks import is_integer, shown, stated_object
from spec_jax.models.families import AnyConfig, family_of_type
from spec_jax.models.specs import ParamSpec

_LAYER_ID = re.compile(r"model\.layers\.([0-9]{1,9})\.")
LAYOUTS = ("DeepSeek", "Qwen3-Next", "MiMo")
SAID = "mtp_config"  # of config.json: what no project has a key for, and SAID_FIELDS are there
SAID_FIELDS = ("protocol", "taps", "recycles_normed")
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


class Layout(NamedTuple):
    """One way to name modules.

    Attributes:
      name: the name in messages and reports.
      prefix: the prefix of a module's layer; ``{i}`` is the module's number.
      first: the number of the first module.
      names: names that differ from those of ``mtp_table``, by our name.
      order: which half of the joining map's input comes first.
      why_order: the reason for the order, for the note on it.
      is_zero_centred: norms scale by 1 + weight.
    """

    name: str
    prefix: str
    first: int
    names: Mapping[str, str]
    order: str
    why_order: str
    is_zero_centred: bool = False

    def tensor(self, ours: str, spec: ParamSpec, index: int, expert: int = 0) -> str:
        """Returns the external name of a weight of module ``index``, counted from 0."""
        name = self.names.get(ours, spec.hf_name).replace("model.layers.{i}.", self.prefix)
        return name.format(i=self.first + index, e=expert)

    def number(self, tensor: str) -> int | None:
        """Returns the module, counted from 0, that a tensor belongs to; None for the target's."""
        if self.name == "Qwen3-Next":
            return 0 if tensor.startswith("mtp.") else None
        match = re.match(re.escape(self.prefix).replace(r"\{i\}", "([0-9]{1,9})"), tensor)
        index = -1 if match is None else int(match[1]) - self.first
        return index if index >= 0 else None


def make_layout(name: str, num_layers: int) -> Layout:
    """Returns the layout of a name.

    Args:
      name: "DeepSeek", "Qwen3-Next" or "MiMo".
      num_layers: of the target, where DeepSeek's numbers of modules begin.

    Raises:
      ConfigError: another name.
    """
    if name == "Qwen3-Next":
        own = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}
        own |= {name: name for name in ("fc", "norm")}
        return Layout(
            name, "mtp.layers.{i}.", 0, {k: f"mtp.{v}.weight" for k, v in own.items()},
            "embedding-first", "as Qwen3-Next's modules are run", is_zero_centred=True,
        )  # fmt: skip
    if name == "MiMo":
        prefix = "model.mtp_layers.{i}."
        own = {
            "embed_norm": "token_layernorm", "hidden_norm": "hidden_layernorm",
            "fc": "input_proj", "norm": "final_layernorm",
        }  # fmt: skip
        return Layout(
            name, prefix, 0, {k: f"{prefix}{v}.weight" for k, v in own.items()},
            "hidden-first", "as MiMo's own code joins them",
        )  # fmt: skip
    if name == "DeepSeek":
        return Layout(
            name, "model.layers.{i}.", num_layers, {}, "embedding-first",
            "as the released eh_proj expects; the paper prints the hidden state first",
        )  # fmt: skip
    raise ConfigError(f"layout is {name!r}; known: {', '.join(LAYOUTS)}")


def find_layout(directory: pathlib.Path, hf: Mapping[str, Any], names: set[str]) -> Layout:
    """Returns the layout of the modules among these tensors.

    Args:
      directory: where they are, for the message.
      hf: the parsed config.json.
      names: the names of the tensors.

    Raises:
      ConfigError: config.json does not say how many layers the target has.
      WeightsError: none of them belongs to an MTP module.
    """
    count = hf.get("num_hidden_layers")
    if any(name.startswith("mtp.") for name in names):
        return make_layout("Qwen3-Next", count)
    if any(name.startswith("model.mtp_layers.") for name in names):
        return make_layout("MiMo", count)
    if not is_integer(count) or count < 1:
        raise ConfigError(
            f"num_hidden_layers is {shown(count)}; expected how many the target has"
        )
    ids = (int(match[1]) for match in map(_LAYER_ID.match, names) if match)
    if any(i >= count for i in ids):
        return make_layout("DeepSeek", count)
    raise WeightsError(
        f"{directory} has no MTP module: no tensor begins with mtp., model.mtp_layers. or "
        f"model.layers.{count}. (config.json has {count} layers). load_model reads a model, "
        "load_head an EAGLE head, and load_draft finds out which it is"
    )


def layer_config(hf: Mapping[str, Any]) -> AnyConfig:
    """Returns the config of a module's one layer from the target's parsed config.json.

    Raises:
      ConfigError: modules of such a model are not supported.
    """
    kind = hf.get("model_type")
    kind = kind if isinstance(kind, str) else shown(kind)
    layer = family_of_type(kind, for_modules=True).config.from_hf(hf)
    return dataclasses.replace(layer, num_hidden_layers=1)


def modules_config(
    hf: Mapping[str, Any], layout: Layout, num_stored: int, target: AnyConfig,
    overrides: Mapping[str, Any], notes: list[str],
) -> MtpConfig:
    """Returns the modules' config, with embedding and head shared unless ``overrides`` differ.

    Args:
      hf: the parsed config.json.
      layout: the layout of the tensors.
      num_stored: number of modules that are stored.
      target: the target's config.
      overrides: fields of ``MtpConfig`` that are given instead of derived.
      notes: a sentence is appended for each choice that the checkpoint leaves open.

    Raises:
      ConfigError: an override does not exist, or the modules do not fit the target.
    """  # fmt: skip
    fixed = ("layer", "target_hidden_size", "target_vocab_size")
    known = [f.name for f in dataclasses.fields(MtpConfig) if f.name not in fixed]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ConfigError(f"no option {', '.join(unknown)}; known: {', '.join(known)}")
    for name in _COUNTS:
        if hf.get(name) is not None and (not is_integer(hf[name]) or hf[name] < 0):
            raise ConfigError(f"{name} is {shown(hf[name])}; expected how many modules are stored")
    said = next((hf[name] for name in _COUNTS if hf.get(name)), num_stored)
    count = overrides.get("num_modules", said)
    after_norm = target.num_hidden_layers + 1
    choices = {
        "num_modules": (count, f"as config.json or the tensors say; {num_stored} are stored"),
        "protocol": (
            "recycled" if count == 1 else "sequential",
            "one module drafts every token, several draft one each",
        ),
        "order": (layout.order, layout.why_order),
        "taps": ((after_norm,), "the target's state after its final norm, which is what current "
                 "servers feed; the checkpoint does not say"),
        "recycles_normed": (True, "after the output norm, as current servers do; the checkpoint "
                            "does not say, so compare the acceptance at the second draft"),
        "has_zero_centred_norms": (layout.is_zero_centred, f"as {layout.name}'s norms are"),
    }  # fmt: skip
    choices |= _stated(hf)
    for name, (value, why) in choices.items():
        is_told = name in overrides
        value = overrides[name] if is_told else value
        notes.append(f"{name} = {value!r}: {'as the caller says' if is_told else why}.")
    values = {name: value for name, (value, _) in choices.items()}
    return MtpConfig.of_target(target, layer=layer_config(hf), **{**values, **overrides})


def _stated(hf: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    stated = stated_object(hf, SAID)
    as_tuple = lambda value: tuple(value) if isinstance(value, list) else value
    return {
        name: (as_tuple(stated[name]), "config.json says so")
        for name in SAID_FIELDS
        if stated.get(name) is not None
    }
