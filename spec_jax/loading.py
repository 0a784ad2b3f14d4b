"""A model by name or path, ready to decode."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp

from spec_jax import zoo
from spec_jax.contracts import Model
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models import panels, transformer, weights
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import Params, num_params
from spec_jax.models.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")


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

    def decoding_params(self, num_rows: int | None = None) -> Params:
        """The weights as passes of ``num_rows`` tokens, of all rows together, want them.

        They are ``params`` itself but on a CPU, where another layout is faster; each is made
        once and kept.

        Args:
          num_rows: None for any number, as in prefill.
        """
        if self.config is None or jax.default_backend() != "cpu":
            return self.params
        has_few = num_rows is not None and num_rows <= panels.MAX_ROWS
        return self._in_panels if has_few else self._with_own_head

    @functools.cached_property
    def _with_own_head(self) -> Params:
        return transformer.with_own_head(self.params)

    @functools.cached_property
    def _in_panels(self) -> Params:
        return transformer.in_panels(self._with_own_head)

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
      ConfigError: a dtype that weights cannot have.
    """
    directory = zoo.path(str(name_or_path)) or pathlib.Path(name_or_path)
    if not directory.is_dir():
        raise WeightsError(
            f"{name_or_path} is neither a directory nor a zoo name; "
            f"the zoo has {', '.join(zoo.NAMES)}"
        )
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ConfigError(f"dtype is {dtype.name!r}; expected one of {', '.join(DTYPES)}")
    params, config = weights.load_pretrained(directory, dtype, scan_layers=scan_layers)
    has_tokenizer = (directory / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer else None
    num_tokens = tokenizer and min(tokenizer.num_ids, config.vocab_size)
    return LoadedModel(
        name=str(name_or_path),
        model=transformer.model(config, num_tokens=num_tokens),
        params=params,
        tokenizer=tokenizer,
        config=config,
        stop_tokens=config.eos_token_id,
    )
