"""Decoding of toys: every drafter with every rule that serves it, on chains and trees.

The target is a table of logits of six ids, so its tokens are the same on every processor; the
heads have a layer of attention, whose rounding is far below the differences of their logits.
One batch mixes rows of several temperatures, filters and penalties.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from goldens import common

import spec_jax
from spec_jax import testing
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.loading import random_head
from spec_jax.models.config import ModelConfig
from spec_jax.overlap.overlap import Devices

V, K, NEW = 6, 3, 24
PROMPTS = [[1, 2, 3], [4, 5, 0, 1, 2, 5], [3], [2, 1]]
COLD = common.samplers({}, {"repetition_penalty": 1.3}, {}, {"frequency_penalty": 0.4})
MIXED = common.samplers(
    {},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.2},
    {"temperature": 0.8, "top_k": 4, "min_p": 0.02, "logit_bias": ((2, 0.5),)},
    {"temperature": 1.3},
)
SHAPES = {
    "chain": {"num_speculative_tokens": K},
    "static": {"tree": (2, 2, 1)},
    "dynamic": {"tree_depth": 3, "tree_top_k": 3, "num_speculative_tokens": 7},
}
ON_TREES = ("greedy", "residual", "traversal", "match")
ON_COPIES = (*ON_TREES, "block", "typical-acceptance", "synthetic")
STRATEGIES = (*ON_COPIES, "logit-comparison")


@functools.cache
def target():
    return testing.mock_model(V, 0, scale=1.5)


@functools.cache
def draft():
    noise = testing.toy_params(V, 1)["logits"]
    return common.with_params(
        target(), "draft", {"logits": target().params["logits"] + 0.8 * noise}
    )


@functools.cache
def head(kind: str):
    """A head with random values for the toy, whose features are its logits."""
    options = dict(
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=256
    )
    layer = ModelConfig(
        vocab_size=V, hidden_size=V, intermediate_size=10, num_hidden_layers=1, **options
    )
    make = {
        "eagle1": lambda: EagleConfig.of_target(layer, 1, taps=(2,)),
        "eagle3": lambda: EagleConfig.of_target(layer, 3, 5, taps=(1,)),
        "mtp": lambda: MtpConfig.of_target(layer),
        "mtp-sequential": lambda: MtpConfig.of_target(layer, protocol="sequential", num_modules=K),
    }[kind]
    loaded = random_head(make(), jax.random.key(0))
    return common.with_params(loaded, kind, common.values(loaded.params, scale=0.7))


def decoder(kind: str, strategy: str, shape: dict, **options) -> spec_jax.SpeculativeDecoder:
    """A decoder of the toy target.

    Args:
      kind: of drafter, "plain" for none.
      strategy: the rule.
      shape: of the drafts, as options of the configuration.
      **options: of the decoder.
    """
    options = {"target_sampler": COLD if strategy == "greedy" else MIXED, **options}
    if kind == "plain":
        return spec_jax.SpeculativeDecoder(target(), **options)
    if kind in ("standalone", "ngram", "suffix"):
        config = common.config(kind, strategy, **shape)
        own = draft() if kind == "standalone" else None
        return spec_jax.SpeculativeDecoder(target(), own, config, **options)
    loaded = head(kind)
    config = common.config(loaded.method, strategy, **shape)
    embed = common.values({"embed": jnp.zeros((V, V))})
    params = {"head": loaded.params, "target": {**target().params, **embed}}
    model = target().model
    drafter = loaded.kind.make_drafter(loaded, model, config)
    return spec_jax.SpeculativeDecoder(
        target(), common.with_params(target(), "head", params), config, drafter=drafter, **options
    )


def decoded(decoder, new: int = NEW, **options) -> list[dict]:
    return common.rows(decoder.generate(PROMPTS, new, stop_tokens=(), **options))


def _product() -> Iterator[tuple[str, str, str]]:
    yield from (("plain", strategy, "chain") for strategy in ("greedy", "match"))
    for kind in ("ngram", "suffix"):
        yield from ((kind, strategy, "chain") for strategy in ON_COPIES)
    for kind in ("standalone", "eagle1", "eagle3", "mtp"):
        yield from ((kind, strategy, "chain") for strategy in STRATEGIES)
        for shape in ("static", "dynamic"):
            yield from ((kind, strategy, shape) for strategy in ON_TREES)
    yield from (("mtp-sequential", strategy, "chain") for strategy in ("greedy", "residual"))


def _cell(kind, strategy, shape):
    made = decoder(kind, strategy, SHAPES[shape])
    first = decoded(made)
    # The second call of suffix decoding finds the outputs of the first one.
    return first + decoded(made) if kind == "suffix" else first


def _ends(kind, shape):
    """Stop tokens, limits of output and of prompt and output together, other seeds."""
    made = decoder(kind, "residual", SHAPES[shape])
    with_stop = made.generate(PROMPTS, NEW, stop_tokens=[5])
    short = [made.generate(PROMPTS, n, stop_tokens=()) for n in (1, 2, 7)]
    total = made.generate(PROMPTS, max_length=20, stop_tokens=())
    seeded = made.generate(PROMPTS, NEW, stop_tokens=(), seeds=[5, 6, 7, 8], rounds_per_sync=2)
    return [row for found in (with_stop, *short, total, seeded) for row in common.rows(found)]


def _adaptive(kind, strategy):
    """Tokens alone: which K is chosen depends on measured time."""
    made = decoder(kind, strategy, {"is_adaptive": True, "adaptive_buckets": (0, 1, 3)})
    return common.rows(made.generate(PROMPTS, NEW, stop_tokens=()), has_counts=False)


def _queue(kind, strategy):
    made = decoder(kind, strategy, SHAPES["chain"])
    prompts = enumerate([*PROMPTS, [5, 5], [0, 1, 2, 3, 4]])
    found = spec_jax.DecodeQueue(
        made, prompts, batch=2, max_prompt_tokens=8, max_new_tokens=NEW, stop_tokens=[5]
    )
    return [
        {"index": index, **common.row(result)}
        for index, result in sorted(found, key=lambda pair: pair[0])
    ]


def overlapped() -> dict[str, Callable[[], list[dict]]]:
    """Cells of drafting beside verification; they need three devices."""

    def cell(kind, strategy):
        target, draft, *_ = jax.devices()
        devices = Devices(draft=draft, target=target)
        return decoded(decoder(kind, strategy, SHAPES["chain"], devices=devices))

    return {
        f"overlap/{kind}/{strategy}": functools.partial(cell, kind, strategy)
        for kind in ("standalone", "ngram")
        for strategy in ("greedy", "residual", "match")
    }


def cells() -> dict[str, Callable[[], list[dict]]]:
    """Every cell of one device, by name, as a function that decodes it."""
    found = {
        f"toy/{kind}/{strategy}/{shape}": functools.partial(_cell, kind, strategy, shape)
        for kind, strategy, shape in _product()
    }
    for kind, shape in (("standalone", "chain"), ("standalone", "static"), ("eagle3", "chain")):
        found[f"toy/{kind}/ends/{shape}"] = functools.partial(_ends, kind, shape)
    for kind in ("standalone", "ngram", "eagle3"):
        for strategy in ("greedy", "match"):
            found[f"toy/{kind}/{strategy}/adaptive"] = functools.partial(_adaptive, kind, strategy)
    for kind, strategy in (
        ("standalone", "greedy"),
        ("standalone", "residual"),
        ("eagle3", "match"),
        ("suffix", "residual"),
    ):
        found[f"toy/{kind}/{strategy}/queue"] = functools.partial(_queue, kind, strategy)
    return found
