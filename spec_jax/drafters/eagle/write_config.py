"""Writes the config.json of a head in the terms of each project, the inverse of ``read_config``.

Everything that a loader would otherwise guess is written, and what a layout's loaders would read as
something else is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.eagle.read_config import (
    AUX,
    EAGLE_1,
    EAGLE_3,
    SPECFORGE,
    SPECULATORS,
    find_layout,
    head_config,
)
from spec_jax.errors import ConfigError
from spec_jax.models.config import ModelConfig

LAYOUTS = (EAGLE_1, EAGLE_3, SPECFORGE, SPECULATORS)
_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SPECULATORS_VERSION = "0.9.0"


def head_json(
    config: EagleConfig, layout: str, target: ModelConfig, *, num_speculative_tokens: int,
    verifier: str | None,
) -> dict[str, Any]:
    """Returns the config.json of a head.

    Args:
      config: the head's.
      layout: one of ``LAYOUTS``.
      target: the config of the model it drafts for.
      num_speculative_tokens: drafted a round; speculators' layout says it.
      verifier: the target's name or path; speculators' layout says it.

    Raises:
      ConfigError: the layout cannot express something of the head's, or its loaders would read it
        as something else.
    """  # fmt: skip
    for message in _objections(config, layout, target):
        raise ConfigError(message)
    own = {"own_embed": config.own_embed}
    if layout == SPECULATORS:
        return own | {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": _SPECULATORS_VERSION,
            "draft_vocab_size": config.layer.vocab_size,
            "target_hidden_size": _other_width(config),
            AUX: list(config.taps),
            **{name: getattr(config, name) for name in _NORM_FLAGS},
            "transformer_layer_config": _layer(config),
            "speculators_config": _speculators(num_speculative_tokens, verifier, target),
        }
    hf = own | _layer(config) | {"bias": config.fc_bias}
    if config.layer.model_type == "qwen2":
        hf["qkv_bias"] = True
    hf["architectures"] = [config.layer.architectures[config.layer.model_type]]
    if layout == EAGLE_1:
        return hf
    hf["draft_vocab_size"] = config.layer.vocab_size
    if _other_width(config) is not None:
        # Loaders ask whether the key is there, not for its value: EAGLE's own then leaves the
        # head without the target's embedding.
        hf["target_hidden_size"] = _other_width(config)
    flags = {name: getattr(config, name) for name in _NORM_FLAGS}
    if layout == EAGLE_3:
        return hf | flags | {AUX: list(config.taps), "taps": list(config.taps)}
    if not config.norm_output:
        # Before September 2026 SpecForge took false for "what is scored is not normalised".
        del flags["norm_output"]
    hf["architectures"] = ["LlamaForCausalLMEagle3"]
    ids = {AUX: _specforge_ids(config.taps), "use_aux_hidden_state": True}
    return hf | flags | {"eagle_config": ids | flags}


def check_is_read(
    hf: dict[str, Any], config: EagleConfig, layout: str, target: ModelConfig,
    names: set[str], fc_in: int,
) -> None:
    """Checks that a head's config.json is read as the config that it was written from.

    Args:
      hf: the config.json.
      config: the head's.
      layout: of ``hf``.
      target: the config of the model it drafts for.
      names: of the tensors beside it.
      fc_in: how many features ``fc.weight`` takes.

    Raises:
      ConfigError: a field would be read as something else; it is named.
    """  # fmt: skip
    found = find_layout(hf, names)
    read = head_config(hf, found, names, fc_in, target, {}, [])
    layer = dataclasses.replace(config.layer, tie_word_embeddings=False)  # a head ties nothing
    expected = dataclasses.replace(config, layer=layer)
    for what, a, b in (("", expected, read), ("layer.", expected.layer, read.layer)):
        for field in dataclasses.fields(a):
            ours, theirs = getattr(a, field.name), getattr(b, field.name)
            if ours != theirs and field.name != "layer":
                raise ConfigError(
                    f"{what}{field.name} is {ours!r}; in the layout {layout} it would be read as "
                    f"{theirs!r}"
                )


def _objections(config: EagleConfig, layout: str, target: ModelConfig) -> Iterator[str]:
    """Yields what a layout cannot express, or its loaders get wrong."""
    if layout not in LAYOUTS:
        yield f"layout is {layout!r}; known: {', '.join(LAYOUTS)}"
    version = 1 if layout == EAGLE_1 else 3
    if config.version != version:
        yield (
            f"a head of version {config.version} has no place in the layout {layout}; expected "
            f"version {version}"
        )
    after_norm = target.num_hidden_layers + 1
    if config.version == 3 and after_norm in config.taps:
        yield (
            f"taps {config.taps} hold {after_norm}, the state after the final norm; loaders "
            "know the states between the layers alone"
        )
    layer, others = config.layer, "use the layout EAGLE-3 or speculators"
    if layout == SPECULATORS and layer.model_type not in ("llama", "qwen3"):
        yield f"a layer of {layer.model_type!r} is not known to speculators; known: llama, qwen3"
    if layout == SPECULATORS and config.fc_bias:
        yield "fc_bias is True; speculators joins states without a bias"
    if layout == SPECFORGE and config.taps[0] == 1:
        yield f"taps {config.taps} begin with 1, after which SGLang adds 1 to each; {others}"
    if layout == SPECFORGE and (layer.attention_bias or layer.mlp_bias):
        yield f"the layer has biases, which SGLang leaves out; {others}"
    if layout == SPECFORGE and config.own_embed and _other_width(config) is None:
        yield (
            "own_embed is True and the head as wide as its target, of which SGLang then takes the "
            f"embedding; {others}"
        )


def _other_width(config: EagleConfig) -> int | None:
    width = config.target_hidden_size
    return None if width == config.layer.hidden_size else width


def _layer(config: EagleConfig) -> dict[str, Any]:
    hf = config.layer.to_hf() | config.layer.rope.spellings()
    del hf["architectures"]
    return hf | {"tie_word_embeddings": False, "vocab_size": config.target_vocab_size}


def _specforge_ids(taps: tuple[int, ...]) -> list[int]:
    """Outputs of layers, which SGLang tells from the states before them by a first id of 1."""
    return [tap - 1 for tap in taps] if taps[0] == 2 else list(taps)


def _speculators(num_tokens: int, verifier: str | None, target: ModelConfig) -> dict[str, Any]:
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ConfigError(f"num_speculative_tokens is {num_tokens!r}; expected 1 or more")
    if not isinstance(verifier, str):
        raise ConfigError(f"verifier is {verifier!r}; expected the target's name or path")
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {
            "name_or_path": verifier, "architectures": [target.architectures[target.model_type]],
        },
    }  # fmt: skip
