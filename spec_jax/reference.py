"""Speculative decoding on one page: the algorithm for models that are black boxes.

A language model decodes one token a pass, yet a pass that scores five tokens costs little more
than one that scores a single token. So a cheap *draft* proposes the next few tokens, the *target*
scores them all in one pass, and an acceptance test keeps as many as it can without changing the
distribution of the output.

Let ``p`` be the target's distribution after some prefix, and ``q`` the one that the draft drew
its token ``d`` from. The draft is accepted with probability ``min(1, p(d) / q(d))``; the first
rejected draft is replaced by a token from ``max(p - q, 0)``, normalised; after drafts that were
all accepted comes a bonus token from ``p``. So a token ``x`` is emitted with probability
``min(p(x), q(x)) + max(p(x) - q(x), 0) = p(x)``, whatever ``q`` is: the draft decides how fast
the tokens come, and never which.

Everything is NumPy in float64, one sequence at a time, and shares no code with the compiled loop,
for which it is an oracle. ``SpeculativeDecoder.decode_round`` here and ``decode_round`` of
``spec_jax/decoding/round.py`` have the same four lines:

    here                                   the compiled round, of a batch of rows
    draft.propose(tokens, k)               draft: the drafter's ``propose``, from a state of its own
    target.verify(tokens, drafts)          verify: one ``forward`` over [pending | drafts]
    accept(proposal, scores, uniforms)     accept: a rule; this is ``residual`` of rules/chain.py
    self._commit(tokens, ...)              commit: appends too; caches forget what was rejected

There are two differences. A black box is handed every token at each call and so has nothing to
forget; the loop keeps caches, and one *pending* token, emitted but not yet fed. And the loop
samples its first token while it reads the prompt, where here a round does.

    decoder = SpeculativeDecoder(Config(k=4, max_new_tokens=32))
    tokens = decoder.generate(as_draft(small, sampler), as_target(large, sampler), [1, 2, 3])
    print(decoder.metrics.acceptance_rate, decoder.metrics.speed_up(cost_ratio=0.1))

Source: Leviathan et al., arXiv 2211.17192, Algorithm 1; Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from spec_jax.compilation import bounded_jit
from spec_jax.config import SamplerConfig
from spec_jax.errors import SpecJaxError
from spec_jax.loading import LoadedModel
from spec_jax.testing.oracles import reference_distribution

ErrorKind = enum.Enum("ErrorKind", "CONFIG PROMPT PROPOSAL SCORES VOCABULARY LENGTH")


class SpeculativeError(SpecJaxError, ValueError):
    """The one error of this module; ``kind``, an ``ErrorKind``, names the variant."""

    def __init__(self, kind: ErrorKind, message: str):
        super().__init__(message)
        self.kind = kind


class DraftProposal(NamedTuple):
    """The draft's tokens, n <= k of them, and the distributions they were drawn from."""

    tokens: tuple[int, ...]
    logprobs: np.ndarray  # f64[n,V], after temperature and filters; (0, -inf, ...) if not sampled


class TargetScores(NamedTuple):
    """The target's distributions: row i is that of the token after the prefix and i drafts."""

    logprobs: np.ndarray  # f64[n+1,V], after temperature and filters; -inf where none is allowed


class DraftModel(Protocol):
    def propose(self, prefix: Sequence[int], k: int) -> DraftProposal:
        """Proposes at most k tokens; they may be random, with noise of the draft's own."""


class TargetModel(Protocol):
    def verify(self, prefix: Sequence[int], tokens: Sequence[int]) -> TargetScores:
        """Scores n tokens after the prefix, in one pass."""


def acceptance_probability(p: np.ndarray, q: np.ndarray, token: int) -> float:
    """The probability min(1, p(token) / q(token)) of accepting a token that was drawn from q.

    Args:
      p: f64[V], the target's distribution.
      q: f64[V], the draft's.
      token: the draft.
    """
    return float(min(1.0, p[token] / q[token]))


