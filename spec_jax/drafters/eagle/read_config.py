"""Reads a head's config.json as an ``EagleConfig``.

The same key means different things in different projects, and some keys are left out. Every such
choice is made here and reported in ``notes``. Two keys are our own, as no project has them:
``own_embed``, and ``taps``, the states before the layers of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checks import is_integer, shown, stated_flag, stated_object
from spec_jax.models.config import ModelConfig

EAGLE_1, EAGLE_3, SPECFORGE, SPECULATORS = "EAGLE-1", "EAGLE-3", "SpecForge", "speculators"
FLAGS = (
    "fc_bias", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "own_embed",
)  # fmt: skip
_NORM_TENSORS = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}
AUX = "eagle_aux_hidden_state_layer_ids"


def find_layout(hf: Mapping[str, Any], names: set[str]) -> str:
    """Returns the layout of a head's directory.

    Args:
      hf: the parsed config.json.
      names: the names of the tensors.

    Raises:
      ConfigError: a speculators head is not of EAGLE-3, or a part of config.json is no object.
    """
    for name in ("eagle_config", "transformer_layer_config"):
        stated_object(hf, name)
    if "transformer_layer_config" in hf or "speculators_model_type" in hf:
        kind = hf.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ConfigError(
                f"speculators_model_type {shown(kind)} is not supported; known: 'eagle3'"
            )
        return SPECULATORS
    is_new = any(n.startswith("midlayer.") or n.endswith(".hidden_norm.weight") for n in names)
    if not is_new:
        return EAGLE_1
    architectures = hf.get("architectures")
    architectures = architectures if isinstance(architectures, list) else ()
    is_specforge = "LlamaForCausalLMEagle3" in architectures
    return SPECFORGE if is_specforge or "eagle_config" in hf else EAGLE_3


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Checks the names and types of the values that a caller gives instead of config.json.

    Args:
      overrides: values by name.

    Raises:
      ConfigError: a name is not known, or a value has the wrong type.
    """
    known = ("taps", *FLAGS)
    for name, value in overrides.items():
        if name not in known:
            raise ConfigError(f"{name} is no option of a head; known: {', '.join(known)}")
        expected = "a tuple of layers" if name == "taps" else "True or False"
        if not isinstance(value, (tuple, list) if name == "taps" else bool):
            raise ConfigError(f"{name} is {value!r}; expected {expected}")


def head_config(
    hf: Mapping[str, Any],
    layout: str,
    names: set[str],
    fc_in: int,
    target: ModelConfig,
    overrides: Mapping[str, Any],
    notes: list[str],
) -> EagleConfig:
    """Returns the config of a head.

    Args:
      hf: the parsed config.json.
      layout: the layout, see ``find_layout``.
      names: the names of the tensors.
      fc_in: number of input features of ``fc.weight``.
      target: the config of the model that it drafts for.
      overrides: values that take precedence over config.json, see ``check_overrides``.
      notes: a sentence is appended for every choice that config.json leaves open.

    Raises:
      ConfigError: the head is for another target, or is not supported.
      WeightsError: ``fc.weight`` takes other states than config.json names.
    """
    layer = _layer(hf, layout, names, target, notes)
    flags = _flags(hf, layout, names, notes, overrides)
    is_narrow = layer.hidden_size != target.hidden_size
    flags.setdefault("own_embed", is_narrow and layout != EAGLE_1)
    return EagleConfig(
        version=1 if layout == EAGLE_1 else 3,
        layer=layer,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        taps=_taps(hf, layout, fc_in, target, overrides, notes),
        **flags,
    )


def _said(hf: Mapping[str, Any], name: str) -> Any:
    """The value of a key at the top level or else in ``eagle_config``; None if it is in neither."""
    value = hf.get(name)
    return (hf.get("eagle_config") or {}).get(name) if value is None else value


# ---------------------------------------------------------------------------- the one layer


