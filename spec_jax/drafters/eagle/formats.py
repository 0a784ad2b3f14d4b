"""The checkpoint formats of EAGLE heads.

The same key means different things in different projects, and some keys are left out. ``FORMATS``,
``FIELDS`` and ``DOUBTS`` hold what differs. Three keys are used by this project
alone: ``own_embed``; ``taps``, the states before the layers of these numbers; and ``max_draft`` of
P-EAGLE. EAGLE's own loader knows none of the norms that are optional in ``EagleConfig``, no bias,
and no states other than the usual three; the format "EAGLE-3" writes them for other loaders.

Source: the loaders of SafeAILab/EAGLE, SpecForge, SGLang, vLLM and vllm-project/speculators 0.9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from spec_jax.drafters.common.vocabulary import check_offsets
from spec_jax.drafters.eagle.model import EagleConfig, PEagleConfig
from spec_jax.drafters.formats import (
    LAYER,
    SPECULATORS,
    End,
    Field,
    Format,
    HeadFormats,
    Reading,
    layer_json,
    speculators_json,
)
from spec_jax.errors import WeightsError
from spec_jax.models.checks import check, is_integer, require, shown, stated_flag, stated_object
from spec_jax.models.config import NO_WINDOWS, ModelConfig, windows_of
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.params import Params
from spec_jax.models.parts import Tensor
from spec_jax.models.tensors import on_host

EAGLE_1 = "EAGLE-1"
EAGLE_3 = "EAGLE-3"
SPECFORGE = "SpecForge"
_EMBED = "embed_tokens.weight"
_IDS = "eagle_aux_hidden_state_layer_ids"
_USES_IDS = "use_aux_hidden_state"
_MASK_IDS = ("mask_token_id", "ptd_token_id", "pard_token")  # of speculators, vLLM, and PARD


FORMATS = {
    "eagle-1": {EAGLE_1: Format()},
    "eagle-3": {
        SPECFORGE: Format(layer="midlayer.", architecture="LlamaForCausalLMEagle3"),
        EAGLE_3: Format(layer="midlayer."),
        SPECULATORS: Format(architecture="Eagle3Speculator"),
    },
    "p-eagle": {
        SPECFORGE: Format(architecture="PEagleDraftModel"),
        SPECULATORS: Format(architecture="PEagleSpeculator"),
    },
}


def _if_stored(key: str, tensor: str) -> Callable[[Reading], tuple[bool, str]]:
    """The default of a flag that a tensor shows to be on."""

    def default(reading):
        is_on = tensor in reading.names
        return is_on, f"config.json does not say {key}, and there is {tensor}" if is_on else ""

    return default


def _owns_embed(reading: Reading) -> tuple[bool, str]:
    """A head that is not as wide as its target has its own embedding, as has a P-EAGLE file's."""
    is_narrow = reading.values["layer"].hidden_size != reading.target.hidden_size
    is_own = is_narrow or reading.cls.is_parallel and _EMBED in reading.names
    return is_own and reading.format != EAGLE_1, ""


def _taps(reading: Reading) -> tuple[int, ...]:
    L = reading.target.num_hidden_layers
    stated = reading.stated("taps")
    if reading.format == EAGLE_1:
        return (L + 1,)
    is_on = reading.flag(_USES_IDS, True)
    require(is_on, f"{_USES_IDS} is false; only heads of tapped states are known")
    if stated is not None:
        is_list = isinstance(stated, list)
        require(is_list, f"taps is {shown(stated)} in config.json; expected a list of layers")
        counts = [list(stated), [tap - 1 for tap in stated if is_integer(tap)], None]
        if reading.stated(_IDS) in counts:
            return tuple(stated)  # as our files say it
        why = f"config.json says so, in place of its {_IDS}"
        return reading.decide("taps", tuple(stated), why)
    ids = reading.stated(_IDS)
    if not ids:
        taps = low, middle, high = 2, L // 2, L - 3
        message = f"a target of {L} layers is too shallow for the usual taps {taps}"
        message = f"config.json does not say {_IDS}, and {message}; pass taps=..."
        require(low < middle < high, message)
        return reading.decide("taps", taps, f"the usual ones; config.json does not say {_IDS}")
    are_layers = isinstance(ids, list) and all(is_integer(i, 0) for i in ids)
    check(are_layers, _IDS, ids, "a list of layers from 0")
    message = f"{_IDS} is {shown(ids)}; the target has {L} layers: pass taps=..."
    require(max(ids) <= L, message)
    # Trainers count outputs of layers or states before them. An id of 1 first is the former's
    # usual choice; an id of L has no layer and proves the latter.
    before = tuple(ids)
    after = tuple(i + 1 for i in ids)
    begins_with_1 = ids[0] == 1 and max(ids) < L
    if reading.format != SPECULATORS and begins_with_1:
        why = f"{_IDS} {ids} begins with 1 and so is read as the outputs of those layers; pass "
        why += f"taps={before} if the ids mean the states before those layers"
        return reading.decide("taps", after, why)
    why = f"{_IDS} {ids} is read as the states before those layers"
    if begins_with_1 or reading.format == SPECFORGE and max(ids) < L:
        why += f"; pass taps={after} if the ids mean the outputs of those layers"
    return reading.decide("taps", before, why)


