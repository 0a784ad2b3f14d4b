"""Reads and writes the tensors of a checkpoint directory, safetensors or a file of torch.

Reading is strict: a tensor that is missing, unexpected or of the wrong shape is an error that
names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike, DTypeLike
from safetensors.numpy import save_file

from spec_jax import processes
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models import gguf
from spec_jax.models.files import foreign_files, write_json
from spec_jax.models.parts import Part, Tensor, stack
from spec_jax.models.pickles import PICKLE, PICKLE_INDEX, open_pickles
from spec_jax.models.shards import INDEX, SINGLE, indexed_files, open_shards, weight_files
from spec_jax.models.specs import ParamSpec

T = TypeVar("T")
_DERIVED = ".rotary_emb.inv_freq"  # a buffer that old Llama checkpoints carry along


class StrictReader:
    """Takes the tensors of a checkpoint one by one and keeps track of those that are left.

    Args:
      directory: for messages.
      tensors: by name.

    Attributes:
      left: the tensors that have not been taken yet.
      sizes: the integers of config.json by name, for messages about shapes.
    """

    def __init__(self, directory: pathlib.Path, tensors: Mapping[str, Tensor]):
        self._directory = directory
        self.sizes: Mapping[str, int] = {}
        self.left = dict(tensors)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as it is stored, and leaves it. Nothing of it is read yet.

        Reading a part of it raises WeightsError if it holds values that are not finite.

        Raises:
          WeightsError: it is missing, or has a dtype that is not read.
        """
        if name not in self.left:
            raise WeightsError(f"{self._directory}: tensor {name} is missing{self._near(name)}")
        tensor = self.left[name]
        if tensor.dtype.kind == "V" and tensor.dtype.metadata:  # bfloat16 is of that kind, too
            stated = tensor.dtype.metadata["stated"]
            raise WeightsError(
                f"{self._directory}: tensor {name} has dtype {stated}, not known here"
            )

        def read(part: Part) -> np.ndarray:
            array = tensor.read(part)
            if not np.isfinite(array).all():
                raise WeightsError(f"{self._directory}: tensor {name} holds NaN or infinite values")
            return array

        return dataclasses.replace(tensor, read=read)

    def _near(self, name: str) -> str:
        """Returns what stands before the names of this file, more or less than should; or ""."""
        for left in sorted(self.left, key=len):
            if name.endswith(f".{left}"):
                prefix = name.removesuffix(left)
                return (
                    f"; there is {left}: the names lack the prefix {prefix!r}, as those of a model "
                    "that was saved without its output head; save the whole one (in transformers "
                    "AutoModelForCausalLM), or rename the tensors"
                )
            if left.endswith(f".{name}"):
                prefix = left.removesuffix(name)
                return f"; there is {left}: rename the tensors, without the prefix {prefix!r}"
        return ""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor as ``tensor`` does, and removes it from those left.

        Args:
          name: of the tensor.
          shape: the shape that it must have.

        Raises:
          WeightsError: it is missing or has another shape.
        """
        tensor = self.tensor(name)
        if tensor.shape != shape:
            raise WeightsError(
                f"{self._directory}: tensor {name} has shape {list(tensor.shape)}; "
                f"config.json asks for {list(shape)}{self._origin(tensor.shape, shape)}"
            )
        del self.left[name]
        return tensor

    def _origin(self, stored: tuple[int, ...], asked: tuple[int, ...]) -> str:
        """Returns the key of config.json that asks for the first dimension that differs, or ""."""
        size = next((b for a, b in zip(stored, asked) if a != b), None)
        origins = [f"{name} is {value}" for name, value in self.sizes.items() if value == size]
        origins = origins or [
            f"{name} is {value}, times {other} {factor}"
            for (name, value), (other, factor) in itertools.combinations(self.sizes.items(), 2)
            if value * factor == size
        ]
        return f" ({origins[0]})" if len(origins) == 1 else ""

    def weight(self, name: str, spec: ParamSpec, dtype: DTypeLike) -> Tensor:
        """Takes the tensor of a weight, or the tensors of experts, which are stacked.

        Args:
          name: of the tensor, with ``{e}`` for the number of an expert.
          spec: the weight's declaration.
          dtype: of the weight, unless its declaration states another.

        Returns:
          The weight as it is declared, so linear maps are ``[in, out]``.

        Raises:
          WeightsError: it is missing, quantised, or has another shape.
        """
        if "{e}" in name:
            one = spec._replace(shape=spec.shape[1:], axes=spec.axes[1:])
            experts = (name.replace("{e}", str(e)) for e in range(spec.shape[0]))
            return stack([self.weight(expert, one, dtype) for expert in experts])
        stored = self.take(name, spec.shape[::-1] if spec.is_linear else spec.shape)
        if stored.dtype.itemsize == 1 or np.issubdtype(stored.dtype, np.integer):
            raise WeightsError(
                f"{self._directory}: tensor {name} has dtype {stored.dtype.name}: quantised "
                "weights are not read; expected float32, bfloat16 or float16"
            )
        return (stored.T if spec.is_linear else stored).astype(spec.dtype or dtype)

    def finish(self) -> None:
        """Checks that no tensor is left.

        Raises:
          WeightsError: some are left; the message names them.
        """
        if self.left:
            names = ", ".join(f"{name:.80}" for name in sorted(self.left)[:8])
            raise WeightsError(f"{self._directory}: unexpected tensors {names}")


def renamed(tensors: Mapping[str, T], prefixes: Mapping[str, str | None]) -> dict[str, T]:
    """Returns tensors by their names in a family's tables, without other parts of a model.

    Args:
      tensors: or anything else, by the names in files.
      prefixes: see ``Family.prefixes``.
    """
    ours = {}
    for name, tensor in tensors.items():
        old = next((old for old in prefixes if name.startswith(old)), "")
        new = prefixes.get(old, "")
        if new is not None:
            ours[new + name.removeprefix(old)] = tensor
    return ours


_FUSED = (".experts.gate_up_proj", ".experts.down_proj")


def expert_places(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, int, range]]:
    """Returns where the matrices of experts are that files hold as one tensor a layer.

    ``experts.gate_up_proj [X,2F,D]``, gates first, and ``experts.down_proj [X,D,F]`` hold what
    others store as ``experts.0.gate_proj.weight`` and so on.

    Args:
      shapes: of all tensors, by name.

    Returns:
      By the name of each matrix: the tensor, the expert, and the rows.
    """
    inside = {}
    for name, shape in shapes.items():
        prefix, _, kind = name.rpartition(".")
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        if not name.endswith(_FUSED) or len(shape) != 3 or shape[1] % len(kinds):
            continue
        size = shape[1] // len(kinds)
        for e in range(shape[0]):
            for i, ours in enumerate(kinds):
                rows = range(i * size, (i + 1) * size)
                inside[f"{prefix}.{e}.{ours}.weight"] = (name, e, rows)
    return inside


def unfused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of which each expert has its own, see ``expert_places``."""
    places = expert_places({name: x.shape for name, x in tensors.items()})
    fused = {name for name, *_ in places.values()}
    experts = {name: tensors[stored].within(e, rows) for name, (stored, e, rows) in places.items()}
    return {name: x for name, x in tensors.items() if name not in fused} | experts


