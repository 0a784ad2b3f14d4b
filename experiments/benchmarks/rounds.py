"""A round and its parts, the fastest plain loop, and the speed-up that the parts predict."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import ROUNDS, GenerateTimer, PlainTimer, cast, rest_timer, start
from experiments.common.costs import pass_timer
from experiments.common.timing import Line, Timer, measure_all
from spec_jax.config import SpeculativeConfig
from spec_jax.decoding import DecodeState, System
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.stats import Stats, predicted_speedup
from spec_jax.loading import LoadedHead, LoadedModel


class Plain(NamedTuple):
    """A variant of the plain loop.

    Attributes:
      dtype: Of the weights.
      padding: Tokens fed in a pass, of which one counts.
      is_laid_out: Whether weights lie as the decoder lays them out for one token a pass.
    """

    dtype: str
    padding: int = 1
    is_laid_out: bool = False


PLAIN = {  # the variants among which the fastest is chosen
    "float32": Plain("float32"),
    "float32 laid out": Plain("float32", is_laid_out=True),
    "float32 padded to two rows": Plain("float32", 2, is_laid_out=True),
    "bfloat16": Plain("bfloat16"),
    "bfloat16 laid out": Plain("bfloat16", is_laid_out=True),
    "bfloat16 padded to two rows": Plain("bfloat16", 2, is_laid_out=True),
}


class Pair(NamedTuple):
    """Target, draft, and the cache slots of everything that is timed."""

    target: LoadedModel
    draft: LoadedModel
    slots: int

    def params(self, num_rows: int | None = 1, dtype: str = "float32") -> dict:
        """Returns the parameters of both for passes of ``num_rows`` tokens; None for any number."""
        lay_out = lambda model: in_dtype(model, dtype).decoding_params(num_rows)
        return {"target": lay_out(self.target), "draft": lay_out(self.draft)}

    def system(self, config: SpeculativeConfig | None = None) -> System:
        """Returns the system for greedy decoding; None for plain decoding, K = 0."""
        draft = None if config is None else self.draft
        return SpeculativeDecoder(self.target, draft, config).system()


def in_dtype(model: LoadedModel | LoadedHead, dtype: str) -> Any:
    """Returns the model or head with its weights in a dtype."""
    return dataclasses.replace(model, params=cast(model.params, dtype))


def try_plain(
    part: str, pair: Pair, prompts: Sequence[Sequence[int]], num_tokens: int, repeats: int
) -> dict[str, np.ndarray]:
    """Returns milliseconds per token of every plain loop, on one batch of prompts."""
    state = start(pair.system(), pair.params(None), prompts, pair.slots, num_tokens)
    makers = {name: functools.partial(plain_timer, pair, [state], name) for name in PLAIN}
    return measure_all(f"{part}, plain loops", makers, repeats)[1]


def fastest(times: Mapping[str, np.ndarray], dtype: str | None = None) -> str:
    """Returns the plain loop with the smallest median, of one dtype or of all."""
    names = [name for name in times if dtype in (None, PLAIN[name].dtype)]
    return min(names, key=lambda name: float(np.median(times[name])))


def plain_timer(pair: Pair, states: Sequence[DecodeState], variant: str) -> PlainTimer:
    """Returns the timer of a variant of ``PLAIN``."""
    dtype, padding, is_laid_out = PLAIN[variant]
    params = pair.params(padding if is_laid_out else None, dtype)["target"]
    return PlainTimer(pair.target.model, params, states, dtype=dtype, padding=padding)


def round_makers(
    pair: Pair, system: System, prompt: Sequence[int], dtype: str = "float32"
) -> dict[str, Callable[[], Timer]]:
    """Returns makers of timers of a round and of its parts, each a jitted loop of 64, one row.

    The first draft pass feeds two tokens and scores one, the other K - 1 feed one.
    """
    K, slots = system.num_draft, pair.slots
    params = pair.params(K + 1, dtype)
    target, draft = (pair.target.model, params["target"]), (pair.draft.model, params["draft"])

    def whole_round() -> Timer:
        max_new_tokens = slots - len(prompt) - K - 1
        state = start(system, pair.params(None, dtype), [prompt], slots, max_new_tokens)
        return GenerateTimer(system, params, [state], max_rounds=ROUNDS, unit="round")

    return {
        "target": lambda: pass_timer(*target, 1, slots, 1),
        "verify": lambda: pass_timer(*target, K + 1, slots, 1),
        "draft": lambda: pass_timer(*draft, 1, slots, 1),
        "draft first": lambda: pass_timer(*draft, 2, slots, 1, scored=1),
        "rest": lambda: rest_timer(system, slots),
        "round": whole_round,
    }


def parts_ms(times: Mapping[str, np.ndarray], num_draft: int) -> np.ndarray:
    """Returns the sum of a round's parts, by repeat."""
    return _drafting_ms(times, num_draft) + times["verify"] + times["rest"]


