"""The distributions of plain decoding, computed without the code that decodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.stats import binom, chi2

from spec_jax.config import GREEDY_BELOW, SamplerConfig
from spec_jax.contracts import Processor
from spec_jax.sampling import reference_filters


def penalised(
    logits: np.ndarray, config: SamplerConfig, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Applies bias, penalties and processors in float64 NumPy, as ``spec_jax.sampling`` should.

    Args and Returns are those of ``reference_distribution``, of logits f64[V].
    """
    x = np.array(logits, np.float64)
    for token, bias in config.logit_bias:
        x[token] += bias
    for token in set(prompt) | set(output):
        r = config.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= config.presence_penalty + config.frequency_penalty * output.count(token)
    for processor in config.processors:
        x = _processed(processor, x.astype(np.float32).tobytes(), tuple(prompt), tuple(output))
    return np.asarray(x, np.float64)


@functools.cache
def _jitted(processor: Processor) -> Processor:
    return processor._replace(
        init=jax.jit(processor.init, static_argnums=2),
        apply=jax.jit(processor.apply),
        advance=jax.jit(processor.advance),
    )


@functools.lru_cache(maxsize=10_000)
def _processed(processor: Processor, logits: bytes, prompt: tuple, output: tuple) -> np.ndarray:
    """f32[V], the processor's logits of one node after a text that it has seen token by token."""
    x = np.frombuffer(logits, np.float32)
    state = _state_after(processor, len(x), prompt, output)
    none = np.zeros(0, np.int32)
    return np.asarray(_jitted(processor).apply(None, state, x[None], none, None))[0]


@functools.lru_cache(maxsize=10_000)
def _state_after(processor: Processor, vocab_size: int, prompt: tuple, output: tuple) -> Any:
    if not output:
        prompt = np.asarray(prompt, np.int32)
        return _jitted(processor).init(prompt, np.int32(len(prompt)), vocab_size)
    before = _state_after(processor, vocab_size, prompt, output[:-1])
    return _jitted(processor).advance(before, np.asarray(output[-1:], np.int32), np.int32(1))


