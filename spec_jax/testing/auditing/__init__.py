"""Why two greedy decodings differ: rounding, or a bug."""
