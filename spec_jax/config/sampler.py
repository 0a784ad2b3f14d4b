"""How one model's logits become a token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.config.checks import check, integer, is_count, is_number, number
from spec_jax.config.read import ConfigRecord
from spec_jax.errors import ConfigError
from spec_jax.show.summary import short_repr

GREEDY_BELOW = 1e-5  # a lower temperature means argmax; it is never divided by
_LARGEST = 1e20  # sums of such values, times 1e10 and over 1e-5, are finite in float32


def _filter(default: float, low: float, help: str) -> Any:
    return number(default, low, 1, stage="filters", help=help)


def _penalty(help: str) -> Any:
    return number(0.0, -_LARGEST, _LARGEST, stage="penalties", help=help)


@dataclasses.dataclass(frozen=True)
class SamplerConfig(ConfigRecord):
    """How one model's logits become a token.

    Applied in this order: logit bias, repetition penalty (over prompt and output), presence
    and frequency penalties (over the output), processors, temperature, top-k, top-p, min-p. Where
    transformers has the processor, the result is transformers', except that it leaves undefined
    which of several tied tokens top-p keeps.

    Example:
      ```python
      import spec_jax

      sampler = spec_jax.SamplerConfig(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=7)
      print(sampler)
      ```

    Attributes:
      temperature: 0 means argmax, and so does anything below 1e-5; at most 1e20.
      top_k: keep the k largest, and all that tie with the k-th; 0 keeps all.
      top_p: keep the smallest set whose mass reaches p, of tied tokens those of the lowest ids; 1
        keeps all.
      min_p: drop tokens less likely than ``min_p`` times the likeliest; 0 keeps all.
      repetition_penalty: divides positive logits and multiplies negative ones of tokens in
        the prompt or the output; 1 is off. Between 1e-10 and 1e10.
      presence_penalty: subtracted once from tokens in the output; between -1e20 and 1e20.
      frequency_penalty: subtracted once for each time a token is in the output; between -1e20
        and 1e20.
      logit_bias: added to the logits of these token ids, at most 1e20; -inf, or anything below
        -1e20, forbids one.
      processors: ``spec_jax.Processor``s of your own, applied in this order.
      seed: one config for a whole batch or queue seeds row i with ``seed + i``; in a list of
        configs each row has its own. The seed of a draft sampler is folded into that of the row's
        target, so one draft sampler draws other drafts for each row.
    """

    temperature: float = number(0.0, 0, _LARGEST, help="of target and draft; 0 is greedy")
    top_k: int = integer(0, stage="filters", help="keep the k likeliest tokens; 0: all")
    top_p: float = _filter(1.0, 1e-30, "keep the likeliest tokens up to this probability")
    min_p: float = _filter(0.0, 0, "drop tokens below this share of the likeliest one")
    repetition_penalty: float = number(
        1.0, 1e-10, 1e10, stage="penalties", help="divides logits of tokens in prompt and output"
    )
    presence_penalty: float = _penalty("subtracted from logits of tokens in the output")
    frequency_penalty: float = _penalty("subtracted once for each time in the output")
    logit_bias: tuple[tuple[int, float], ...] = ()
    processors: tuple[Any, ...] = ()
    seed: int = integer(0, 0, 2**32 - 1, help="of the random numbers")

    __repr__ = short_repr("temperature")

    @classmethod
    def from_generation_config(cls, stated: Mapping[str, Any]) -> SamplerConfig:
        """Reads the object of a generation_config.json as transformers does.

        What is left out, or null, is what transformers takes: greedy without ``do_sample``, else
        temperature 1 and the 50 likeliest tokens.

        Args:
          stated: the parsed file. Limits, stop tokens and the like are not read.

        Raises:
          ConfigError: a value is out of range, or an option is stated that is not supported.
        """
        stated = {name: value for name, value in stated.items() if value is not None}
        for name, value in stated.items():
            is_read = name in (*_GENERATION, "repetition_penalty", *_IRRELEVANT)
            is_read |= name.startswith(_IRRELEVANT_PREFIXES)
            if not is_read and value not in _NEUTRAL.get(name, ()):
                instead = "pass stop=" if name == "stop_strings" else "give a SamplerConfig"
                raise ConfigError(f"{name} is {value!r:.80}, which is not supported; {instead}")
        penalty = {"repetition_penalty": stated.get("repetition_penalty", 1.0)}
        if not stated.get("do_sample", False):
            return cls(**penalty)
        return cls(
            **{name: stated.get(name, usual) for name, usual in _GENERATION.items()}, **penalty
        )

    def __post_init__(self):
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        super().__post_init__()

        def is_processor(x):
            return all(callable(getattr(x, n, None)) for n in ("init", "advance"))

        is_tuple = isinstance(self.processors, tuple) and not is_processor(self.processors)
        are_processors = is_tuple and all(map(is_processor, self.processors))
        check(are_processors, "processors", self.processors, "a tuple of spec_jax.Processor")


def options() -> dict[str, dataclasses.Field]:
    """Returns the fields of ``SamplerConfig`` that are numbers, by name; each has a ``help``."""
    return {x.name: x for x in dataclasses.fields(SamplerConfig) if x.metadata}


def columns(configs: Sequence[SamplerConfig], stage: str) -> dict[str, list] | None:
    """Returns the options of a stage of sampling by name, with a value for each config.

    Args:
      configs: one for each row.
      stage: "filters" or "penalties".

    Returns:
      The values, or None where all configs have the defaults, which change nothing.
    """
    fields = [x for x in options().values() if x.metadata.get("stage") == stage]
    values = {x.name: [getattr(config, x.name) for config in configs] for x in fields}
    return values if any(set(values[x.name]) - {x.default} for x in fields) else None


# What generation_config.json may hold without changing which tokens are drawn: any value of these,
_IRRELEVANT_PREFIXES = ("output_", "return_", "cache_", "assistant_", "num_assistant_")
_IRRELEVANT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "max_length",
    "max_new_tokens",
    "max_time",
    "use_cache",
    "renormalize_logits",
    "length_penalty",
    "early_stopping",
    "transformers_version",
    "_from_model_config",
    "disable_compile",
    "is_assistant",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "target_lookbehind",
    "prefill_chunk_size",
    "compile_config",
    "trust_remote_code",
    "chat_format",  # this and the rest are of models whose code is beside their weights
    "max_window_size",
    "user_token_id",
)
# and these values of others.
_NEUTRAL = {
    "do_sample": (True, False),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "diversity_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "penalty_alpha": (0,),
    "low_memory": (False,),
}
_GENERATION = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # as transformers has


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """Sorted (token id, bias) pairs of a mapping or of pairs; JSON's string ids are taken."""
    expected = f"pairs of a token id of 0 or more and a number of at most {_LARGEST:g}, or -inf"
    try:
        pairs = [
            (int(t) if isinstance(t, str) else t, v)
            for t, v in (bias.items() if isinstance(bias, Mapping) else bias)
        ]
    except (TypeError, ValueError):
        raise ConfigError(f"logit_bias is {bias!r}; expected {expected}") from None
    for token, value in pairs:
        is_pair = is_count(token) and is_number(value, -math.inf, _LARGEST)
        check(is_pair, "logit_bias", (token, value), expected)

    def value_or_ban(value):
        return float(value) if value >= -_LARGEST else -math.inf

    return tuple(sorted((token, value_or_ban(value)) for token, value in pairs))
