"""Fixtures of streaming, cancellation and event loops."""

from support.circle import decoder, on_round  # noqa: F401