def _mask(reading: Reading) -> int:
    stated = {key: reading.stated(key) for key in _MASK_IDS}
    for key, value in stated.items():
        check(value is None or is_integer(value), key, value, "an integer")
    ids = {value for value in stated.values() if value is not None}
    message = f"config.json has none of {', '.join(_MASK_IDS)}; pass mask_token_id=..."
    require(len(ids) > 0, message)
    require(len(ids) == 1, f"config.json states several masks: {stated}")
    return ids.pop()


def _max_draft(reading: Reading) -> Any:
    """The largest K, or that of the first proposal, which speculators' trainer sets to it."""
    if "max_draft" in reading.hf:
        return reading.hf["max_draft"]
    methods = stated_object(reading.hf, "speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    why = "the drafts that speculators_config proposes"
    if count is None:
        why = "config.json does not say how many drafts the head was trained for"
    return reading.decide("max_draft", count, why)


_NORM = {EAGLE_1: None, SPECFORGE: ("", "eagle_config")}


def _norm(name: str, default: Any = False) -> Field:
    return Field(name, name, default=default, places=_NORM)


FIELDS = (
    Field("taps", read=_taps),
    Field("fc_bias", "bias", default=lambda r: (r.format == EAGLE_1, ""), places={SPECULATORS: ()}),
    _norm("norm_before_residual"),
    _norm("norm_before_fc", _if_stored("norm_before_fc", "input_norm.weight")),
    _norm("fc_norm", _if_stored("fc_norm", "fc_norm.0.weight")),
    _norm("norm_output"),
    Field("own_embed", "own_embed", default=_owns_embed),
    Field("mask_token_id", "mask_token_id", read=_mask),
    Field("max_draft", "max_draft", read=_max_draft),
)
# What loaders of a format disagree about, by the stated value.
DOUBTS = {
    (SPECULATORS, "norm_before_residual", None): "config.json does not say norm_before_residual; "
    "False is assumed, as in speculators itself, though vLLM then assumes True: try "
    "norm_before_residual=True if few drafts are accepted.",
    (SPECFORGE, "norm_output", True): "norm_output is true: the recycled state is normalised, as "
    "SGLang and vLLM read it. SpecForge before September 2026 meant only that the scored state is "
    "normalised: pass norm_output=False for a head that it trained.",
    (SPECFORGE, "norm_output", False): "norm_output is false: the recycled state is not "
    "normalised, the scored state is. SpecForge before September 2026 did not normalise the scored "
    "state either, which is not supported: expect few accepted drafts of such a head.",
}


def has_masks(names: AbstractSet[str]) -> bool:
    """Whether the tensors of these names are those of a P-EAGLE head."""
    return {"fc.weight", "mask_hidden"} <= names


class EagleFormats(HeadFormats):
    """The formats of EAGLE heads and of P-EAGLE, with what no table says."""

    known = FORMATS
    fields = FIELDS
    inner = ("eagle_config",)
    doubts = DOUBTS

    def find(self, reading: Reading) -> tuple[str, type]:
        hf, names = reading.hf, reading.names
        if "fc.weight" not in names:
            is_model = "model.embed_tokens.weight" in names
            advice = "load_model reads a model" if is_model else "load_draft detects the kind"
            message = f"tensor fc.weight is missing, which every EAGLE head has; {advice}"
            raise WeightsError(f"{reading.directory}: {message}")
        for name in ("eagle_config", LAYER):
            stated_object(hf, name)
        cls = PEagleConfig if has_masks(names) else EagleConfig
        if LAYER in hf or "speculators_model_type" in hf:
            kind = hf.get("speculators_model_type")
            expected = _algorithm(cls)
            message = f"speculators_model_type {shown(kind)} is not supported; known: {expected!r}"
            require(kind in (None, expected), message)
            return SPECULATORS, cls
        if cls.is_parallel:
            return SPECFORGE, cls
        if not any(n.startswith("midlayer.") or n.endswith(".hidden_norm.weight") for n in names):
            return EAGLE_1, cls
        listed = hf.get("architectures")
        name = FORMATS["eagle-3"][SPECFORGE].architecture
        is_specforge = isinstance(listed, list) and name in listed
        return SPECFORGE if is_specforge or "eagle_config" in hf else EAGLE_3, cls

    def settled(self, reading: Reading) -> dict[str, Any]:
        """The version, and the layer, which is Llama's outside of speculators, or Qwen2's."""
        is_speculators = reading.format == SPECULATORS
        layer = dict(stated_object(reading.hf, LAYER) if is_speculators else reading.hf)
        target = reading.target
        reading.check_target("vocabulary", "vocab_size", layer.get("vocab_size"), target.vocab_size)
        width = reading.stated("target_hidden_size")
        key = "hidden_size" if width is None else "target_hidden_size"
        width = layer.get("hidden_size") if width is None else width
        reading.check_target("width", key, width, target.hidden_size)
        windows = windows_of(layer, is_head=True)
        size = reading.stated("draft_vocab_size")
        if reading.format != EAGLE_1 and size is not None:
            check(is_integer(size, 1), "draft_vocab_size", size, "a positive integer")
            layer["vocab_size"] = size
        if not is_speculators:
            kind = "qwen2" if stated_flag(layer, "qkv_bias") else "llama"
            length = ModelConfig.max_position_embeddings
            layer = {"num_key_value_heads": None, "max_position_embeddings": length} | layer
            if layer.get("model_type") not in (None, kind):
                stated = shown(layer["model_type"])
                note = f"config.json says model_type {stated}; the layer is read as {kind}."
                reading.notes.append(note)
            layer["model_type"] = kind
            has_biases = any(name.endswith("q_proj.bias") for name in reading.names)
            if stated_flag(layer, "attention_bias") and not has_biases:
                layer["attention_bias"] = False
                note = "config.json says attention_bias; it is off, as there is no q_proj.bias."
                reading.notes.append(note)
        ropes = (stated_object(layer, name) for name in ("rope_parameters", "rope_scaling"))
        if all(stated.get("rope_theta") is None for stated in (layer, *ropes)):
            note = "config.json has no rope_theta; 10000 is assumed, whatever the target's is."
            reading.notes.append(note)
        others = NO_WINDOWS | {"tie_word_embeddings": False}
        layer = dataclasses.replace(ModelConfig.from_hf(layer | others), **windows)
        return {"layer": layer, "version": 1 if reading.format == EAGLE_1 else 3}

    def source(self, reading: Reading) -> Any:
        files = super().source(reading)
        shape = files["fc.weight"].shape
        config = reading.config
        width = config.target_hidden_size
        taps = config.taps
        if config.version == 3 and len(shape) == 2 and shape[1] != len(taps) * width:
            states = f"{shape[1] / width:.2f}".removesuffix(".00")
            raise WeightsError(
                f"{reading.directory}: fc.weight takes {shape[1]} features, {states} states of the "
                f"target's width {width}; taps {taps} are {len(taps)} states"
            )
        return files

    def ends(self, config: EagleConfig, format: str, num_layers: int) -> tuple[End, ...]:
        # Else the package of speculators may keep memory that is not set.
        is_copied = format == SPECULATORS or config.is_parallel
        return (End((_EMBED,), "embed", "own_embed", is_copied),)

    def extra_params(self, reading: Reading) -> dict[str, Tensor]:
        """``{"d2t": i32[U]}``, or nothing where the vocabularies are equal."""
        config = reading.config
        tensors = reading.tensors
        if config.version == 1:
            return {}
        U = config.layer.vocab_size
        V = config.target_vocab_size
        t2d = tensors.take("t2d", (V,)).read_whole() if "t2d" in tensors.left else None
        is_whole = U == V and "d2t" not in tensors.left
        d2t = np.zeros(U, np.int32) if is_whole else tensors.take("d2t", (U,)).read_whole()
        try:
            offsets = check_offsets(d2t, t2d, V)
        except WeightsError as error:
            raise WeightsError(f"{reading.directory}: {error}") from error
        return {"d2t": Tensor.of(np.asarray(offsets))} if U < V else {}

    def extra_tensors(self, config: Any, format: str, params: Params) -> dict[str, np.ndarray]:
        """The tables of ids; SpecForge's converter asks for them in equal vocabularies, too."""
        U = config.layer.vocab_size
        V = config.target_vocab_size
        if config.version == 1 or U == V and format != SPECFORGE:
            return {}
        d2t = on_host(params.get("d2t", np.zeros(U, np.int32)))  # offsets from draft ids
        t2d = np.isin(np.arange(V), np.arange(U) + d2t)  # which ids can be drafted
        return {"d2t": check_offsets(d2t, t2d, V).astype(np.int64), "t2d": t2d}

    def check(self, config: EagleConfig, format: str, target: ModelConfig) -> None:
        layer = config.layer
        last = target.num_hidden_layers + 1
        taps = config.taps
        message = f"taps {taps} hold {last}, the state after the final norm, unknown to loaders"
        require(format == EAGLE_1 or last not in taps, message)
        if format == SPECFORGE:
            has_biases = layer.attention_bias or layer.mlp_bias
            advice = "use EAGLE-3 or speculators"
            require(not has_biases, f"the layer has biases, which SGLang leaves out; {advice}")
            message = f"own_embed is True, which SGLang ignores at the target's width; {advice}"
            may_own = layer.hidden_size != config.target_hidden_size or config.is_parallel
            require(may_own or not config.own_embed, message)
            has_norms = config.is_parallel and (config.fc_norm or config.norm_before_fc)
            require(not has_norms, "SpecForge's P-EAGLE has no norms before fc; use speculators")
        if format == SPECULATORS:
            is_known = layer.model_type in ("llama", "qwen3")
            require(is_known, f"{format} knows layers of llama and qwen3, not {layer.model_type!r}")

    def to_json(
        self, config: Any, format: str, target: LoadedModel, num_draft: int, hf: dict[str, Any]
    ) -> dict[str, Any]:
        layer = layer_json(config.layer) | {"vocab_size": config.target_vocab_size}
        usual = config.layer.architectures[config.layer.model_type]
        hf["architectures"] = [self.formats(config)[format].architecture or usual]
        taps = list(config.taps)
        is_narrow = config.layer.hidden_size != config.target_hidden_size
        if config.is_parallel:
            hf |= {"ptd_token_id": config.mask_token_id, "parallel_drafting": True}
        if format == SPECULATORS:
            num_draft = getattr(config, "max_draft", None) or num_draft
            hf |= speculators_json(_algorithm(config), config, layer, target, num_draft)
            width = config.target_hidden_size if is_narrow else None
            return hf | {"target_hidden_size": width, _IDS: taps}
        hf |= layer
        hf |= {"qkv_bias": True} if config.layer.model_type == "qwen2" else {}
        if format == EAGLE_1:
            return hf
        hf["draft_vocab_size"] = config.layer.vocab_size
        # Most loaders ask whether the key is there, not for its value: EAGLE's own then leaves
        # the head without the target's embedding.
        hf |= {"target_hidden_size": config.target_hidden_size} if is_narrow else {}
        if format == EAGLE_3:
            return hf | {_IDS: taps, "taps": taps}
        if not config.norm_output:  # see DOUBTS
            del hf["norm_output"], hf["eagle_config"]["norm_output"]
        if taps[0] != 1 or config.is_parallel:  # else other loaders read others, see ``check``
            hf["taps"] = taps  # the ids leave open what they count
        is_first = taps[0] == 2 and not config.is_parallel
        # SGLang counts outputs of layers if the first id is 1, and drafts with none for P-EAGLE.
        ids = [tap - 1 for tap in taps] if is_first else taps
        hf["eagle_config"] |= {_IDS: ids, _USES_IDS: True}
        return hf


def _algorithm(config: EagleConfig | type[EagleConfig]) -> str:
    """The ``speculators_model_type``, and the algorithm's name there."""
    return "peagle" if config.is_parallel else "eagle3"


EAGLE_FORMATS = EagleFormats()
