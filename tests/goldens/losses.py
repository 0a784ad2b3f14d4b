"""Twenty steps of every training objective on a tiny model, as hexadecimal floats.

A change of the objectives' keywords is to be followed here; nothing else of training is named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from goldens import tiny
from goldens.find import find

STEPS, WINDOW = 20, 24


def _tokens(seed: int = 1):
    draw = np.random.RandomState(seed).randint(0, tiny.CONFIG["vocab_size"], (3, WINDOW))
    return jnp.asarray(draw, jnp.int32)


def _run(params, objective, batch_at, frozen) -> list[str]:
    """The loss of each step, of an optimiser that no later change of ours touches."""
    optimizer = optax.adam(3e-3)
    run = functools.partial(find("train_step"), objective=objective, optimizer=optimizer)
    step, state, found = jax.jit(run), find("TrainState").create(params, optimizer), []
    for i in range(STEPS):
        state, metrics = step(state, batch_at(i), frozen)
        found.append(float(metrics["loss"]).hex())
    return found


def _of_head(kind: str, objective: str, changes: dict, **options) -> list[str]:
    head, target = tiny.head(kind, **changes), tiny.llama()
    model = find("model", room="transformer")(target.config, head.config.taps)
    constants = {name: w for name, w in head.params.items() if name == "d2t"}
    params = {name: w for name, w in head.params.items() if name != "d2t"}
    loss = functools.partial(find(objective), config=head.config, model=model, **options)
    tokens = _tokens()
    mask = jnp.arange(WINDOW)[None] < jnp.asarray([[WINDOW], [WINDOW - 5], [WINDOW]])
    view = find("target_view")(target.params, tokens, config=target.config, taps=head.config.taps)
    make = lambda step: find("Batch", room="train")(
        tokens, mask, jax.random.fold_in(jax.random.key(0), step), view
    )
    whole = lambda params, *rest: loss({**params, **constants}, *rest)
    return _run(params, whole, make, target.params)


def _lm() -> list[str]:
    model = tiny.llama()
    loss = functools.partial(find("lm_loss"), config=model.config)
    return _run(model.params, loss, _tokens, None)


def _distill(divergence: str) -> list[str]:
    draft, teacher = tiny.llama(1), tiny.llama()
    loss = functools.partial(
        find("distill_loss"), config=draft.config, teacher_config=teacher.config,
        ce_weight=0.3, divergence=divergence,
    )  # fmt: skip
    return _run(draft.params, loss, _tokens, teacher.params)


def cells() -> dict[str, Callable[[], list[str]]]:
    """Every objective by name, as a function that trains."""
    of_head = functools.partial(functools.partial, _of_head)
    return {
        "eagle1": of_head("eagle1", "eagle1_loss", {}, noise=0.2),
        "eagle3": of_head("eagle3", "eagle3_loss", {}, num_steps=3),
        "eagle3, remat and forward-kl": of_head(
            "eagle3", "eagle3_loss", {}, num_steps=3, divergence="forward-kl",
            is_remat=True,
        ),
        "mtp recycled": of_head("mtp", "mtp_loss", {}, num_steps=3),
        "mtp recycled, the target's": of_head(
            "mtp", "mtp_loss", {}, num_steps=2, labels="target"
        ),
        "mtp sequential": of_head(
            "mtp", "mtp_loss", {"protocol": "sequential", "num_modules": 2}
        ),
        "lm": _lm,
        "distillation, forward-kl": functools.partial(_distill, "forward-kl"),
        "distillation, acceptance": functools.partial(_distill, "acceptance"),
    }  # fmt: skip
