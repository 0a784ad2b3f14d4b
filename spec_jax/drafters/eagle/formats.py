"""The checkpoint formats of EAGLE heads: how config.json states a head, for reading and writing.

The same key means different things in different projects, and some keys are left out. ``FORMATS``,
``OPTIONS`` and ``DOUBTS`` hold what differs. Reading appends a note for every choice that a file
leaves open; writing leaves none open, and refuses what a format's loaders would read as something
else. Three keys are used by this project alone: ``own_embed``; ``taps``, the states before the
layers of these numbers; and ``max_draft`` of P-EAGLE.

Source: the loaders of SafeAILab/EAGLE, SpecForge, SGLang, vLLM and vllm-project/speculators 0.9.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from spec_jax.drafters.common.formats import check_target, speculators_config
from spec_jax.drafters.eagle.model import EagleConfig, PEagleConfig, head_table
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.checks import is_integer, require, shown, stated_flag, stated_object
from spec_jax.models.config import ModelConfig, check_sees_all, with_attention
from spec_jax.models.params import flat_table
from spec_jax.models.specs import ParamSpec

EAGLE_1 = "EAGLE-1"
EAGLE_3 = "EAGLE-3"
SPECFORGE = "SpecForge"
SPECULATORS = "speculators"
_LAYER = "transformer_layer_config"
_IDS = "eagle_aux_hidden_state_layer_ids"
_USES_IDS = "use_aux_hidden_state"
_MASK_IDS = ("mask_token_id", "ptd_token_id", "pard_token")  # of speculators, vLLM, and PARD


class EagleFormat(NamedTuple):
    """A project's convention for the files of a head.

    Attributes:
      version: the version of EAGLE.
      prefix: how the names of the layer's tensors begin.
      architecture: in config.json; None means the architecture of the layer's family.
      parallel: the same of a P-EAGLE head, whose first layer is "layers.0."; None: it has none.
    """

    version: int
    prefix: str
    architecture: str | None = None
    parallel: str | None = None


FORMATS = {  # of each version, the preferred one first
    EAGLE_1: EagleFormat(1, "layers.0."),
    SPECFORGE: EagleFormat(3, "midlayer.", "LlamaForCausalLMEagle3", "PEagleDraftModel"),
    EAGLE_3: EagleFormat(3, "midlayer."),
    SPECULATORS: EagleFormat(3, "layers.0.", "Eagle3Speculator", "PEagleSpeculator"),
}


class Option(NamedTuple):
    """How config.json states an option of ``EagleConfig``, at its top or in ``eagle_config``.

    Attributes:
      key: its key.
      versions: the versions of EAGLE that have it.
      tensor: the tensor that shows that it is on, where the key is absent.
    """

    key: str
    versions: tuple[int, ...] = (3,)
    tensor: str | None = None


OPTIONS = {
    "fc_bias": Option("bias", versions=(1, 3)),
    "norm_before_residual": Option("norm_before_residual"),
    "norm_before_fc": Option("norm_before_fc", tensor="input_norm.weight"),
    "fc_norm": Option("fc_norm", tensor="fc_norm.0.weight"),
    "norm_output": Option("norm_output"),
    "own_embed": Option("own_embed", versions=(1, 3)),
}
# What loaders of a format disagree about, by the key's value; None means an absent key.
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


def formats_of(version: int, is_parallel: bool = False) -> tuple[str, ...]:
    """Returns the names of the formats of a version of EAGLE, the preferred one first.

    Args:
      version: of EAGLE.
      is_parallel: those of P-EAGLE, which extends version 3.
    """

    def fits(fmt):
        return fmt.version == version and (fmt.parallel is not None or not is_parallel)

    return tuple(name for name, fmt in FORMATS.items() if fits(fmt))


def file_names(config: EagleConfig, prefix: str) -> dict[str, tuple[str, ParamSpec]]:
    """Returns the name of each weight in a file, and its declaration, by our dotted name.

    Args:
      config: the head's.
      prefix: of the tensors of the first layer.
    """
    table = flat_table(head_table(config))

    def layer(name):
        return f"{name.rpartition('.')[0]}." if "." in name else prefix

    def stored(name):
        return table[name].hf_name.replace("model.layers.{i}.", layer(name))

    return {name: (stored(name), spec) for name, spec in table.items()}


def prefix_of(config: EagleConfig, format: str) -> str:
    """Returns how the names of the first layer's tensors begin in files of a format."""
    return "layers.0." if config.is_parallel else FORMATS[format].prefix


