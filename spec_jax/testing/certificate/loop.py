"""The compiled loop, run with many seeds, and tests of its tokens.

After the text before it the distribution of each token is known. The first token of a round has it
also given how earlier rounds went, since each round has noise of its own. So the tokens of many
long texts, with a target near the draft where late drafts are read often, are tested place by
place, the first ones of rounds by how the round before went, and those of neighbouring seeds
against the product of their distributions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Drafter, Model, Rule
from spec_jax.decoding import Kind
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.standalone.model import standalone
from spec_jax.engine.generation import find_forbidding, find_raised
from spec_jax.rules.registry import GREEDY, MATCH
from spec_jax.sampling import make_sampler
from spec_jax.testing import oracles
from spec_jax.testing.certificate.forcing import AS_WRITTEN, DRAFT_SEED, propose_next
from spec_jax.testing.certificate.records import (
    ALPHA,
    CertificateError,
    Range,
    probability,
    settings_of,
    where,
)
from spec_jax.testing.certificate.rounds import Difference
from spec_jax.testing.certificate.subjects import system_of
from spec_jax.testing.mocks import toy_model, toy_params
from spec_jax.testing.oracles import LogitsOf, Row

_UNLIKELY = 1e-12  # a first token that is left out of a sum over all
_PER_CELL = 50  # draws that a cell of a table should have on average
_NEAR = 0.5  # share of the draft's distribution in the target's
_CONTEXT = 3  # maximum tokens before the tested one that a table has
_WINDOW = 8  # places that are tested together
_WITH_PROCESSORS = 200  # texts that are followed where each has distributions of its own


@dataclasses.dataclass
class Loop:
    """Decodes rows of several settings in one batch, as the decoder does.

    Attributes:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      rows: prompts and samplers.
      num_tokens: how many tokens follow the first one.
      slots: of all states; loops with as many share the programs that read the prompts.
      logits_of: ``tokens -> f32[V]``, what the target says, computed another way.
      run: ``decoding.generate`` as it is compiled.
    """

    system: decoding.System
    params: dict[str, Any]
    rows: Sequence[Row]
    num_tokens: int
    slots: int
    logits_of: Callable[[Sequence[int]], np.ndarray]
    run: Callable[..., Any] | None = None

    def __post_init__(self):
        self.run = self.run or _generate
        self._lengths = np.asarray([len(row.prompt) for row in self.rows], np.int32)
        self._prompts = np.zeros((len(self.rows), self._lengths.max()), np.int32)
        for ids, row in zip(self._prompts, self.rows):
            ids[: len(row.prompt)] = row.prompt

    def prefill(self, of: np.ndarray, seeds: np.ndarray) -> decoding.DecodeState:
        """Returns the state after the prompts.

        Args:
          of: i64[B], which of ``rows`` stands in each place.
          seeds: i64[B].
        """
        V = self.system.target.vocab_size
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
            jnp.full((len(of), 1), -1, jnp.int32),
            *samplers,
            system=self.system,
            slots=self.slots,
        )

    def generate(
        self, state: decoding.DecodeState, max_rounds: int = 2**30
    ) -> decoding.DecodeState:
        """Runs rounds, at most ``max_rounds`` of them. Donates the state.

        Args:
          state: after a prefill.
          max_rounds: how many rounds.
        """
        running = jnp.zeros((len(state.finish),), jnp.int32)
        return self.run(self.params, state, running, jnp.int32(max_rounds), system=self.system)[0]

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
            row = self.rows[of[b]]
            reason = decoding.Finish(int(finish[b]))
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
        return self.of_output(tokens, of)

    def of_output(self, array: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Returns i64[B,1+num_tokens], what an array i32[B,M] of a state has of the output."""
        index = self._lengths[of][:, None] + np.arange(1 + self.num_tokens)
        return np.take_along_axis(array, index, axis=1).astype(np.int64)

    def decode(self, of: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Returns i64[B,1+num_tokens], what rows emit; the arguments are those of ``prefill``."""
        return self.output(self.generate(self.prefill(of, seeds)), of)

    def plain(self, of: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Returns what plain decoding emits, by the package's rule of the same noise."""
        rule = GREEDY if self.system.rule.is_greedy else MATCH
        plain = self.system._replace(drafter=NO_DRAFT, num_draft=0, rule=rule)
        return dataclasses.replace(self, system=plain).decode(of, seeds)

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
        self, counts: np.ndarray, begin: int, dists: Sequence[np.ndarray], alpha: float = ALPHA
    ) -> float:
        """Returns the p-value of some tokens, corrected for the number of rows.

        Args:
          counts: i64[R,V,...,V], how often each outcome was seen.
          begin: how many tokens come before the ones that were counted.
          dists: f64[V,...,V] of each row, see ``joint``.
          alpha: smallest p-value that passes.

        Raises:
          CertificateError: the p-value is smaller.
        """
        tests = []
        for row, seen, dist in zip(self.rows, counts, dists):
            while seen.ndim > 1 and seen.sum() * dist.max() < 5:  # too few draws: of fewer tokens
                seen, dist = seen.sum(axis=-1), dist.sum(axis=-1)
            tests.append((oracles.goodness_of_fit(seen, dist), row, seen, dist))
        p_value, row, seen, dist = min(tests, key=lambda test: test[0])
        p_value = min(1.0, p_value * len(tests))
        if not p_value >= alpha:
            raise CertificateError(
                f"{self.name}: the decoded tokens do not have the target's distribution "
                f"(chi-square p-value {p_value:.1e}): "
                f"{_first_difference(row, seen, dist, begin, self)}"
            )
        return p_value

    def test_means(self, output: np.ndarray, of: np.ndarray) -> tuple[float, Range]:
        """Returns the p-value of the mean probability that plain decoding gives to the tokens.

        Drafts that are accepted too readily are less probable than plain decoding's tokens. The
        test sees this in any vocabulary, where few sequences are emitted twice. All tokens but the
        first count, each by its distribution after those before it.

        Args:
          output: i64[N,1+num_tokens], of the first N places.
          of: i64[B], the rows of all places.

        Returns:
          The p-value, and the probabilities of plain decoding after all these texts.

        Raises:
          CertificateError: the p-value is smaller, or a token has probability 0.
        """
        R = len(self.rows)
        K = self.system.num_draft
        emitted, expected, variance = np.zeros((3, R + 1))  # the last: of all rows together
        ranges = []
        counts = np.bincount(of[: len(output)], minlength=R) * self.num_tokens
        for r, row in enumerate(self.rows):
            texts = output[of[: len(output)] == r]
            probs = distributions(texts, row, self.logits_of)
            p = np.take_along_axis(probs, texts[:, 1:, None], axis=2)[:, :, 0]
            if (p == 0).any():
                text, i = np.argwhere(p == 0)[0]
                raise CertificateError(
                    f"{self.name}: token {texts[text, i + 1]}, which plain decoding never emits, "
                    f"{where(row, texts[text, : i + 1], K)}"
                )
            mean = (probs**2).sum(axis=2)
            emitted[[r, R]] += p.sum()
            expected[[r, R]] += mean.sum()
            variance[[r, R]] += ((probs**3).sum(axis=2) - mean**2).sum()
            ranges.append(Range.of(probs))
        p_values = oracles.tail_of_sums(emitted - expected, variance)
        worst = int(p_values.argmin())
        p_value = min(1.0, float(p_values[worst]) * len(p_values))
        if not p_value >= ALPHA:
            count = counts.sum() if worst == R else counts[worst]
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