def _layer(hf, layout, names, target, notes) -> ModelConfig:
    inner = dict(hf.get("transformer_layer_config") or {}) if layout == SPECULATORS else dict(hf)
    _check_target(hf, inner, target)
    kinds = inner.get("layer_types") or ()
    if not isinstance(kinds, (list, tuple)) or "sliding_attention" in kinds:
        raise ConfigError(f"layer_types is {shown(kinds)}; expected a list of full attention alone")
    draft_size = _said(hf, "draft_vocab_size")
    if layout != EAGLE_1 and draft_size is not None:
        if not is_integer(draft_size) or draft_size < 1:
            raise ConfigError(
                f"draft_vocab_size is {shown(draft_size)}; expected a positive integer"
            )
        inner["vocab_size"] = draft_size
    if layout != SPECULATORS:
        inner["model_type"] = _layer_type(inner, notes)
        has_biases = any(name.endswith("q_proj.bias") for name in names)
        if stated_flag(inner, "attention_bias") and not has_biases:
            inner["attention_bias"] = False
            notes.append(
                "config.json says attention_bias, yet there is no q_proj.bias: it is off, as in "
                "the projects that train such heads."
            )
    rope = (inner, *(stated_object(inner, name) for name in ("rope_parameters", "rope_scaling")))
    if all(stated.get("rope_theta") is None for stated in rope):
        notes.append("config.json names no rope_theta; 10000 is assumed, whatever the target's is.")
    return ModelConfig.from_hf({**inner, "tie_word_embeddings": False})


def _layer_type(inner, notes) -> str:
    """Heads outside of speculators have a Llama layer, with biases on q, k, v where they say so."""
    kind, stated = "qwen2" if stated_flag(inner, "qkv_bias") else "llama", inner.get("model_type")
    if stated not in (None, kind):
        notes.append(
            f"config.json says model_type {shown(stated)}; the head's layer is read as {kind}."
        )
    return kind


def _check_target(hf, inner, target) -> None:
    width, width_key = _said(hf, "target_hidden_size"), "target_hidden_size"
    if width is None:
        width, width_key = inner.get("hidden_size"), "hidden_size"
    for what, key, ours, theirs in (
        ("vocabulary", "vocab_size", inner.get("vocab_size"), target.vocab_size),
        ("width", width_key, width, target.hidden_size),
    ):
        if ours != theirs:
            raise ConfigError(
                f"the head is for a target of {what} {shown(ours)}; this one has {theirs} "
                f"(by the key {key})"
            )


# --------------------------------------------------------------------------------- flags


def _flags(hf, layout, names, notes, overrides) -> dict[str, bool]:
    flags = {}
    for name in FLAGS:
        if name in overrides:
            flags[name] = overrides[name]
            notes.append(f"{name} is {overrides[name]}: the caller says so.")
        elif name == "fc_bias":
            flags[name] = _flag(hf, "bias", layout == EAGLE_1)
        elif name == "own_embed" and _said(hf, name) is not None:
            flags[name] = _flag(hf, name, False)
        elif name in _NORM_TENSORS and layout != EAGLE_1:
            flags[name] = _flag_or_tensor(hf, name, names, notes)
        elif name in ("norm_before_residual", "norm_output") and layout != EAGLE_1:
            flags[name] = _flag(hf, name, False)
            notes += _doubt(layout, name, _said(hf, name))
    return flags


def _flag(hf, name, default) -> bool:
    return stated_flag({name: _said(hf, name)}, name, default)


def _flag_or_tensor(hf, name, names, notes) -> bool:
    tensor = _NORM_TENSORS[name]
    has_tensor = tensor in names
    if _said(hf, name) is None and has_tensor:
        notes.append(f"config.json does not say {name}; it is on, since there is {tensor}.")
    return _flag(hf, name, has_tensor)


