"""What a head is worth: real speculative decoding of held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.stats import Stats


def decode_stats(
    target: LoadedModel, draft: LoadedModel | LoadedHead | None, prompts: Sequence[Sequence[int]],
    *, num_draft: int, max_new_tokens: int, batch: int, temperature: float = 0.0,
) -> Stats:
    """Counts and times of decoding prompts, in chains of ``num_draft``, ``batch`` rows at a time.

    Rows do not end at stop tokens, so every prompt counts alike.

    Args:
      target: the model.
      draft: what drafts for it.
      prompts: ids.
      num_draft: K.
      max_new_tokens: of every prompt.
      batch: rows at a time; the last may be fewer.
      temperature: of target and draft.
    """  # fmt: skip
    method = "standalone" if isinstance(draft, LoadedModel) else draft.method
    config = SpeculativeConfig(speculative_method=method, num_speculative_tokens=num_draft)
    sampler = SamplerConfig(temperature=temperature)
    decoder = SpeculativeDecoder(target, draft, config, target_sampler=sampler)
    longest = max(map(len, prompts))
    for begin in range(0, len(prompts), batch):
        part = [list(p) for p in prompts[begin : begin + batch]]
        decoder.generate(
            part, max_new_tokens, stop_tokens=(), pad_to=longest,
            seeds=range(begin, begin + len(part)),
        )  # fmt: skip
    return decoder.stats


def acceptance_figures(stats: Stats) -> dict[str, object]:
    """``tau``, and ``accept`` conditional by position."""
    return {"tau": stats.tau, "accept": np.nan_to_num(stats.acceptance_by_position)}
