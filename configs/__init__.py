"""Configs of the experiments: each docstring gives command, cost and expected result."""