def distributions(
    output: np.ndarray,
    row: Row,
    logits_of: Callable[[Sequence[int]], np.ndarray],
    num_read: int | None = None,
) -> np.ndarray:
    """Returns f64[N,T,V], plain decoding's distribution of every token of i64[N,1+T] but the first.

    Args:
      output: texts of the row.
      row: prompt and sampler.
      logits_of: ``tokens -> f32[V]``, what the target says.
      num_read: of how many last tokens target and sampler make it; None: of the whole text.
    """
    size = output.shape[1] if num_read is None else num_read

    @functools.cache
    def after(text: tuple[int, ...]) -> np.ndarray:
        return oracles.reference_distribution(
            logits_of((*row.prompt, *text)), row.target, row.prompt, text
        )

    return np.asarray(
        [
            [after(tuple(text[max(t - size, 0) : t])) for t in range(1, len(text))]
            for text in output.tolist()
        ]
    )


def joint(
    row: Row, begin: int, num_tokens: int, logits_of: Callable[[Sequence[int]], np.ndarray]
) -> np.ndarray:
    """Returns f64[V,...,V], the distribution of plain decoding's tokens after 0 or 1 others.

    Args:
      row: prompt and sampler.
      begin: how many tokens come before these.
      num_tokens: how many they are.
      logits_of: ``tokens -> f32[V]``, what the target says.
    """
    first = oracles.reference_distribution(logits_of(row.prompt), row.target, row.prompt, ())
    dist = np.zeros((len(first),) * num_tokens)
    for token in np.flatnonzero(first > _UNLIKELY).tolist():
        size = num_tokens + begin - 1
        after = oracles.plain_distribution(None, row, token, size, lambda _, x: logits_of(x))
        dist[() if begin else token] += first[token] * after
    return dist


