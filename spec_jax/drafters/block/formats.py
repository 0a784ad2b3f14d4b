"""The checkpoint formats of block drafters: how config.json states a head.

An id l of z-lab, DeepSpec and TreeFlash is the output of layer l, our tap l + 1; an id of
speculators is our tap. Reading appends a note for every choice that a file leaves open; writing
leaves none open, and refuses what would be read as something else.

Source: z-lab/dflash, deepseek-ai/DeepSpec, SpecForge, ETH-DISCO/TreeFlash, and
vllm-project/speculators 0.9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from spec_jax.drafters.block.config import (
    BlockConfig,
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    TreeFlashConfig,
    default_taps,
)
from spec_jax.drafters.common.formats import (
    check_target,
    first_that_can_express,
    speculators_config,
)
from spec_jax.errors import ConfigError
from spec_jax.models.checks import is_integer, require, shown, stated_flag, stated_object
from spec_jax.models.config import ModelConfig, with_attention

Z_LAB = "z-lab"
DEEPSPEC = "DeepSpec"
TREEFLASH = "TreeFlash"
SPECULATORS = "speculators"
OLDER = "logit_head."  # what the names of a step's tensors begin with in older files of DSpark
_LAYER = "transformer_layer_config"
_IDS = "target_layer_ids"
_INNER = ("dflash_config", "treeflash_config", _LAYER)
OVERRIDES = ("taps", "block_size", "is_anchor_first", "is_causal", "windows")
# What some drafts of this family have and this model has not; by config.json's key the value that
# changes nothing.
_NEUTRAL = {
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "final_logit_softcapping": 0,
    "add_swa_attention_sink_bias": False,
}
SIZES_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OTHERS = {  # tensors of drafters that extend these
    "prefix_gru.": "Domino",
    "markov_head.joint_proj.": "DSpark with markov_head_type 'rnn'",
    "attention_sink_bias": "DFlash with attention sinks",
}


class Format(NamedTuple):
    """A project's convention.

    Attributes:
      architectures: in config.json, by the name of the kind.
      prefix: how the names of the backbone's tensors begin.
      has_copies: files hold copies of the target's embedding and output head.
    """

    architectures: Mapping[str, str]
    prefix: str = ""
    has_copies: bool = False


FORMATS = {
    Z_LAB: Format({"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}),
    DEEPSPEC: Format(dict.fromkeys(("dspark", "dflash"), "Qwen3DSparkModel"), has_copies=True),
    TREEFLASH: Format({"treeflash": "TreeFlashDraftModel"}, prefix="model."),
    SPECULATORS: Format(
        {"dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel", "dspark": "DSparkSpeculator"}
    ),
}


def formats_of(name: str) -> tuple[str, ...]:
    """Returns the formats of a kind, the preferred one first."""
    return tuple(fmt for fmt, record in FORMATS.items() if name in record.architectures)


def find_kind(hf: Mapping[str, Any], names: AbstractSet[str]) -> str | None:
    """Returns the name of the kind that a directory holds, or None.

    Args:
      hf: the parsed config.json.
      names: the names of the tensors.
    """
    plain = {name.removeprefix("model.") for name in names}
    has_block = any(_stated(hf, key) is not None for key in ("mask_token_id", "block_size"))
    if not {"fc.weight", "hidden_norm.weight"} <= plain or not has_block:
        return None
    if any(name.startswith("ar_approximation.") for name in names):
        return TreeFlashConfig.name
    if any(name.startswith("candidate_selector.") for name in names):
        return DFlash2Config.name
    has_step = any(name.removeprefix(OLDER).startswith("markov_head.") for name in names)
    return DSparkConfig.name if has_step else DFlashConfig.name


def _find_format(hf: Mapping[str, Any], kind: str) -> str:
    if kind == TreeFlashConfig.name:
        return TREEFLASH
    if _LAYER in hf or "speculators_model_type" in hf:
        return SPECULATORS
    return Z_LAB if "dflash_config" in hf else DEEPSPEC


def _stated(hf: Mapping[str, Any], key: str) -> Any:
    """The value of a key at the top or in one of the objects that formats put it in."""
    places = (hf, *(stated_object(hf, name) for name in _INNER))
    return next((place[key] for place in places if place.get(key) is not None), None)


def _flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """``_stated`` of a key that is true or false."""
    return stated_flag({key: _stated(hf, key)}, key, default)


# -------------------------------------------------------------------------------- reading


def head_config(
    hf: Mapping[str, Any],
    names: AbstractSet[str],
    target: Any,
    overrides: Mapping[str, Any],
    notes: list[str],
) -> tuple[str, BlockConfig]:
    """Returns the format and the config of a head.

    Args:
      hf: the parsed config.json.
      names: the names of the tensors.
      target: the config of the model that it drafts for.
      overrides: fields of the config, of ``OVERRIDES``, instead of what config.json says.
      notes: a sentence is appended for every choice that config.json leaves open.

    Raises:
      ConfigError: the head is for another target, or is not supported.
    """
    kind = find_kind(hf, names)
    require(kind is not None, "not a block drafter: fc or hidden_norm is missing")
    _check_supported(hf, names)
    format = _find_format(hf, kind)
    layer = _layer(hf, target)
    values = {
        "layer": layer,
        "target_hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "taps": _taps(hf, format, layer.num_hidden_layers, target, notes),
        "is_anchor_first": _is_anchor_first(hf, format, kind, notes),
    }
    for key in ("block_size", "mask_token_id"):
        values[key] = _stated(hf, key)
        require(is_integer(values[key]), f"{key} is {shown(values[key])}; expected an integer")
    values["windows"], values["is_causal"] = _visibility(hf, format, kind, layer, notes)
    kinds = (DFlashConfig, DFlash2Config, DSparkConfig, TreeFlashConfig)
    cls = {c.name: c for c in kinds}[kind]
    if cls is DFlash2Config:
        stated = {key: _stated(hf, key) for key in SIZES_2}
        values |= {key: value for key, value in stated.items() if value is not None}
        notes += [
            f"config.json does not say {key}; the usual {getattr(cls, key)} is assumed."
            for key in SIZES_2
            if stated[key] is None
        ]
    rank = _stated(hf, "markov_rank")
    if cls is DFlashConfig:
        message = (
            f"markov_rank is {shown(rank)}, but there is no tensor markov_head.markov_w1.weight"
        )
        require(rank in (None, 0), f"{message}; expected it, or markov_rank 0")
    if cls is DSparkConfig:
        is_rank = is_integer(rank) and rank > 0
        stated = "missing" if rank is None else shown(rank)
        message = f"markov_rank is {stated}, but there are tensors markov_head.*; expected"
        require(is_rank, f"{message} their rank, the width of markov_w1")
        values["markov_rank"] = rank
        values["markov_head_type"] = _stated(hf, "markov_head_type") or "vanilla"
        values["has_confidence"] = _flag(hf, "enable_confidence_head", True)
        values["confidence_with_markov"] = _flag(hf, "confidence_head_with_markov", True)
    for name, value in overrides.items():
        require(name in OVERRIDES, f"unknown option {name}; known: {', '.join(OVERRIDES)}")
        notes.append(f"{name} is {value}: the caller says so.")
    config = cls(**values | overrides)
    # A caller may name our last tap, the state after the final norm; no file can.
    _check_taps(config.taps, target, target.num_hidden_layers + 1)
    return format, config


def _check_supported(hf, names) -> None:
    for part, what in _OTHERS.items():
        is_there = any(part in name for name in names)
        require(not is_there, f"the tensors {part}* are those of {what}, which is not supported")
    for key, neutral in _NEUTRAL.items():
        value = _stated(hf, key)
        require(value in (None, neutral), f"{key} is {shown(value)}, which is not supported")
    projector = _stated(hf, "projector_type")
    message = f"projector_type {shown(projector)} is not supported; known: dflash, dflash2, dspark"
    require(projector in (None, "dflash", "dflash2", "dspark"), message)
    step = _stated(hf, "ar_approximation")
    message = f"ar_approximation {shown(step)} is not supported; known: swiglu"
    require(step in (None, "swiglu"), message)


def _layer(hf, target) -> ModelConfig:
    layer = dict(stated_object(hf, _LAYER) or hf)
    kind = layer.get("model_type")
    message = f"the head's layers are of model_type {shown(kind)}; expected 'qwen3'"
    require(kind == "qwen3", f"{message}, with the target's embedding and output head")
    draft_vocab = hf.get("draft_vocab_size")
    for what, key, value, expected in (
        ("vocabulary", "vocab_size", layer.get("vocab_size"), target.vocab_size),
        ("width", "hidden_size", layer.get("hidden_size"), target.hidden_size),
        ("depth", "num_target_layers", hf.get("num_target_layers"), target.num_hidden_layers),
    ):
        is_left_out = key == "num_target_layers" and value is None
        if not is_left_out:
            check_target(what, key, value, expected)
    message = f"draft_vocab_size is {draft_vocab}: a reduced draft vocabulary is not supported here"
    require(draft_vocab in (None, target.vocab_size), message)
    # Windows are read by ``_visibility``, and the output head is the target's.
    seen_apart = {"layer_types": None, "sliding_window": None, "use_sliding_window": False}
    return ModelConfig.from_hf({**layer, **seen_apart, "tie_word_embeddings": False})


def _taps(hf, format, num_layers, target, notes) -> tuple[int, ...]:
    L = target.num_hidden_layers
    ids = _stated(hf, "aux_hidden_state_layer_ids" if format == SPECULATORS else _IDS)
    if ids is None:
        usual = (2, L // 2, L - 3) if format == SPECULATORS else default_taps(L, num_layers)
        notes.append(f"config.json names no layers of the target; taps are the usual {usual}.")
        return _check_taps(usual, target, L)
    are_layers = isinstance(ids, list) and ids and all(is_integer(i) for i in ids)
    require(are_layers, f"the target's layers are {shown(ids)}; expected a list of integers")
    taps = tuple(i + (0 if format == SPECULATORS else 1) for i in ids)
    _check_taps(taps, target, L)
    meaning = "the states before" if format == SPECULATORS else "the outputs of"
    notes.append(f"layer ids {ids} are read as {meaning} those layers: taps are {taps}.")
    return taps


def _check_taps(taps: tuple[int, ...], target, last: int) -> tuple[int, ...]:
    """Returns the taps; raises a ConfigError if one is not of 0 to the last."""
    known = f"a target of {target.num_hidden_layers} layers has taps 0 to {last}"
    require(all(0 <= tap <= last for tap in taps), f"taps {shown(taps)} do not exist: {known}")
    return taps


def _is_anchor_first(hf, format, kind, notes) -> bool:
    default = format == DEEPSPEC or kind == DSparkConfig.name
    if _stated(hf, "sample_from_anchor") is not None:
        return _flag(hf, "sample_from_anchor")
    which = "the pending token's slot predicts" if default else "masks alone predict"
    notes.append(f"config.json does not say sample_from_anchor; {which}, as in {format}.")
    return default


def _visibility(hf, format, kind, layer, notes):
    """Windows and causality of each layer."""
    M = layer.num_hidden_layers
    inner = stated_object(hf, "dflash_config")
    kinds = _stated(hf, "layer_types")
    size = _stated(hf, "sliding_window")
    use_swa = stated_flag(inner, "use_swa")
    if use_swa and inner.get("swa_window_size") is not None:
        size = inner["swa_window_size"]
    if not use_swa and kinds is None and _flag(hf, "use_sliding_window"):
        raise ConfigError("use_sliding_window is set without layer_types; name each layer's kind")
    kinds = kinds or ["full_attention"] * M
    are_kinds = isinstance(kinds, list) and len(kinds) == M
    are_kinds = are_kinds and all(k in ("full_attention", "sliding_attention") for k in kinds)
    expected = f"'full_attention' or 'sliding_attention' for each of {M} layers"
    require(are_kinds, f"layer_types is {shown(kinds)}; expected {expected}")
    listed = [kind == "sliding_attention" for kind in kinds]
    # transformers writes a list of full layers by itself, so such a list does not undo use_swa.
    slides = [True] * M if use_swa and not any(listed) else listed
    if slides != listed:
        notes.append("use_swa puts a window on all layers, as layer_types names none that slides.")
    message = f"sliding_window is {shown(size)}; expected a positive integer"
    require(not any(slides) or (is_integer(size) and size > 0), message)
    windows = tuple(size if is_sliding else None for is_sliding in slides)
    if format == SPECULATORS:
        looks_ahead = kind == DFlash2Config.name  # of each kind the package's own default
        is_free = stated_flag(hf, "sliding_window_non_causal", looks_ahead)
        causal = [is_sliding and not is_free for is_sliding in slides]
    else:
        places = (hf, "is_causal"), (inner, "is_causal"), (inner, "causal")
        stated = next((d[key] for d, key in places if d.get(key) is not None), None)
        by_layer = stated if isinstance(stated, list) else [stated] * M
        are_all = len(by_layer) == M
        require(are_all, f"is_causal is {shown(stated)}; expected one for each of {M} layers")
        if stated is None:
            causal = listed
        else:
            causal = [stated_flag({"is_causal": flag}, "is_causal") for flag in by_layer]
        if stated is None and any(slides):
            which = "layers with a window are" if any(listed) else "no layer is"
            notes.append(f"config.json does not say is_causal; {which} causal.")
    if any(slides):
        notes.append(
            f"a token sees the {size} tokens up to itself in layers with a window; projects differ "
            "by up to a block at its far edge."
        )
    return windows, tuple(causal)


# -------------------------------------------------------------------------------- writing


def head_json(
    config: BlockConfig, format: str, target: Any, num_tokens: int, verifier: str | None
) -> dict[str, Any]:
    """Returns the config.json of a head, the inverse of ``head_config``.

    Args:
      config: the head's.
      format: a name in ``FORMATS``.
      target: the config of the model it drafts for.
      num_tokens: K, stated by the format "speculators".
      verifier: the target's name or path, stated by the format "speculators".

    Raises:
      ConfigError: the format cannot express the head's config.
    """
    known = formats_of(config.name)
    require(format in known, f"format is {format!r}; known for {config.name}: {', '.join(known)}")
    sizes = {size for size in config.windows if size is not None}
    message = f"windows are {config.windows}; a file states one size"
    require(len(sizes) <= 1, message)
    layer = config.layer.to_hf() | config.layer.rope.spellings()
    del layer["architectures"]
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    layer |= {"layer_types": kinds, "sliding_window": min(sizes, default=None)}
    layer |= {"use_sliding_window": bool(sizes), "tie_word_embeddings": False}
    own = {"mask_token_id": config.mask_token_id}
    hf: dict[str, Any] = {"architectures": [FORMATS[format].architectures[config.name]]}
    if isinstance(config, DSparkConfig):
        own["markov_rank"] = config.markov_rank
        own["markov_head_type"] = config.markov_head_type
        own["enable_confidence_head"] = config.has_confidence
        own["confidence_head_with_markov"] = config.confidence_with_markov
    elif isinstance(config, DFlash2Config):
        own |= {key: getattr(config, key) for key in SIZES_2}
    elif format == DEEPSPEC:
        own |= {"markov_rank": 0, "enable_confidence_head": False}
    ids = [tap - 1 for tap in config.taps]
    if format == SPECULATORS:
        hf |= {"speculators_model_type": config.name, "speculators_version": "0.9.0", **own}
        hf |= {"aux_hidden_state_layer_ids": list(config.taps), _LAYER: layer}
        hf["draft_vocab_size"] = config.target_vocab_size
        hf["sliding_window_non_causal"] = not any(config.is_causal)
        hf["speculators_config"] = speculators_config(config.name, num_tokens, verifier, target)
    elif format == DEEPSPEC:
        hf |= layer | own | {_IDS: ids, "num_target_layers": target.num_hidden_layers}
    else:
        hf |= layer | {"dflash_config": own | {_IDS: ids}}
        hf["num_target_layers"] = target.num_hidden_layers
        if format == TREEFLASH:
            hf["treeflash_config"] = {"ar_approximation": "swiglu"}
    hf["block_size"] = config.block_size
    if format == SPECULATORS:
        hf["sample_from_anchor"] = config.is_anchor_first
    elif len(set(config.is_causal)) == 1:
        hf["is_causal"] = config.is_causal[0]
    _check_is_read(hf, config, format, target)
    return hf


def pick_format(config: BlockConfig, target: Any, format: str | None, num_tokens: int) -> str:
    """Returns the format to write a head in: the given one, or the first that can express it.

    Args:
      config: the head's.
      target: the ``LoadedModel`` that it drafts for.
      format: a name in ``FORMATS``, or None.
      num_tokens: K.

    Raises:
      ConfigError: no format can express this config.
    """
    names = (format,) if format else formats_of(config.name)

    def write(name):
        return head_json(config, name, target.config, num_tokens, target.name)

    return first_that_can_express(names, write)


def _check_is_read(hf, config: BlockConfig, format: str, target: Any) -> None:
    """Raises a ConfigError if a config.json is read as another config than it was written from."""
    steps = {"dspark": "markov_head.", "treeflash": "ar_approximation."}
    steps["dflash2"] = "candidate_selector."
    names = {"fc.weight", "hidden_norm.weight", steps.get(config.name, "")}
    _, read = head_config(hf, names, target, {}, [])
    layer = dataclasses.replace(config.layer, tie_word_embeddings=False)
    layer = with_attention(layer, "auto")  # no file states it
    expected = dataclasses.replace(config, layer=layer)
    read = dataclasses.replace(read, layer=with_attention(read.layer, "auto"))
    for prefix, a, b in (("layer.", expected.layer, read.layer), ("", expected, read)):
        for field in dataclasses.fields(a):
            value = getattr(a, field.name)
            read_value = getattr(b, field.name)
            if value != read_value:
                raise ConfigError(
                    f"{prefix}{field.name} is {value!r}; in the format {format} it would be read "
                    f"as {read_value!r}; known formats: {', '.join(formats_of(config.name))}"
                )