def _doubt(layout: str, name: str, value: bool | None) -> list[str]:
    """What is to be said of a flag that readers of this layout understand differently."""
    if (layout, name, value) == (SPECULATORS, "norm_before_residual", None):
        return [
            "config.json does not say norm_before_residual; False is assumed, as in speculators "
            "itself, though vLLM then assumes True: try norm_before_residual=True where few "
            "drafts are accepted."
        ]
    if (layout, name) != (SPECFORGE, "norm_output") or value is None:
        return []
    if value:
        return [
            "norm_output is true: what is recycled is normalised, as SGLang and vLLM read it. "
            "SpecForge before September 2026 meant only that what is scored is normalised: pass "
            "norm_output=False for a head that it has trained."
        ]
    return [
        "norm_output is false: what is recycled is not normalised, what is scored is. SpecForge "
        "before September 2026 did not normalise what is scored either, which is not supported: "
        "expect few accepted drafts of a head that it has trained so."
    ]


# ---------------------------------------------------------------------------------- taps


def _taps(hf, layout, fc_in, target, overrides, notes) -> tuple[int, ...]:
    L, width = target.num_hidden_layers, target.hidden_size
    if "taps" in overrides:
        taps = tuple(overrides["taps"])
        notes.append(f"taps are {taps}: the caller says so.")
    elif layout == EAGLE_1:
        taps = (L + 1,)
    elif not _flag(hf, "use_aux_hidden_state", True):
        raise ConfigError("use_aux_hidden_state is false; only heads of tapped states are known")
    elif _said(hf, "taps") is not None:
        taps = _said(hf, "taps")
        if not isinstance(taps, list):
            raise ConfigError(f"taps is {shown(taps)} in config.json; expected a list of layers")
        taps = tuple(taps)
        notes.append(f"taps are {taps}: config.json says so.")
    else:
        taps = _named_taps(_said(hf, AUX), layout, L, notes) or _default_taps(L, notes)
    wrong = [i for i in taps if not _is_id(i) or i > L + 1]
    if wrong:
        raise ConfigError(
            f"taps {shown(taps)} do not exist: a target of {L} layers has 0 to {L}, and {L + 1} "
            "after its final norm"
        )
    if layout != EAGLE_1 and fc_in != len(taps) * width:
        states = f"{fc_in // width}" if fc_in % width == 0 else f"{fc_in / width:.2f}"
        raise WeightsError(
            f"fc.weight takes {fc_in} features, {states} states of the target's width {width}; "
            f"taps {taps} are {len(taps)} states"
        )
    return taps


def _is_id(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _named_taps(ids, layout, num_layers, notes) -> tuple[int, ...]:
    """States before a layer, as we count them, from the ids of config.json; () for none.

    The project's trainers count outputs of layers or states before them. An id of 1 first is
    the former's usual choice; an id of ``num_layers`` has no layer and proves the latter.
    """
    if not ids:
        return ()
    if not isinstance(ids, list) or not all(map(_is_id, ids)):
        raise ConfigError(f"{AUX} is {shown(ids)}; expected a list of layers from 0")
    if max(ids) > num_layers:
        raise ConfigError(
            f"{AUX} is {shown(ids)}; the target has {num_layers} layers. Pass taps=... to say "
            "otherwise"
        )
    after = tuple(i + 1 for i in ids)
    is_after = layout != SPECULATORS and ids[0] == 1 and max(ids) < num_layers
    taps = after if is_after else tuple(ids)
    if is_after:
        notes.append(
            f"{AUX} {ids} begins with 1 and so is read as the outputs of those layers: taps are "
            f"{taps}. Pass taps={tuple(ids)} where the ids mean the states before those layers."
        )
    else:
        notes.append(f"{AUX} {ids} is read as the states before those layers: taps are {taps}.")
        if max(ids) < num_layers and (ids[0] == 1 or layout == SPECFORGE):
            notes.append(f"Pass taps={after} where the ids mean the outputs of those layers.")
    return taps


def _default_taps(num_layers: int, notes) -> tuple[int, ...]:
    """The taps that EAGLE-3 has where config.json names none."""
    taps = low, middle, high = 2, num_layers // 2, num_layers - 3
    if not low < middle < high:
        raise ConfigError(
            f"config.json does not say {AUX}, and a target of {num_layers} layers is too shallow "
            f"for the usual taps {taps}, which need 7 or more; pass taps=..."
        )
    notes.append(f"config.json does not say {AUX}; taps are the usual {taps}.")
    return taps
