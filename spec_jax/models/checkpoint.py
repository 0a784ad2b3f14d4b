"""Reads and writes Hugging Face model directories.

Reading is strict: a tensor that is missing, unexpected or of the wrong shape is an error that
names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.families import AnyConfig, family_of, read_config
from spec_jax.models.params import Params, assemble, outer_table, walk
from spec_jax.models.specs import ParamSpec
from spec_jax.models.tokenizer import Tokenizer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DERIVED = ".rotary_emb.inv_freq"  # a buffer that old Llama checkpoints carry along
_MODULES = ("mtp.", "model.mtp_layers.")  # what ``load_mtp`` reads from the same directory
_FLOAT8 = {
    "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": jnp.dtype(jnp.float8_e5m2),
}


class Shards:
    """The tensors of a directory's safetensors files, each read when it is asked for.

    Args:
      directory: holds one file, or shards and their index.
      stack: closes the files.

    Raises:
      WeightsError: there is no such file, or one cannot be read.
    """

    def __init__(self, directory: pathlib.Path, stack: contextlib.ExitStack):
        self._where: dict[str, pathlib.Path] = {}
        self._files = {}
        for file in self._list(directory):
            try:
                self._files[file] = stack.enter_context(safe_open(file, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{file} cannot be read as safetensors: {error}") from error
            self._where.update(dict.fromkeys(self._files[file].keys(), file))

    @staticmethod
    def _list(directory: pathlib.Path) -> list[pathlib.Path]:
        if (directory / INDEX).exists():
            try:
                index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
                names = sorted(set(index["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise WeightsError(f"{directory / INDEX} is no shard index: {error!r}") from error
            return [directory / name for name in names]
        if (directory / SINGLE).exists():
            return [directory / SINGLE]
        raise WeightsError(f"{directory} has neither {SINGLE} nor {INDEX}")

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._where)

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as it is stored."""
        file = self._where[name]
        if self._files[file].get_slice(name).get_dtype() in _FLOAT8:
            return _read_float8(file, name)
        return self._files[file].get_tensor(name)


def _read_float8(file: pathlib.Path, name: str) -> np.ndarray:
    """Reads a tensor of 8-bit floats, which safetensors can write from NumPy but not read to it."""
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        entry = json.loads(stream.read(size))[name]
        begin, end = entry["data_offsets"]
        stream.seek(8 + size + begin)
        content = stream.read(end - begin)
    return np.frombuffer(content, _FLOAT8[entry["dtype"]]).reshape(entry["shape"])


class StrictReader:
    """Takes the tensors of a checkpoint one by one and keeps track of those that are left.

    Args:
      directory: for messages.
      source: ``Shards``, or another object with ``names() -> set[str]`` and
        ``read(name) -> np.ndarray``.

    Attributes:
      left: names of the tensors that nobody has taken yet.
    """

    def __init__(self, directory: pathlib.Path, source: Any):
        self._directory, self._source = directory, source
        self.left = {name for name in source.names() if not name.endswith(_DERIVED)}

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as it is stored, and leaves it.

        Raises:
          WeightsError: it is missing.
        """
        if name not in self.left:
            raise WeightsError(f"{self._directory}: tensor {name} is missing")
        return self._source.read(name)

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a tensor as it is stored, and removes it from those left.

        Args:
          name: of the tensor.
          shape: the shape that it must have.

        Raises:
          WeightsError: it is missing, has another shape, or holds values that are not finite.
        """
        array = self.read(name)
        if array.shape != shape:
            raise WeightsError(
                f"{self._directory}: tensor {name} has shape {list(array.shape)}; "
                f"config.json asks for {list(shape)}"
            )
        if not np.isfinite(array).all():
            raise WeightsError(f"{self._directory}: tensor {name} holds NaN or infinite values")
        self.left.discard(name)
        return array

    def finish(self) -> None:
        """Checks that no tensor is left.

        Raises:
          WeightsError: some are left; the message names them.
        """
        if self.left:
            names = ", ".join(sorted(self.left)[:8])
            raise WeightsError(f"{self._directory}: unexpected tensors {names}")


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


def save_tensors(directory: pathlib.Path, shards: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Writes one file of tensors, or several and their index. Each is written completely or not.

    Args:
      directory: created if it does not exist.
      shards: the tensors of each file, by name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards):
        save_file(dict(shard), directory / f"{name}.partial", metadata={"format": "pt"})
        os.replace(directory / f"{name}.partial", directory / name)
    # A directory that is overwritten must not keep the entry point of the other layout.
    (directory / (INDEX if len(shards) == 1 else SINGLE)).unlink(missing_ok=True)
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        size = sum(array.nbytes for shard in shards for array in shard.values())
        write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": where})


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file, completely or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