def has_masks(names: AbstractSet[str]) -> bool:
    """Whether the tensors of these names are those of a P-EAGLE head."""
    return {"fc.weight", "mask_hidden"} <= names


def find_format(hf: Mapping[str, Any], names: set[str]) -> str:
    """Returns the name of the format of a head's directory.

    Args:
      hf: the parsed config.json.
      names: the names of the tensors.

    Raises:
      ConfigError: a head of speculators is no EAGLE head, or a part of config.json is not an
        object.
    """
    for name in ("eagle_config", _LAYER):
        stated_object(hf, name)
    if _LAYER in hf or "speculators_model_type" in hf:
        kind = hf.get("speculators_model_type")
        expected = _model_type(has_masks(names))
        message = f"speculators_model_type {shown(kind)} is not supported; known: {expected!r}"
        require(kind in (None, expected), message)
        return SPECULATORS
    if has_masks(names):
        return SPECFORGE
    if not any(n.startswith("midlayer.") or n.endswith(".hidden_norm.weight") for n in names):
        return EAGLE_1
    architectures = hf.get("architectures")
    specforge = FORMATS[SPECFORGE].architecture
    is_specforge = isinstance(architectures, list) and specforge in architectures
    return SPECFORGE if is_specforge or "eagle_config" in hf else EAGLE_3


def _model_type(is_parallel: bool) -> str:
    """The ``speculators_model_type``, and the algorithm's name there."""
    return "peagle" if is_parallel else "eagle3"


# -------------------------------------------------------------------------------- reading


def check_overrides(overrides: Mapping[str, Any], is_parallel: bool = False) -> None:
    """Raises a ConfigError if an argument instead of config.json has an unknown name or type.

    Args:
      overrides: the arguments.
      is_parallel: of a P-EAGLE head, which has more options.
    """
    known = ("taps", *OPTIONS, *(("mask_token_id", "max_draft") if is_parallel else ()))
    for name, value in overrides.items():
        require(name in known, f"{name} is no option of a head; known: {', '.join(known)}")
        if name in ("mask_token_id", "max_draft"):
            continue  # the config checks them
        expected = "a tuple of layers" if name == "taps" else "True or False"
        is_right = isinstance(value, (tuple, list) if name == "taps" else bool)
        require(is_right, f"{name} is {value!r}; expected {expected}")


def head_config(
    hf: dict, names: set[str], fc_in: int, target: ModelConfig, overrides: dict, notes: list[str]
) -> EagleConfig:
    """Returns the config of a head.

    Args:
      hf: the parsed config.json.
      names: the names of the tensors.
      fc_in: number of input features of ``fc.weight``.
      target: the config of the model that it drafts for.
      overrides: values that take precedence over config.json, see ``check_overrides``.
      notes: a sentence is appended for every choice that config.json leaves open.

    Raises:
      ConfigError: the head is for another target, or is not supported.
      WeightsError: ``fc.weight`` takes other states than config.json names.
    """
    format = find_format(hf, names)
    width = target.hidden_size
    version = FORMATS[format].version
    layer = _layer(hf, format, names, target, notes)
    is_narrow = layer.hidden_size != width
    is_parallel = has_masks(names)
    options = {name: value for name, value in overrides.items() if name != "taps"}
    notes += [f"{name} is {value}: the caller says so." for name, value in options.items()]
    has_embed = is_narrow or is_parallel and "embed_tokens.weight" in names
    defaults = {"fc_bias": version == 1, "own_embed": version == 3 and has_embed}
    for name, (key, versions, tensor) in OPTIONS.items():
        if name in overrides or version not in versions:
            continue
        stated = _stated(hf, key)
        options[name] = stated_flag({key: stated}, key, defaults.get(name, tensor in names))
        if stated is None and tensor in names:
            notes.append(f"config.json does not say {key}; it is on, since there is {tensor}.")
        if (format, key, stated) in DOUBTS:
            notes.append(DOUBTS[format, key, stated])
    taps = _taps(hf, format, target, overrides, notes)
    if version == 3 and fc_in != len(taps) * width:
        states = f"{fc_in // width}" if fc_in % width == 0 else f"{fc_in / width:.2f}"
        raise WeightsError(
            f"fc.weight takes {fc_in} features, {states} states of the target's width {width}; "
            f"taps {taps} are {len(taps)} states"
        )
    if not is_parallel:
        return EagleConfig(version, layer, width, target.vocab_size, taps, **options)
    options = _parallel_options(hf, notes, overrides) | options
    return PEagleConfig(version, layer, width, target.vocab_size, taps, **options)


