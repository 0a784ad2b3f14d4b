"""What a head is worth: real speculative decoding, and beside it the same rounds teacher-forced."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.drafters import registry
from spec_jax.engine.decoder import Generation, SpeculativeDecoder
from spec_jax.engine.stats import Stats
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.train.objective import target_view
from spec_jax.train.unroll import unroll

_BUCKET = 64  # sequences are padded to multiples, so that few shapes compile


def decode(
    target: LoadedModel, draft: LoadedModel | LoadedHead | None, prompts: Sequence[Sequence[int]],
    *, num_draft: int, max_new_tokens: int, batch: int, temperature: float = 0.0,
) -> tuple[list[Generation], Stats]:
    """Decodes prompts in chains of ``num_draft``, ``batch`` rows at a time.

    Rows do not end at stop tokens, so every prompt counts alike.

    Args:
      target: the model.
      draft: what drafts for it.
      prompts: ids.
      num_draft: K.
      max_new_tokens: of every prompt.
      batch: rows at a time; the last may be fewer.
      temperature: of target and draft.

    Returns:
      What was written behind each prompt, and counts and times of them all.
    """  # fmt: skip
    config = SpeculativeConfig(speculative_method=draft.method, num_speculative_tokens=num_draft)
    sampler = SamplerConfig(temperature=temperature)
    decoder = SpeculativeDecoder(target, draft, config, target_sampler=sampler)
    longest = max(map(len, prompts))
    rows = []
    for begin in range(0, len(prompts), batch):
        part = [list(p) for p in prompts[begin : begin + batch]]
        rows += decoder.generate(
            part, max_new_tokens, stop_tokens=(), pad_to=longest,
            seeds=range(begin, begin + len(part)),
        )  # fmt: skip
    return rows, decoder.stats


def acceptance_figures(stats: Stats) -> dict[str, object]:
    """``tau``, and ``accept`` conditional by position."""
    return {"tau": stats.tau, "accept": np.nan_to_num(stats.acceptance_by_position)}


def teacher_forced(
    target: LoadedModel, head: LoadedHead, prompts: Sequence[Sequence[int]],
    rows: Sequence[Generation], *, num_draft: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The rounds that ``decode`` ran greedily, judged by the training's unrolling instead.

    Every sequence is fed whole, and a draft is judged where the decoder judged it: at the same
    round starts, behind the same accepted drafts. Tests the training's mask and shifts
    against the decoder's cache.

    Args:
      target: the model.
      head: a recycled head.
      prompts: ids.
      rows: what ``decode`` wrote behind each.
      num_draft: K.

    Returns:
      i64[K] twice: how many drafts of each position were judged, and how many accepted.
    """  # fmt: skip
    draft = _draft_table(head.config, target.model, target.config, num_draft)
    judged, accepted = np.zeros((2, num_draft), np.int64)
    for prompt, row in zip(prompts, rows):
        text = np.asarray([*prompt, *row.tokens], np.int32)
        padded = np.zeros(-(-(len(text) + 2) // _BUCKET) * _BUCKET, np.int32)
        padded[: len(text)] = text
        drafts = np.asarray(draft(target.params, head.params, padded[None]))[:, 0]
        pending = len(prompt)
        while pending + 1 < len(text):
            wanted = text[pending + 1 : pending + 1 + num_draft]
            is_right = drafts[: len(wanted), pending - 1] == wanted
            n = int(np.argmin([*is_right, False]))
            judged[: min(n + 1, len(wanted))] += 1
            accepted[:n] += 1
            pending += n + 1
    return judged, accepted


@functools.cache
def _draft_table(config, model, target_config, num_draft: int):
    """Jitted ``(target's params, head's, tokens i32[1,T+2]) -> i32[K,1,T]``, greedy drafts."""
    head = registry.kind_of(config).head(config, model)

    @jax.jit
    def table(target_params, head_params, tokens):
        params = {"head": head_params, "target": target_params}
        view = target_view(target_params, tokens, config=target_config, taps=config.taps)
        states = unroll(head, params, view.features, tokens, num_draft)
        return jnp.stack([jnp.argmax(head.unembed(params, x), axis=-1) for x in states])

    return table
