"""Explains where two greedy decodings diverge: by rounding, or by a bug.

A pass of one token and a pass of K + 1 tokens round in different orders, so where two logits nearly
tie, plain and speculative decoding may correctly choose different tokens. A bug may look the same,
so the tie alone proves nothing. The audit therefore decodes the rows again, records the logits that
each decoding chose from, and compares them with one pass over the same text in a wider dtype,
without cache or window. The effect of rounding is measured, not assumed: it is the error of such a
pass in the model's own dtype at the same positions. ``judge`` gives the verdict, from recorded
numbers alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from spec_jax.config import GREEDY_BELOW, SamplerConfig
from spec_jax.engine import request
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import Prompt
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel
from spec_jax.sampling import Samplers, highest_temperature
from spec_jax.testing.auditing.replay import Call, Honest, Passes, Replayed, replay
from spec_jax.testing.oracles import penalised

# In units of the honest pass's error; docs/decisions.md has the measurements.
LOCAL_FACTOR = 3.0  # of the logits after one prefix
POOLED_FACTOR = 1.3  # of all of a row, on average; more of a few positions, see ``judge``


@dataclasses.dataclass(frozen=True)
class RowAudit:
    """The audit's result for one prompt. Positions count output tokens from 0.

    Attributes:
      row: the number of the prompt.
      verdict: "identical", "rounding", "bug" or, where the effect of rounding cannot be measured,
        "unknown".
      evidence: sentences.
      at: the position of the first difference; None where there is none.
      tokens: the two tokens there, of plain decoding and of the other; None where an output ended.
      gap: the distance, in float32, of the worse of the two below the best logit.
      rounding: the largest error of a logit there in the dtype of the weights.
      deviations: the largest distance of each decoding's logits from the float32 pass, as a
        multiple of that of a pass without a cache in the same dtype.
      pooled: likewise, root mean square of all positions up to the difference.
    """

    row: int
    verdict: str
    evidence: tuple[str, ...] = ()
    at: int | None = None
    tokens: tuple[int | None, int | None] | None = None
    gap: float | None = None
    rounding: float | None = None
    deviations: tuple[float, ...] = ()
    pooled: tuple[float, ...] = ()

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.verdict == "rounding"

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, for JSON."""
        return dataclasses.asdict(self) | {"is_near_tie": self.is_near_tie}

    def __str__(self) -> str:
        where = "" if self.at is None else f" at token {self.at}"
        return f"row {self.row}: {self.verdict}{where}; " + "; ".join(self.evidence)


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of ``audit``.

    Attributes:
      num_rows: prompts whose outputs were compared.
      rows: the examined rows: those that differ, or all. For the others only the equality of the
        tokens is known.
      width: K + 1, the tokens of a verify pass.
    """

    num_rows: int
    rows: tuple[RowAudit, ...]
    width: int

    def of(self, verdict: str) -> tuple[RowAudit, ...]:
        """Returns the rows with this verdict."""
        return tuple(row for row in self.rows if row.verdict == verdict)

    @property
    def num_not_examined(self) -> int:
        """How many rows were not examined, since their outputs are identical."""
        return self.num_rows - len(self.rows)

    @property
    def is_explained(self) -> bool:
        """Whether no examined row shows a bug, so that every row that differs is explained."""
        return not self.of("bug") and not self.of("unknown")

    def to_dict(self) -> dict[str, Any]:
        """Returns counts and rows, for JSON."""
        counts = {verdict: len(self.of(verdict)) for verdict in _DESCRIPTIONS}
        counts["not_examined"] = self.num_not_examined
        rows = [row.to_dict() for row in self.rows]
        return {"num_rows": self.num_rows, **counts, "width": self.width, "rows": rows}

    def __str__(self) -> str:
        plural = "s" * (self.num_rows != 1)
        count = len(self.rows)
        parts = []
        if count:
            kinds = (
                f"{len(self.of(verdict))} {text}"
                for verdict, text in _DESCRIPTIONS.items()
                if verdict != "unknown" or self.of(verdict)
            )
            parts.append(f"{count} examined ({', '.join(kinds)})")
        if self.num_not_examined:
            parts.append(f"{self.num_not_examined} not examined, with identical outputs")
        lines = [f"{self.num_rows} prompt{plural}: {', '.join(parts)}"]
        return "\n".join([*lines, *(f"  {row}" for row in self.rows if row.verdict != "identical")])


_DESCRIPTIONS = {
    "identical": "identical",
    "rounding": "explained by rounding",
    "bug": "with a bug",
    "unknown": "of unknown cause",
}


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Returns the first position at which two outputs differ; None if they are the same."""
    pairs = zip(first, second)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return None if at == len(first) == len(second) else at


