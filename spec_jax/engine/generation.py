"""What a prompt produced: its text, where each token came from, and what went wrong.

The ``finish_reason`` of a faulty row names the model, drafter or rule at fault. A target without a
distribution and drafts that were not finite are logged as a warning; invalid results of a drafter
or a rule raise an error.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.decoding import Finish, Kind, System
from spec_jax.engine.stats import Stats, row_stats
from spec_jax.engine.text import TextTracker
from spec_jax.errors import ConfigError, InvalidDraftError, InvalidVerdictError
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.sampling import Samplers, make_sampler
from spec_jax.show import page, plots
from spec_jax.show.summary import ReprMixin, cut

_log = logging.getLogger(__name__)

_CONTEXT = 64  # ids of the prompt that are kept: the text of the output may depend on the last ones


@dataclasses.dataclass(frozen=True)
class Trace:
    """Where each output token of a row came from.

    Attributes:
      kinds: of each token: "first", "accepted", "corrected" or "bonus".
      offered: drafts offered by the round that begins at each token, else -1.
      rejected: the id of the draft that each corrected token replaces, else -1. In a tree it is the
        first of the rejected siblings.
      expected: the rule's closed-form acceptance of each draft that was reached, else NaN; empty if
        it was not recorded.
      prompt: the last ids of the prompt.
      tokenizer: turns ids into text, or None.
    """

    kinds: tuple[str, ...]
    offered: tuple[int, ...]
    rejected: tuple[int, ...]
    expected: tuple[float, ...]
    prompt: tuple[int, ...]
    tokenizer: Tokenizer | None

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text that each output token adds, "" for one that ends inside a character.

        Args:
          tokens: of the output, or the first of them.
        """
        if self.tokenizer is None:
            return [f"{token} " for token in tokens]
        text = TextTracker(self.tokenizer, self.prompt, has_pieces=True)
        pieces = []
        for n in range(1, len(tokens) + 1):
            end = Finish.LENGTH if n == len(tokens) else Finish.RUNNING
            pieces.append(text.look([*tokens[:n]], end)[1])
        return pieces

    def shown(self, tokens: Sequence[int]) -> list[page.Token]:
        """Returns the output's tokens as ``page.tokens`` shows them.

        Args:
          tokens: of the output.
        """
        found = []
        number = place = count = 0
        for i, text in enumerate(self.pieces(tokens[: len(self.kinds)])):
            if self.offered[i] >= 0:
                number += 1
                place = 0
                count = self.offered[i]
            place += 1
            kind = "target" if self.kinds[i] == "bonus" and not count else self.kinds[i]
            hint = f"token {i + 1}, id {tokens[i]}: {page.MEANING[kind]}"
            if number:
                hint += f"; round {number}"
            if kind == "accepted":
                hint += f", draft {place} of {count}"
            if self.expected and not math.isnan(self.expected[i]):
                hint += f", accepted with probability {self.expected[i]:.2f}"
            if self.tokenizer is not None and not text:
                text = self.tokenizer.special_texts.get(tokens[i], "")
            rejected = None
            if self.rejected[i] >= 0:
                rejected = self._draft([*self.prompt, *tokens[:i]], self.rejected[i])
            found.append(page.Token(text, kind, hint, rejected, self.offered[i] >= 0))
        return found

    def _draft(self, context: Sequence[int], token: int) -> str:
        """The text that a draft would have added."""
        if self.tokenizer is None:
            return str(token)
        text = self.tokenizer.decode_after(context[-_CONTEXT:], [token])
        return text or self.tokenizer.special_texts.get(token, "")

    def plot(self, axes: Any = None) -> Any:
        """Draws the tokens of each round; returns the figure, see ``plots.plot_rounds``."""
        starts = [i for i, count in enumerate(self.offered) if count >= 0]
        rounds = [
            self.kinds[begin:end] for begin, end in zip(starts, [*starts[1:], len(self.kinds)])
        ]
        return plots.plot_rounds(
            [kinds.count("accepted") for kinds in rounds],
            [kinds[-1] if kinds[-1] != "accepted" else "" for kinds in rounds],
            [self.offered[i] for i in starts],
            axes,
        )


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a row's output tokens under the target, in nats.

    Attributes:
      raw: by the model.
      processed: after all sampling parameters, of the distribution that the token was drawn from;
        0 at temperature 0.
    """

    raw: tuple[float, ...]
    processed: tuple[float, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Generation(ReprMixin):
    """What one prompt produced; ``str`` of it is its text.

    A notebook shows its tokens in colour: accepted drafts, corrections, bonus tokens.

    Attributes:
      text: the output without the prompt, or None without a tokenizer. The text of a cancelled row
        ends with a whole character, even if ``tokens`` end inside one.
      tokens: the output's ids, a stop token included.
      finish_reason: "stop_token", "stop_string", "length", "cancelled", or a fault: "nan_target",
        "invalid_draft", "invalid_draft_probs", "invalid_verdict".
      stats: counts of this row; times are the batch's, in ``SpeculativeDecoder.stats``.
      trace: where each token came from, and which drafts were rejected.
      logprobs: log-probabilities of each token, if ``logprobs=True`` was given; else None.
      seen: the states of the decoder's observers for this row, by the observers' names.
    """

    text: str | None
    tokens: tuple[int, ...]
    finish_reason: str
    stats: Stats
    trace: Trace | None = dataclasses.field(default=None, compare=False)
    logprobs: TokenLogprobs | None = dataclasses.field(default=None, compare=False)
    seen: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return repr(self) if self.text is None else self.text

    def _repr_fields(self) -> dict[str, str]:
        text = "" if self.text is None else cut(repr(self.text), 60)
        counts = {"tokens": str(len(self.tokens)), "tau": f"{self.stats.tau:.2f}"}
        return {"": text, **counts, "finish": self.finish_reason}

    def _repr_html_(self) -> str:
        if self.trace is None:
            return super()._repr_html_()
        note = f"{self.stats.tau:.2f} tokens a round · ended by {self.finish_reason}"
        return page.tokens(self.trace.shown(self.tokens), note)

    def plot(self, axes: Any = None) -> Any:
        """Draws the tokens of each round: accepted drafts, the target's own, drafts dropped.

        Args:
          axes: matplotlib axes to draw on; None: a new figure.

        Returns:
          The matplotlib figure.

        Raises:
          ConfigError: matplotlib is not installed, or there is no trace.
        """
        if self.trace is None:
            raise ConfigError("this generation has no trace to plot; generate() makes one with it")
        return self.trace.plot(axes)


def collect(record: decoding.Record, text: TextTracker, system: System) -> Generation:
    """Turns the record of one row into a ``Generation``.

    Args:
      record: of the row alone.
      text: has followed the row.
      system: what decoded it.
    """
    begin = int(record.prompt_length)
    ids = record.tokens[begin : begin + int((record.kind > 0).sum())].tolist()
    n, shown, finish = text.result(ids, Finish(int(record.finish)))
    kept = slice(begin, begin + n)
    seen = dict(record.seen)
    expected = seen.pop("expected", None)
    expected = None if expected is None else expected[kept]
    logprobs = seen.pop("logprobs", None)
    if logprobs is not None:
        logprobs = TokenLogprobs(
            *(tuple(x[kept].tolist()) for x in (logprobs.raw, logprobs.processed))
        )
    until = math.inf if system.drafted_until is None else system.drafted_until - begin
    kind = record.kind[kept]
    offered = record.offered[kept]
    stats = row_stats(kind, offered, system.depth, expected, finish=finish, drafted_until=until)
    return Generation(
        text=shown,
        tokens=tuple(ids[:n]),
        finish_reason=finish.name.lower(),
        stats=dataclasses.replace(stats, nan_drafts=int(record.nan_drafts)),
        trace=Trace(
            tuple(Kind(k).name.lower() for k in kind.tolist()),
            tuple(offered.tolist()),
            tuple(record.rejected[kept].tolist()),
            () if expected is None else tuple(expected.tolist()),
            tuple(record.tokens[:begin][-_CONTEXT:].tolist()),
            text.tokenizer,
        ),
        logprobs=logprobs,
        seen=seen,
    )


class Fault(NamedTuple):
    """What went wrong in a row.

    Attributes:
      text: without a final full stop.
      error: the type of the error that a call raises for it; None: it logs a warning.
      raised: what the drafter's Python function raised, or None.
    """

    text: str
    error: type[InvalidDraftError | InvalidVerdictError] | None = None
    raised: Exception | None = None


def fault_of(
    row: Generation,
    system: System,
    sampler: SamplerConfig,
    prompt: Sequence[int],
    num_ahead: int = 0,
) -> Fault | None:
    """Returns what went wrong in a row, or None.

    Args:
      row: what it has produced.
      system: what decoded it.
      sampler: the target's.
      prompt: the ids of its prompt.
      num_ahead: how many drafts the drafter may be ahead of the output.
    """
    finish = Finish[row.finish_reason.upper()]
    drafter = f"drafter {system.drafter.name!r}"
    raised = find_raised(finish, system, (*prompt, *row.tokens), num_ahead)
    if raised is not None:
        text = f"{drafter} raised {type(raised).__name__}: {raised}"
        return Fault(text, InvalidDraftError, raised)
    processor = find_forbidding(finish, system, sampler, prompt, row.tokens)
    if processor is not None:
        return Fault(f"processor {processor!r} forbade every token of the target")
    faults = {
        Finish.NAN_TARGET: Fault("the target's logits were not finite"),
        Finish.INVALID_DRAFT: Fault(
            f"{drafter} proposed ids outside of the vocabulary 0..{system.target.last_id}, a "
            f"number of drafts outside of 0..{system.num_draft}, or parents that make no tree",
            InvalidDraftError,
        ),
        Finish.INVALID_DRAFT_PROBS: Fault(
            f"{drafter} returned Proposal.probs that are not distributions (each row is finite, "
            "not negative, and sums to 1), or gives the token that was drawn probability 0",
            InvalidDraftError,
        ),
        Finish.INVALID_VERDICT: Fault(
            f"rule {system.rule.name!r} returned an inconsistent Verdict: n_accept counts drafts "
            "that were not offered, tokens are not these drafts and one token of positive "
            "probability in replacement, or accept_probs are not finite",
            InvalidVerdictError,
        ),
    }
    return faults.get(finish)


def describe_nan_drafts(system: System) -> str:
    """Says that drafts were left out, without a final full stop, see ``Stats.nan_drafts``."""
    name = system.drafter.name
    return f"the logits of drafter {name!r} were not finite, and those drafts were left out"


def error_of(
    rows: Sequence[Any],
    system: System,
    samplers: Samplers,
    prompts: Sequence[Sequence[int]],
    num_ahead: int = 0,
) -> Exception | None:
    """Returns the error that a call should raise for its rows, and logs other faults.

    Args:
      rows: every ``Generation`` of the call.
      system: what decoded them.
      samplers: the target's, one for all rows or one for each.
      prompts: the ids of the prompt of each row.
      num_ahead: how many drafts the drafter may be ahead of the output.

    Returns:
      An ``InvalidDraftError`` or ``InvalidVerdictError`` that holds the rows, or None. What a
      drafter's Python function raised is its ``__cause__``.
    """
    unsound = [i for i, row in enumerate(rows) if row.stats.nan_drafts]
    if unsound:
        count = sum(row.stats.nan_drafts for row in rows)
        _log.warning("%s, in %d rounds of rows %s", describe_nan_drafts(system), count, unsound)
    faults: dict[tuple, tuple[Fault, list[int]]] = {}
    for i, (row, prompt) in enumerate(zip(rows, prompts)):
        sampler = samplers if isinstance(samplers, SamplerConfig) else samplers[i]
        fault = fault_of(row, system, sampler, prompt, num_ahead)
        if fault is not None:
            faults.setdefault((row.finish_reason, fault.text), (fault, []))[1].append(i)
    # What a function raised comes first: it says more than what the loop saw.
    error = None
    for fault, places in sorted(faults.values(), key=lambda found: found[0].raised is None):
        text = f"{fault.text}, in rows {places}"
        if fault.error is None:
            _log.warning("%s; those rows stopped there", text)
        elif error is None:
            if fault.raised is not None:
                length = len(prompts[places[0]]) + len(rows[places[0]].tokens)
                text += f" (row {places[0]} after {length} tokens of prompt and output)"
            error = fault.error(
                f"{text}; those rows stopped there; all rows' tokens are in this error's "
                "`generations`",
                rows,
            )
            error.__cause__ = fault.raised
    return error


def find_forbidding(
    finish: Finish,
    system: System,
    sampler: SamplerConfig,
    prompt: Sequence[int],
    output: Sequence[int],
) -> str | None:
    """Returns the name of the processor that forbids every token after a text, or None.

    Args:
      finish: why the row ended; None is returned unless the target had no distribution.
      system: what decoded it.
      sampler: the target's.
      prompt: ids of the prompt.
      output: ids of the output.
    """
    if finish != Finish.NAN_TARGET:
        return None
    V = system.target.vocab_size
    text = jnp.asarray([*prompt, *output], jnp.int32)[None]
    begin = len(prompt)
    state = make_sampler(sampler, 1, V).start(text[:, :begin], jnp.asarray([begin]), V)
    state = state.advance(text[:, begin:], jnp.asarray([len(output)]))
    logits = jnp.where(jnp.arange(V) <= system.target.last_id, 0.0, -jnp.inf)[None, None]
    for active in state.processors:
        logits = active.apply(logits, jnp.zeros((1, 0), jnp.int32), None)
        if not bool((logits > -jnp.inf).any()):
            return active.processor.name
    return None


def find_raised(
    finish: Finish, system: System, prefix: Sequence[int], num_ahead: int = 0
) -> Exception | None:
    """Returns the exception of a drafter's Python function that ended a row, or None.

    Args:
      finish: why the row ended.
      system: what decoded it.
      prefix: the ids of its prompt and output.
      num_ahead: how many drafts the drafter may be ahead of the output.
    """
    if finish != Finish.INVALID_DRAFT or system.drafter.host is None:
        return None
    return system.drafter.host.find_error(tuple(map(int, prefix)), num_ahead)