def open_tensors(directory: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    """Returns the tensors of a directory's safetensors, or of files of torch; or of a GGUF file.

    Args:
      directory: of the checkpoint.
      stack: closes the files.

    Raises:
      WeightsError: it has neither, or they cannot be read.
    """
    if gguf.is_gguf(directory):
        return gguf.open_tensors(directory)
    names = _stored_names(directory)
    if not names:
        raise WeightsError(
            f"{directory} has neither {SINGLE} nor {INDEX} nor {PICKLE}{foreign_files(directory)}"
        )
    has_safetensors = SINGLE in names
    tensors = open_shards(directory, stack) if has_safetensors else open_pickles(directory)
    return {name: x for name, x in tensors.items() if not name.endswith(_DERIVED)}


def stored_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that ``open_tensors`` reads; none if there are no weights.

    Raises:
      WeightsError: see ``weight_files``.
    """
    if gguf.is_gguf(directory):
        return [directory]
    names = _stored_names(directory)
    return weight_files(directory, *names) if names else []


def _stored_names(directory: pathlib.Path) -> tuple[str, ...]:
    """The names of the single file and the index of which one is there; those that are read."""
    for names in ((SINGLE, INDEX), (PICKLE, PICKLE_INDEX)):
        if any((directory / name).exists() for name in names):
            return names
    return ()


def unread_index(directory: pathlib.Path) -> tuple[str, ...]:
    """Returns a sentence about an index of other files than the one that is read, if there is one.

    Args:
      directory: of the checkpoint, see ``weight_files``.
    """
    names = _stored_names(directory)
    if not names or not all((directory / name).exists() for name in names):
        return ()
    single, index = names
    if single in indexed_files(directory, index):
        return ()
    return (
        f"there are {single} and {index}, which names other files; {single} alone is read, "
        "as by transformers. Delete the one that is out of date.",
    )


def check_layers(directory: pathlib.Path, num_layers: int, num_tensors: int) -> None:
    """Refuses a config.json of more layers than there are tensors, before any is declared.

    Args:
      directory: for the message.
      num_layers: what config.json states.
      num_tensors: how many the headers of the weights name; a layer has at least one.

    Raises:
      WeightsError: the layers cannot all be there.
    """
    if num_layers > num_tensors:
        raise WeightsError(
            f"{directory / 'config.json'}: num_hidden_layers is {num_layers}, but the weights hold "
            f"{num_tensors} tensors, and a layer has at least one; expected the number of layers "
            "that are stored"
        )


def on_host(array: ArrayLike) -> np.ndarray:
    """Returns the values of an array, gathered from the processes that share it."""
    is_shared = isinstance(array, jax.Array) and not array.is_fully_addressable
    if is_shared and not array.is_fully_replicated:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def save_tensors(
    directory: pathlib.Path, shards: Sequence[Iterable[tuple[str, np.ndarray]]]
) -> None:
    """Writes one file of tensors, or several and their index. Each is written completely or not.

    Every process goes through all tensors, and process 0 writes them.

    Args:
      directory: created if it does not exist.
      shards: the tensors of each file with their names. The next file's are not asked for before
        this one's are written.

    Raises:
      ConfigError: the directory cannot be made.
    """
    is_writer = processes.is_writer()
    if is_writer:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            is_file = isinstance(error, FileExistsError | NotADirectoryError)
            why = "a file of this name is in the way" if is_file else error.strerror
            raise ConfigError(f"{directory} cannot be made a directory: {why}") from error
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    where: dict[str, str] = {}
    size = 0
    for name, shard in zip(names, shards):
        content = {}
        for tensor, array in shard:
            where[tensor] = name
            size += array.nbytes
            if is_writer:
                content[tensor] = array
        if is_writer:
            save_file(content, directory / f"{name}.partial", metadata={"format": "pt"})
            os.replace(directory / f"{name}.partial", directory / name)
    if not is_writer:
        return
    # A directory that is overwritten must not keep the entry point of the other layout.
    (directory / (INDEX if len(shards) == 1 else SINGLE)).unlink(missing_ok=True)
    if len(shards) > 1:
        write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
