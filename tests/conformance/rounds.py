"""The heart of a certificate, without the loop: all outcomes of rounds after short texts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spec_jax.named import to_rule
from spec_jax.testing import CertificateError, Row
from spec_jax.testing.certificate import certify
from spec_jax.testing.certificate.forcing import Drafting, Forced, force_all
from spec_jax.testing.certificate.rounds import check_round
from spec_jax.testing.certificate.subjects import Subject, certified_rows, make_subject, prefixes


def run_of(rule="residual", make=None, num_rows=2, **options) -> certify._Run:
    """A certificate of which no check has run, so that a test runs the one that it is about.

    Args:
      rule: the rule, or its name.
      make: ``make(target)`` or the drafter; None: a toy draft model.
      num_rows: how many of a certificate's settings; None: all, of which the last are greedy.
      **options: of ``certify``.
    """
    run = certify._Run(to_rule(rule), make, **options)
    run.rows = run.rows[:num_rows]
    return run


class Rounds(NamedTuple):
    """Rounds with every draft, after every short text in some settings."""

    subject: Subject
    rows: list[Row]
    drafting: Drafting
    forced: Forced

    def check(self, rule, forced: Forced | None = None):
        """Compares a rule's outcomes of them, or of others, with plain decoding."""
        system = self.subject.system(to_rule(rule), self.drafting.system.num_draft)
        forced = self.forced if forced is None else forced
        return check_round(system, forced, self.rows, self.subject.logits_of, 1e-6)


def force(
    subject, num_draft=1, num_rows=None, rule="residual", num_tokens=1, draft=None, **options
):
    """Forces rounds of one draft model or drafter.

    Args:
      subject: it, or ``make(target)``; None: a toy draft model.
      num_draft: K of chains.
      num_rows: how many of a certificate's settings; None: all.
      rule: the rule, or its name.
      num_tokens: longest text.
      draft: the draft's sampler, if not that of each setting.
      **options: of ``Drafting``.
    """
    if not isinstance(subject, Subject):
        subject = make_subject(subject, None, 0)
    rows = certified_rows()[:num_rows]
    rows = rows if draft is None else [row._replace(draft=draft) for row in rows]
    drafting = Drafting(subject.system(to_rule(rule), num_draft), subject.params, rows, **options)
    forced = force_all(drafting, prefixes(subject, len(rows), num_tokens))
    return Rounds(subject, rows, drafting, forced)


def prove_rounds(make, params, rule, **options) -> np.ndarray:
    """Proves rounds of two drafts in wide, peaked and penalised settings.

    Args:
      make: ``make(target)``, the drafter.
      params: of the drafter, or a function of the target.
      rule: the name of the rule.
      **options: of ``force``.

    Returns:
      How many drafts each round offered.

    Raises:
      CertificateError: an outcome has another probability than it should.
    """
    rounds = force(make_subject(make, params, 0), 2, 4, rule, **options)
    found = rounds.check(rule)
    if found.first is not None:
        raise CertificateError(found.first.text(rounds.drafting.system.num_draft))
    assert found.error <= 1e-6 and found.num_outcomes >= 20
    return np.asarray(rounds.forced.proposal.n_draft)
