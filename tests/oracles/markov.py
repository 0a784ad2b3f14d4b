"""What a target that remembers two tokens writes: every output and its probability, in NumPy."""

import itertools
from collections.abc import Sequence

import numpy as np
from scipy.stats import chi2


def distribution(logits, temperature: float = 1.0, top_k: int = 0) -> np.ndarray:
    """f64[V], what one token is drawn from; a tie at the k-th place keeps both."""
    x = np.asarray(logits, np.float64) / temperature
    if top_k:
        x = np.where(x < np.sort(x)[-top_k], -np.inf, x)
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def output_distribution(
    table, prompt: Sequence[int], num_tokens: int, temperature: float = 1.0, top_k: int = 0
) -> np.ndarray:
    """Probability of every output of ``num_tokens`` tokens.

    Args:
      table: f32[V * V, V], the logits after the tokens a, b in row ``a * V + b``.
      prompt: two ids or more.
      num_tokens: N.
      temperature: above 0.
      top_k: keep the k most likely tokens; 0 keeps all.

    Returns:
      f64[V, ..., V], an axis a token.
    """
    table = np.asarray(table)
    V = table.shape[1]
    next_token = [distribution(row, temperature, top_k) for row in table]
    result = np.zeros((V,) * num_tokens)
    for output in itertools.product(range(V), repeat=num_tokens):
        text, probability = [*prompt[-2:], *output], 1.0
        for a, b, token in zip(text, text[1:], text[2:]):
            probability *= next_token[a * V + b][token]
        result[output] = probability
    assert abs(result.sum() - 1) < 1e-9
    return result


def p_value(outputs, probabilities: np.ndarray, least: float = 8.0) -> float:
    """Chi-square of outputs against their distribution; 0 where an impossible one occurred.

    Cells in which fewer than ``least`` are expected are one cell.

    Args:
      outputs: i32[trials, N].
      probabilities: f64[V, ..., V], of every output.
      least: number of expected outputs.
    """
    outputs = np.asarray(outputs)
    counts = np.zeros(probabilities.shape, np.int64)
    np.add.at(counts, tuple(outputs.T), 1)
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * len(outputs)
    is_rare = expected < least
    pool = lambda x: np.append(x[~is_rare], x[is_rare].sum())
    observed, expected = pool(counts), pool(expected)
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(observed) - 1))