def adjusted_distribution(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What replaces a rejected draft: max(p - q, 0), normalised; p itself where nothing is left."""
    residual = np.maximum(p - q, 0.0)
    return residual / residual.sum() if residual.sum() > 0 else p


def draw(probs: np.ndarray, uniform: float) -> int | None:
    """Draws from f64[V] with a uniform in [0, 1), never a token of probability 0.

    Returns None where all probabilities are 0.
    """
    cumulative = np.cumsum(probs)
    if cumulative[-1] == 0:
        return None
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def accept(
    proposal: DraftProposal, scores: TargetScores, uniforms: np.ndarray
) -> tuple[int, int | None]:
    """Decides how many of n drafts are accepted, and which token comes after them.

    Args:
      proposal: n drafts.
      scores: n + 1 rows.
      uniforms: f64[n+1] in [0, 1), independent of the draft's noise: one a draft, one to draw.

    Returns:
      The number of accepted drafts and the token, a replacement or the bonus; None where the
      target allows no token.

    Raises:
      SpeculativeError: wrong shapes, rows that are no distributions, another vocabulary.
    """
    _check(proposal, scores)
    p = np.exp(scores.logprobs)
    q = np.exp(proposal.logprobs)
    n = len(proposal.tokens)
    for i, token in enumerate(proposal.tokens):
        if not uniforms[i] < acceptance_probability(p[i], q[i], token):
            return i, draw(adjusted_distribution(p[i], q[i]), uniforms[n])
    return n, draw(p[n], uniforms[n])


def generator(seed: int, stream: str) -> np.random.Generator:
    """A seeded generator. Streams of different names are independent, as draft and decoder must
    be: an acceptance test that shares the draft's noise makes the output biased."""
    return np.random.default_rng([seed, *stream.encode()])


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a ``SpeculativeDecoder``."""

    k: int = 4  # drafts a round; 0 is plain decoding
    max_new_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        for name, least in (("k", 0), ("max_new_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SpeculativeError(
                    ErrorKind.CONFIG, f"{name} is {value!r}; expected an integer, {least} or more"
                )


class SpeculativeDecoder:
    """Decodes a target with a draft; the output has exactly the target's distribution.

    Attributes:
      config: how it decodes.
      generator: the noise of ``accept``; its state moves on with every round.
      metrics: counts of all calls so far.
    """

    def __init__(self, config: Config = Config()):
        self.config = config
        self.metrics = SpeculativeMetrics()
        self.generator = generator(config.seed, "accept")

    def generate(
        self, draft: DraftModel, target: TargetModel, prompt: Sequence[int]
    ) -> tuple[int, ...]:
        """Returns the ids that follow the prompt, up to the limit or a stop token, which is kept.

        Args:
          draft: proposes tokens.
          target: scores them.
          prompt: ids, at least one.

        Raises:
          SpeculativeError: an empty prompt, an invalid proposal or scores, or an output after which
            the target allows no token.
        """
        tokens = tuple(prompt)
        start = len(prompt)
        stops = set(self.config.stop_tokens)
        if not tokens:
            raise SpeculativeError(ErrorKind.PROMPT, "the prompt is empty")
        limit = start + self.config.max_new_tokens
        while len(tokens) < limit and stops.isdisjoint(tokens[start:]):
            tokens = self.decode_round(draft, target, tokens, limit)
        return tokens[start:]

    def decode_round(
        self, draft: DraftModel, target: TargetModel, tokens: tuple[int, ...], limit: int
    ) -> tuple[int, ...]:
        """One round: draft, verify, accept, commit. Returns the tokens and 1 to k + 1 more.

        Args:
          draft: proposes tokens.
          target: scores them.
          tokens: the prompt and the output so far.
          limit: the largest number of tokens of both.
        """
        k = min(self.config.k, limit - len(tokens))  # no draft past the limit
        proposal = draft.propose(tokens, k)
        scores = target.verify(tokens, proposal.tokens)
        verdict = accept(proposal, scores, self.generator.random(len(proposal.tokens) + 1))
        return self._commit(tokens, proposal, verdict, limit)

    def _commit(self, tokens, proposal, verdict, limit):
        """Appends what is emitted, cut at the limit and after a stop token, and counts it."""
        n_accept, token = verdict
        emitted = (*proposal.tokens[:n_accept], token)[: limit - len(tokens)]
        stops = [i for i, t in enumerate(emitted) if t in self.config.stop_tokens]
        n = stops[0] + 1 if stops else len(emitted)
        if token is None and n > n_accept:
            text = tokens + emitted[:n_accept]
            raise SpeculativeError(ErrorKind.SCORES, f"the target allows no token after {text}")
        n_draft = len(proposal.tokens)
        m = self.metrics
        if n_draft > self.config.k:
            raise SpeculativeError(
                ErrorKind.PROPOSAL, f"{n_draft} drafts; expected at most {self.config.k}"
            )
        m.steps += 1
        m.drafted += n_draft
        m.emitted += n
        m.accepted += min(n_accept, n)
        m.tested += min(n_accept + 1, n_draft, n)
        return tokens + emitted[:n]


def expected_tokens(acceptance_rate: float, k: int) -> float:
    """Tokens a step, 1 + a + ... + a^k, of drafts accepted with probability a each.

    Source: Leviathan et al., equation 1.
    """
    return float(sum(acceptance_rate**i for i in range(k + 1)))


def expected_speed_up(acceptance_rate: float, k: int, cost_ratio: float) -> float:
    """Expected tokens for the time of one target pass; plain decoding has 1.

    Source: Leviathan et al., theorem 3.8.

    Args:
      acceptance_rate: of a draft whose predecessors were accepted.
      k: drafts a step.
      cost_ratio: time of one draft pass over the time of one target pass.
    """
    return expected_tokens(acceptance_rate, k) / (k * cost_ratio + 1)


@dataclasses.dataclass
class SpeculativeMetrics:
    """Counts over all calls of a decoder, without the tokens that were cut off."""

    steps: int = 0  # target passes
    drafted: int = 0  # each of them cost a pass, also those after a stop token
    tested: int = 0  # drafts whose predecessors were all accepted
    accepted: int = 0
    emitted: int = 0  # accepted drafts, replacements and bonus tokens

    @property
    def acceptance_rate(self) -> float:
        """Accepted over tested drafts, the paper's alpha; NaN before the first draft."""
        return self.accepted / self.tested if self.tested else float("nan")

    @property
    def tokens_per_step(self) -> float:
        """Between 1 and k + 1; NaN before the first step."""
        return self.emitted / self.steps if self.steps else float("nan")

    def speed_up(self, cost_ratio: float) -> float:
        """Measured tokens for the time of one target pass; see ``expected_speed_up``."""
        cost = self.steps + cost_ratio * self.drafted
        return self.emitted / cost if cost else float("nan")


def _check(proposal: DraftProposal, scores: TargetScores) -> None:
    n = len(proposal.tokens)
    for kind, rows, height in (
        (ErrorKind.SCORES, scores.logprobs, n + 1),
        (ErrorKind.PROPOSAL, proposal.logprobs, n),
    ):
        if np.ndim(rows) != 2 or len(rows) != height:
            raise SpeculativeError(
                kind, f"logprobs has shape {np.shape(rows)}; expected ({height}, V)"
            )
        mass = np.exp(rows).sum(axis=1)
        is_none = (mass == 0) & (kind == ErrorKind.SCORES)  # no token is allowed
        if not np.allclose(mass[~is_none], 1.0, atol=1e-6):
            raise SpeculativeError(kind, f"the rows of probabilities sum to {mass}; expected 1")
    V = scores.logprobs.shape[1]
    own = proposal.logprobs.shape[1]
    if n and own != V:
        raise SpeculativeError(ErrorKind.VOCABULARY, f"the draft has {own} ids, the target {V}")
    for row, token in zip(proposal.logprobs, proposal.tokens):
        if not (0 <= token < V and np.isfinite(row[token])):
            raise SpeculativeError(
                ErrorKind.PROPOSAL, f"token {token} has no probability in its own row"
            )


@dataclasses.dataclass
class FunctionDraft:
    """A draft that samples from ``distribution``: any function from tokens to f64[V]."""

    distribution: Callable[[tuple[int, ...]], np.ndarray]
    generator: np.random.Generator
    max_length: int | None = None  # prefixes that its drafts would take past it get none

    def propose(self, prefix: Sequence[int], k: int) -> DraftProposal:
        if self.max_length is not None and len(prefix) + k > self.max_length:
            k = 0
        tokens = ()
        rows = []
        for _ in range(k):
            probs = self.distribution((*prefix, *tokens))
            if (token := draw(probs, self.generator.random())) is None:  # all are forbidden
                break
            rows.append(probs)
            tokens += (token,)
        return DraftProposal(tokens, _log(np.stack(rows) if rows else np.zeros((0, 0))))


@dataclasses.dataclass
class FunctionTarget:
    """A target of any function from tokens to f64[V]."""

    distribution: Callable[[tuple[int, ...]], np.ndarray]

    def verify(self, prefix: Sequence[int], tokens: Sequence[int]) -> TargetScores:
        prefixes = [(*prefix, *tokens[:i]) for i in range(len(tokens) + 1)]
        return TargetScores(_log(np.stack([self.distribution(p) for p in prefixes])))


def _log(probs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64))


