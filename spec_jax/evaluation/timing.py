"""Interleaved repeats, and their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spec_jax.meshes import use_mesh
from spec_jax.progress import Progress

Timer = Callable[[], float]  # runs once, returns milliseconds of one unit of work


def loop_timer(
    run: Callable[[Any], Any], carry: Any, iterations: int, mesh: Mesh | None = None
) -> Timer:
    """Returns a timer of ``carry = run(carry)``, in milliseconds of one of its iterations.

    Args:
      run: A compiled loop that may donate its carry. It runs once before it is timed.
      carry: What it begins with.
      iterations: The number of its iterations.
      mesh: The devices that it runs on; None: those of its arrays.
    """

    def time_ms() -> float:
        nonlocal carry
        begin = time.perf_counter()
        with use_mesh(mesh):
            carry = jax.block_until_ready(run(carry))
        return (time.perf_counter() - begin) * 1e3 / iterations

    time_ms()
    return time_ms


def interleave(
    timers: Mapping[Any, Timer],
    repeats: int,
    on_turn: Callable[[str], None] = lambda text: None,
    *,
    is_backwards: bool = False,
) -> dict[Any, np.ndarray]:
    """Times A B C ... C B A ..., so that drift of the machine meets all alike.

    Every other turn runs backwards: what one timer does to the next (a cold cache) then
    falls on both of its neighbours.

    Args:
      timers: The timers by name; each is already compiled and has run once.
      repeats: The number of turns.
      on_turn: Called with a text after each turn.
      is_backwards: Whether the first turn is one of those that run backwards.

    Returns:
      f64[repeats] by name: repeat i of one name may be divided by repeat i of another.
    """
    times: dict[Any, list[float]] = {name: [] for name in timers}
    for turn in range(repeats):
        for name in list(timers)[:: -1 if turn % 2 != is_backwards else 1]:
            times[name].append(timers[name]())
        on_turn(f"turn {turn + 1} of {repeats}")
    return {name: np.asarray(values) for name, values in times.items()}


def measure_all(
    part: str, makers: Mapping[str, Callable[[], Timer]], repeats: int
) -> tuple[dict[str, Timer], dict[str, np.ndarray]]:
    """Makes all timers, then runs them interleaved, with progress.

    Args:
      part: The benchmark's part, for the progress.
      makers: Functions that compile a timer, by its name.
      repeats: The number of turns.

    Returns:
      The timers, and the times of ``interleave``.
    """
    timers = {}
    with Progress(len(makers) + repeats, part) as bar:
        for name, make in makers.items():
            timers[name] = make()
            bar.step(f"compiled {name}")
        return timers, interleave(timers, repeats, bar.step)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median of repeats, and their quartiles."""
    low, median, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75]).tolist()
    return median, low, high
