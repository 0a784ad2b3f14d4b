"""``--profile`` of the benchmark: where a round of the zoo's drafts goes, in both dtypes."""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from experiments.benchmarks.rounds import DTYPES, in_dtype
from experiments.benchmarks.zoo import ZooPrompts, with_head
from experiments.run import cli
from spec_jax.config import SamplerConfig
from spec_jax.evaluation.bench import Bench
from spec_jax.evaluation.cells import Cell
from spec_jax.evaluation.profile import RoundProfile, profile_cells
from spec_jax.loading import load_draft, load_model


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    cli.require_positive(config, "k", "profile")


def measure(config: ConfigDict, folder: pathlib.Path) -> tuple[dict[str, RoundProfile], list[str]]:
    """Traces greedy rounds of plain decoding, of the zoo's draft and of a head, of one prompt.

    Args:
      config: See ``configs/benchmark.py``.
      folder: Gets a folder for each dtype.

    Returns:
      The records of ``profile_rounds`` by method and dtype, and notes on the prompts.
    """
    zoo, K = config.zoo, config.profile.k
    found = {}
    target = load_model(zoo.target)
    drafts = with_head(target, load_draft(zoo.draft, target), config.profile.head)
    prompts, notes = ZooPrompts.of(zoo, [target, *drafts.values()], 1)
    for dtype in DTYPES:
        of_dtype = {name: in_dtype(draft, dtype) for name, draft in drafts.items()}
        model = in_dtype(target, dtype)
        bench = Bench(model, of_dtype, prompts, SamplerConfig(), zoo.new_tokens)
        cells = [Cell("plain", 0, 0.0), *(Cell(name, K, 0.0, "greedy") for name in drafts)]
        records = profile_cells(bench, cells, folder / dtype)
        found |= {f"{label}, {dtype}": record for label, record in records.items()}
    return found, notes
