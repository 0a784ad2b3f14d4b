"""Drafters and rules compared with plain decoding: ``decode`` and ``evaluate``."""
