"""A model by name or path, ready to decode."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from spec_jax import zoo
from spec_jax.contracts import Model
from spec_jax.errors import WeightsError
from spec_jax.models import transformer, weights
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import Params, num_params
from spec_jax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model's functions, its weights and its tokenizer.

    ``tokenizer`` may be None: prompts are then ids. ``config`` is None for a model of
    your own (see ``spec_jax.testing`` for small ones).
    """

    name: str
    model: Model
    params: Params
    tokenizer: Tokenizer | None = None
    config: ModelConfig | None = None
    stop_tokens: tuple[int, ...] = ()

    @property
    def num_params(self) -> int | None:
        return None if self.config is None else num_params(self.config)


def load_model(
    name_or_path: str | pathlib.Path, dtype="float32", *, scan_layers: bool = False
) -> LoadedModel:
    """Loads a zoo model ("zoo/target", "zoo/draft") or a Hugging Face directory.

    Args:
      name_or_path: a zoo name, or a directory of a Llama, Qwen2 or Qwen3 model.
      dtype: of the weights in memory; the cache follows.
      scan_layers: stack the layers: compiles faster for an accelerator, runs slower on a CPU.

    Raises:
      WeightsError: no such model, or its files are not sound.
    """
    directory = zoo.path(str(name_or_path)) or pathlib.Path(name_or_path)
    if not directory.is_dir():
        raise WeightsError(
            f"{name_or_path} is neither a directory nor a zoo name; "
            f"the zoo has {', '.join(zoo.NAMES)}"
        )
    params, config = weights.load_pretrained(directory, jnp.dtype(dtype), scan_layers=scan_layers)
    if jax.default_backend() == "cpu":
        params = transformer.for_cpu(params)
    has_tokenizer = (directory / "tokenizer.json").exists()
    return LoadedModel(
        name=str(name_or_path),
        model=transformer.model(config),
        params=params,
        tokenizer=Tokenizer.from_directory(directory) if has_tokenizer else None,
        config=config,
        stop_tokens=config.eos_token_id,
    )
