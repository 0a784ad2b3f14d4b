"""Greedy decoding with drafts of which a script says how many are right."""

import numpy as np

from spec_jax import SpeculativeConfig, SpeculativeDecoder, host_drafter


def check_every_count(target, prompt, num_tokens=64, num_draft=3):
    """Checks text with drafts against plain text, where every accept count occurs; returns it."""
    plain, seen = list(SpeculativeDecoder(target).generate(prompt, num_tokens).tokens), []
    V = target.config.vocab_size

    def script(prefix, k, seed):
        """How many drafts are right changes from round to round."""
        n = len(prefix) - len(prompt)
        assert list(prefix[len(prompt) :]) == plain[:n]
        seen.append(n)
        drafts = [*plain[n : n + k], *[0] * k][:k]
        wrong = len(seen) % (k + 1)
        return [(t + 1) % V if i == wrong else t for i, t in enumerate(drafts)]

    config = SpeculativeConfig(
        num_speculative_tokens=num_draft, rejection_sampling_strategy="greedy"
    )
    decoder = SpeculativeDecoder(target, config=config, drafter=host_drafter(script))
    assert list(decoder.generate(prompt, num_tokens).tokens) == plain
    assert {n - 1 for n in np.diff(seen)} == {*range(num_draft + 1)}
    return plain
