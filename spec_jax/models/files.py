"""Reads and writes small files of a model directory; what is written is complete or absent."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from spec_jax import processes
from spec_jax.errors import ConfigError, WeightsError


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Reads the object in a JSON file of a Hugging Face directory.

    Raises:
      WeightsError: there is no such file, or it holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{file.parent} is no Hugging Face model directory: {file.name}: {error}"
        ) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{file} holds a {type(value).__name__}; expected an object")
    return value


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
        raise ConfigError(
            f"{file} has a {key}: weights quantised by {method!r} are not read. Load the weights "
            "that were quantised, or have transformers write them in full, by model.dequantize() "
            f"and model.save_pretrained(...); if they are plain, remove {key} from the file"
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