class Trail(NamedTuple):
    """How a decoding's own logits support its tokens.

    Attributes:
      name: of the decoding, for sentences.
      ratio: f64[N], how far its logits are from the float32 pass, over how far those of the
        honest pass are.
      pooled: the same of all positions together, root mean square.
      own_gap: f64[N], how far its token lies below the best of its own logits.
      tolerance: what of that gap the rounding of one logit explains.
      parts_at: the position where the second run gave another token than the first; None if
        nowhere.
    """

    name: str
    ratio: np.ndarray
    pooled: float
    own_gap: np.ndarray
    tolerance: float
    parts_at: int | None = None


def judge(
    at: int | None,
    gaps: np.ndarray,
    rounding: np.ndarray,
    trails: Sequence[Trail],
    taken: Sequence[str] = (),
    unmeasured: str | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Returns the verdict on one row and its evidence, from recorded numbers alone.

    Args:
      at: the position of the first difference; None where there is none.
      gaps: f64[N], how far, by the float32 pass, the token at each position lies below the best;
        at the difference the worse of the two.
      rounding: f64[N], the largest error of a logit at each position.
      trails: of the decodings that were run again.
      taken: says which token each output takes at the difference; none where there is none.
      unmeasured: why the effect of rounding is not known; then only a token that is not the best
        of its own logits is a bug.
    """
    wrong = []
    right = []
    for trail in trails:
        n = len(trail.ratio)
        # The fewer positions, the farther their average may be: as far as one of them alone.
        most = max(POOLED_FACTOR, 1 + (LOCAL_FACTOR - 1) / max(n, 1))
        missed = np.flatnonzero(trail.own_gap > trail.tolerance)
        if len(missed):
            i = int(missed[0])
            wrong.append(
                f"{trail.name} emits a token at {i} that is not the best of its own logits "
                f"there, but {trail.own_gap[i]:.2g} below"
            )
        if trail.parts_at is not None:
            right.append(f"{trail.name}, run again, diverges from its output at {trail.parts_at}")
        if unmeasured is not None:
            continue
        far = np.flatnonzero(~(trail.ratio <= LOCAL_FACTOR))
        if len(far):
            i = int(far[0])
            wrong.append(
                f"{trail.name}'s own logits at token {i} are {trail.ratio[i]:.1f} times as far "
                f"from float32 as by rounding alone (limit {LOCAL_FACTOR:g})"
            )
        elif n and not trail.pooled <= most:
            wrong.append(
                f"{trail.name}'s own logits are on average {trail.pooled:.2f} times as far from "
                f"float32 as by rounding alone (limit {most:.2g})"
            )
        elif n:
            right.append(
                f"{trail.name}'s own logits are {trail.pooled:.2f} times as far from float32 as by "
                f"rounding alone, at one token {trail.ratio.max():.2f}"
            )
    if unmeasured is not None:
        evidence = (*wrong, f"rounding cannot be measured: {unmeasured}", *right)
        usual = "identical" if at is None else "unknown"
        return "bug" if wrong else usual, evidence
    is_far = ~(gaps <= 2 * rounding)
    shared = np.flatnonzero(is_far[:at])
    if len(shared):
        i = int(shared[0])
        wrong.append(
            f"the token at {i} lies {gaps[i]:.2g} below the best in float32, where rounding moves "
            f"a logit by up to {rounding[i]:.2g}"
        )
    is_bug = bool(wrong) or bool(is_far.any())
    evidence = wrong if is_bug else right
    if at is not None:
        evidence.append(
            f"at {at} {', and '.join(taken)} in float32, where rounding moves a logit by up to "
            f"{rounding[at]:.2g}"
        )
    if is_bug:
        return "bug", tuple(evidence)
    return ("identical" if at is None else "rounding"), tuple(evidence)


def audit(
    decoder: SpeculativeDecoder,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int | None = None,
    *,
    plain: SpeculativeDecoder | None = None,
    outputs: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]] | None = None,
    sampler: Samplers | None = None,
    stop_tokens: Sequence[int] | None = None,
    pad_to: int = 0,
    has_all_rows: bool = False,
) -> Audit:
    """Compares greedy decoding with and without drafts, and explains every row that differs.

    Each such row is decoded again with both decoders, in the same batch, one program a round. Its
    verdict is *bug* unless all of this holds, up to the difference: every token is the best by the
    logits that it was chosen from; these logits are as near to a pass in float32 as rounding
    explains, at each position and on average; and by that pass each token is the best but for a
    near tie.

    Example:
      ```python
      import spec_jax
      from spec_jax.testing import mock_model

      target = mock_model(vocab_size=8)  # or spec_jax.load_model("zoo/target")
      draft = mock_model(vocab_size=8, seed=1)

      decoder = spec_jax.SpeculativeDecoder(target, draft)
      audit = spec_jax.testing.audit(decoder, [[1, 2, 3]], max_new_tokens=4)
      assert audit.is_explained
      print(audit)
      ```

    Args:
      decoder: with drafts.
      prompts: texts, ids or conversations, decoded as one batch.
      max_new_tokens: maximum output tokens of a row, 128 by default.
      plain: the decoder to compare with, of the same target; by default the target without drafts.
      outputs: existing outputs of both, ``plain``'s rows first; by default both decode now.
      sampler: as in ``SpeculativeDecoder.generate``; of temperature 0.
      stop_tokens: likewise.
      pad_to: likewise.
      has_all_rows: also examine rows whose tokens are equal, since their logits may still be wrong.
        By default they are counted as not examined.

    Raises:
      ConfigError: the temperature is above 0, a decoder is overlapped, or the outputs are not two
        of as many rows as there are prompts, or hold an id that the target does not have.
      PromptError: as in ``SpeculativeDecoder.generate``.
    """
    target = decoder.target
    if decoder.is_overlapped or plain is not None and plain.is_overlapped:
        raise ConfigError(
            "the decoder drafts on devices of its own; an audit runs whole rounds, so give it a "
            "decoder of the same parts without devices"
        )
    if plain is None:
        options = {"target_sampler": decoder.target_sampler, "mesh": decoder.mesh}
        plain = SpeculativeDecoder(target, **options)
    samplers = decoder.target_sampler if sampler is None else sampler
    if highest_temperature(samplers) >= GREEDY_BELOW:
        raise ConfigError(
            f"the temperature is {highest_temperature(samplers):g}; an audit compares greedy "
            "outputs, so it needs temperature 0"
        )
    ids, _ = request.encode_all(target, prompts)
    stops = target.stop_tokens if stop_tokens is None else tuple(stop_tokens)
    limits = request.output_limits(ids, max_new_tokens, None, decoder.max_length)
    call = Call(ids, limits, samplers, stops, pad_to)
    if outputs is None:
        options = {"sampler": sampler, "stop_tokens": stops, "pad_to": pad_to}
        outputs = tuple(
            [row.tokens for row in d.generate(ids, max_new_tokens, **options)]
            for d in (plain, decoder)
        )
    if len(outputs) != 2 or any(len(rows) != len(ids) for rows in outputs):
        sizes = " and ".join(str(len(rows)) for rows in outputs)
        raise ConfigError(
            f"outputs have {sizes} rows; expected two lists of {len(ids)} rows, one for each prompt"
        )
    for rows in outputs:
        _check_ids(target, rows)
    pairs = {row: pair for row, pair in enumerate(zip(*outputs))}
    until = {
        row: len(a) if at is None else at + 1
        for row, (a, b) in pairs.items()
        for at in [first_difference(a, b)]
        if has_all_rows or at is not None
    }
    replays = [replay(d, call, until) for d in (plain, decoder)] if until else []
    configs = [samplers] * len(ids) if isinstance(samplers, SamplerConfig) else samplers
    passes = Passes(target)
    rows = tuple(
        _examine(passes, row, ids[row], pairs[row], [found[row] for found in replays], configs[row])
        for row in until
    )
    return Audit(len(ids), rows, decoder.system().num_draft + 1)


def audit_outputs(
    target: LoadedModel,
    prompt: Prompt,
    first: Sequence[int],
    second: Sequence[int],
    *,
    sampler: SamplerConfig | None = None,
    row: int = 0,
) -> RowAudit:
    """Examines two greedy outputs of one prompt without decoding again.

    It can only determine whether the two tokens nearly tie. A bug may also change a token at a near
    tie; ``audit`` examines the logits that the tokens were chosen from.

    Args:
      target: the target.
      prompt: the text, ids or conversation that both continue.
      first: one output.
      second: the other.
      sampler: whose penalties apply; by default none do.
      row: the number of the prompt, for the record.

    Raises:
      ConfigError: an output holds an id that the target does not have.
      PromptError: as in ``SpeculativeDecoder.generate``.
    """
    _check_ids(target, (first, second))
    ids = request.encode(target, prompt)
    return _examine(Passes(target), row, ids, (first, second), [], sampler or SamplerConfig())


def _check_ids(target: LoadedModel, rows: Sequence[Sequence[int]]) -> None:
    last = target.model.last_id
    for row, output in enumerate(rows):
        if bad := [i for i in output if not 0 <= i <= last]:
            raise ConfigError(f"output {row} holds id {bad[0]}; {target.name} has ids 0 to {last}")


_NAMES = ("plain decoding", "the decoder")
_OUTPUTS = ("the first output", "the second")


def _examine(
    passes: Passes,
    row: int,
    prompt: Sequence[int],
    pair: Sequence[Sequence[int]],
    replays: Sequence[Replayed],
    config: SamplerConfig,
) -> RowAudit:
    """Computes what ``judge`` needs of one row."""
    at = first_difference(*pair)
    names = _NAMES if replays else _OUTPUTS
    if at is not None and at == min(map(len, pair)):
        tokens = tuple(rows[at] if at < len(rows) else None for rows in pair)
        ends, goes_on = names if tokens[0] is None else names[::-1]
        token = _shown(passes.target, next(t for t in tokens if t is not None))
        return RowAudit(row, "bug", (f"{ends} ends there, {goes_on} takes {token}",), at, tokens)
    N = len(pair[0]) if at is None else at + 1
    honest = passes.logits([*prompt, *pair[0][: N - 1]], len(prompt))

    def of_row(logits):
        """Returns logits f64[N,V] with bias and penalties."""
        texts = (tuple(pair[0][:i]) for i in range(len(logits)))
        rows = [penalised(x, config, prompt, text) for x, text in zip(logits, texts)]
        return np.asarray(rows).reshape(-1, logits.shape[-1])

    exact = of_row(honest.exact)
    rounded = of_row(honest.rounded)
    below = exact.max(axis=1) - np.asarray([exact[range(N), [*ids[:N]]] for ids in pair])
    gaps = below.max(axis=0)
    taken = [
        f"{name} takes {_shown(passes.target, ids[at])}, {gap[at]:.2g} below the best"
        for name, ids, gap in zip(names, pair, below)
        if at is not None
    ]
    unit = honest.eps * np.abs(exact).max(axis=1)  # of one rounding of a logit
    rounding = np.maximum(np.abs(exact - rounded).max(axis=1), unit)
    trails = [
        _trail(name, rows[:N], again, honest, of_row)
        for name, rows, again in zip(_NAMES, pair, replays)
    ]
    verdict, evidence = judge(at, gaps, rounding, trails, taken, honest.unmeasured)
    if not replays:
        evidence = (*evidence, "the logits that the tokens were chosen from were not examined")
    there = {}
    if at is not None:
        tokens = tuple(rows[at] for rows in pair)
        there = dict(tokens=tokens, gap=float(gaps[at]), rounding=float(rounding[at]))
    return RowAudit(
        row,
        verdict,
        evidence,
        at,
        deviations=tuple(float(max(trail.ratio, default=0.0)) for trail in trails),
        pooled=tuple(float(trail.pooled) for trail in trails),
        **there,
    )


def _trail(name, output, again: Replayed, honest: Honest, of_row) -> Trail:
    parts_at = first_difference(output, again.tokens[: len(output)])
    # Up to the difference the texts are the same, so the logits there still are comparable.
    n = len(output) if parts_at is None else parts_at + 1
    raw = np.asarray(again.logits, np.float64)[:n, : honest.exact.shape[1]]
    n = len(raw)
    exact = honest.exact[:n]
    rounded = honest.rounded[:n]

    def rms(x, axis=None):
        return np.sqrt(np.mean(x**2, axis=axis))

    # No less than the rounding of the logits themselves.
    noise = np.maximum(rms(rounded - exact, 1), honest.eps / 4 * rms(exact, 1))
    usual = rms(noise)
    off = np.where(np.isfinite(raw).all(axis=1), rms(raw - exact, 1), np.inf)
    logits = of_row(raw)
    own_gap = logits.max(axis=1) - logits[range(n), again.tokens[:n]]
    tolerance = honest.eps * float(np.abs(logits).max())
    pooled = float(rms(off) / usual)
    return Trail(name, off / np.maximum(noise, usual), pooled, own_gap, tolerance, parts_at)


def _shown(target: LoadedModel, token: int) -> str:
    """Names a token by its id and, if there is a tokenizer, its text."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return f"id {token}"
    return f"id {token} ({tokenizer.special_texts.get(token) or tokenizer.decode([token])!r})"