def _drafting_ms(times, num_draft):
    return times["draft first"] + (num_draft - 1) * times["draft"]


def predict(times: Mapping[str, np.ndarray], stats: Stats, num_draft: int) -> np.ndarray:
    """Returns the speed-up that acceptance and the costs of the parts predict, by repeat."""
    draft = _drafting_ms(times, num_draft) / num_draft / times["plain"]
    verify = (times["verify"] + times["rest"]) / times["plain"]
    rates = stats.acceptance_by_position
    return np.asarray([predicted_speedup(rates, d, v) for d, v in zip(draft, verify)])


def round_lines(
    times: Mapping[str, np.ndarray], stats: Stats, num_draft: int, bars: ConfigDict,
    plain_variant: str, dtype: str = "float32", verify_bar: float | None = None,
) -> list[Line]:
    """Returns the lines that both pairs of models have.

    Args:
      times: Of ``round_makers`` and of whole generations: "plain" (the fastest loop),
        "plain K=0" and "speculative", in ms a token.
      stats: Of the speculative generation.
      num_draft: K.
      bars: ``round`` and ``predicted``.
      plain_variant: The name of the fastest plain loop.
      dtype: Of the round and its parts.
      verify_bar: The bar of the verify pass, or None.
    """  # fmt: skip
    K = num_draft
    measured, predicted = times["plain"] / times["speculative"], predict(times, stats, K)
    rates = ", ".join(f"{r:.2f}" for r in stats.acceptance_by_position)
    return [
        Line(
            f"verify pass of {K + 1} tokens / pass of one", times["verify"] / times["target"],
            bar=verify_bar, note=dtype,
        ),
        Line(
            f"round, K={K} / sum of its parts", times["round"] / parts_ms(times, K),
            bar=bars.round,
            note=f"{dtype}; draft passes really run, verify, rest of the round; each its own loop",
        ),
        Line(
            f"speed-up, K={K}", measured,
            note=f"over {plain_variant}; tau {stats.tau:.2f}, accepted {rates}",
        ),
        Line(f"predicted speed-up, K={K}", predicted, note="from acceptance and the parts"),
        Line("measured / predicted", measured / predicted, bar=bars.predicted, is_upper=False),
        Line(
            "decoding.generate at K=0 / fastest plain loop", times["plain K=0"] / times["plain"],
            note="what one program for everything costs where nothing is drafted",
        ),
        Line("pass of one token", times["target"], "ms", note=dtype),
        Line(f"pass of {K + 1} tokens", times["verify"], "ms"),
        Line("draft pass of one token", times["draft"], "ms"),
        Line("draft pass of two tokens", times["draft first"], "ms"),
        Line(f"rest of a round, K={K}", times["rest"], "ms", note="noise, rule, limits, commit"),
        Line(f"round, K={K}", times["round"], "ms"),
    ]  # fmt: skip


def plain_lines(times: Mapping[str, np.ndarray]) -> list[Line]:
    """Returns a line for every plain loop that was tried."""
    return [Line(f"plain loop, {name}", ms, "ms") for name, ms in times.items()]
