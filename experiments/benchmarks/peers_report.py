"""Lines and tables of the benchmark's part "peers"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks.shapes import listed
from experiments.benchmarks.table import Line
from spec_jax.evaluation.timing import spread
from spec_jax.show.tables import Section

OURS, THEIRS = "spec_jax", "transformers"
_NAMES = {"lookup": "prompt lookup", "assisted": "assisted generation"}
_PEERS = {"plain": "plain", "ngram": "lookup", "standalone": "assisted", "head": "assisted"}
_BARRED = ("standalone", "head")  # the methods that are held against assisted generation
_NUMBERS = ("K", "tokens/s", "x own plain", "tau", "x peer", "first run, s", "peak memory, MB")
_ABOUT = (
    "transformers' assisted generation takes any two models of the Hugging Face hub, on PyTorch, "
    "and compiles nothing. Python launches its passes, which takes as long whatever the model: "
    "much beside a pass of millions of parameters, little beside one of billions. The ratios are "
    "those of these small models",
    "transformers' prompt lookup needs no draft; it is for outputs that repeat their prompt, such "
    "as summaries and edits",
    "spec_jax compiles a loop for every method, K and shape before it decodes: see the first run, "
    "and the memory, which includes the compiler's",
    "tau counts transformers' passes from the first one on, which reads the prompt and verifies "
    "drafts at once; of spec_jax it counts the rounds after the prompt",
)  # what each was built for, and how the figures are to be read


class PeerCell(NamedTuple):
    """What is timed.

    Attributes:
      side: ``OURS`` or ``THEIRS``.
      method: The method, see the workers.
      k: K; 0 for plain decoding, None for the peer's own choice.
    """

    side: str
    method: str
    k: int | None = 0

    @property
    def plain(self) -> PeerCell:
        """Plain decoding of the same side."""
        return PeerCell(self.side, "plain")

    @property
    def peer(self) -> PeerCell | None:
        """What transformers does in its place; None for transformers itself."""
        return PeerCell(THEIRS, _PEERS[self.method], self.k) if self.side == OURS else None

    @property
    def k_text(self) -> str:
        return {0: "", None: "its own"}.get(self.k, str(self.k))

    def name(self, head: str) -> str:
        """The method in words; ``head`` is the head's name."""
        return {**_NAMES, "head": head}.get(self.method, self.method)

    def label(self, head: str) -> str:
        """Side, method and K in words."""
        return f"{self.side} {self.name(head)}" + (f", K={self.k_text}" if self.k_text else "")


class Measured(NamedTuple):
    """What was found in one dtype.

    Attributes:
      ms: f64[repeats] by cell, milliseconds a token, prefill included.
      tokens: The output ids of every prompt, by cell.
      tau: Tokens a target pass, by cell; None where it is not known.
      first_s: Seconds of the first run of all prompts, by cell.
      peak_bytes: The largest memory of each side's process; None where it is not known.
      facts: Versions, and the peer's threads.
    """

    ms: Mapping[PeerCell, np.ndarray]
    tokens: Mapping[PeerCell, Sequence[Sequence[int]]]
    tau: Mapping[PeerCell, float | None]
    first_s: Mapping[PeerCell, float]
    peak_bytes: Mapping[str, int | None]
    facts: Mapping[str, Any]

    def ratio(self, cell: PeerCell, other: PeerCell | None) -> np.ndarray | None:
        """Returns tokens a second of a cell over those of another, by repeat; None without it."""
        return self.ms[other] / self.ms[cell] if other in self.ms else None

    def same_rows(self, cell: PeerCell, other: PeerCell | None) -> int | None:
        """Returns how many rows of two cells have the same tokens; None without the other."""
        if other not in self.tokens:
            return None
        return sum(a == b for a, b in zip(self.tokens[cell], self.tokens[other], strict=True))

    def best(self, side: str) -> PeerCell:
        """Returns the fastest cell of a side."""
        return min((c for c in self.ms if c.side == side), key=lambda c: np.median(self.ms[c]))


