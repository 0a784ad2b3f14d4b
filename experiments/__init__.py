"""Experiments: absl mains that assemble spec_jax; one module a command."""
