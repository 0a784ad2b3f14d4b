"""Reads and writes small files of a model directory; what is written is complete or absent."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from spec_jax import processes
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models import gguf
from spec_jax.models.checks import shown

MAX_DEPTH = 100  # of JSON: what walks over a value may recurse so deeply
_TOO_DEEP = f"objects and lists are nested over {MAX_DEPTH} levels deep"
MAX_BYTES = 1 << 29  # of a file that is read at once


def parse_json(text: str) -> Any:
    """Parses a JSON text of bounded depth.

    Raises:
      ValueError: it is not JSON, or nested too deeply, see ``check_depth``.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises a ValueError if JSON objects and lists are nested over ``MAX_DEPTH`` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [x for x in level if isinstance(x, (dict, list, tuple))]
        if not level:
            return
        level = [x for one in level for x in (one.values() if isinstance(one, dict) else one)]
    raise ValueError(_TOO_DEEP)


def read_text(file: pathlib.Path) -> str:
    """Reads a small text file of a directory that may come from anywhere.

    Raises:
      OSError: there is no such file, or it is a device or a pipe, which may never end.
      ValueError: it is not UTF-8, or larger than ``MAX_BYTES``.
    """
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is not a regular file")
    if (size := file.stat().st_size) > MAX_BYTES:
        raise ValueError(f"it has {size} bytes; expected at most {MAX_BYTES}")
    return file.read_text(encoding="utf-8")


def exists(file: pathlib.Path) -> bool:
    """Whether a directory has a file; of a GGUF file, whether it stands for it (see ``gguf``)."""
    return gguf.has(file) if gguf.is_gguf(file.parent) else file.exists()


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Reads the object in a JSON file of a Hugging Face directory, or what a GGUF file has of it.

    Raises:
      WeightsError: there is no such file, or it holds something else.
    """
    if gguf.is_gguf(file.parent):
        return gguf.read_json(file)
    try:
        value = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        if file.exists():
            raise WeightsError(f"{file} cannot be read: {error}") from error
        raise WeightsError(
            f"{file.parent} is no Hugging Face model directory: {file.name}: {error}"
            f"{foreign_files(file.parent)}"
        ) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{file} holds a {type(value).__name__}; expected an object")
    return value


_FOREIGN = {
    "*.gguf": "it holds the GGUF file {name}: name the file",
    "adapter_model.*": (
        "it holds a LoRA adapter. Merge it into its model where peft is: AutoPeftModelForCausalLM."
        "from_pretrained(DIRECTORY).merge_and_unload().save_pretrained(OUT)"
    ),
    "consolidated*": (
        "it holds its publisher's own layout. Load the Hugging Face repository of the model, whose "
        "files are model*.safetensors"
    ),
    "*.bin": "{name} is not a name that is read; expected pytorch_model.bin, or an index of shards",
}


def foreign_files(directory: pathlib.Path) -> str:
    """Returns what a directory holds in place of readable weights, and what to do; "" if nothing.

    Args:
      directory: has none of the files that are read.
    """
    for pattern, said in _FOREIGN.items():
        for file in sorted(directory.glob(pattern)):
            return f": {said.format(name=file.name)}"
    return ""


def check_not_quantised(file: pathlib.Path, hf: Mapping[str, Any]) -> None:
    """Refuses a config.json that says its weights are quantised.

    Args:
      file: the config.json, for the message.
      hf: the object in it.

    Raises:
      ConfigError: it says so; the message names the method.
    """
    for key in ("quantization_config", "compression_config"):
        if not hf.get(key):
            continue
        said = hf[key] if isinstance(hf[key], Mapping) else {}
        method = said.get("quant_method") or said.get("format") or "a method that it does not name"
        how = " without weight_block_size" if method == "fp8" else ""
        raise ConfigError(
            f"{file} has a {key}: weights quantised by {shown(method)}{how} are not read. Load the "
            "weights that were quantised, or have transformers write them in full, by "
            "model.dequantize() and model.save_pretrained(...); if they are plain, remove "
            f"{key} from the file"
        )


def write_once(write: Callable[[], None]) -> None:
    """Calls a function that writes files in process 0; the other processes wait until it is done.

    Args:
      write: the function. An error in it ends the other processes.
    """
    if processes.is_writer():
        write()
    processes.from_writer(None)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file, completely or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
