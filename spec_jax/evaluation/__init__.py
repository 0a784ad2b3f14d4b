"""Comparisons of drafters with plain decoding, for notebooks and experiments."""
