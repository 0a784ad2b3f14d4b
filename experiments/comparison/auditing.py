"""The audit of rows that differ from plain decoding's: ``--config.has_audit``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.run.tables import table
from spec_jax.config import GREEDY_BELOW
from spec_jax.evaluation.grid import Bench, Cell, Row

if TYPE_CHECKING:
    from spec_jax.testing import RowAudit

_COLUMNS = (
    "method", "K", "T", "rows", "identical", "not examined", "rounding", "bug",
    "farthest from float32",
)  # fmt: skip
MEANING = (
    "Audit: rows that differ from plain decoding, explained by rounding or by nothing but a bug; "
    "not examined: rows of which only the tokens were compared; "
    "farthest from float32: how far the logits that any of their tokens was chosen from lie from a "
    "pass in float32, over how far rounding alone moves them (more than 3 is a bug)."
)


def examine(
    bench: Bench, cell: Cell, row: int, rows: Mapping[int, Row], plain: Mapping[int, Row]
) -> dict[int, RowAudit]:
    """Examines a greedy row that differs from plain decoding's.

    Args:
      bench: What has decoded; if it has an audit, the row's whole batch is decoded again.
      cell: The cell whose row it is.
      row: The number of the prompt.
      rows: The cell's outputs, by prompt.
      plain: Plain decoding's.

    Returns:
      What was found, by prompt: of this row, and of the others of its batch that differ.
    """
    from spec_jax.testing import audit, audit_outputs  # needs scipy.stats, slow to import

    if not bench.has_audit:
        pair = (plain[row].tokens, rows[row].tokens)
        found = audit_outputs(
            bench.target, bench.prompts[row], *pair, sampler=bench.sampler, row=row
        )
        return {row: found}
    chosen = next(c for c in map(bench.chosen, bench.batches) if row in c)
    outputs = tuple([rows_of[i].tokens for i in chosen] for rows_of in (plain, rows))
    decoder = bench.decoder(cell)
    found = audit(
        decoder, [bench.prompts[i] for i in chosen], bench.max_new_tokens, outputs=outputs,
        plain=bench.decoder(Cell("plain", 0, cell.temperature)), pad_to=bench.longest,
    )  # fmt: skip
    return {chosen[r.row]: dataclasses.replace(r, row=chosen[r.row]) for r in found.rows}


def summary(results: Sequence[Mapping]) -> list[dict]:
    """Returns what the audits of each greedy result found, for report.json."""
    return [
        {
            **{key: r[key] for key in ("method", "k", "tree", "temperature", "rows")},
            "batch": r.get("batch", 1),
            "identical": r["identical_rows"],
            "not_examined": r["rows"] - len(r["differences"]),
            **{v: sum(d["verdict"] == v for d in r["differences"]) for v in ("rounding", "bug")},
            "farthest": max((x for d in r["differences"] for x in d["deviations"]), default=None),
        }
        for r in results
        if r["method"] != "plain" and r["identical_rows"] is not None
        and r["temperature"] < GREEDY_BELOW
    ]


def audit_table(audits: Sequence[Mapping], *, is_markdown: bool = False) -> str:
    """Formats what ``summary`` returned."""
    of = lambda a: f", batch {a['batch']}" if len({other["batch"] for other in audits}) > 1 else ""
    rows = [
        [
            (f"{a['method']} {a['tree']}" if a["tree"] else a["method"]) + of(a), str(a["k"]),
            f"{a['temperature']:g}",
            *(str(a[key]) for key in ("rows", "identical", "not_examined", "rounding", "bug")),
            "–" if a["farthest"] is None else f"{a['farthest']:.2f}",
        ]
        for a in audits
    ]  # fmt: skip
    return table(_COLUMNS, rows, numbers=_COLUMNS[1:], is_markdown=is_markdown)


def document(audits: Sequence[Mapping] | None) -> list[str]:
    """Returns the lines of report.md; none without an audit."""
    return ["", audit_table(audits, is_markdown=True), "", MEANING] if audits else []
