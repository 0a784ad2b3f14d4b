"""A processor in a batch: its parameters and its state, by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplerConfig, columns
from spec_jax.contracts import Processor
from spec_jax.errors import ConfigError
from spec_jax.processors.bias import LOGIT_BIAS, bias_of
from spec_jax.processors.penalties import PENALTIES


@flax.struct.dataclass
class BatchedProcessor:
    """A processor that some row of a batch uses."""

    processor: Processor = flax.struct.field(pytree_node=False)
    params: Any  # of a row's config, [B,...]; None for a processor of your own
    is_on: jax.Array | None = None  # bool[B], rows that use it; None: all
    state: Any = None  # [B,...]; None before the prompts are known

    def start(self, tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> BatchedProcessor:
        """Returns it with the state after the prompts i32[B,T] of ``lengths`` i32[B]."""

        def init(tokens, length):
            return self.processor.init(tokens, length, vocab_size)

        return self.replace(state=jax.vmap(init)(tokens, lengths))

    def apply(self, logits: jax.Array, drafted: jax.Array, is_before: jax.Array | None):
        """Returns the logits f32[B,T,V] of T nodes, see ``Processor.apply``."""
        axes = (0, 0, 0, 0, None if is_before is None else 0)
        given = (self.params, self.state, logits, drafted, is_before)
        new = jax.vmap(self.processor.apply, axes)(*given)
        if new.shape != logits.shape:
            raise ConfigError(
                f"processor {self.processor.name!r} returns logits of shape {new.shape[1:]}; "
                f"expected {logits.shape[1:]}"
            )
        return new if self.is_on is None else jnp.where(self.is_on[:, None, None], new, logits)

    def advance(self, tokens: jax.Array, n: jax.Array) -> BatchedProcessor:
        """Returns it after the first n (i32[B]) of i32[B,P] tokens were emitted or drafted."""
        return self.replace(state=jax.vmap(self.processor.advance)(self.state, tokens, n))


def from_configs(configs: Sequence[SamplerConfig], vocab_size: int) -> tuple[BatchedProcessor, ...]:
    """Returns the processors that rows use, in the order in which they are applied.

    Args:
      configs: one for each row.
      vocab_size: V.

    Raises:
      ConfigError: a biased id is not in the vocabulary, or two processors have one name.
    """
    penalties = columns(configs, "penalties")
    if penalties is not None:
        penalties = {name: np.asarray(x, np.float32) for name, x in penalties.items()}
    own = {LOGIT_BIAS: bias_of(configs, vocab_size), PENALTIES: penalties}
    used = {p: jax.tree.map(jnp.asarray, params) for p, params in own.items() if params is not None}
    given = dict.fromkeys(p for config in configs for p in config.processors)
    names = [p.name for p in (*own, *given)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"two processors are named {min(twice)!r}; expected one of a name")

    def rows(p):
        return jnp.asarray(np.asarray([p in config.processors for config in configs]))

    return *(BatchedProcessor(*x) for x in used.items()), *(
        BatchedProcessor(p, None, rows(p)) for p in given
    )