def _parallel_options(hf, notes, overrides) -> dict[str, Any]:
    """The mask and the largest K of a P-EAGLE head."""
    options = {}
    if "mask_token_id" not in overrides:
        stated = {key: _stated(hf, key) for key in _MASK_IDS}
        keys = ", ".join(_MASK_IDS)
        for key, value in stated.items():
            is_id = value is None or is_integer(value)
            require(is_id, f"{key} is {shown(value)}; expected an integer")
        ids = {value for value in stated.values() if value is not None}
        require(len(ids) > 0, f"config.json has none of {keys}; pass mask_token_id=...")
        require(len(ids) == 1, f"config.json states several masks: {stated}")
        options["mask_token_id"] = ids.pop()
    if "max_draft" not in overrides:
        options["max_draft"] = hf.get("max_draft", _trained_draft(hf))
        count = options["max_draft"]
        if count is None:
            notes.append("config.json does not say how many drafts the head was trained for.")
        elif "max_draft" not in hf:
            notes.append(f"max_draft is {count}, the drafts that speculators_config proposes.")
    return options


def _trained_draft(hf) -> Any:
    """K of the first proposal of ``speculators_config``, which its trainer sets to what it trains.

    None where there is none.
    """
    methods = stated_object(hf, "speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    return first.get("speculative_tokens") if isinstance(first, dict) else None


def _stated(hf: Mapping[str, Any], key: str) -> Any:
    """The value of a key at the top level or else in ``eagle_config``; None if it is in neither."""
    value = hf.get(key)
    return stated_object(hf, "eagle_config").get(key) if value is None else value


def _layer(hf, format, names, target, notes) -> ModelConfig:
    layer = dict(stated_object(hf, _LAYER) if format == SPECULATORS else hf)
    width = _stated(hf, "target_hidden_size")
    width_key = "target_hidden_size"
    if width is None:
        width = layer.get("hidden_size")
        width_key = "hidden_size"
    for what, key, value, expected in (
        ("vocabulary", "vocab_size", layer.get("vocab_size"), target.vocab_size),
        ("width", width_key, width, target.hidden_size),
    ):
        check_target(what, key, value, expected)
    check_sees_all(layer, is_head=True)
    size = _stated(hf, "draft_vocab_size")
    if format != EAGLE_1 and size is not None:
        is_size = is_integer(size) and size > 0
        require(is_size, f"draft_vocab_size is {shown(size)}; expected a positive integer")
        layer["vocab_size"] = size
    if format != SPECULATORS:
        # Elsewhere a head's layer is Llama's, with biases on q, k and v where config.json says so.
        # Keys that are left out are Llama's too.
        kind = "qwen2" if stated_flag(layer, "qkv_bias") else "llama"
        length = ModelConfig.max_position_embeddings
        layer = {"num_key_value_heads": None, "max_position_embeddings": length} | layer
        if layer.get("model_type") not in (None, kind):
            stated = shown(layer["model_type"])
            notes.append(f"config.json says model_type {stated}; the layer is read as {kind}.")
        layer["model_type"] = kind
        has_biases = any(name.endswith("q_proj.bias") for name in names)
        if stated_flag(layer, "attention_bias") and not has_biases:
            layer["attention_bias"] = False
            notes.append("config.json says attention_bias; it is off, as there is no q_proj.bias.")
    rope = (layer, *(stated_object(layer, name) for name in ("rope_parameters", "rope_scaling")))
    if all(stated.get("rope_theta") is None for stated in rope):
        notes.append("config.json has no rope_theta; 10000 is assumed, whatever the target's is.")
    return ModelConfig.from_hf({**layer, "tie_word_embeddings": False})


def _taps(hf, format, target, overrides, notes) -> tuple[int, ...]:
    L = target.num_hidden_layers
    stated = _stated(hf, "taps")
    if "taps" in overrides:
        taps = tuple(overrides["taps"])
        notes.append(f"taps are {taps}: the caller says so.")
    elif format == EAGLE_1:
        taps = (L + 1,)
    elif not stated_flag({_USES_IDS: _stated(hf, _USES_IDS)}, _USES_IDS, True):
        raise ConfigError(f"{_USES_IDS} is false; only heads of tapped states are known")
    elif stated is not None:
        is_list = isinstance(stated, list)
        require(is_list, f"taps is {shown(stated)} in config.json; expected a list of layers")
        taps = tuple(stated)
        notes.append(f"taps are {taps}: config.json says so.")
    else:
        taps = _taps_of_ids(_stated(hf, _IDS), format, L, notes)
    known = f"a target of {L} layers has 0 to {L}, and {L + 1} after its final norm"
    exist = all(_is_layer(tap, L + 1) for tap in taps)
    require(exist, f"taps {shown(taps)} do not exist: {known}")
    return taps


def _is_layer(value: Any, last: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= last


def _taps_of_ids(ids, format, num_layers, notes) -> tuple[int, ...]:
    """The states before a layer that the ids of config.json mean, or the usual states.

    The project's trainers count outputs of layers or states before them. An id of 1 first is
    the former's usual choice; an id of ``num_layers`` has no layer and proves the latter.
    """
    if not ids:
        taps = low, middle, high = 2, num_layers // 2, num_layers - 3
        message = f"a target of {num_layers} layers is too shallow for the usual taps {taps}"
        message = f"config.json does not say {_IDS}, and {message}; pass taps=..."
        require(low < middle < high, message)
        notes.append(f"config.json does not say {_IDS}; taps are the usual {taps}.")
        return taps
    are_layers = isinstance(ids, list) and all(_is_layer(i, float("inf")) for i in ids)
    require(are_layers, f"{_IDS} is {shown(ids)}; expected a list of layers from 0")
    message = f"{_IDS} is {shown(ids)}; the target has {num_layers} layers: pass taps=..."
    require(max(ids) <= num_layers, message)
    before = tuple(ids)
    after = tuple(i + 1 for i in ids)
    if format != SPECULATORS and ids[0] == 1 and max(ids) < num_layers:
        notes.append(
            f"{_IDS} {ids} begins with 1 and so is read as the outputs of those layers: taps are "
            f"{after}. Pass taps={before} if the ids mean the states before those layers."
        )
        return after
    notes.append(f"{_IDS} {ids} is read as the states before those layers: taps are {before}.")
    if max(ids) < num_layers and (ids[0] == 1 or format == SPECFORGE):
        notes.append(f"Pass taps={after} if the ids mean the outputs of those layers.")
    return before


# -------------------------------------------------------------------------------- writing


def head_json(
    config: EagleConfig, format: str, target: ModelConfig, num_tokens: int, verifier: str | None
) -> dict[str, Any]:
    """Returns the config.json of a head, the inverse of ``head_config``.

    Args:
      config: the head's.
      format: a name in ``FORMATS``.
      target: the config of the model it drafts for.
      num_tokens: K, stated by the format "speculators".
      verifier: the target's name or path, stated by the format "speculators".

    Raises:
      ConfigError: the format cannot express the head's config, or its loaders would read it as
        something else.
    """
    _check_loaders(config, format, target)
    is_speculators = format == SPECULATORS
    is_narrow = _is_narrow(config)
    layer = config.layer.to_hf() | config.layer.rope.spellings()
    (architecture,) = layer.pop("architectures")
    layer |= {"tie_word_embeddings": False, "vocab_size": config.target_vocab_size}
    hf: dict[str, Any] = {"own_embed": config.own_embed}
    if isinstance(config, PEagleConfig):
        hf |= {key: config.mask_token_id for key in _MASK_IDS[:2]}
        hf |= {"parallel_drafting": True, "max_draft": config.max_draft}
    if not is_speculators:
        hf |= layer | {"bias": config.fc_bias}
        hf |= {"qkv_bias": True} if config.layer.model_type == "qwen2" else {}
    own = FORMATS[format].parallel if config.is_parallel else FORMATS[format].architecture
    hf["architectures"] = [own or architecture]
    if is_speculators:
        kind = _model_type(config.is_parallel)
        hf |= {"speculators_model_type": kind, "speculators_version": "0.9.0"}
    if format != EAGLE_1:
        hf["draft_vocab_size"] = config.layer.vocab_size
        # Most loaders ask whether the key is there, not for its value: EAGLE's own then leaves
        # the head without the target's embedding.
        if is_speculators or is_narrow:
            hf["target_hidden_size"] = config.target_hidden_size if is_narrow else None
        norms = {name: getattr(config, name) for name in OPTIONS if "norm" in name}
        if format == SPECFORGE and not config.norm_output:
            del norms["norm_output"]  # see DOUBTS
        ids = {_IDS: list(config.taps)}
        if format == EAGLE_3:
            hf |= norms | ids | {"taps": list(config.taps)}
        elif format == SPECFORGE:
            if config.is_parallel:  # SGLang drafts with none
                hf["taps"] = list(config.taps)
            elif config.taps[0] == 2:  # SGLang counts outputs of layers if the first id is 1
                ids = {_IDS: [tap - 1 for tap in config.taps]}
            hf |= norms | {"eagle_config": ids | {_USES_IDS: True} | norms}
        else:
            num_tokens = getattr(config, "max_draft", None) or num_tokens
            proposal = speculators_config(kind, num_tokens, verifier, target)
            hf |= ids | norms | {_LAYER: layer, "speculators_config": proposal}
    _check_is_read(hf, config, format, target)
    return hf


def _is_narrow(config: EagleConfig) -> bool:
    return config.target_hidden_size != config.layer.hidden_size


def _check_loaders(config: EagleConfig, format: str, target: ModelConfig) -> None:
    """Raises a ConfigError if other loaders of a format misread a config that this one reads."""

    require(format in FORMATS, f"format is {format!r}; known: {', '.join(FORMATS)}")
    layer = config.layer
    (version, *_) = FORMATS[format]
    message = f"{format} is for heads of version {version}; this one is of {config.version}"
    require(config.version == version, message)
    is_known = FORMATS[format].parallel is not None or not config.is_parallel
    require(is_known, f"{format} has no P-EAGLE heads; known: {', '.join(formats_of(3, True))}")
    last = target.num_hidden_layers + 1
    taps = config.taps
    message = f"taps {taps} hold {last}, the state after the final norm, unknown to loaders"
    require(version == 1 or last not in taps, message)
    if format == SPECFORGE:
        has_biases = layer.attention_bias or layer.mlp_bias
        advice = "use EAGLE-3 or speculators"
        require(not has_biases, f"the layer has biases, which SGLang leaves out; {advice}")
        message = f"own_embed is True, which SGLang ignores at the target's width; {advice}"
        may_own = _is_narrow(config) or config.is_parallel
        require(may_own or not config.own_embed, message)
        has_norms = config.is_parallel and (config.fc_norm or config.norm_before_fc)
        require(not has_norms, "SpecForge's P-EAGLE has no norms before fc; use speculators")
    if format == SPECULATORS:
        is_known = layer.model_type in ("llama", "qwen3")
        require(is_known, f"{format} knows layers of llama and qwen3, not {layer.model_type!r}")


def _check_is_read(hf, config: EagleConfig, format: str, target: ModelConfig) -> None:
    """Raises a ConfigError if a config.json is read as another config than it was written from."""
    table = file_names(config, prefix_of(config, format))
    names = {name for name, _ in table.values()}
    read = head_config(hf, names, table["fc"][1].shape[0], target, {}, [])
    layer = dataclasses.replace(config.layer, tie_word_embeddings=False)  # a head ties nothing
    layer = with_attention(layer, "auto")  # no file states it
    expected = dataclasses.replace(config, layer=layer)
    read = dataclasses.replace(read, layer=with_attention(read.layer, "auto"))
    for prefix, a, b in (("layer.", layer, read.layer), ("", expected, read)):
        for field in dataclasses.fields(a):
            value = getattr(a, field.name)
            read_value = getattr(b, field.name)
            if value != read_value:
                raise ConfigError(
                    f"{prefix}{field.name} is {value!r}; in the format {format} it would be read "
                    f"as {read_value!r}; known formats: "
                    f"{', '.join(formats_of(config.version, config.is_parallel))}"
                )