def reference_distribution(
    logits: np.ndarray, config: SamplerConfig, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Computes the distribution of one token in float64 NumPy, as ``spec_jax.sampling`` should.

    Args:
      logits: f32[V], raw.
      config: the sampling parameters.
      prompt: ids of the prompt.
      output: ids emitted or drafted so far, the pending token included.

    Returns:
      f64[V], a distribution; 0 where every token is forbidden.
    """
    x = penalised(logits, config, prompt, output)
    if x.max() == -np.inf:
        return np.zeros(len(x))
    if config.temperature < GREEDY_BELOW:
        return np.eye(len(x))[int(np.argmax(x))]
    return reference_filters(x / config.temperature, config)


LogitsOf = Callable[[Any, Sequence[int]], np.ndarray]
"""A model computed another way: ``(params, tokens) -> f32[V]``, the logits after these tokens."""


class Row(NamedTuple):
    """One row of a certificate: the prompt, and how target and draft sample."""

    prompt: tuple[int, ...]
    target: SamplerConfig
    draft: SamplerConfig


def toy_logits(params: Any, tokens: Sequence[int]) -> np.ndarray:
    """Returns f32[V], what a ``toy_model`` says after these tokens."""
    table = np.asarray(params["logits"])
    a, b = (0, *tokens)[-2:]
    return table[(a * table.shape[1] + b) % table.shape[0]]


def plain_distribution(
    params: Any, row: Row, pending: int, num_tokens: int, logits_of: LogitsOf = toy_logits
) -> np.ndarray:
    """Returns f64[V, ..., V], the joint distribution of plain decoding's tokens after ``pending``.

    Args:
      params: of the target.
      row: prompt and sampler.
      pending: the first output token, which is given.
      num_tokens: how many tokens follow it.
      logits_of: what the target says.
    """
    V = len(logits_of(params, row.prompt))
    dist = np.zeros((V,) * num_tokens)

    def visit(output: tuple[int, ...], prob: float) -> None:
        if len(output) == num_tokens + 1:
            dist[output[1:]] = prob
            return
        logits = logits_of(params, (*row.prompt, *output))
        p = reference_distribution(logits, row.target, row.prompt, output)
        for token in np.flatnonzero(p):
            visit((*output, int(token)), prob * p[token])

    visit((pending,), 1.0)
    return dist


def tail_of_sums(off: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Returns upper bounds of the p-values of sums of differences, each between -1 and 1.

    Args:
      off: f64[...], sums of differences, each of mean 0 given those before it.
      variance: f64[...], the sums of their variances given those before.

    Source: Freedman's inequality for martingales.
    """
    off = np.abs(off)
    return 2 * np.exp(-(off**2) / np.maximum(2 * (variance + off / 3), 1e-9))


def goodness_of_fit(observed: np.ndarray, dist: np.ndarray) -> float:
    """Returns the p-value of ``chi_square``, also where one outcome is nearly sure.

    If all others together are expected fewer than 5 times, it is the binomial probability that they
    are seen so often. The arguments are those of ``chi_square``.
    """
    observed, dist = np.ravel(observed), np.ravel(dist)
    is_other = np.arange(len(dist)) != dist.argmax()
    total = observed.sum()
    rest = dist[is_other].sum()
    if total * rest >= 5:
        return chi_square(observed, dist)
    if observed[dist <= 0].any():
        return 0.0
    return float(binom.sf(observed[is_other].sum() - 1, total, rest))


class TableFit(NamedTuple):
    """How tokens that were drawn in several groups fit their distributions.

    Attributes:
      p_value: of all groups together, see ``goodness_of_fit``.
      group: of the cell that is furthest off.
      token: of this cell.
      seen: how often the token was drawn in this group.
      expected: how often it should have been.
      size: draws of the group.
    """

    p_value: float
    group: int
    token: int
    seen: float
    expected: float
    size: int


def fit_table(tokens: np.ndarray, probs: np.ndarray, group: np.ndarray) -> TableFit:
    """Tests tokens that were drawn in several groups, each with its own distribution.

    Args:
      tokens: i64[N].
      probs: f64[N,V], their distributions.
      group: i64[N], such as the number of the text before each; each has several draws of a token.
    """
    seen, expected = np.zeros((2, group.max() + 1, probs.shape[1]))
    np.add.at(seen, (group, tokens), 1)
    np.add.at(expected, group, probs)
    off = np.abs(seen - expected) / np.sqrt(np.maximum(expected, 1e-3))
    cell = np.unravel_index(off.argmax(), off.shape)
    p_value = goodness_of_fit(seen, expected / expected.sum())
    row, token = map(int, cell)
    return TableFit(p_value, row, token, seen[cell], expected[cell], int(seen[row].sum()))


def chi_square(observed: np.ndarray, dist: np.ndarray) -> float:
    """Returns the p-value of a chi-square test.

    Rare outcomes are pooled to expected counts of at least 5. If an outcome of probability zero
    was observed, the p-value is 0.

    Args:
      observed: i64[...], how often each outcome was seen.
      dist: f64[...], its probability.

    Raises:
      ValueError: there are too few observations to test anything.
    """
    observed, dist = np.ravel(observed), np.ravel(dist)
    if observed[dist <= 0].any():
        return 0.0
    order = np.argsort(-dist, kind="stable")
    expected = dist[order] * observed.sum()
    observed = observed[order]
    n_alone = int((expected >= 5).sum())
    if n_alone == 0:
        raise ValueError(f"{observed.sum()} observations are too few to test any outcome")

    def pooled(x):
        return np.append(x[:n_alone], x[n_alone:].sum())

    e = pooled(expected)
    o = pooled(observed)
    if e[-1] < 5:  # the remainder joins the rarest outcome that stands alone
        e = np.append(e[:-2], e[-2:].sum())
        o = np.append(o[:-2], o[-2:].sum())
    if len(e) < 2:
        raise ValueError("fewer than two outcomes have an expected count of 5: nothing is tested")
    return float(chi2.sf(((o - e) ** 2 / e).sum(), len(e) - 1))
