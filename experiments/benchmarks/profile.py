"""``--profile`` of the benchmark: where a round of the zoo's drafts goes, in both dtypes."""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from experiments.benchmarks.rounds import DTYPES
from experiments.common import cli
from experiments.common.grid import Bench, Cell
from experiments.common.profiling import profile_cells
from experiments.common.prompts import load_prompts
from spec_jax.config import SamplerConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import load_draft, load_model


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    cli.require_positive(config, "k", "profile")


def measure(config: ConfigDict, folder: pathlib.Path) -> dict[str, dict]:
    """Traces greedy rounds of plain decoding, of the zoo's draft and of its head.

    Args:
      config: See ``configs/benchmark.py``.
      folder: Gets a folder for each dtype.

    Returns:
      The records of ``profile_rounds`` by method and dtype.
    """
    zoo, K = config.zoo, config.profile.k
    found = {}
    for dtype in DTYPES:
        target = load_model(zoo.target, dtype)
        drafts = {
            "standalone": load_draft(zoo.draft, target, dtype),
            "eagle": load_draft(config.profile.head, target, dtype),
        }
        encode = SpeculativeDecoder(target).encode
        (prompt,) = (encode(p.text) for p in load_prompts("", 1, zoo.seed))
        bench = Bench(
            target, drafts, [prompt[-zoo.max_prompt_tokens :]], SamplerConfig(), zoo.new_tokens
        )
        cells = [Cell("plain", 0, 0.0), *(Cell(name, K, 0.0, "greedy") for name in drafts)]
        records = profile_cells(bench, cells, folder / dtype)
        found |= {f"{label}, {dtype}": record for label, record in records.items()}
    return found
