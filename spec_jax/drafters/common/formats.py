"""What the checkpoint formats of heads share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spec_jax.errors import ConfigError
from spec_jax.models.checks import require, shown


def check_target(what: str, key: str, value: Any, expected: int) -> None:
    """Checks a size of the target that a head's config.json states.

    Args:
      what: of the target, in words.
      key: of config.json.
      value: that is stated; None: it is not.
      expected: the target's own.

    Raises:
      ConfigError: the head is for another target, or does not say for which.
    """
    message = f"{key} is missing, so the head's target is not known; expected the {what} of this"
    require(value is not None, f"{message} one, {expected}")
    message = f"the head is for a target of {what} {shown(value)}; this one has {expected}"
    require(value == expected, f"{message} (by the key {key})")


def first_that_can_express(formats: Sequence[str], write: Callable[[str], Any]) -> str:
    """Returns the first format that a head can be written in.

    Args:
      formats: names, the preferred one first.
      write: makes the config.json of a format, or raises a ConfigError.

    Raises:
      ConfigError: no format can express the head's config.
    """
    refusals = {}
    for name in formats:
        try:
            write(name)
            return name
        except ConfigError as error:
            refusals[name] = str(error)
    if len(set(refusals.values())) == 1:
        raise ConfigError(refusals[name])
    listed = "; ".join(f"{name}: {message}" for name, message in refusals.items())
    raise ConfigError(f"no format can express this config: {listed}")


def speculators_config(
    algorithm: str, num_tokens: int, verifier: str | None, target: Any
) -> dict[str, Any]:
    """Returns the ``speculators_config`` of a head's config.json in the format "speculators".

    Args:
      algorithm: its name there.
      num_tokens: K.
      verifier: the target's name or path.
      target: the target's config.
    """
    is_count = isinstance(num_tokens, int) and num_tokens > 0
    require(is_count, f"num_speculative_tokens is {num_tokens!r}; expected 1 or more")
    is_name = isinstance(verifier, str)
    require(is_name, f"verifier is {verifier!r}; expected the target's name or path")
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    stated = {"algorithm": algorithm, "default_proposal_method": "greedy"}
    architectures = [target.architectures[target.model_type]]
    model = {"name_or_path": verifier, "architectures": architectures}
    return stated | {"proposal_methods": [proposal], "verifier": model}
