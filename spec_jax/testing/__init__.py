"""Public tools to test rules, drafters and decoders: mocks, oracles and the certificate.

``certify`` makes one certificate of a rule and a drafter. It answers one question: do the emitted
tokens have exactly the target's distribution? Its two main stages can be run alone.
``certify_rule`` enumerates: it forces every draft, every coin and every last token of a round
through the functions that the decoder itself calls, multiplies the probabilities, and compares
them with plain decoding's. ``certify_decoder`` samples: it runs the jitted decoder many times and
applies a chi-square test. Both compare with ``reference_distribution``, which shares no code with
the decoder.

``audit`` answers another one: where greedy decoding with drafts diverges from plain decoding, is it
rounding or a bug? ``invariant_pair`` gives both the same rounding, so that their bits are equal.

``check_conformance`` asks what every decoder must do, whatever it drafts with: its tokens, the
states of its drafter, and the ways in which it is driven.
"""

from spec_jax.testing.auditing.audit import Audit, RowAudit, audit, audit_outputs
from spec_jax.testing.auditing.invariant import InvariantPair, invariant_pair
from spec_jax.testing.certificate.certify import certify
from spec_jax.testing.certificate.loop import certify_decoder
from spec_jax.testing.certificate.records import (
    Certificate,
    CertificateError,
    Check,
    Range,
    TargetCertificate,
)
from spec_jax.testing.certificate.rounds import certify_rule
from spec_jax.testing.certificate.subjects import STANDARD_SETTINGS, standard_rows
from spec_jax.testing.certificate.target import certify_target
from spec_jax.testing.conformance import Conformance, ConformanceError, check_conformance
from spec_jax.testing.mocks import (
    TokenCache,
    mock_model,
    ragged,
    scripted_drafter,
    slow_model,
    toy_model,
    toy_params,
)
from spec_jax.testing.oracles import Row, chi_square, reference_distribution

__all__ = [
    "Audit",
    "Certificate",
    "CertificateError",
    "Check",
    "Conformance",
    "ConformanceError",
    "InvariantPair",
    "Range",
    "Row",
    "RowAudit",
    "STANDARD_SETTINGS",
    "TargetCertificate",
    "TokenCache",
    "audit",
    "audit_outputs",
    "certify",
    "certify_decoder",
    "certify_rule",
    "certify_target",
    "check_conformance",
    "chi_square",
    "invariant_pair",
    "mock_model",
    "ragged",
    "reference_distribution",
    "scripted_drafter",
    "slow_model",
    "standard_rows",
    "toy_model",
    "toy_params",
]
