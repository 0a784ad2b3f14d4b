"""The compiled loop, run with many seeds: its tokens, its states and the places of its rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.contracts import Proposal
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.engine.generation import find_forbidding, find_raised
from spec_jax.rules.registry import GREEDY, MATCH
from spec_jax.sampling import make_sampler
from spec_jax.testing.certificate.forcing import (
    AS_WRITTEN,
    DRAFT_SEED,
    matches_report,
    parents_of,
    propose_afresh,
)
from spec_jax.testing.certificate.records import CertificateError, Range, settings_of, short, where
from spec_jax.testing.certificate.rounds import Difference
from spec_jax.testing.oracles import (
    Row,
    goodness_of_fit,
    plain_distribution,
    reference_distribution,
    tail_of_sums,
)

_ALONE = 50  # places whose drafts are drawn in batches of one
_TOLERANCE = 1e-4  # on probabilities of a state that has been fed token by token


class Loop:
    """Decodes rows of several settings in one batch, as the decoder does.

    Attributes:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      rows: prompts and samplers.
      num_tokens: how many tokens follow the first one.
      slots: of all states; loops with as many share the programs that read the prompts.
    """

    def __init__(
        self,
        system: decoding.System,
        params: dict[str, Any],
        rows: Sequence[Row],
        num_tokens: int,
        slots: int,
    ):
        self.system, self.params, self.rows, self.num_tokens = system, params, rows, num_tokens
        self.slots = slots
        self._asked: tuple[Any, Any, Any] | None = None  # contexts, noise, proposal
        self._lengths = np.asarray([len(row.prompt) for row in rows], np.int32)
        self._prompts = np.zeros((len(rows), self._lengths.max()), np.int32)
        for row, prompt in zip(self._prompts, (row.prompt for row in rows)):
            row[: len(prompt)] = prompt

    def prefill(self, of: np.ndarray, seeds: np.ndarray, system=None) -> decoding.DecodeState:
        """Returns the state after the prompts.

        Args:
          of: i64[B], which of ``rows`` stands in each place.
          seeds: i64[B].
          system: in place of the loop's own.
        """
        system, V, B = system or self.system, self.system.target.vocab_size, len(of)
        lengths = self._lengths[of]
        limit = lengths + 1 + self.num_tokens
        # Made of all rows, so that every batch has the same features and so the same program.
        sides = zip(*(row[1:] for row in self.rows))
        seeds = jnp.asarray(seeds, jnp.uint32)
        # Half of the rows have draft samplers with one seed; the others have none, so that among
        # them neighbouring seeds draw drafts too.
        draft_seeds = jnp.where(seeds // 128 % 2 == 0, seeds, DRAFT_SEED)
        samplers = [
            jax.tree.map(lambda x: x[of], make_sampler(side, len(self.rows), V)).replace(seed=own)
            for side, own in zip(sides, (seeds, draft_seeds))
        ]
        return decoding.prefill(
            self.params,
            jnp.asarray(self._prompts[of]),
            jnp.asarray(lengths),
            jnp.asarray(limit),
            jnp.full((B, 1), -1, jnp.int32),
            *samplers,
            system=system,
            slots=self.slots,
        )

    def generate(
        self, state: decoding.DecodeState, max_rounds: int = 2**30, system=None
    ) -> decoding.DecodeState:
        """Runs rounds, at most ``max_rounds`` of them. Donates the state."""
        system = system or self.system
        running = jnp.zeros((len(state.finish),), jnp.int32)
        return _generate(self.params, state, running, jnp.int32(max_rounds), system=system)[0]

    def output(self, state: decoding.DecodeState, of: np.ndarray) -> np.ndarray:
        """Returns i64[B,1+num_tokens], what the rows have emitted.

        Raises:
          CertificateError: a row has stopped for another reason than its length.
        """
        finish = np.asarray(state.finish)
        early = np.flatnonzero(finish != decoding.Finish.LENGTH)
        tokens = np.asarray(state.tokens)
        if len(early):
            b = early[0]
            row, reason = self.rows[of[b]], decoding.Finish(int(finish[b]))
            text = tokens[b, : int(state.total[b])]
            output = text[len(row.prompt) :].tolist()
            place = where(row, output, self.system.num_draft)
            processor = find_forbidding(reason, self.system, row.target, row.prompt, output)
            if processor is not None:
                raise CertificateError(
                    f"processor {processor!r} forbids every token of the target, {place}; a row "
                    "ends there, so what follows cannot be certified"
                )
            raised = find_raised(reason, self.system, text)
            why = reason.name.lower()
            if raised is not None:
                why = f"the drafter raised {type(raised).__name__}: {raised}"
            raise CertificateError(f"{self.name}: a row stops early ({why}), {place}") from raised
        return self._emitted(tokens, of)

    def kinds(self, state: decoding.DecodeState, of: np.ndarray) -> np.ndarray:
        """Returns i64[B,1+num_tokens], the ``Kind`` of each token of the output."""
        return self._emitted(np.asarray(state.kind), of)

    def _emitted(self, array: np.ndarray, of: np.ndarray) -> np.ndarray:
        index = self._lengths[of][:, None] + np.arange(1 + self.num_tokens)
        return np.take_along_axis(array, index, axis=1).astype(np.int64)

    def decode(self, of: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Returns i64[B,1+num_tokens], what rows emit; the arguments are those of ``prefill``."""
        return self.output(self.generate(self.prefill(of, seeds)), of)

    def plain(self, of: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Returns what plain decoding emits, by the package's rule of the same noise."""
        rule = GREEDY if self.system.rule.is_greedy else MATCH
        plain = self.system._replace(drafter=NO_DRAFT, num_draft=0, rule=rule)
        state = self.generate(self.prefill(of, seeds, plain), system=plain)
        return self.output(state, of)

    def check_states(self, state: decoding.DecodeState, of: np.ndarray) -> float:
        """Compares the drafter's next proposal with the one after a fresh prefill of the text.

        Returns:
          The largest difference of a probability.

        Raises:
          CertificateError: they differ.
        """
        B, K, V = len(of), self.system.num_draft, self.system.target.vocab_size
        noise = np.random.default_rng(2).gumbel(size=(1, K, V)).astype(np.float32)
        noise = np.broadcast_to(noise, (B, K, V))  # of all rows, whatever their place
        kept = propose_next(self.system, self.params, state, noise)
        contexts = (state.tokens, state.length, state.sampler, state.draft_sampler)
        _, fresh = _propose_afresh(self.system, self.params, contexts, noise)
        if self._asked is None:  # on the host, since the state's arrays are donated
            self._asked = jax.tree.map(np.asarray, (contexts, noise, fresh))
        kept, fresh = jax.tree.map(np.asarray, (kept, fresh))
        alike, off = _compare(kept, fresh)
        differing = np.flatnonzero(~alike | ~(off.max(axis=1) <= _TOLERANCE))
        if not len(differing):
            return float(off.max())
        total = np.asarray(state.total)
        b = differing[total[differing].argmin()]
        row, tokens = self.rows[of[b]], np.asarray(state.tokens)[b]
        output = tokens[len(row.prompt) : total[b]]
        kinds = np.asarray(state.kind)[b, len(row.prompt) : total[b]]
        kinds = ", ".join(decoding.Kind(int(k)).name.lower() for k in kinds)
        if alike[b]:
            node = off[b].argmax()
            show = lambda p: f"draws draft {node + 1} from {short(p.probs[b, node])}"
        else:
            show = lambda p: f"drafts {p.tokens[b, : p.n_draft[b]].tolist()}"
        raise CertificateError(
            f"drafter {self.system.drafter.name!r}: its state after commit is not that of a fresh "
            f"prefill of the same tokens: it {show(kept)}, and after a fresh prefill it "
            f"{show(fresh)}, {where(row, output, K)}; these tokens were {kinds}. If it is meant to "
            "remember more than the row's text, pass has_memory=True; if it remembers other "
            "outputs, it must say so itself (Drafter.has_memory, host_drafter(num_updates=...))"
        )

    def check_stateless(self) -> int:
        """Compares what is proposed after some texts with what was, before much was decoded.

        Returns:
          How many texts, those of the first call of ``check_states``.

        Raises:
          CertificateError: the drafts differ, so the drafter remembers what it does not say.
        """
        contexts, noise, before = self._asked
        _, after = _propose_afresh(self.system, self.params, contexts, noise)
        names = [
            name
            for name in ("tokens", "n_draft", "probs", "parents")
            if getattr(before, name) is not None
        ]
        if not all(np.array_equal(getattr(before, x), getattr(after, x)) for x in names):
            raise CertificateError(
                f"drafter {self.system.drafter.name!r} proposed different drafts for the same "
                "texts later on, so it remembers earlier outputs. Declare it (Drafter.has_memory, "
                "host_drafter(num_updates=...)), or outputs are biased where a seed is reused"
            )
        return len(before.tokens)

    def check_alone(self) -> int:
        """Compares what is proposed after some texts with what is in batches of one.

        Returns:
          How many texts.

        Raises:
          CertificateError: the drafts differ, or their distributions.
        """
        contexts, noise, batch = self._asked
        count = min(_ALONE, len(noise))
        for b in range(count):
            context, gumbel, row = jax.tree.map(lambda x: x[b : b + 1], (contexts, noise, batch))
            _, alone = _propose_afresh(self.system, self.params, context, gumbel)
            alone = jax.tree.map(np.asarray, alone)
            alike, off = _compare(alone, row)
            is_drawn = (alone.tokens == row.tokens).all()
            if alone.probs is not None:  # a near tie is drawn either way
                is_drawn |= matches_report(alone, gumbel, parents_of(self.system)).all()
            if not (alike.all() and (off <= _TOLERANCE).all() and is_drawn):
                tokens, length = contexts[0][b], contexts[1][b]
                raise CertificateError(
                    f"drafter {self.system.drafter.name!r} proposes other drafts in a batch of one "
                    f"than in a larger batch, after the tokens {tokens[: length + 1].tolist()} "
                    f"(K={self.system.num_draft})"
                )
        return count

    def check_equal(
        self, expected: np.ndarray, actual: np.ndarray, of: np.ndarray, how: str, hint: str = ""
    ) -> None:
        """Raises a CertificateError where two outputs differ.

        Args:
          expected: i64[B,1+num_tokens].
          actual: likewise.
          of: i64[B], their rows.
          how: how the expected ones were decoded.
          hint: what else it may be, for the end of the message.
        """
        is_same = expected == actual
        if is_same.all():
            return
        first = np.where(is_same.all(axis=1), len(is_same), is_same.argmin(axis=1))
        b = first.argmin()
        index = first[b]
        raise CertificateError(
            f"{self.name}: token {actual[b, index]} should be {expected[b, index]} as decoded "
            f"{how}, {where(self.rows[of[b]], actual[b, :index], self.system.num_draft)}{hint}"
        )

    def test(
        self,
        counts: np.ndarray,
        begin: int,
        logits_of: Callable[[Sequence[int]], np.ndarray],
        alpha: float,
    ) -> float:
        """Returns the p-value of some tokens, corrected for the number of rows.

        Args:
          counts: i64[R,V,...,V], how often each outcome was seen.
          begin: how many tokens come before the ones that were counted.
          logits_of: ``tokens -> f32[V]``, what the target says, computed another way.
          alpha: smallest p-value that passes.

        Raises:
          CertificateError: the p-value is smaller.
        """
        tests = []
        for row, seen in zip(self.rows, counts):
            dist = _joint(row, begin + seen.ndim, logits_of).sum(axis=tuple(range(begin)))
            while seen.ndim > 1 and seen.sum() * dist.max() < 5:  # too few draws: of fewer tokens
                seen, dist = seen.sum(axis=-1), dist.sum(axis=-1)
            tests.append((goodness_of_fit(seen, dist), row, seen, dist))
        p_value, row, seen, dist = min(tests, key=lambda test: test[0])
        p_value = min(1.0, p_value * len(tests))
        if not p_value >= alpha:
            raise CertificateError(
                f"{self.name}: the decoded tokens do not have the target's distribution "
                f"(chi-square p-value {p_value:.1e}): "
                f"{_first_difference(row, seen, dist, begin, self)}"
            )
        return p_value

    def test_means(
        self,
        output: np.ndarray,
        of: np.ndarray,
        logits_of: Callable[[Sequence[int]], np.ndarray],
        alpha: float,
    ) -> tuple[float, Range]:
        """Returns the p-value of the mean probability that plain decoding gives to the tokens.

        Drafts that are accepted too readily are less probable than plain decoding's tokens. The
        test sees this in any vocabulary, where few sequences are emitted twice. All tokens but the
        first count, each by its distribution after those before it.

        Args:
          output: i64[N,1+num_tokens], of the first N places.
          of: i64[B], the rows of all places.
          logits_of: as for ``test``.
          alpha: smallest p-value that passes.

        Returns:
          The p-value, and the probabilities of plain decoding after all these texts.

        Raises:
          CertificateError: the p-value is smaller, or a token has probability 0.
        """
        R, K = len(self.rows), self.system.num_draft
        emitted, expected, variance = np.zeros((3, R + 1))  # the last: of all rows together
        ranges = []

        @functools.cache
        def dist_of(r: int, before: tuple[int, ...]) -> np.ndarray:
            row = self.rows[r]
            logits = logits_of((*row.prompt, *before))
            dist = reference_distribution(logits, row.target, row.prompt, before)
            ranges.append(Range.of(dist))
            return dist

        rows = of[: len(output)]
        for r, tokens in zip(rows.tolist(), output.tolist()):
            for i in range(1, len(tokens)):
                before, token = tuple(tokens[:i]), tokens[i]
                p = dist_of(r, before)
                if p[token] == 0:
                    raise CertificateError(
                        f"{self.name}: token {token}, which plain decoding never emits, "
                        f"{where(self.rows[r], before, K)}"
                    )
                mean = p @ p
                for sums, value in (
                    (emitted, p[token]),
                    (expected, mean),
                    (variance, p @ p**2 - mean**2),
                ):
                    sums[[r, R]] += value
        p_values = tail_of_sums(emitted - expected, variance)
        worst = int(p_values.argmin())
        p_value = min(1.0, float(p_values[worst]) * len(p_values))
        if not p_value >= alpha:
            count = self.num_tokens * (len(output) if worst == R else int((rows == worst).sum()))
            settings = "all settings" if worst == R else settings_of(self.rows[worst])
            raise CertificateError(
                f"{self.name}: the decoded tokens do not have the target's distribution: "
                f"plain decoding gives them the mean probability {emitted[worst] / count:.4f}, and "
                f"its own tokens {expected[worst] / count:.4f} (p-value {p_value:.1e} over "
                f"{count:,} tokens; K={K}, {settings})"
            )
        return p_value, Range.join(ranges)

    @property
    def name(self) -> str:
        """Rule and drafter, for messages."""
        return f"rule {self.system.rule.name!r}, drafter {self.system.drafter.name!r}"


_generate = bounded_jit(
    decoding.generate.__wrapped__,
    static_argnames="system",
    donate_argnames="state",
    compiler_options=AS_WRITTEN,
)


@functools.partial(bounded_jit, static_argnames="system")
def propose_next(system: decoding.System, params, state: decoding.DecodeState, gumbel):
    context = system.context(
        state.tokens,
        state.length,
        state.draft_sampler,
        state.sampler.seed,
        is_greedy=None,  # also where no rule would read it, the report is compared
    )
    context = context._replace(is_coupled=False, has_probs=True, gumbel=gumbel)
    return decoding.propose(params["draft"], state.draft, context, system)[0]


_propose_afresh = bounded_jit(propose_afresh, static_argnames="system")


def _compare(a: Proposal, b: Proposal) -> tuple[np.ndarray, np.ndarray]:
    """bool[B], whether as much is offered, the same if nothing is reported; f64[B,K], how far apart
    the reports are.
    """
    B, K = a.tokens.shape
    offered = [np.asarray(proposal.is_offered) for proposal in (a, b)]
    alike = (offered[0] == offered[1]).all(axis=1)
    is_offered = offered[0] & offered[1]
    if a.probs is not None:
        # After a near tie two chains go on from different drafts: compare up to there.
        same = np.cumprod(a.tokens == b.tokens, axis=1)
        same = np.concatenate([np.ones((B, 1), bool), same[:, :-1] > 0], axis=1)
        return alike, np.where(is_offered & same, np.abs(a.probs - b.probs).max(axis=2), 0.0)
    alike &= ((a.tokens == b.tokens) | ~is_offered).all(axis=1)
    if a.parents is not None:
        alike &= ((a.parents == b.parents) | ~is_offered).all(axis=1)
    return alike, np.zeros((B, K))


def _joint(row: Row, num_tokens: int, logits_of) -> np.ndarray:
    """f64[V, ..., V], the distribution of plain decoding's first tokens."""
    first = reference_distribution(logits_of(row.prompt), row.target, row.prompt, ())
    of = lambda params, tokens: logits_of(tokens)
    after = [plain_distribution(None, row, t, num_tokens - 1, of) for t in range(len(first))]
    return np.einsum("v,v...->v...", first, np.stack(after))


def _first_difference(row: Row, seen: np.ndarray, dist: np.ndarray, begin: int, loop: Loop) -> str:
    """Says which token after how few others is furthest from its probability."""
    total = seen.sum()
    for depth in range(1, seen.ndim + 1):
        rest = tuple(range(depth, seen.ndim))
        o, p = seen.sum(axis=rest), dist.sum(axis=rest)
        off = np.abs(o - total * p) / np.sqrt(np.maximum(total * p, 1e-3))
        worst = np.unravel_index(off.argmax(), off.shape)
        if off[worst] > 6 or depth == seen.ndim:
            before = worst[:-1]
            seen_before, p_before = (x.sum(axis=-1)[before] for x in (o, p))
            actual = o[worst] / max(seen_before, 1)
            expected = p[worst] / p_before if p_before > 0 else 0.0
            output = (*["any"] * begin, *map(int, before))
            text = Difference(row, output, int(worst[-1]), actual, expected, 0.0, 0.0)
            return f"{text.text(loop.system.num_draft)}, measured in {int(seen_before):,} draws"
    raise AssertionError