def _first_difference(row: Row, seen: np.ndarray, dist: np.ndarray, begin: int, loop: Loop) -> str:
    """Says which token after how few others is furthest from its probability."""
    total = seen.sum()
    for depth in range(1, seen.ndim + 1):
        rest = tuple(range(depth, seen.ndim))
        o = seen.sum(axis=rest)
        p = dist.sum(axis=rest)
        off = np.abs(o - total * p) / np.sqrt(np.maximum(total * p, 1e-3))
        worst = np.unravel_index(off.argmax(), off.shape)
        if off[worst] > 6:
            break
    before = worst[:-1]
    seen_before, p_before = (x.sum(axis=-1)[before] for x in (o, p))
    actual = o[worst] / max(seen_before, 1)
    expected = p[worst] / p_before if p_before > 0 else 0.0
    output = (*["any"] * begin, *map(int, before))
    text = Difference(row, output, int(worst[-1]), actual, expected, 0.0, 0.0)
    return f"{text.text(loop.system.num_draft)}, measured in {int(seen_before):,} draws"


def near_target(loop: Loop, of: np.ndarray) -> dict[str, Any]:
    """Returns parameters with a target that is halfway to what the drafter drafts first.

    They have the shapes of the loop's own, so all programs are shared.

    Args:
      loop: of a toy target, which reads two tokens.
      of: i64[B], the rows after whose outputs the drafter is asked.
    """
    state = loop.generate(loop.prefill(of, np.arange(len(of))))
    V = loop.system.target.vocab_size
    K = loop.system.num_draft
    noise = np.random.default_rng(4).gumbel(size=(len(of), K, V)).astype(np.float32)
    proposal = propose_next(loop.system, loop.params, state, noise)
    tokens, length, proposal = jax.tree.map(np.asarray, (state.tokens, state.length, proposal))
    logits = np.array(loop.params["target"]["logits"])
    index = np.arange(len(of))
    context = tokens[index, np.maximum(length - 1, 0)] * V + tokens[index, length]
    context %= len(logits)
    q = np.eye(V)[proposal.tokens[:, 0]] if proposal.probs is None else proposal.probs[:, 0]
    is_offered = np.asarray(proposal.is_offered)[:, 0]
    total = np.zeros(logits.shape)
    count = np.zeros((len(logits), 1))
    np.add.at(total, context[is_offered], q[is_offered])
    np.add.at(count, context[is_offered], 1)
    temperature = loop.rows[of[0]].target.temperature or 1.0
    p = np.asarray(jax.nn.softmax(logits / temperature, axis=-1), np.float64)
    p = np.where(count > 0, (1 - _NEAR) * p + _NEAR * total / np.maximum(count, 1), p)
    near = np.where(np.isfinite(logits), temperature * np.log(np.maximum(p, 1e-30)), logits)
    target = {**loop.params["target"], "logits": near.astype(np.float32)}
    return {**loop.params, "target": target}


