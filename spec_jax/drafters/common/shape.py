"""What the configs of heads with layers share."""

from __future__ import annotations

import dataclasses
from typing import Any

from spec_jax.models.checks import check, is_integer, require, shown


class HeadShape:
    """The base of a frozen dataclass with ``taps`` and the config of its layers as ``layer``."""

    layer: Any
    taps: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """M."""
        return self.layer.num_hidden_layers

    @property
    def max_length(self) -> int:
        """Maximum tokens of a row, prompt and output together."""
        return self.layer.max_position_embeddings

    def check_shape(self) -> None:
        """Checks what every config has, and turns a list of taps into a tuple.

        Raises:
          ConfigError: taps are no layers or none, a flag is not True or False, or layers are
            stacked.
        """
        is_list = isinstance(self.taps, (tuple, list))
        check(is_list, "taps", self.taps, "a tuple of integers of 0 or more")
        object.__setattr__(self, "taps", tuple(self.taps))
        require(len(self.taps) > 0, "taps are empty; a head reads one state or more")
        are_taps = all(is_integer(tap, 0) for tap in self.taps)
        require(are_taps, f"taps are {shown(self.taps)}; expected integers of 0 or more")
        for name in (field.name for field in dataclasses.fields(self) if field.type == "bool"):
            value = getattr(self, name)
            check(isinstance(value, bool), name, value, "True or False")
        require(not self.layer.scan_layers, "scan_layers is set; a head's layers are apart")
