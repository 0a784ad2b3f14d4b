"""Shapes of the heads that draft a block in one pass: DFlash, DFlash 2, DSpark and TreeFlash.

They have one backbone and differ in their step, see ``steps``.

Source: DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147; TreeFlash, arXiv 2606.03819.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

from spec_jax.config.checks import check, check_integer, check_name
from spec_jax.drafters.common.shape import HeadShape
from spec_jax.errors import ConfigError
from spec_jax.models.checks import is_integer, require, shown
from spec_jax.models.config import ModelConfig
from spec_jax.show.summary import short_repr

MARKOV_TYPES = ("vanilla", "gated")
_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")
_BY_LAYER = {  # what their tuples hold, and what an empty one stands for
    "windows": ("positive integers, or None for all tokens", None),
    "is_causal": ("True or False, by layer", False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadShape):
    """The shape of a head and the meaning of its block.

    A block is [pending | masks]. It attends over the target's states of the tokens before it,
    which every layer reads as keys and values, and over itself.

    Attributes:
      layer: of the head's layers, of the target's width; their embedding and output are its own.
      target_hidden_size: D of the target.
      target_vocab_size: V.
      taps: the target's states that it reads, see ``transformer.forward``.
      block_size: tokens of the block that the head was trained with.
      mask_token_id: the id whose embedding stands for a token that is not known. It may be one
        that only pads the target's embedding.
      is_anchor_first: the pending token's slot predicts the token after it, and every slot the
        token after its own position. Otherwise each mask predicts the token at its position, and
        the output of the pending token's slot is not used.
      windows: of each layer, how many tokens a token sees, itself included; None means all.
      is_causal: of each layer, whether a token of the block sees the block only up to itself.
    """

    name: ClassVar[str] = "dflash"

    layer: ModelConfig
    target_hidden_size: int
    target_vocab_size: int
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    is_anchor_first: bool = False
    windows: tuple[int | None, ...] = ()
    is_causal: tuple[bool, ...] = ()

    __repr__ = short_repr()

    def __post_init__(self):
        self.check_shape()
        M = self.num_layers
        V = self.target_vocab_size
        for name, (what, default) in _BY_LAYER.items():
            values = getattr(self, name)
            check(isinstance(values, (list, tuple)), name, values, f"a tuple of {what}")
            values = tuple(values) or (default,) * M
            object.__setattr__(self, name, values)
            message = f"{name} are {shown(values)}; expected one for each of {M} layers"
            require(len(values) == M, message)
        U = self.layer.vocab_size
        D = self.layer.hidden_size
        width = self.target_hidden_size
        require(D == width, f"the head's width is {D}; the embedding that it shares has {width}")
        require(U == V, f"the layers have {U} ids, the target {V}")
        are_flags = all(isinstance(flag, bool) for flag in self.is_causal)
        check(are_flags, "is_causal", self.is_causal, _BY_LAYER["is_causal"][0])
        is_mask = is_integer(self.mask_token_id, 0, V - 1)
        require(is_mask, f"mask_token_id is {self.mask_token_id!r}; the target has {V} embeddings")
        check_integer("block_size", self.block_size, 1 if self.is_anchor_first else 2)
        are_sizes = all(size is None or is_integer(size, 1) for size in self.windows)
        require(are_sizes, f"windows are {shown(self.windows)}; expected {_BY_LAYER['windows'][0]}")

    @property
    def max_draft(self) -> int:
        """The largest K: as many tokens as a block predicts."""
        return self.block_size - (0 if self.is_anchor_first else 1)

    def block_width(self, num_draft: int) -> int:
        """Returns how many tokens of a block are fed for K drafts.

        All of them if a layer looks ahead, so that the distributions do not depend on K.
        """
        return (
            num_draft + self.block_size - self.max_draft if all(self.is_causal) else self.block_size
        )

    @classmethod
    def of_target(cls, target: Any, num_layers: int = 2, **changes: Any) -> Self:
        """Returns the config of a new head, whose layers are Qwen3's with the target's sizes.

        It taps the outputs of as many layers as it has, spread from the second to the third from
        the end, see ``default_taps``. The mask is the last id. Of a mixture of experts the size of
        a dense layer is that of the experts that a token reads.

        Args:
          target: the target's config.
          num_layers: of the head.
          **changes: fields that differ from this; ``block_size`` is 8 by default.

        Raises:
          ConfigError: the target's layers have no sizes to copy.
        """
        if "layer" not in changes:
            kept = ("hidden_size", "intermediate_size", "num_attention_heads")
            kept += ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
            sizes = {name: getattr(target, name, None) for name in (*kept, "vocab_size", "rope")}
            experts = [getattr(target, name, None) for name in _EXPERTS]
            if sizes["intermediate_size"] is None and all(experts):
                sizes["intermediate_size"] = math.prod(experts)
            if missing := [name for name, size in sizes.items() if size is None]:
                raise ConfigError(
                    f"a {type(target).__name__} has no {', '.join(missing)} to copy: give the "
                    "head's own as `layer`"
                )
            changes["layer"] = ModelConfig(
                model_type="qwen3", num_hidden_layers=num_layers, **sizes
            )
        values = {
            "target_hidden_size": target.hidden_size,
            "target_vocab_size": target.vocab_size,
            "taps": default_taps(target.num_hidden_layers, num_layers),
            "block_size": 8,
            "mask_token_id": target.vocab_size - 1,
        }
        return cls(**values | changes)


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns the usual taps of a target of ``num_layers`` layers, ``count`` of them.

    A target of fewer than seven layers is read after a sixth, a half and five sixths of them.
    """
    if num_layers < 7:
        return tuple(sorted({round(num_layers * i / 6) for i in (1, 3, 5)}))
    if count == 1:
        return (num_layers // 2 + 1,)
    # Rounded before one is added: published heads count layers from 0, and halves go to even.
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """A head whose distributions are marginals: none knows what another position drafts."""

    __repr__ = short_repr()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """A head with convolutions in its layers, and scores of pairs of its likeliest tokens.

    Attributes:
      conv_kernel_size: taps of the convolutions, over a token of the block and those before it.
      conv_group_size: channels that share what the token adds to a tap.
      selector_rank: r, of the scores of pairs.
      selector_top_k: C, the likeliest tokens of each position, of which one is drafted.
    """

    name: ClassVar[str] = "dflash2"

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    __repr__ = short_repr()

    def __post_init__(self):
        super().__post_init__()
        D = self.layer.hidden_size
        V = self.target_vocab_size
        most = {"conv_kernel_size": self.block_size, "conv_group_size": D, "selector_top_k": V}
        for name in (*most, "selector_rank"):
            value = getattr(self, name)
            limit = most.get(name, math.inf)
            check(is_integer(value, 1, limit), name, value, f"an integer from 1 to {limit}")
        is_divided = D % self.conv_group_size == 0
        require(is_divided, f"conv_group_size is {self.conv_group_size}; the width is {D}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """A head whose logits get a bias of low rank, by the token before.

    Attributes:
      markov_rank: r, the rank.
      markov_head_type: "vanilla", or "gated" by the block's state and the token before.
      has_confidence: it estimates how probably each draft is accepted, from the tokens before it.
      confidence_with_markov: the estimate reads the token before, too.
    """

    name: ClassVar[str] = "dspark"

    is_anchor_first: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    has_confidence: bool = True
    confidence_with_markov: bool = True

    __repr__ = short_repr()

    def __post_init__(self):
        super().__post_init__()
        rank = self.markov_rank
        expected = "1 or more: a head without this bias is DFlash"
        check(is_integer(rank, 1), "markov_rank", rank, expected)
        check_name("markov_head_type", self.markov_head_type, MARKOV_TYPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeFlashConfig(BlockConfig):
    """A head whose states are corrected by a gated map of them and the token before."""

    name: ClassVar[str] = "treeflash"

    __repr__ = short_repr()
