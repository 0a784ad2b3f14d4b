"""Writes EAGLE heads in the layouts of EAGLE, SpecForge and vllm-project/speculators."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spec_jax.drafters.common.vocabulary import check_offsets
from spec_jax.drafters.eagle.model import EagleConfig, check_head, head_table
from spec_jax.drafters.eagle.read import EMBED, file_name
from spec_jax.drafters.eagle.read_config import EAGLE_3, SPECFORGE, SPECULATORS
from spec_jax.drafters.eagle.write_config import check_is_read, head_json
from spec_jax.errors import ConfigError
from spec_jax.models.checkpoint import as_stored
from spec_jax.models.config import ModelConfig
from spec_jax.models.files import write_json, write_once
from spec_jax.models.params import check_weights
from spec_jax.models.specs import ParamSpec
from spec_jax.models.tensors import on_host, save_tensors


def write_head(
    directory: str | pathlib.Path,
    config: EagleConfig,
    params: dict[str, jax.Array],
    *,
    layout: str,
    target_config: ModelConfig,
    target_embed: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    num_speculative_tokens: int = 3,
    verifier: str | None = None,
) -> None:
    """Writes a directory that the layout's loaders and ``read_head`` read as the same head.

    config.json leaves nothing open: it has every norm, the tapped states in the numbering of the
    layout, and both spellings of the rotary embedding. EAGLE's own loader knows none of the norms
    that are optional in ``EagleConfig``, no bias, and no states other than the usual three; the
    layout "EAGLE-3" writes them for other loaders. Files get their final names when they are
    complete.

    Args:
      directory: a directory for the head alone, created if absent; its files are overwritten.
      config: the head's.
      params: its weights.
      layout: "EAGLE-1", "EAGLE-3", "SpecForge" (which SGLang loads too) or "speculators".
      target_config: the config of the model it drafts for.
      target_embed: dtype[V,D], written as the embedding of a head that shares the target's. The
        layout "speculators" needs it; "SpecForge" leaves it out, as its loaders always share.
      dtype: the dtype to store, "float32", "bfloat16" or "float16"; by default the weights' own.
      num_speculative_tokens: tokens drafted a round, for the layout "speculators".
      verifier: the target's name or path for the layout "speculators", which needs it, as its
        package and vLLM load the target.

    Raises:
      ConfigError: the layout cannot express something of the head's, or its loaders would read it
        as something else.
      WeightsError: a weight is missing or misshapen, or ``d2t`` is no table of offsets.
    """
    directory = pathlib.Path(directory)
    hf = head_json(
        config, layout, target_config, num_speculative_tokens=num_speculative_tokens,
        verifier=verifier,
    )  # fmt: skip
    if layout == SPECULATORS and not config.own_embed and target_embed is None:
        # Its package may keep unset memory where a file has no embedding.
        raise ConfigError("target_embed is None; speculators takes the embedding from the file")
    check_head(config, params)
    dtype = jnp.dtype(params["fc"].dtype if dtype is None else dtype)
    tensors = _tensors(config, params, layout, dtype)
    if target_embed is not None and not config.own_embed and layout != SPECFORGE:
        shape = (config.target_vocab_size, config.layer.hidden_size)
        check_weights({"target_embed": target_embed}, {"target_embed": shape}, "")
        tensors[EMBED] = as_stored(target_embed, ParamSpec(shape, (), EMBED), dtype)
    fc_in = params["fc"].shape[0]
    check_is_read(hf, config, layout, target_config, set(tensors), fc_in)
    save_tensors(directory, [tensors.items()])
    names = ["dtype"] if layout == SPECULATORS else ["dtype", "torch_dtype"]
    hf |= dict.fromkeys(names, dtype.name)
    write_once(lambda: write_json(directory / "config.json", hf))


def _tensors(config: EagleConfig, params, layout: str, dtype) -> dict[str, np.ndarray]:
    layer = "midlayer." if layout in (EAGLE_3, SPECFORGE) else "layers.0."
    tensors = {
        file_name(name, spec, layer): as_stored(params[name], spec, dtype)
        for name, spec in head_table(config).items()
    }
    U, V = config.layer.vocab_size, config.target_vocab_size
    # SpecForge's own converter asks for the tables where the vocabularies are equal, too.
    if config.version == 1 or (U == V and layout != SPECFORGE):
        return tensors
    return tensors | _vocabulary(params, U, V)


def _vocabulary(params: dict[str, Any], U: int, V: int) -> dict[str, np.ndarray]:
    """Both tables: offsets from draft ids to the target's, and which target ids can be drafted."""
    d2t = on_host(params.get("d2t", np.zeros(U, np.int32)))
    kept = np.isin(np.arange(V), np.arange(U) + d2t)
    return {"d2t": check_offsets(d2t, kept, V).astype(np.int64), "t2d": kept}