def _look_up(table: np.ndarray) -> Callable[[tuple[int, ...]], np.ndarray]:
    order = np.ndim(table) - 1
    return lambda tokens: table[((0,) * order + tokens)[len(tokens) :]]


class MockDraft(FunctionDraft):
    """A draft whose distributions stand in a table f64[V,...,V] by the last tokens, then the
    next one; what comes before the first token counts as 0."""

    def __init__(self, table: np.ndarray, seed: int = 0):
        super().__init__(_look_up(table), generator(seed, "draft"))


class MockTarget(FunctionTarget):
    """A target with a table like ``MockDraft``'s."""

    def __init__(self, table: np.ndarray):
        super().__init__(_look_up(table))


@functools.partial(bounded_jit, static_argnames="model")
def _logits(params, tokens, *, model):
    """f32[T,V] of tokens i32[T], by one pass over an empty cache."""
    cache = model.init_cache(params, 1, tokens.shape[0])
    return model.unembed(params, model.forward(params, tokens[None], cache).hidden)[0]


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """A loaded model as a target, and in ``distribution`` as a function of tokens."""

    loaded: LoadedModel
    sampler: SamplerConfig
    prompt_length: int

    def distribution(self, tokens: tuple[int, ...]) -> np.ndarray:
        return np.exp(self.verify(tokens, ()).logprobs[0])

    def verify(self, prefix: Sequence[int], tokens: Sequence[int]) -> TargetScores:
        everything = (*prefix, *tokens)
        start = self.prompt_length
        limit = self.loaded.max_length
        if limit is not None and len(everything) > limit:
            raise SpeculativeError(
                ErrorKind.LENGTH,
                f"{len(everything)} tokens are more than the {limit} of {self.loaded.name}",
            )
        padded = jnp.asarray(everything + (0,) * (-len(everything) % 32), jnp.int32)  # few shapes
        logits = np.asarray(_logits(self.loaded.params, padded, model=self.loaded.model))
        rows = [
            reference_distribution(
                logits[n - 1], self.sampler, everything[:start], everything[start:n]
            )
            for n in range(len(prefix), len(everything) + 1)
        ]
        return TargetScores(_log(np.stack(rows)))