def lines_of(found: Mapping[str, Measured], head: str, bar: float) -> list[Line]:
    """Returns the ratios of tokens a second, each with what was identical.

    Args:
      found: What was measured, by dtype.
      head: The head's name.
      bar: The bar of draft models and heads over assisted generation.
    """
    lines = []
    for dtype, measured in found.items():
        rows = len(next(iter(measured.tokens.values())))
        for cell in measured.ms:
            ratio = measured.ratio(cell, cell.peer)
            if ratio is not None:
                same = measured.same_rows(cell, cell.peer)
                lines.append(
                    Line(
                        f"{cell.label(head)} / {cell.peer.label(head)}, {dtype}",
                        ratio,
                        bar=bar if cell.method in _BARRED else None,
                        is_upper=False,
                        note=f"tokens a second, prefill included; {same} of {rows} rows identical",
                    )
                )
        ours, theirs = measured.best(OURS), measured.best(THEIRS)
        lines.append(
            Line(
                f"fastest of {OURS} / fastest of {THEIRS}, {dtype}",
                measured.ratio(ours, theirs),
                note=f"{ours.label(head)} / {theirs.label(head)}",
            )
        )
    return lines


def sections_of(found: Mapping[str, Measured], head: str) -> list[Section]:
    """Returns a table of the systems, and one of their processes."""
    header = (
        "dtype",
        "system",
        "method",
        "K",
        "tokens/s",
        "x own plain",
        "tau",
        "x peer",
        "rows as own plain",
        "rows as peer",
        "first run, s",
    )
    median = lambda values: "" if values is None else f"{spread(values).median:.2f}"
    rows = []
    for dtype, measured in found.items():
        for cell in sorted(measured.ms, key=lambda c: (c.side, str(c.k_text), c.method)):
            of = f" of {len(measured.tokens[cell])}"
            count = lambda n: "" if n is None else f"{n}{of}"
            tau = measured.tau[cell]
            is_plain = cell == cell.plain
            rows.append(
                [
                    dtype,
                    cell.side,
                    cell.name(head),
                    cell.k_text,
                    f"{1e3 / spread(measured.ms[cell]).median:.0f}",
                    "" if is_plain else median(measured.ratio(cell, cell.plain)),
                    "" if tau is None else f"{tau:.2f}",
                    median(measured.ratio(cell, cell.peer)),
                    "" if is_plain else count(measured.same_rows(cell, cell.plain)),
                    count(measured.same_rows(cell, cell.peer)),
                    f"{measured.first_s[cell]:.1f}",
                ]
            )
    processes = [
        [dtype, side, "" if peak is None else f"{peak / 1e6:.0f}"]
        for dtype, measured in found.items()
        for side, peak in measured.peak_bytes.items()
    ]
    return [
        Section("Peers", header, rows, _NUMBERS),
        Section("Peers' processes", ("dtype", "system", "peak memory, MB"), processes, _NUMBERS),
    ]


def about(found: Mapping[str, Measured]) -> list[str]:
    """Returns what the reader must know: what each was built for, and the versions."""
    facts = next(iter(found.values())).facts
    versions = ", ".join(f"{n} {facts[n]}" for n in ("transformers", "torch", "python"))
    return [*_ABOUT, f"peers: {versions}, {facts['threads']} threads"]


def record_of(found: Mapping[str, Measured], head: str) -> dict[str, Any]:
    """Returns what report.json keeps, by dtype."""
    return {
        dtype: {
            "versions": dict(measured.facts),
            "peak_bytes": dict(measured.peak_bytes),
            "rows": len(next(iter(measured.tokens.values()))),
            "times_ms": listed({c.label(head): ms for c, ms in measured.ms.items()}),
            "tau": {c.label(head): tau for c, tau in measured.tau.items()},
            "first_run_s": {c.label(head): s for c, s in measured.first_s.items()},
            "identical_rows": {
                c.label(head): {
                    "own plain": measured.same_rows(c, c.plain),
                    "peer": measured.same_rows(c, c.peer),
                }
                for c in measured.ms
            },
        }
        for dtype, measured in found.items()
    }
