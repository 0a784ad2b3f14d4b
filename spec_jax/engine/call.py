"""One call of a decoder: its arguments, checked, become a ``Session``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from spec_jax.config import check_integer
from spec_jax.decoding import LOGPROBS
from spec_jax.engine import request
from spec_jax.engine.cancellation import CancellationToken, RowCancellation
from spec_jax.engine.parts import Parts
from spec_jax.engine.request import make_request
from spec_jax.engine.session import Session
from spec_jax.engine.stats import RunningStats
from spec_jax.engine.text import TextTracker
from spec_jax.errors import ConfigError
from spec_jax.sampling import check_samplers, make_sampler


def start(
    parts: Parts, token: CancellationToken, totals: RunningStats, prompts, max_new_tokens, *,
    has_pieces: bool, messages=None, max_length=None, stop=(), stop_tokens=None, sampler=None,
    draft_sampler=None, seeds=None, cancellation_token=None, rounds_per_sync=None, pad_to=0,
    logprobs=False,
) -> tuple[Session, bool]:  # fmt: skip
    """Checks all arguments of a call, and decodes nothing yet.

    Args:
      parts: of the decoder.
      token: the decoder's, which cancels every call.
      totals: gets the statistics of the call.
      prompts, max_new_tokens: see ``SpeculativeDecoder.generate``, as for all options but these.
      has_pieces: somebody streams the text.

    Returns:
      What runs the call, and whether it is of a single prompt.

    Raises:
      PromptError, ConfigError: see ``SpeculativeDecoder.generate``.
    """
    target = parts.target
    ids, is_single = request.encode_all(target, prompts, messages)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise ConfigError("a stop string is empty")
    if (stops or has_pieces) and target.tokenizer is None:
        raise ConfigError(f"{target.name} has no tokenizer, so it has no text to look at")
    check_samplers(sampler=sampler, draft_sampler=draft_sampler)
    samplers = parts.target_sampler if sampler is None else sampler
    drafts = parts.draft_sampler if draft_sampler is None else draft_sampler
    if rounds_per_sync is not None:
        check_integer("rounds_per_sync", rounds_per_sync, 1)
    engine, B = parts.engine(samplers, (LOGPROBS,) if logprobs else ()), len(ids)
    V = engine.system.target.vocab_size
    limits = request.output_limits(ids, max_new_tokens, max_length, parts.max_length)
    session = Session(
        engine,
        make_request(
            engine.system, ids, limits, make_sampler(samplers, B, V, seeds),
            make_sampler(drafts or samplers, B, V, seeds),
            stop_tokens=target.stop_tokens if stop_tokens is None else stop_tokens, pad_to=pad_to,
        ),
        TextTracker(target.tokenizer, ids, stops, has_pieces=has_pieces),
        RowCancellation(token, cancellation_token, B),
        totals,
        rounds_per_sync,
    )  # fmt: skip
    return session, is_single


# The options of ``start`` that the caller of a decoder may give.
OPTIONS = frozenset(
    name for name, parameter in inspect.signature(start).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
) - {"has_pieces"}  # fmt: skip


def warm_up(
    parts: Parts, token: CancellationToken, lengths: Sequence[int], max_new_tokens: int | None,
    max_length: int | None, batch: int, **options,
) -> float:  # fmt: skip
    """Prefills prompts of these lengths and decodes a round; see ``SpeculativeDecoder.warmup``."""
    rows, totals = check_integer("batch", batch, 1), RunningStats()
    for length in lengths:
        ids = [[0] * check_integer("a prompt's length", length, 1)] * rows
        session, _ = start(
            parts.for_warmup(), token, totals, ids, max_new_tokens, has_pieces=False,
            max_length=max_length, rounds_per_sync=1, **options,
        )  # fmt: skip
        session.step()  # prefills
        session.step()
        session.close()
    return totals.value.compile_s
