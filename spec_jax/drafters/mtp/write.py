"""Writes MTP modules in the layouts of DeepSeek-V3, Qwen3-Next and MiMo."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spec_jax.drafters.mtp.layout import SAID, SAID_FIELDS, Layout, make_layout, modules_config
from spec_jax.drafters.mtp.model import MtpConfig, check_mtp, mtp_table
from spec_jax.errors import ConfigError
from spec_jax.models.checkpoint import as_stored
from spec_jax.models.families import AnyConfig, family_of
from spec_jax.models.files import write_json, write_once
from spec_jax.models.tensors import on_host, save_tensors


def write_mtp(
    directory: str | pathlib.Path,
    config: MtpConfig,
    params: dict[str, dict[str, jax.Array]],
    *,
    target_config: AnyConfig,
    layout: str | None = None,
    dtype: DTypeLike | None = None,
) -> None:
    """Writes a directory that ``read_mtp`` reads as the same modules.

    Layers of DeepSeek-V3 and Qwen3-Next are written under their families' names. Layers of
    Llama, Qwen2 and Qwen3 get MiMo's names where the hidden state is joined first and
    DeepSeek's where the embedding is, since that order goes with the names. Servers know MiMo's
    names with a Qwen2 layer alone: ask for ``layout="MiMo"`` to be read by them.

    Where an explicit layout has the other order, the halves of the joining map change places:
    what is read back computes the same, and its ``order`` is the layout's. ``taps``,
    ``protocol`` and ``recycles_normed`` are said under a key of ours, which servers do not read.
    Files appear under their final names only when they are whole.

    Args:
      directory: a directory for the modules alone, created if absent; its files are overwritten.
      config: the modules'.
      params: their weights.
      target_config: the config of the model that they draft for.
      layout: "DeepSeek", "Qwen3-Next" or "MiMo"; by default what the layer and order imply.
      dtype: the dtype to store; by default the weights' own. A router's bias stays float32.

    Raises:
      ConfigError: the layout cannot express something of the modules'.
      WeightsError: a weight is missing or misshapen.
    """
    directory = pathlib.Path(directory)
    L = target_config.num_hidden_layers
    form = make_layout(_implied(config, L) if layout is None else layout, L)
    for message in _objections(config, form, target_config):
        raise ConfigError(message)
    check_mtp(config, params)
    dtype = jnp.dtype(params["0"]["fc"].dtype if dtype is None else dtype)
    tensors: dict[str, np.ndarray] = {}
    for i in range(config.num_modules):
        tensors |= _module(config, params[str(i)], form, i, dtype)
    hf = _config_json(config, form, L)
    read = modules_config(hf, form, config.num_modules, target_config, {}, [])
    ends = {name: getattr(config, name) for name in ("has_own_embed", "has_own_head")}
    if dataclasses.replace(read, **ends) != dataclasses.replace(config, order=form.order):
        raise ConfigError(f"the layer {config.layer} would be read as {read.layer}")
    save_tensors(directory, [tensors.items()])
    hf |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    write_once(lambda: write_json(directory / "config.json", hf))


def _implied(config: MtpConfig, num_layers: int) -> str:
    """The layout of the layer's family that joins in the modules' order, or else its first."""
    names = family_of(config.layer).mtp_layouts
    if not names:
        raise ConfigError(f"no layout is known for MTP modules of {type(config.layer).__name__}")
    return next((n for n in names if make_layout(n, num_layers).order == config.order), names[0])


def _objections(config: MtpConfig, form: Layout, target: AnyConfig) -> Iterator[str]:
    """Yields what a layout cannot express, or its loaders get wrong."""
    known = family_of(config.layer).mtp_layouts
    if form.name not in known:
        kind = type(config.layer).__name__
        yield f"a layer of {kind} has no place in the layout {form.name}; use {' or '.join(known)}"
    for what, ours, theirs in (
        ("width", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.target_vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            yield f"the modules are for a target of {what} {ours}; this one has {theirs}"
    if config.has_zero_centred_norms != form.is_zero_centred:
        yield (
            f"has_zero_centred_norms is {config.has_zero_centred_norms}; loaders of {form.name} "
            f"take it for {form.is_zero_centred}"
        )
    if form.name == "Qwen3-Next" and config.num_modules > 1:
        yield f"num_modules is {config.num_modules}; the layout {form.name} names one"
    if form.name != "DeepSeek" and (config.has_own_embed or config.has_own_head):
        yield (
            f"has_own_embed or has_own_head is True; modules in the layout {form.name} share the "
            "target's"
        )


def _module(config: MtpConfig, params, form: Layout, index: int, dtype) -> dict[str, np.ndarray]:
    """The tensors of one module by their names in the file."""
    tensors = {}
    for name, spec in mtp_table(config).items():
        own_dtype = jnp.float32 if name == "router_bias" else dtype
        array = on_host(params[name])
        if name == "fc" and config.order != form.order:
            array = np.roll(array, config.layer.hidden_size, axis=0)
        parts = enumerate(array) if "{e}" in spec.hf_name else [(0, array)]
        for expert, part in parts:
            tensors[form.tensor(name, spec, index, expert)] = as_stored(part, spec, own_dtype)
    return tensors


def _config_json(config: MtpConfig, form: Layout, num_layers: int) -> dict[str, Any]:
    """The part of the target's config.json that describes the modules."""
    hf = config.layer.to_hf()
    hf = config.layer.rope.spellings() | hf | {
        "num_hidden_layers": num_layers, "num_nextn_predict_layers": config.num_modules,
        SAID: {name: getattr(config, name) for name in SAID_FIELDS},
    }  # fmt: skip
    if form.name == "MiMo" and hf["model_type"] == "qwen2":
        hf |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    return hf
