"""The floor of a decode round's time, and the speed that it and acceptance predict.

No constant here is fitted. A pass takes at least as long as the slowest of memory, arithmetic and
links at their published peaks (``chips``), and the passes of a round depend on each other, so their
floors add up. Left out are kernel launches, the host, activations, the latency of links, and
whatever a program reads twice: a real round is slower. ``overhead_s_per_pass`` stands for them.

Source: the roofline is that of Williams, Waterman and Patterson, 2009; the round is that of
``decoding/round.py``, with theorem 3.8 of Leviathan et al., arXiv 2211.17192.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spec_jax.drafters.registry import kind_of_draft
from spec_jax.errors import ConfigError
from spec_jax.models.chunks import CHUNK
from spec_jax.planning.chips import Chip
from spec_jax.planning.work import Setting, Stack, Work
from spec_jax.tree import DynamicTree, Tree


@dataclasses.dataclass(frozen=True)
class Pass:
    """Passes of a round that are alike.

    Attributes:
      name: "verify", "refresh" (a head reads the target's new states), "draft" or "prefill".
      count: how many there are.
      work: of one of them.
    """

    name: str
    count: int
    work: Work


@dataclasses.dataclass(frozen=True)
class RoundWork:
    """One round of decoding, or all chunks of prompts, on one device."""

    passes: tuple[Pass, ...]

    @property
    def work(self) -> Work:
        """Of all passes."""
        return sum((one.work * one.count for one in self.passes), Work())

    @property
    def num_passes(self) -> int:
        """How many passes follow each other."""
        return sum(one.count for one in self.passes)

    def floor_s(self, chip: Chip, overhead_s_per_pass: float = 0.0) -> float:
        """The sum of the passes' floors: passes of a round depend on each other.

        Args:
          chip: what it runs on.
          overhead_s_per_pass: seconds added to each pass, for what the floor leaves out; assumed,
            not measured.
        """
        work_s = sum(one.count * one.work.floor_s(chip) for one in self.passes)
        return work_s + self.num_passes * overhead_s_per_pass


def round_work(
    target: Any,
    draft: Any = None,
    num_draft: int = 0,
    setting: Setting = Setting(),
    tree: Tree | DynamicTree | None = None,
) -> RoundWork:
    """Counts the passes of one round, as the package's drafters run them.

    Args:
      target: the target's config.
      draft: None for plain decoding; "ngram" or "suffix"; the config of a standalone draft, or of
        a head (``EagleConfig``, ``MtpConfig`` or that of a registered kind).
      num_draft: K. For a tree, the number of its nodes.
      setting: batch, context, mesh and dtype.
      tree: what is drafted; None means a chain.

    Raises:
      ConfigError: K is not the tree's number of nodes, there is no draft for it, or the draft is of
        no known kind.
    """
    if num_draft < 0 or (tree is not None and tree.num_nodes != num_draft):
        nodes = "0 or more" if tree is None else f"the tree's {tree.num_nodes} nodes"
        raise ConfigError(f"num_draft is {num_draft}; expected {nodes}")
    if draft is None and num_draft:
        raise ConfigError(f"num_draft is {num_draft} without a draft; expected 0")
    own = Stack.of(target, setting)
    if draft is None or num_draft == 0:
        return RoundWork((Pass("verify", 1, own.run(setting, 1, 1)),))
    verify = Pass("verify", 1, own.run(setting, num_draft + 1, num_draft + 1))
    kind = kind_of_draft(draft)
    if isinstance(draft, str) and kind.drafting.draft != "none":
        raise ConfigError(f"draft is {draft!r}; expected the config of a model or a head")
    passes = [verify]
    for one in kind.drafting.round_passes(draft, num_draft, tree):
        stack = Stack.of(
            draft if one.num_layers is None else target,
            setting,
            is_draft=one.num_layers is None,
            part=one.part,
            skipped_weights=one.skipped_weights,
            num_layers=one.num_layers,
        )
        scorer = stack if stack.head else own
        work = stack.run(setting, one.width, one.scored, scorer, attends=one.attends)
        passes.append(Pass(one.name, one.count, work))
    return RoundWork(tuple(passes))


def prefill_work(
    target: Any, prompt_tokens: int, setting: Setting = Setting(), chunk: int = CHUNK
) -> RoundWork:
    """Counts the passes that feed the target a prompt a row, each a chunk of them.

    A token attends over those before it: on average of a pass, half of the chunk and all tokens
    before the chunk. A drafter's own prefill is not counted.

    Args:
      target: the target's config.
      prompt_tokens: tokens of each prompt.
      setting: batch, mesh and dtype; the context follows from the prompt.
      chunk: tokens of a prompt that a pass has at most.

    Raises:
      ConfigError: a prompt or a chunk without a token.
    """
    if prompt_tokens < 1 or chunk < 1:
        raise ConfigError(
            f"prompt_tokens is {prompt_tokens} and chunk {chunk}; expected 1 or more of each"
        )
    own = Stack.of(target, setting)
    passes = []
    for begin in range(0, prompt_tokens, chunk):
        end = min(begin + chunk, prompt_tokens)
        within = dataclasses.replace(setting, context=(begin + end) // 2)
        work = own.run(within, end - begin, int(end == prompt_tokens))
        passes.append(Pass("prefill", 1, work))
    return RoundWork(tuple(passes))


def queue(
    target: Any,
    prompt_tokens: int,
    new_tokens: float,
    round_s: float,
    tokens: float,
    chip: Chip,
    setting: Setting = Setting(),
) -> dict[str, float]:
    """Returns how a queue's time is divided if prompts never run out.

    The next prompt takes the place of a finished row. Passes over prompts and rounds take turns,
    whether a prompt is fed whole or between rounds.

    Args:
      target: the target's config.
      prompt_tokens: of each request.
      new_tokens: that each request emits.
      round_s: of a round of all rows.
      tokens: expected tokens of a row's round.
      chip: what it runs on.
      setting: batch, mesh and dtype.

    Returns:
      Of a request: "prefill_s", its share of a call that feeds a prompt to each group along "data";
      "decode_s", its share of the rounds that emit its "new_tokens". Of all: "prefill_share" of the
      devices' time, and "tok_s", tokens a second at most.
    """
    groups = setting.abstract_mesh.shape["data"]
    feeding = prefill_work(target, prompt_tokens, dataclasses.replace(setting, batch=groups))
    prefill_s = feeding.floor_s(chip) / groups
    decode_s = round_s * new_tokens / tokens / setting.batch
    return {
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "new_tokens": new_tokens,
        "prefill_share": prefill_s / (prefill_s + decode_s),
        "tok_s": new_tokens / (prefill_s + decode_s),
    }


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device that stay between rounds.

    Attributes:
      params: of target and draft.
      cache: of target and draft, with ``Setting.context`` slots a row.
    """

    params: float
    cache: float

    @property
    def total(self) -> float:
        return self.params + self.cache

    def shortfall(self, chip: Chip) -> float:
        """The bytes that a device of the chip lacks; 0 if everything fits without temporaries."""
        return max(0.0, self.total - chip.per_device.hbm_bytes)


def memory(target: Any, draft: Any = None, setting: Setting = Setting()) -> DeviceMemory:
    """Returns what target and draft occupy on one device; arguments as in ``round_work``."""
    stacks = [Stack.of(target, setting)]
    if draft is not None and not isinstance(draft, str):
        kind = kind_of_draft(draft)
        parts = kind.head.parts_of(draft) if kind.head else (None,)
        stacks += [Stack.of(draft, setting, is_draft=True, part=part) for part in parts]
    params = setting.itemsize * sum(stack.num_params for stack in stacks)
    row = sum(stack.slots_bytes(setting.context) + stack.fixed_bytes for stack in stacks)
    return DeviceMemory(params, setting.rows * row)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a round's floor and its accepted tokens amount to.

    Attributes:
      num_draft: K.
      tokens: expected tokens of a row's round, the target's own included.
      plain_s: floor of a round of plain decoding.
      round_s: floor of this round.
      batch: rows over all devices.
    """

    num_draft: int
    tokens: float
    plain_s: float
    round_s: float
    batch: int

    @property
    def plain_tok_s(self) -> float:
        """Tokens a second of plain decoding, of all rows: at most so many."""
        return self.batch / self.plain_s

    @property
    def tok_s(self) -> float:
        """Tokens a second of all rows: at most so many."""
        return self.batch * self.tokens / self.round_s

    @property
    def speedup(self) -> float:
        """Over plain decoding. Both are floors, so their ratio may err to either side."""
        return self.tok_s / self.plain_tok_s


def predict(
    target: Any,
    draft: Any,
    num_draft: int,
    tokens: float,
    chip: Chip,
    setting: Setting = Setting(),
    tree: Tree | DynamicTree | None = None,
    overhead_s_per_pass: float = 0.0,
) -> Prediction:
    """Predicts the speed with speculation, and without it.

    Args:
      target: the target's config.
      draft: see ``round_work``.
      num_draft: K.
      tokens: expected tokens of a row's round (tau), between 1 and K + 1.
      chip: what it runs on.
      setting: batch, context, mesh and dtype.
      tree: what is drafted; None means a chain.
      overhead_s_per_pass: see ``RoundWork.floor_s``.

    Raises:
      ConfigError: a round cannot emit so many tokens.
    """
    most = 1 + (num_draft if tree is None else tree.depth)
    if not 1 <= tokens <= most:
        raise ConfigError(f"tokens is {tokens}; a round of K = {num_draft} emits 1 to {most}")

    def time(*drafts):
        return round_work(target, *drafts).floor_s(chip, overhead_s_per_pass)

    plain = time(None, 0, setting)
    one = time(draft, num_draft, setting, tree)
    return Prediction(num_draft, tokens, plain, one, setting.batch)


def best(
    target: Any, draft: Any, tokens: Sequence[float], chip: Chip, setting: Setting = Setting()
) -> Prediction:
    """Returns the prediction of the K with the highest speed; K = 0 is plain decoding.

    Args:
      target: the target's config.
      draft: see ``round_work``.
      tokens: expected tokens of a round for K = 0, 1, ..., as ``adaptive.policy.expected_tokens``
        returns them from acceptance rates.
      chip: what it runs on.
      setting: batch, context, mesh and dtype.
    """
    each = (predict(target, draft, k, t, chip, setting) for k, t in enumerate(tokens))
    return max(each, key=lambda prediction: prediction.tok_s)
