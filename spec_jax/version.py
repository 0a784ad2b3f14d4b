"""The version, importable without importing jax."""

__version__ = "0.1.0"
