"""Evaluates a draft by real speculative decoding, and a head by the same rounds, teacher-forced."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from spec_jax.compilation import bounded_jit
from spec_jax.config import SpeculativeConfig
from spec_jax.drafters import registry
from spec_jax.engine.decoder import Generation, SpeculativeDecoder
from spec_jax.engine.stats import Stats
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.meshes import mesh_of, use_mesh
from spec_jax.progress import Progress
from spec_jax.sharding import replicate
from spec_jax.train.objective import target_view
from spec_jax.train.unroll import unroll

_BUCKET = 64  # sequences are padded to multiples, so that few shapes compile


def decode(
    target: LoadedModel,
    draft: LoadedModel | LoadedHead,
    prompts: Sequence[Sequence[int]],
    *,
    num_draft: int,
    max_new_tokens: int,
    batch: int,
    devices: MeshOptions = MeshOptions(),
) -> tuple[list[Generation], Stats]:
    """Decodes prompts greedily in chains of ``num_draft``, ``batch`` rows at a time.

    Rows do not end at stop tokens, so that every prompt has the same weight.

    Args:
      target: The target.
      draft: The draft.
      prompts: The prompts as ids.
      num_draft: K.
      max_new_tokens: New tokens of every prompt.
      batch: Rows at a time; the last batch may have fewer.
      devices: The devices.

    Returns:
      The output of each prompt, and the counts and times of all together.
    """
    config = SpeculativeConfig(draft.method, num_draft)
    decoder = SpeculativeDecoder(target, draft, config, **devices.options(draft))
    longest = max(map(len, prompts))
    rows = []
    for begin in range(0, len(prompts), batch):
        part = [list(p) for p in prompts[begin : begin + batch]]
        rows += decoder.generate(
            part,
            max_new_tokens,
            stop_tokens=(),
            pad_to=longest,
            seeds=range(begin, begin + len(part)),
        )
    return rows, decoder.stats


def acceptance_figures(stats: Stats) -> dict[str, object]:
    """Returns ``tau``, and ``accept``, by position; NaN where no draft was reached."""
    return {"tau": stats.tau, "accept": np.asarray(stats.acceptance_by_position)}


def unrolled(
    target: LoadedModel,
    head: LoadedHead,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Generation],
    *,
    num_draft: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Repeats the rounds of a greedy ``decode`` with the passes that train the head.

    Every sequence is fed at once. A draft is compared with the text wherever the decoder's rule
    looked at it: at the same round starts, after the same accepted drafts. This tests the mask and
    the shifts of training against the cache of decoding.

    Args:
      target: The target.
      head: A head that ``has_drafts``.
      prompts: The prompts as ids.
      rows: The outputs of ``decode``.
      num_draft: K.

    Returns:
      i64[K] twice: how many drafts the rule reached at each position, and how many it accepted.
    """
    draft = functools.partial(
        _draft_table, config=head.config, model=target.model, num_draft=num_draft
    )
    reached, accepted = np.zeros((2, num_draft), np.int64)
    bar = Progress(len(rows), f"teacher-forced {head.method}", every_s=10.0, delay_s=2.0)
    with bar:
        for prompt, row in zip(prompts, rows):
            text = np.asarray([*prompt, *row.tokens], np.int32)
            padded = np.zeros(-(-(len(text) + 2) // _BUCKET) * _BUCKET, np.int32)
            padded[: len(text)] = text
            with use_mesh(mesh_of(target.params)):
                drafts = np.asarray(draft(target.params, head.params, padded[None]))[:, 0]
            pending = len(prompt)
            while pending + 1 < len(text):
                true_next = text[pending + 1 : pending + 1 + num_draft]
                is_right = drafts[: len(true_next), pending - 1] == true_next
                n = int(np.argmin([*is_right, False]))
                reached[: min(n + 1, len(true_next))] += 1
                accepted[:n] += 1
                pending += n + 1
            bar.step(f"K={num_draft}")
    return reached, accepted


def has_drafts(target: LoadedModel, draft: LoadedModel | LoadedHead | None) -> bool:
    """Whether ``unrolled`` can repeat the rounds of a draft: it is unrolled, or drafts blocks."""
    has_head = draft is not None and registry.find(draft.method).head is not None
    return has_head and _text_drafts(draft.config, target.model) is not None


@functools.cache
def _text_drafts(config, model):
    """Returns a head's drafts at all places of a text, see ``Objective.drafts``, or None."""
    kind = registry.kind_of(config)
    head = kind.head.functions and kind.head.functions(config, model)
    if head is None:
        drafts = registry.objective_of(config).drafts if kind.training else None
        return drafts and functools.partial(drafts, config=config, model=model)

    def drafts(params, features, tokens, num_draft):
        states = unroll(head, params, features, tokens, num_draft)
        return jnp.stack([jnp.argmax(head.unembed(params, x), -1) for x in states])

    return drafts


@functools.partial(bounded_jit, static_argnames=("config", "model", "num_draft"))
def _draft_table(target_params, head_params, tokens, *, config, model, num_draft: int):
    """Returns i32[K,1,T], greedy drafts at all places of the tokens i32[1,T+2]."""
    params = {"head": head_params, "target": target_params}
    view = target_view(target_params, tokens, model=model, taps=config.taps)
    return replicate(_text_drafts(config, model)(params, view.features, tokens, num_draft))
