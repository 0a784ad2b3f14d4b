"""What every part of the record shares: seeded values, rows of a generation, configurations."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import spec_jax

COUNTS = ("emitted", "first", "accepted", "corrected", "bonus", "rounds")


def values(tree, seed: int = 0, scale: float = 0.2):
    """The same pytree with values that NumPy draws by the name of each leaf; integers stay."""

    def leaf(path, old):
        name = jax.tree_util.keystr(path)
        if not jnp.issubdtype(old.dtype, jnp.floating):
            return old
        stream = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
        draw = stream.standard_normal(old.shape)
        return jnp.asarray(1 + 0.1 * draw if "norm" in name else scale * draw, old.dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def config(method: str, strategy: str | None, **options) -> spec_jax.SpeculativeConfig:
    """A configuration from flat options; the one place to edit when their spelling changes."""
    if strategy == "synthetic":
        options["synthetic_acceptance_rate"] = 0.6
    return spec_jax.SpeculativeConfig(
        speculative_method=method, rejection_sampling_strategy=strategy, **options
    )


def row(generation, has_counts: bool = True) -> dict:
    """What is recorded of one row."""
    stats = generation.stats
    record = {"tokens": " ".join(map(str, generation.tokens)), "finish": generation.finish_reason}
    if generation.text is not None:
        record["text"] = generation.text
    if has_counts:
        record["counts"] = [getattr(stats, name) for name in COUNTS]
        record |= {name: list(getattr(stats, name)) for name in ("drafted_at", "accepted_at")}
    return record


def rows(generations, has_counts: bool = True) -> list[dict]:
    return [row(generation, has_counts) for generation in generations]


def samplers(*changes: dict) -> list[spec_jax.SamplerConfig]:
    """One sampler a row, with seeds of their own."""
    return [spec_jax.SamplerConfig(**{"seed": 11 + i, **c}) for i, c in enumerate(changes)]


def with_params(loaded, name: str, params):
    return dataclasses.replace(loaded, name=name, params=params)
