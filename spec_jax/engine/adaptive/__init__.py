"""Adaptive K: the policy, and the rounds that it runs."""
