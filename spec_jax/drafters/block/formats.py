"""The checkpoint formats of block drafters.

An id l of z-lab, DeepSpec and TreeFlash is the output of layer l, our tap l + 1; an id of
speculators is our tap.

Source: z-lab/dflash, deepseek-ai/DeepSpec, SpecForge, ETH-DISCO/TreeFlash, and
vllm-project/speculators 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from spec_jax.drafters.block.config import (
    BlockConfig,
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    TreeFlashConfig,
    default_taps,
)
from spec_jax.drafters.formats import (
    LAYER,
    REQUIRED,
    SPECULATORS,
    End,
    Field,
    Format,
    HeadFormats,
    Reading,
    layer_json,
    speculators_json,
)
from spec_jax.errors import ConfigError
from spec_jax.models.checks import (
    check,
    integers_of,
    is_integer,
    require,
    shown,
    stated_flag,
    stated_object,
)
from spec_jax.models.config import NO_WINDOWS, ModelConfig
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.specs import ParamSpec

Z_LAB = "z-lab"
DEEPSPEC = "DeepSpec"
TREEFLASH = "TreeFlash"
SIZES_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OLDER = "logit_head."  # what the names of a step's tensors begin with in older files of DSpark
_IDS = "target_layer_ids"
_SPECULATORS_IDS = "aux_hidden_state_layer_ids"
_KEYS = {  # of config.json, that state the sizes of dimensions which no layer of a model has
    "rank": ("markov_rank", "selector_rank"),
    "reach": ("conv_kernel_size",),
    "taps": (),
}
# What some drafts of this family have and this model has not; by config.json's key the values that
# change nothing.
_NEUTRAL = {
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "add_swa_attention_sink_bias": (False,),
    "projector_type": ("dflash", "dflash2", "dspark"),
    "ar_approximation": ("swiglu",),
}
_OTHERS = {  # tensors of drafters that extend these
    "prefix_gru.": "Domino",
    "markov_head.joint_proj.": "DSpark with markov_head_type 'rnn'",
    "attention_sink_bias": "DFlash with attention sinks",
}


_BACKBONE = {"fc": "fc", "context_norm": "hidden_norm", "norm": "norm"}
FORMATS = {
    "dflash": {
        Z_LAB: Format(architecture="DFlashDraftModel"),
        DEEPSPEC: Format(architecture="Qwen3DSparkModel"),
        SPECULATORS: Format(architecture="DFlashSpeculator"),
    },
    "dflash2": {
        Z_LAB: Format(architecture="DFlash2DraftModel"),
        SPECULATORS: Format(architecture="DFlash2DraftModel"),
    },
    "dspark": {
        DEEPSPEC: Format(architecture="Qwen3DSparkModel"),
        SPECULATORS: Format(architecture="DSparkSpeculator"),
    },
    "treeflash": {
        TREEFLASH: Format(
            architecture="TreeFlashDraftModel",
            layer="model.layers.{i}.",
            names={ours: f"model.{name}.weight" for ours, name in _BACKBONE.items()},
        )
    },
}


def find_kind(hf: Mapping[str, Any], names: AbstractSet[str]) -> type[BlockConfig] | None:
    """Returns the class of the config of the head that a directory holds, or None.

    Args:
      hf: the parsed config.json.
      names: the names of the tensors.
    """
    plain = {name.removeprefix("model.") for name in names}
    reading = Reading(hf, names, None, inner=BlockFormats.inner)
    has_block = reading.stated("mask_token_id", "block_size") is not None
    if not {"fc.weight", "hidden_norm.weight"} <= plain or not has_block:
        return None
    for start, cls in (
        ("ar_approximation.", TreeFlashConfig),
        ("candidate_selector.", DFlash2Config),
        ("markov_head.", DSparkConfig),
    ):
        if any(name.removeprefix(_OLDER).startswith(start) for name in names):
            return cls
    return DFlashConfig


def _taps(reading: Reading) -> tuple[int, ...]:
    L = reading.target.num_hidden_layers
    is_speculators = reading.format == SPECULATORS
    key = _SPECULATORS_IDS if is_speculators else _IDS
    ids = reading.stated(key)
    if ids is None:
        usual = (2, L // 2, L - 3)
        if not is_speculators:
            usual = default_taps(L, reading.values["layer"].num_hidden_layers)
        why = "the usual ones; config.json names no layers of the target"
        return reading.decide("taps", reading.check_taps(usual, L), why)
    are_layers = isinstance(ids, list) and ids and all(is_integer(i) for i in ids)
    require(are_layers, f"the target's layers are {shown(ids)}; expected a list of integers")
    taps = reading.check_taps([i + (0 if is_speculators else 1) for i in ids], L)
    meaning = "the states before" if is_speculators else "the outputs of"
    return reading.decide("taps", taps, f"layer ids {ids} are read as {meaning} those layers")


def _is_anchor_first(reading: Reading) -> tuple[bool, str]:
    is_first = reading.format == DEEPSPEC or reading.cls is DSparkConfig
    which = "the pending token's slot predicts" if is_first else "masks alone predict"
    return is_first, f"{which}, as in {reading.format}; config.json does not say sample_from_anchor"


def _listed(reading: Reading) -> list[bool]:
    """Of each layer, whether layer_types says that it has a window."""
    M = reading.values["layer"].num_hidden_layers
    kinds = reading.stated("layer_types") or ["full_attention"] * M
    are_kinds = isinstance(kinds, list) and len(kinds) == M
    are_kinds = are_kinds and all(k in ("full_attention", "sliding_attention") for k in kinds)
    expected = f"'full_attention' or 'sliding_attention' for each of {M} layers"
    check(are_kinds, "layer_types", kinds, expected)
    return [kind == "sliding_attention" for kind in kinds]


def _slides(reading: Reading) -> list[bool]:
    """Of each layer, whether it has a window."""
    listed = _listed(reading)
    # transformers writes a list of full layers by itself, so such a list does not undo use_swa.
    is_all = stated_flag(stated_object(reading.hf, "dflash_config"), "use_swa") and not any(listed)
    return [True] * len(listed) if is_all else listed


def _windows(reading: Reading) -> tuple[int | None, ...]:
    inner = stated_object(reading.hf, "dflash_config")
    size = reading.stated("sliding_window")
    use_swa = stated_flag(inner, "use_swa")
    if use_swa and inner.get("swa_window_size") is not None:
        size = inner["swa_window_size"]
    is_unnamed = not use_swa and reading.stated("layer_types") is None
    if is_unnamed and reading.flag("use_sliding_window"):
        raise ConfigError("use_sliding_window is set without layer_types; name each layer's kind")
    slides = _slides(reading)
    if slides != _listed(reading):
        note = "use_swa puts a window on all layers, as layer_types names none that slides."
        reading.notes.append(note)
    is_size = not any(slides) or is_integer(size, 1)
    check(is_size, "sliding_window", size, "a positive integer")
    if any(slides):
        reading.notes.append(
            f"a token sees the {size} tokens up to itself in layers with a window; projects differ "
            "by up to a block at its far edge."
        )
    return tuple(size if is_sliding else None for is_sliding in slides)


def _is_causal(reading: Reading) -> tuple[bool, ...]:
    M = reading.values["layer"].num_hidden_layers
    slides = _slides(reading)
    if reading.format == SPECULATORS:
        looks_ahead = reading.cls is DFlash2Config  # each kind's default there
        is_free = stated_flag(reading.hf, "sliding_window_non_causal", looks_ahead)
        return tuple(is_sliding and not is_free for is_sliding in slides)
    stated = reading.stated("is_causal", "causal", inner=("dflash_config",))
    if stated is None:
        listed = _listed(reading)
        which = "layers with a window are" if any(listed) else "no layer is"
        why = f"{which} causal; config.json does not say is_causal"
        return reading.decide("is_causal", tuple(listed), why) if any(slides) else tuple(listed)
    by_layer = stated if isinstance(stated, list) else [stated] * M
    check(len(by_layer) == M, "is_causal", stated, f"one for each of {M} layers")
    return tuple(stated_flag({"is_causal": flag}, "is_causal") for flag in by_layer)


def _rank(reading: Reading) -> int:
    """The rank of DSpark's bias, which tensors and config.json have to agree about."""
    rank = reading.stated("markov_rank")
    stated = "missing" if rank is None else shown(rank)
    message = f"markov_rank is {stated}, but there are tensors markov_head.*; expected"
    require(is_integer(rank, 1), f"{message} their rank, the width of markov_w1")
    return rank


