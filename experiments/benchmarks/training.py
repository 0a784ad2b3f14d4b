"""The benchmark's part "training": the share of the machine's matmul rate that a step reaches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.shapes import facts, random_model
from experiments.benchmarks.table import Line, Result, listed
from experiments.run import cli
from spec_jax.drafters.eagle.model import EagleConfig, head_table, init_head
from spec_jax.drafters.eagle.objective import EAGLE3
from spec_jax.drafters.standalone import objective as lm
from spec_jax.evaluation.timing import Timer, loop_timer, measure_all
from spec_jax.loading import LoadedModel
from spec_jax.models.params import num_params
from spec_jax.train.objective import Batch, with_view
from spec_jax.train.optimizer import make_optimizer
from spec_jax.train.step import TrainState, train_step

_MATMULS = 8  # products of each shape in one call


class TrainingCase(NamedTuple):
    """A training step.

    Attributes:
      name: Its name in the table.
      run: ``state -> state``, one step.
      state: The first state.
      flops: FLOPs of the model in one step, see ``eagle3_case`` and ``lm_case``.
      tokens: Tokens of one batch.
    """

    name: str
    run: Callable[[TrainState], TrainState]
    state: TrainState
    flops: float
    tokens: int


def attention_flops(width: int, length: int, tokens: int) -> float:
    """Returns forward FLOPs of attention, in which a token sees half of the others on average.

    Args:
      width: Of all query heads together.
      length: Tokens of a window.
      tokens: Of all windows together.
    """
    return tokens * 2 * 2 * width * length / 2


def _optimizer(config):
    return make_optimizer(**config.optimizer, steps=1_000_000)


def lm_case(target: LoadedModel, config: ConfigDict) -> TrainingCase:
    """Returns a language model's step: 6 FLOPs per parameter and token, and those of attention."""
    optimizer = _optimizer(config)
    shape = target.config
    objective = functools.partial(lm.lm_loss, config=shape)
    tokens = config.lm_batch * config.length
    batch = _tokens(config.seed, (config.lm_batch, config.length + 1), shape.vocab_size)
    step = jax.jit(
        functools.partial(train_step, objective=objective, optimizer=optimizer), donate_argnums=0
    )
    params = jax.tree.map(jnp.copy, target.params)
    width = shape.num_attention_heads * shape.head_dim
    attention = attention_flops(width, config.length, tokens) * shape.num_hidden_layers
    flops = 6 * tokens * num_params(shape) + 3 * attention

    def run(state):
        return step(state, batch)[0]

    return TrainingCase("language model", run, TrainState.create(params, optimizer), flops, tokens)


def eagle3_case(target: LoadedModel, config: ConfigDict) -> TrainingCase:
    """Returns a step of an EAGLE-3 head.

    Per token it has 6 FLOPs for each parameter that a pass uses (the joining map once, the rest in
    each step of the unrolling), 2 for each of the target's, and those of attention: forward and
    backward of the head, forward of the target.
    """
    shape = EagleConfig.of_target(target.config, 3, config.draft_vocab_size)
    optimizer = _optimizer(config)
    T = config.length
    K = config.num_steps
    params, constants = EAGLE3.split(init_head(shape, jax.random.key(0)))
    objective = EAGLE3.bind(shape, target.model, {"num_steps": K}, constants)
    tokens = _tokens(config.seed, (config.batch, T + 2), target.config.vocab_size)
    mask = jnp.ones(tokens.shape, bool)
    objective = with_view(objective, target.model, shape.taps)
    step = jax.jit(
        functools.partial(
            train_step, objective=objective, optimizer=optimizer, dtype=config.get("dtype")
        ),
        donate_argnums=0,
    )
    batch = Batch(tokens, mask, jax.random.key(0))
    table = head_table(shape)
    count = config.batch * T

    def size(name):
        return int(np.prod(table[name].shape))

    matrices = sum(size(name) for name in table if len(table[name].shape) == 2)
    layer = shape.layer
    outer = target.config
    own_width = layer.num_attention_heads * layer.head_dim
    flops = 6 * count * (size("fc") + K * (matrices - size("fc")))
    flops += 3 * K * attention_flops(own_width, T, count)
    flops += 2 * count * num_params(outer)
    width = outer.num_attention_heads * outer.head_dim
    flops += attention_flops(width, T, count) * outer.num_hidden_layers

    def run(state):
        return step(state, batch, target.params)[0]

    return TrainingCase(
        f"EAGLE-3, {K} steps", run, TrainState.create(params, optimizer), flops, count
    )


def _tokens(seed: int, shape: tuple[int, int], vocab_size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(vocab_size, size=shape), jnp.int32)


@functools.partial(jax.jit, static_argnames="repeats", donate_argnames="carry")
def _matmuls(carry: Any, x, w, *, repeats: int):
    """Computes products of one shape, forward and both backward; each depends on the one before."""

    def one(_, carry):
        y = (x + carry) @ w
        dx = (y + carry) @ w.T
        dw = (x + carry).T @ y
        return 1e-20 * (y[0, 0] + dx[0, 0] + dw[0, 0])

    return jax.lax.fori_loop(0, repeats, one, carry)


def matmul_timer(rows: int, d_in: int, d_out: int) -> Timer:
    """Returns a timer of the three products of a linear map in training, in milliseconds.

    Args:
      rows: Tokens that are multiplied.
      d_in: Width of the map's inputs.
      d_out: Width of its outputs.
    """
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (rows, d_in))
    w = jax.random.normal(keys[1], (d_in, d_out))

    def run(carry):
        return _matmuls(carry, x, w, repeats=_MATMULS)

    return loop_timer(run, jnp.zeros(()), _MATMULS)


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    names = "lm_batch draft_vocab_size num_steps batch length repeats"
    cli.require_positive(config, names, "training")


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Compares the FLOP rate of a step with the rate of its largest products alone."""
    bars, config = config.bars, config.training
    target = random_model("target", config.target, config.seed)
    shape = target.config
    rows = config.batch * config.length
    products = {
        "feed-forward": (rows, shape.hidden_size, shape.intermediate_size),
        "vocabulary": (rows, shape.hidden_size, config.draft_vocab_size or shape.vocab_size),
    }
    cases = [eagle3_case(target, config), lm_case(target, config)]
    makers = {name: functools.partial(matmul_timer, *size) for name, size in products.items()}
    makers |= {case.name: functools.partial(loop_timer, case.run, case.state, 1) for case in cases}
    _, times = measure_all("training", makers, config.repeats)
    flops = sum(6.0 * math.prod(size) for size in products.values())
    rate = flops / sum(times[name] for name in products)  # FLOPs per millisecond
    lines = []
    for case in cases:
        lines += [
            Line(
                f"{case.name}: model FLOP utilisation",
                case.flops / times[case.name] / rate,
                bar=bars.training,
                is_upper=False,
                note="6 x parameters + attention, over the rate "
                "of the largest products alone, forward and back",
            ),
            Line(f"{case.name}: tokens trained on", case.tokens / times[case.name] * 1e3, "tok/s"),
        ]
    lines.append(Line("largest products alone, GFLOP/s", rate / 1e6, ""))
    return Result(
        lines,
        {
            "target": facts(target, config.target),
            "times_ms": listed(times),
            "flops": {case.name: case.flops for case in cases},
        },
    )