def check_texts(loop: Loop, output: np.ndarray, kinds: np.ndarray, row: Row) -> float:
    """Tests each token after the text and the rounds before it, and neighbouring seeds jointly.

    Args:
      loop: what decoded.
      output: i64[N,1+T], of seeds that follow each other.
      kinds: i64[N,1+T], the ``Kind`` of each token.
      row: the prompt and the samplers of all of them, without penalties.

    Returns:
      The p-value, corrected for the number of tests.

    Raises:
      CertificateError: the p-value is smaller.
    """
    if row.target.processors:
        output, kinds = (x[:_WITH_PROCESSORS] for x in (output, kinds))
    # A toy target reads two tokens; processors may read all.
    probs = distributions(output, row, loop.logits_of, None if row.target.processors else 2)
    tests = [*_places(output, probs), *_rounds(output, kinds, probs), *_neighbours(output, probs)]
    p_value, text = min(tests, key=lambda test: test[0], default=(1.0, ""))
    p_value = min(1.0, p_value * len(tests))
    if not p_value >= ALPHA:
        raise CertificateError(
            f"{loop.name}: the decoded tokens do not have the target's distribution (chi-square "
            f"p-value {p_value:.1e}): {text}, after the prompt {row.prompt} "
            f"(K={loop.system.num_draft}, {settings_of(row)})"
        )
    return p_value


def _places(output, probs) -> Iterator[tuple[float, str]]:
    """Yields the tests of each token but the first, and of some neighbouring ones together."""
    for which, places in _windows(probs.shape[1]):
        is_tested = np.zeros(probs.shape[:2], bool)
        is_tested[:, places] = True
        yield from _test(which, is_tested, output, probs)


