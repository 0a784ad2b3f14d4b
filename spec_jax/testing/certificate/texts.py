"""Long texts with a target near the draft, where late drafts are read often.

After the text before it the distribution of each token is known. The first token of a round has it
also given how earlier rounds went, since each round has noise of its own. So the tokens of many
texts are tested place by place, the first ones of rounds by how the round before went, and those
of neighbouring seeds against the product of their distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax.decoding import Kind
from spec_jax.testing.certificate.loop import Loop, distributions
from spec_jax.testing.certificate.records import ALPHA, CertificateError, probability, settings_of
from spec_jax.testing.certificate.states import propose_next
from spec_jax.testing.oracles import Row, fit_table, goodness_of_fit

_PER_CELL = 50  # draws that a cell of a table should have on average
_NEAR = 0.5  # share of the draft's distribution in the target's
_CONTEXT = 3  # maximum tokens before the tested one that a table has
_WINDOW = 8  # places that are tested together
_WITH_PROCESSORS = 200  # texts that are followed where each has distributions of its own


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


def check_texts(
    loop: Loop,
    output: np.ndarray,
    kinds: np.ndarray,
    row: Row,
    logits_of: Callable[[Sequence[int]], np.ndarray],
) -> float:
    """Tests each token after the text and the rounds before it, and neighbouring seeds jointly.

    Args:
      loop: what decoded.
      output: i64[N,1+T], of seeds that follow each other.
      kinds: i64[N,1+T], the ``Kind`` of each token.
      row: the prompt and the samplers of all of them, without penalties.
      logits_of: ``tokens -> f32[V]``, what the target says, computed another way.

    Returns:
      The p-value, corrected for the number of tests.

    Raises:
      CertificateError: the p-value is smaller.
    """
    if row.target.processors:
        output, kinds = (x[:_WITH_PROCESSORS] for x in (output, kinds))
    # A toy target reads two tokens; processors may read all.
    probs = distributions(output, row, logits_of, None if row.target.processors else 2)
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
    fit = fit_table(output[rows, places + 1], probs[rows, places], group)
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
            yield goodness_of_fit(tables[0], tables[1] / tables[1].sum()), text
