"""Reads and writes Hugging Face model directories: config, weights and tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.families import AnyConfig, family_of, read_config
from spec_jax.models.files import write_json
from spec_jax.models.params import Params, assemble, outer_table, walk
from spec_jax.models.specs import ParamSpec
from spec_jax.models.tensors import Shards, StrictReader, save_tensors
from spec_jax.models.tokenizer import Tokenizer

_MODULES = ("mtp.", "model.mtp_layers.")  # what ``load_mtp`` reads from the same directory


def load_pretrained(
    directory: str | pathlib.Path,
    dtype: DTypeLike = jnp.float32,
    *,
    scan_layers: bool = False,
) -> tuple[Params, AnyConfig]:
    """Loads a model directory of a registered family, from one safetensors file or many shards.

    MTP modules in the directory are not read.

    Args:
      directory: holds config.json and the weights.
      dtype: of the returned parameters.
      scan_layers: stack the layers, see ``ModelConfig``.

    Returns:
      The parameters and their config.

    Raises:
      WeightsError: a file cannot be read or is truncated; or a tensor is missing, unexpected, not
        finite, or of another shape than config.json asks for. The message names the tensor.
      ConfigError: the family is not supported, or its layers cannot be stacked.
    """
    directory = pathlib.Path(directory)
    config = read_config(directory)
    if family_of(config).can_scan:
        config = dataclasses.replace(config, scan_layers=scan_layers)
    elif scan_layers:
        raise ConfigError(f"scan_layers: the layers of {directory} are never stacked")
    with contextlib.ExitStack() as stack:
        shards = Shards(directory, stack)
        tensors = StrictReader(directory, shards)

        def leaf(spec, layer):
            shape = spec.shape[::-1] if spec.is_linear else spec.shape
            array = tensors.take(spec.hf_name.format(i=layer), shape)
            return jnp.asarray(array.T if spec.is_linear else array, dtype)

        params = assemble(config, leaf)
        if config.tie_word_embeddings and "lm_head.weight" in tensors.left:
            # Some tied checkpoints store the head again; it must then be the embedding.
            shape = (config.vocab_size, config.hidden_size)
            head = tensors.take("lm_head.weight", shape)
            embed = outer_table(config)["embed"].hf_name
            if not np.array_equal(head, shards.read(embed)):
                raise WeightsError(
                    f"{directory}: config.json says tie_word_embeddings, yet lm_head.weight "
                    f"differs from {embed}"
                )
        tensors.left -= {name for name in tensors.left if name.startswith(_MODULES)}
        tensors.finish()
    return params, config


def save_pretrained(
    directory: str | pathlib.Path,
    params: Params,
    config: AnyConfig,
    tokenizer: Tokenizer | None = None,
    dtype: DTypeLike = "float32",
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes a directory that transformers and ``load_pretrained`` load as the same model.

    Files appear under their final names only when they are complete.

    Args:
      directory: created if it does not exist.
      params: the weights.
      config: their config.
      tokenizer: is saved beside them; None for no tokenizer.
      dtype: of the stored weights, "float32" or "bfloat16".
      max_shard_bytes: larger models are split into shards with an index.
    """
    directory = pathlib.Path(directory)
    dtype = jnp.dtype(dtype)
    shards: list[dict[str, np.ndarray]] = [{}]
    sizes = [0]
    for spec, layer, array in walk(config, params):
        array = as_stored(array, spec, dtype)
        if sizes[-1] and sizes[-1] + array.nbytes > max_shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][spec.hf_name.format(i=layer)] = array
        sizes[-1] += array.nbytes

    save_tensors(directory, shards)
    hf = {**config.to_hf(), "dtype": dtype.name}
    write_json(directory / "config.json", hf)
    generation = {n: hf[n] for n in ("bos_token_id", "eos_token_id") if hf[n] is not None}
    write_json(directory / "generation_config.json", generation)
    if tokenizer is not None:
        tokenizer.save(directory)


def as_stored(array: ArrayLike, spec: ParamSpec, dtype: DTypeLike) -> np.ndarray:
    """Returns a weight as files hold it, with linear maps as ``[out, in]``.

    Args:
      array: the weight as it is declared, or the part of one expert.
      spec: its declaration.
      dtype: of the result.
    """
    array = np.asarray(array).astype(jnp.dtype(dtype))
    # safetensors writes memory as it lies.
    return np.ascontiguousarray(array.T if spec.is_linear else array)
