"""The heart of a certificate, without the loop: all outcomes of rounds after short texts."""

from __future__ import annotations

import numpy as np

from spec_jax.named import to_rule
from spec_jax.testing import CertificateError
from spec_jax.testing.certificate.forcing import Drafting, force_all
from spec_jax.testing.certificate.rounds import check_round
from spec_jax.testing.certificate.subjects import certified_rows, make_subject, prefixes


def prove_rounds(make, params, rule, num_draft=2, num_rows=4, draft=None) -> np.ndarray:
    """Proves rounds after every text of a token, in wide, peaked and penalised rows.

    Args:
      make: ``make(target)``, the drafter.
      params: of the drafter, or a function of the target.
      rule: the name of the rule.
      num_draft: K of chains.
      num_rows: how many of a certificate's settings.
      draft: the draft's sampler, if not that of each setting.

    Returns:
      How many drafts each round offered.

    Raises:
      CertificateError: an outcome has another probability than it should.
    """
    subject, rows = make_subject(make, params, 0), certified_rows()[:num_rows]
    rows = rows if draft is None else [row._replace(draft=draft) for row in rows]
    system = subject.system(to_rule(rule), num_draft)
    drafting = Drafting(system, subject.params, rows)
    forced = force_all(drafting, prefixes(subject, num_rows, 1))
    found = check_round(system, forced, rows, subject.logits_of, 1e-6)
    if found.first is not None:
        raise CertificateError(found.first.text(system.num_draft))
    assert found.error <= 1e-6 and found.num_outcomes >= 20
    return np.asarray(forced.proposal.n_draft)
