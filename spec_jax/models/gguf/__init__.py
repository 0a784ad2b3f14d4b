"""GGUF files, which read as Hugging Face directories: config, tokenizer and weights.

``FILE.gguf / "config.json"`` is what such a directory would state (``files.read_json``). Weights
are made plain tensor by tensor, whatever they are quantised by. The ``gguf`` package knows the
quantisations; the header is read here, since a file from anywhere may ask for any number of bytes,
and the package makes an array of each number in it.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import pathlib
from typing import Any

from spec_jax.errors import WeightsError
from spec_jax.models.checks import naming
from spec_jax.models.gguf.config import config_json, head_counts, source_text, token_ids
from spec_jax.models.gguf.header import SUFFIX, Header, read_header
from spec_jax.models.gguf.tensors import places, tensors_of
from spec_jax.models.gguf.tokenizer import read_tokenizer
from spec_jax.models.parts import Tensor

__all__ = [
    "SUFFIX",
    "Header",
    "has",
    "is_gguf",
    "open_tensors",
    "places",
    "read_header",
    "read_json",
    "read_tokenizer",
    "source_text",
    "tensors_of",
    "within",
]
_JSON = {"config.json": config_json, "generation_config.json": token_ids}


def is_gguf(directory: pathlib.Path) -> bool:
    """Whether a path names a GGUF file, which is read as if it were a directory."""
    return directory.suffix.lower() == SUFFIX and directory.is_file()


def within(directory: pathlib.Path) -> pathlib.Path:
    """Returns the GGUF file of a directory without other weights; else the directory.

    Raises:
      WeightsError: it has several.
    """
    files = sorted(path for path in directory.glob(f"*{SUFFIX}") if path.is_file())
    others = any(directory.glob("*.safetensors")) or (directory / "config.json").exists()
    if not files or others:
        return directory
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise WeightsError(f"{directory} has several GGUF files; name one of them: {names}")
    return files[0]


def has(file: pathlib.Path) -> bool:
    """Whether a GGUF file has what a file of this name in a directory would hold.

    Args:
      file: the path of the GGUF file, and the name.

    Raises:
      WeightsError: the GGUF file cannot be read.
    """
    if file.name == "tokenizer.json":
        return "tokenizer.ggml.tokens" in read_header(file.parent).fields
    return file.name in _JSON


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns what a GGUF file states as the object of a JSON file in a directory.

    Args:
      file: the path of the GGUF file, and "config.json" or "generation_config.json".

    Raises:
      ConfigError: the model is not supported.
      WeightsError: the GGUF file cannot be read.
    """
    with naming(file.parent):
        return _JSON[file.name](read_header(file.parent))


def open_tensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Returns the weights of a GGUF file, see ``read_json`` for what is refused."""
    header = read_header(path)
    with naming(path):
        return tensors_of(header, head_counts(config_json(header)))