def _windows(num_tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Yields each place, and windows of several, with their names."""
    yield from ((f"token {t + 2}", [t]) for t in range(num_tokens))
    for begin in range(0, num_tokens, _WINDOW):
        places = list(range(begin, min(begin + _WINDOW, num_tokens)))
        yield f"tokens {begin + 2} to {places[-1] + 2}", places


def _rounds(output, kinds, probs) -> Iterator[tuple[float, str]]:
    """Yields the tests of the first tokens of rounds, by how the round before went."""
    num_accepted = np.zeros(kinds.shape, np.int64)
    for t in range(1, kinds.shape[1]):
        is_accepted = kinds[:, t - 1] == Kind.ACCEPTED
        num_accepted[:, t] = np.where(is_accepted, num_accepted[:, t - 1] + 1, 0)
    for kind in (Kind.CORRECTED, Kind.BONUS):
        for n in range(num_accepted.max() + 1):
            is_last = (kinds == kind) & (num_accepted == n)
            which = f"the first token after a round with {n} accepted drafts, {kind.name.lower()},"
            yield from _test(which, is_last[:, :-1], output, probs)


def _test(which: str, is_tested, output, probs) -> Iterator[tuple[float, str]]:
    """Yields the test of some tokens, by the tokens before them.

    Args:
      which: these tokens.
      is_tested: bool[N,T], of the tokens after the first.
      output: i64[N,1+T].
      probs: f64[N,T,V], their distributions.
    """
    V = probs.shape[2]
    rows, places = np.nonzero(is_tested)
    if len(rows) < _PER_CELL * V:
        return
    size = min(1 + int(places.min()), _CONTEXT)
    while size and V ** (size + 1) * _PER_CELL > len(rows):
        size -= 1
    before = [output[rows, places - i] for i in reversed(range(size))]
    group = np.ravel_multi_index(before, (V,) * size) if size else np.zeros_like(rows)
    fit = oracles.fit_table(output[rows, places + 1], probs[rows, places], group)
    text = tuple(map(int, np.unravel_index(fit.group, (V,) * size)))
    chance, should = (probability(x / max(fit.size, 1)) for x in (fit.seen, fit.expected))
    yield (
        fit.p_value,
        f"{which}{f' after {text}' * bool(size)} is {fit.token} with probability {chance} and "
        f"should be with {should}, measured in {fit.size:,} draws",
    )


def _neighbours(output, probs) -> Iterator[tuple[float, str]]:
    """Yields the tests of each token of two neighbouring seeds, whose texts are independent."""
    N, T, V = probs.shape
    num_classes = min(V, int((N / 2 / _PER_CELL) ** 0.5))  # of tokens, so that a table has few
    if num_classes < 2:
        return
    of_class = np.arange(V)[:, None] % num_classes == np.arange(num_classes)
    seen = of_class[output[:, 1:]].astype(np.float64)
    expected = probs @ of_class
    for begin in (0, 1):
        pairs = slice(begin, N - 1, 2), slice(begin + 1, N, 2)
        for which, places in _windows(T):
            tables = [
                np.einsum("ntv,ntw->vw", *(x[some][:, places] for some in pairs))
                for x in (seen, expected)
            ]
            agreed, should = (np.trace(x) / x.sum() for x in tables)
            text = (
                f"{which} of neighbouring seeds agree with probability {probability(agreed)} and "
                f"should with {probability(should)}"
            )
            yield oracles.goodness_of_fit(tables[0], tables[1] / tables[1].sum()), text


def certify_decoder(
    rule: Rule,
    drafter: Drafter | None = None,
    *,
    vocab_size: int = 4,
    num_draft: int = 2,
    num_tokens: int = 4,
    row: Row = Row((0, 1), SamplerConfig(temperature=1.0), SamplerConfig(temperature=1.0)),
    trials: int = 200_000,
    batch: int = 20_000,
    alpha: float = ALPHA,
    params: dict[str, Any] | None = None,
    target: Model | None = None,
    logits_of: LogitsOf = oracles.toy_logits,
    run: Callable[..., Any] | None = None,
) -> float:
    """Tests the jitted decoder's tokens against the target's distribution with a chi-square test.

    The tested tokens are the ``num_tokens`` after the first, whose own distribution is summed
    over.

    Args:
      rule: any lossless rule.
      drafter: by default ``standalone`` over a toy draft.
      vocab_size: V.
      num_draft: K; that of the drafter's tree, where it has one.
      num_tokens: of the joint distribution; the table has V**num_tokens outcomes.
      row: prompt and samplers of all trials.
      trials: sequences decoded; each has a seed of its own.
      batch: rows decoded at once.
      alpha: smallest p-value that passes.
      params: ``{"target": ..., "draft": ...}``; by default random ones of toy models.
      target: by default a toy; a mutated one, to see the test fail, or a model of your own.
      logits_of: what the target says, computed another way.
      run: ``decoding.generate`` as it is compiled.

    Returns:
      The p-value.

    Raises:
      CertificateError: the p-value is below ``alpha``, or there are too few trials to tell.
    """
    V = vocab_size
    params = params or {"target": toy_params(V, 0), "draft": toy_params(V, 1)}
    drafter = drafter or standalone(toy_model(V))
    system = system_of(target or toy_model(V), drafter, rule, num_draft)
    slots = len(row.prompt) + num_tokens + system.lookahead_slots + 3
    of_target = functools.partial(logits_of, params["target"])
    loop = Loop(system, params, [row], num_tokens, slots, of_target, run)
    dist = joint(row, 1, num_tokens, of_target)
    if trials * dist.max() < 5:
        raise CertificateError(
            f"trials is {trials}; a test of {num_tokens} tokens jointly needs {5 / dist.max():.0f} "
            "or more"
        )
    of = np.zeros(batch, np.int64)
    counts = np.zeros((1, *[V] * num_tokens), np.int64)
    for begin in range(0, trials, batch):
        output = loop.decode(of, begin + np.arange(batch))
        np.add.at(counts[0], tuple(output[:, 1:].T), 1)
    return loop.test(counts, 1, [dist], alpha)
