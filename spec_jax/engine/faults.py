"""What rows that ended by a fault say to the caller.

A faulty row's ``finish_reason`` names who was at fault. Numbers that went wrong in a model are
logged. What only wrong code can do, in a drafter or in a rule, is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from spec_jax.decoding import Finish, System
from spec_jax.errors import InvalidDraftError, InvalidVerdictError

_log = logging.getLogger(__name__)

_ERRORS = {
    Finish.INVALID_DRAFT: InvalidDraftError,
    Finish.INVALID_DRAFT_PROBS: InvalidDraftError,
    Finish.INVALID_VERDICT: InvalidVerdictError,
}


def describe(
    finish: Finish, system: System, raised: Exception | None = None
) -> str | None:  # fmt: skip
    """Returns what went wrong, in a sentence without its end; None for a row that ended well.

    Args:
      finish: why the row ended.
      system: whose drafter and rule are named.
      raised: what the drafter's Python function raised, see ``find_raised``.
    """
    if raised is not None:
        return f"drafter {system.drafter.name!r} raised {type(raised).__name__}: {raised}"
    drafter, rule = f"drafter {system.drafter.name!r}", f"rule {system.rule.name!r}"
    return {
        Finish.NAN_TARGET:
            "the target's logits were not finite, or every token was forbidden",
        Finish.NAN_DRAFT: f"the logits of {drafter} were not finite",
        Finish.INVALID_DRAFT:
            f"{drafter} proposed ids outside of the vocabulary 0..{system.target.last_id}, a "
            f"number of drafts outside of 0..{system.num_draft}, or parents that make no tree",
        Finish.INVALID_DRAFT_PROBS:
            f"{drafter} put into Proposal.probs what is no distribution (each row is finite, not "
            "negative, and sums to 1), or gives the token that was drawn probability 0",
        Finish.INVALID_VERDICT:
            f"{rule} returned a Verdict that cannot be: n_accept counts drafts that were not "
            "offered, tokens are not these drafts and one token of positive probability in "
            "replacement, or accept_probs are not finite",
    }.get(finish)  # fmt: skip


def error_of(
    rows: Sequence[Any], system: System, prefixes: Sequence[Sequence[int]], num_ahead: int = 0
) -> Exception | None:
    """Returns the error that a call raises because of its rows, and logs other faults.

    Args:
      rows: every ``Generation`` of the call.
      system: what decoded them.
      prefixes: the ids of prompt and output of each row.
      num_ahead: how many drafts the drafter may be ahead of the output.

    Returns:
      An ``InvalidDraftError`` or ``InvalidVerdictError`` that holds the rows, or None. What a
      drafter's Python function raised is its ``__cause__``.
    """
    reasons = [Finish[row.finish_reason.upper()] for row in rows]
    groups: dict[tuple, list[int]] = {}
    causes = {}
    for i, finish in enumerate(reasons):
        if describe(finish, system) is not None:
            raised = find_raised(finish, system, prefixes[i], num_ahead)
            key = (finish, raised and (type(raised), str(raised)))
            groups.setdefault(key, []).append(i)
            causes.setdefault(key, raised)
    # What a function raised comes first: it says more than what the loop saw.
    error = None
    for key in sorted(groups, key=lambda key: causes[key] is None):
        finish, raised = key[0], causes[key]
        text = f"{describe(finish, system, raised)}, in rows {groups[key]}"
        if finish not in _ERRORS:
            _log.warning("%s; those rows stopped there", text)
        elif error is None:
            if raised is not None:
                first = groups[key][0]
                text += f" (row {first} after {len(prefixes[first])} tokens of prompt and output)"
            error = _ERRORS[finish](
                f"{text}; those rows stopped there; all rows' tokens are in this error's "
                "`generations`",
                rows,
            )
            error.__cause__ = raised
    return error


def find_raised(
    finish: Finish, system: System, prefix: Sequence[int], num_ahead: int = 0
) -> Exception | None:
    """Returns what a drafter's Python function raised and so ended a row, or None.

    Args:
      finish: why the row ended.
      system: what decoded it.
      prefix: the ids of its prompt and output.
      num_ahead: how many drafts the drafter may be ahead of the output.
    """
    if finish != Finish.INVALID_DRAFT or system.drafter.find_error is None:
        return None
    return system.drafter.find_error(tuple(map(int, prefix)), num_ahead)
