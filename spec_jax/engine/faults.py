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


def describe(finish: Finish, system: System) -> str | None:
    """Returns what went wrong, in a sentence without its end; None for a row that ended well.

    Args:
      finish: why the row ended.
      system: whose drafter and rule are named.
    """
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


def error_of(rows: Sequence[Any], system: System) -> Exception | None:
    """Returns the error that a call raises because of its rows, and logs other faults.

    Args:
      rows: every ``Generation`` of the call.
      system: what decoded them.

    Returns:
      An ``InvalidDraftError`` or ``InvalidVerdictError`` that holds the rows, or None.
    """
    reasons = [Finish[row.finish_reason.upper()] for row in rows]
    error = None
    for finish in dict.fromkeys(reasons):
        text = describe(finish, system)
        if text is None:
            continue
        where = f"{text}, in rows {[i for i, reason in enumerate(reasons) if reason == finish]}"
        if finish not in _ERRORS:
            _log.warning("%s; those rows stopped there", where)
        elif error is None:
            error = _ERRORS[finish](
                f"{where}; those rows stopped there; all rows' tokens are in this error's "
                "`generations`",
                rows,
            )
    return error