def as_target(
    loaded: LoadedModel, sampler: SamplerConfig = SamplerConfig(), prompt_length: int | None = None
) -> TargetModel:
    """A loaded model as a target, which reads all tokens anew at every call: slow and simple.

    Args:
      loaded: from ``spec_jax.load_model``.
      sampler: how its tokens are drawn; greedy by default.
      prompt_length: tokens that are the prompt; only presence and frequency penalties and
        processors need it.

    Raises:
      SpeculativeError: such a penalty or a processor without ``prompt_length``.
    """
    penalises = sampler.presence_penalty or sampler.frequency_penalty
    if prompt_length is None and (penalises or sampler.processors):
        raise SpeculativeError(
            ErrorKind.CONFIG, "presence and frequency penalties and processors need prompt_length"
        )
    return _Loaded(loaded, sampler, prompt_length or 0)


def as_draft(
    loaded: LoadedModel, sampler: SamplerConfig = SamplerConfig(), prompt_length: int | None = None
) -> DraftModel:
    """A loaded model as a draft; see ``as_target``.

    The sampler's seed seeds its draws, so a decoder with another seed needs a draft with another.
    It drafts nothing where a round's drafts would pass its maximum length.

    Args:
      loaded: from ``spec_jax.load_model``.
      sampler: how its tokens are drawn; greedy by default.
      prompt_length: as in ``as_target``.
    """
    model = as_target(loaded, sampler, prompt_length)
    stream = generator(sampler.seed, "draft")
    return FunctionDraft(model.distribution, stream, loaded.max_length)