def _usual(name: str) -> Callable[[Reading], tuple[int, str]]:
    """The default of a size of DFlash 2."""
    why = f"the usual one is assumed; config.json does not say {name}"
    return lambda reading: (getattr(DFlash2Config, name), why)


_UNSTATED = dict.fromkeys((Z_LAB, DEEPSPEC, TREEFLASH), ())
_INNER = dict.fromkeys((Z_LAB, TREEFLASH), ("dflash_config",))
FIELDS = (
    Field("block_size", "block_size", kind=int, default=REQUIRED),
    Field("mask_token_id", "mask_token_id", kind=int, default=REQUIRED, places=_INNER),
    Field("taps", read=_taps),
    Field("is_anchor_first", "sample_from_anchor", default=_is_anchor_first, places=_UNSTATED),
    Field("windows", read=_windows),
    Field("is_causal", read=_is_causal),
    *(Field(name, name, int, _usual(name), places=_INNER) for name in SIZES_2),
    Field("markov_rank", "markov_rank", read=_rank),
    Field("markov_head_type", "markov_head_type", kind=str, default="vanilla"),
    Field("has_confidence", "enable_confidence_head", default=True),
    Field("confidence_with_markov", "confidence_head_with_markov", default=True),
)


class BlockFormats(HeadFormats):
    """The formats of block drafters, with what no table says."""

    known = FORMATS
    fields = FIELDS
    inner = ("dflash_config", "treeflash_config", LAYER)
    older = (_OLDER + "{}", "{}.weight")

    def find(self, reading: Reading) -> tuple[str, type]:
        hf = reading.hf
        cls = find_kind(hf, reading.names)
        require(cls is not None, "not a block drafter: fc or hidden_norm is missing")
        for part, what in _OTHERS.items():
            is_there = any(part in name for name in reading.names)
            message = f"the tensors {part}* are those of {what}, which is not supported"
            require(not is_there, message)
        if cls is TreeFlashConfig:
            return TREEFLASH, cls
        if LAYER in hf or "speculators_model_type" in hf:
            return SPECULATORS, cls
        return Z_LAB if "dflash_config" in hf else DEEPSPEC, cls

    def settled(self, reading: Reading) -> dict[str, ModelConfig]:
        for key, neutral in _NEUTRAL.items():
            value = reading.stated(key)
            known = f"known: {', '.join(map(str, neutral))}"
            message = f"{key} {shown(value)} is not supported; {known}"
            require(value is None or value in neutral, message)
        layer = dict(stated_object(reading.hf, LAYER) or reading.hf)
        kind = layer.get("model_type")
        message = f"the head's layers are of model_type {shown(kind)}; expected 'qwen3'"
        require(kind == "qwen3", f"{message}, with the target's embedding and output head")
        target = reading.target
        reading.check_target("vocabulary", "vocab_size", layer.get("vocab_size"), target.vocab_size)
        reading.check_target("width", "hidden_size", layer.get("hidden_size"), target.hidden_size)
        depth = "num_target_layers"
        if reading.hf.get(depth) is not None:
            reading.check_target("depth", depth, reading.hf[depth], target.num_hidden_layers)
        size = reading.hf.get("draft_vocab_size")
        message = f"draft_vocab_size is {size}: a reduced draft vocabulary is not supported here"
        require(size in (None, target.vocab_size), message)
        rank = reading.stated("markov_rank")
        message = "but there is no tensor markov_head.markov_w1.weight; expected it, or 0"
        is_right = reading.cls is not DFlashConfig or rank in (None, 0)
        require(is_right, f"markov_rank is {shown(rank)}, {message}")
        # Windows are read by ``_windows``, and the output head is the target's.
        hf = {**layer, **NO_WINDOWS, "tie_word_embeddings": False}
        return {"layer": ModelConfig.from_hf(hf)}

    def sizes(self, config: BlockConfig, spec: ParamSpec) -> dict[str, int]:
        if not any(axis in _KEYS for axis in spec.axes):
            return integers_of(config.layer)
        keys = [key for axis in spec.axes for key in _KEYS.get(axis, ())]
        return {key: getattr(config, key) for key in keys if hasattr(config, key)}

    def ends(self, config: BlockConfig, format: str, num_layers: int) -> tuple[End, ...]:
        stored = {"embed": "embed_tokens.weight", "head": "lm_head.weight"}
        is_copied = format == DEEPSPEC
        return tuple(End((name,), end, is_copied=is_copied) for end, name in stored.items())

    def check(self, config: BlockConfig, format: str, target: Any) -> None:
        sizes = {size for size in config.windows if size is not None}
        message = f"windows are {config.windows}; a file states one size"
        require(len(sizes) <= 1, message)

    def to_json(
        self, config: Any, format: str, target: LoadedModel, num_draft: int, hf: dict[str, Any]
    ) -> dict[str, Any]:
        windows = [size for size in config.windows if size is not None]
        layer = layer_json(config.layer) | {
            "layer_types": [
                "full_attention" if w is None else "sliding_attention" for w in config.windows
            ],
            "sliding_window": min(windows, default=None),
            "use_sliding_window": bool(windows),
        }
        hf["architectures"] = [FORMATS[config.name][format].architecture]
        if format == SPECULATORS:
            hf |= speculators_json(config.name, config, layer, target, num_draft)
            hf["sliding_window_non_causal"] = not any(config.is_causal)
            return hf | {_SPECULATORS_IDS: list(config.taps)}
        if len(set(config.is_causal)) == 1:
            hf["is_causal"] = config.is_causal[0]
        ids = {_IDS: [tap - 1 for tap in config.taps]}
        hf |= layer | {"num_target_layers": target.config.num_hidden_layers}
        if format == DEEPSPEC:
            is_plain = not isinstance(config, DSparkConfig)
            hf |= {"markov_rank": 0, "enable_confidence_head": False} if is_plain else {}
            return hf | ids
        hf["dflash_config"] |= ids
        step = {"treeflash_config": {"ar_approximation": "swiglu"}}
        return hf | (step if format == TREEFLASH else {})


BLOCK_FORMATS = BlockFormats()
