"""What every process decodes in tests of several: K fixed and adaptive, a row cancelled.

    PYTHONPATH=tests python -m experiments.launch --processes=2 --devices=4 support.decode_worker \
        --workdir=DIR --config.mesh=data:2,tensor:4
"""

import json
import pathlib
import sys

from ml_collections import ConfigDict
from support.tiny_models import loaded

from experiments.run import cli
from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, processes
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.models.config import ModelConfig

_CONFIG = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
_CONFIG |= dict(num_attention_heads=4, num_key_value_heads=4)
CONFIG = ModelConfig(**_CONFIG)
PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7])
NEW = 12


def get_config():
    return ConfigDict({"mesh": ""})


def model(seed):
    return loaded(CONFIG, f"tiny-{seed}", seed)


def decoder(mesh, **options):
    config = SpeculativeConfig(
        num_speculative_tokens=2, rejection_sampling_strategy="residual", **options
    )
    samplers = SamplerConfig(temperature=1.0, top_k=20, seed=7)
    return SpeculativeDecoder(model(0), model(1), config, target_sampler=samplers, mesh=mesh)


def fixed(mesh):
    """Tokens of every row, K fixed."""
    rows = decoder(mesh).generate(PROMPTS, NEW, stop_tokens=())
    return [list(row.tokens) for row in rows]


def cancelled(mesh):
    """Tokens and reasons, where process 0 alone cancels a row before the rounds begin."""
    tokens = [CancellationToken() for _ in PROMPTS]
    if processes.is_writer():
        tokens[1].cancel()
    rows = decoder(mesh).generate(PROMPTS, NEW, stop_tokens=(), cancellation_token=tokens)
    return [[row.finish_reason, list(row.tokens)] for row in rows]


def adaptive(mesh):
    """The Ks that were chosen by costs which every process measures with its own clock."""
    it = decoder(mesh, is_adaptive=True)
    it.generate(PROMPTS, NEW, stop_tokens=())
    (costs,) = it.adaptive.costs.values()
    return [sorted(costs.round_ms.items()), costs.catch_up_ms, it.adaptive.tuner.rates]


def main():
    mesh = _CONFIG.value.mesh or None
    found = {"fixed": fixed(mesh), "cancelled": cancelled(mesh), "adaptive": adaptive(mesh)}
    folder = pathlib.Path(_WORKDIR.value)
    (folder / f"{processes.index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(sys.modules[__name__], "Folder of what is found.")
    cli.run(main)
