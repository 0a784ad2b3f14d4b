"""What a certificate says: its checks, what they did not cover, and the error where one fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from spec_jax.config import SamplerConfig
from spec_jax.errors import SpecJaxError
from spec_jax.testing.oracles import Row

ALPHA = 1e-6  # smallest p-value that passes
TOLERANCE = 1e-6  # of a joint probability, see ``rounds.compare``: 16 roundings of float32


class Range(NamedTuple):
    """Probabilities of tokens, from the smallest to the largest, as float32 can hold them.

    Attributes:
      low: the smallest above 0.
      gap: how far the largest below 1 lies below 1; 1 if there is none.
    """

    low: float = 1.0
    gap: float = 1.0

    @classmethod
    def of(cls, probs: np.ndarray) -> Range:
        """Returns the range of distributions f64[...,V]."""
        probs = np.asarray(probs, np.float64).reshape(-1, np.shape(probs)[-1])
        best = probs.argmax(axis=1)
        others = probs.copy()
        others[np.arange(len(probs)), best] = 0.0
        gaps = others.sum(axis=1)  # more exact than 1 - p

        def above(x, least):
            return x[x >= least].min(initial=1.0)

        return cls(above(probs, 2.0**-126), above(gaps, 2.0**-24))

    @classmethod
    def join(cls, ranges: Iterable[Range]) -> Range:
        """Returns the range of all probabilities of some ranges."""
        return cls(*(min(x) for x in zip(cls(), *ranges)))

    def __str__(self) -> str:
        if self.low == 1:
            return "only 0 and 1"
        return f"{self.low:.1e} to 1 - {self.gap:.1e}"


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was proved or tested.

    Attributes:
      what: a sentence.
      method: "enumeration", "chi-square", "mean probability" (that plain decoding gives to the
        tokens), "equality" (with plain decoding), or "control": a defect that was made on purpose,
        to see that it is seen.
      error: the largest difference of a probability from what it should be; None if no probability
        was computed.
      p_value: of a test, corrected for the number of tests in this check; None if there
        was none.
      trials: how many outcomes were enumerated, or how many draws were made.
      seconds: how long it took, compilation included.
    """

    what: str
    method: str
    error: float | None = None
    p_value: float | None = None
    trials: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        found = []
        if self.error is not None:
            found.append(f"error {self.error:.1e}")
        if self.p_value is not None:
            found.append(f"p-value {self.p_value:.2g}")
        found.append(f"{self.trials:,} outcomes")
        return f"{self.what}: {', '.join(found)}, {self.seconds:.1f} s"


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What ``certify`` proved of a rule and a drafter, and what it did not.

    Attributes:
      rule: the name of the rule.
      drafter: the name of the drafter.
      vocab_size: V of the models that were enumerated.
      num_draft: the values of K.
      settings: the sampling parameters, one text for each row.
      checks: what was proved or tested, in this order.
      not_proved: sentences: what was left out, and why.
      failure: why it is no certificate; None if all checks passed.
      p: the target's probabilities of tokens, in all contexts that were enumerated or decoded.
      q: the drafter's, as it reported them; None if none were.
    """

    rule: str
    drafter: str
    vocab_size: int
    num_draft: tuple[int, ...]
    settings: tuple[str, ...]
    checks: tuple[Check, ...]
    not_proved: tuple[str, ...]
    failure: str | None = None
    p: Range | None = None
    q: Range | None = None

    @property
    def max_error(self) -> float:
        """The largest difference of an enumerated probability from what it should be."""
        proved = (c for c in self.checks if c.method == "enumeration")
        return max((c.error for c in proved), default=0.0)

    @property
    def min_p_value(self) -> float:
        """The smallest p-value of the tests."""
        return min((c.p_value for c in self.checks if c.p_value is not None), default=1.0)

    @property
    def seconds(self) -> float:
        """How long all checks took."""
        return sum(c.seconds for c in self.checks)

    def __repr__(self) -> str:
        state = "proved" if self.failure is None else "failed"
        return (
            f"Certificate({state}: rule {self.rule!r}, drafter {self.drafter!r}, {len(self.checks)}"
            f" checks, largest error {self.max_error:.1e}, smallest p-value "
            f"{self.min_p_value:.2g}, {self.seconds:.0f} s)"
        )

    def __str__(self) -> str:
        subject = f"rule {self.rule!r} with drafter {self.drafter!r}"
        lines = _lines_of(subject, self.checks, self.not_proved, self.failure)
        settings = "; ".join(self.settings)
        lines += [f"  V = {self.vocab_size}; {len(self.settings)} settings: {settings}"]
        tested = (f"{name} from {x}" for name, x in (("p", self.p), ("q", self.q)) if x is not None)
        lines += [f"  Tested: {'; '.join(tested)}"] * (self.p is not None)
        lines += [f"  Largest error {self.max_error:.1e}, {self.seconds:.0f} s"]
        return "\n".join(lines)


_HEADS = {
    "enumeration": "  Proved by enumeration",
    "equality": "  Found equal",
    "chi-square": "  Tested by chi-square",
    "mean probability": "  Tested by the mean probability of tokens",
    "control": "  Made wrong on purpose, and found",
}


def _lines_of(
    subject: str, checks: Sequence[Check], not_proved: Sequence[str], failure: str | None
) -> list[str]:
    lines = [f"{'Certificate' if failure is None else 'No certificate'} of {subject}"]
    for method, head in _HEADS.items():
        lines += [head] * any(c.method == method for c in checks)
        lines += [f"    {c}" for c in checks if c.method == method]
    lines += [f"  Failed: {failure}"] * (failure is not None)
    return lines + ["  Not proved"] + [f"    {text}" for text in not_proved]


@dataclasses.dataclass(frozen=True)
class TargetCertificate:
    """What ``certify(target=...)`` found of a model, and what it did not look at.

    Attributes:
      target: the name of the model.
      vocab_size: V.
      max_length: maximum tokens of a row.
      checks: what was compared, in this order; errors are those of logits, over the largest.
      not_proved: sentences: what was left out, and why.
      failure: why it is no certificate; None if all checks passed.
    """

    target: str
    vocab_size: int
    max_length: int
    checks: tuple[Check, ...]
    not_proved: tuple[str, ...]
    failure: str | None = None

    def __str__(self) -> str:
        size = f" (V = {self.vocab_size:,}, up to {self.max_length:,} tokens)"
        subject = f"target {self.target!r}{size}"
        return "\n".join(_lines_of(subject, self.checks, self.not_proved, self.failure))


class CertificateError(SpecJaxError, AssertionError):
    """The emitted tokens do not have the target's distribution.

    Attributes:
      certificate: what ``certify`` had proved before it failed; None from other functions.
    """

    certificate: Certificate | TargetCertificate | None = None


class ProposalError(CertificateError):
    """A drafter makes a proposal at which the decoder stops the row."""


class StatementError(CertificateError):
    """A rule does not flip its coins, or does not draw its last token, as its verdict states."""


def describe(config: SamplerConfig) -> str:
    """Returns the temperature and all that is not a default."""
    other = [
        f"{field.name} {getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if field.name not in ("temperature", "seed")
        and getattr(config, field.name) != field.default
    ]
    return ", ".join([f"temperature {config.temperature}", *other])


def settings_of(row: Row) -> str:
    """Returns the settings of target and draft."""
    ours = describe(row.target)
    theirs = describe(row.draft)
    return f"{ours}, draft {'alike' if ours == theirs else theirs}"


def probability(x: float) -> str:
    """Returns a probability with three digits, also one near 0 or 1."""
    if 0 < abs(x) < 1e-3:
        return f"{x:.2e}"
    if 2**-24 <= 1 - x < 1e-3:
        return f"1 - {1 - x:.2e}"
    return f"{x:.3f}"


def short(probs: Sequence[float]) -> str:
    """Returns the first probabilities of a distribution."""
    return "(" + ", ".join(map(probability, probs[:8])) + ", …" * (len(probs) > 8) + ")"


def where(row: Row, output: Sequence[Any], num_draft: int) -> str:
    """Says after which tokens and under which settings something happens.

    Args:
      row: prompt and settings.
      output: the tokens after the prompt.
      num_draft: K.
    """
    return (
        f"after the prompt {row.prompt} and the output {tuple(map(int, output))} "
        f"(K={num_draft}, {settings_of(row)})"
    )
