"""A round and its parts, the fastest plain loop, and the speed-up that the parts predict."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import ROUNDS, GenerateTimer, PlainTimer, cast, rest_timer, start
from experiments.benchmarks.table import Line
from spec_jax.config import SpeculativeConfig
from spec_jax.decoding import DecodeState, System
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.stats import Stats, predicted_speedup
from spec_jax.evaluation.passes import round_timer
from spec_jax.evaluation.timing import Timer, measure_all
from spec_jax.loading import LoadedHead, LoadedModel

DTYPES = ("float32", "bfloat16")


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
        lay_out = lambda model: in_dtype(model, dtype).cpu_layout.prepare(num_rows)
        return {"target": lay_out(self.target), "draft": lay_out(self.draft)}

    def system(self, config: SpeculativeConfig | None = None) -> System:
        """Returns the system for greedy decoding; None for plain decoding, K = 0."""
        draft = None if config is None else self.draft
        return SpeculativeDecoder(self.target, draft, config).system()


def in_dtype(model: LoadedModel | LoadedHead, dtype: str) -> Any:
    """Returns the model or head with its weights in a dtype; itself if they are already."""
    params = cast(model.params, dtype)
    dtypes = lambda params: [x.dtype for x in jax.tree.leaves(params)]
    if dtypes(params) == dtypes(model.params):
        return model
    return dataclasses.replace(model, params=params)


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


def generate_timer(
    system: System, params: Any, states: Sequence[DecodeState], dtype: str
) -> GenerateTimer:
    """Returns the timer of whole generations, in ms a token, from states in any dtype."""
    of_dtype = [s.replace(target=cast(s.target, dtype), draft=cast(s.draft, dtype)) for s in states]
    return GenerateTimer(system, params, of_dtype)


def plain_timer(pair: Pair, states: Sequence[DecodeState], variant: str) -> PlainTimer:
    """Returns the timer of a variant of ``PLAIN``."""
    dtype, padding, is_laid_out = PLAIN[variant]
    params = pair.params(padding if is_laid_out else None, dtype)["target"]
    return PlainTimer(pair.target.model, params, states, dtype=dtype, padding=padding)


class Rounds(NamedTuple):
    """Rounds that are timed.

    Attributes:
      system: Target, drafter, rule and K.
      target: The target.
      draft: What drafts.
      params: The parameters of both, laid out for rounds of one row.
      state: What a long generation begins with.
      slots: S, of its caches.
      dtype: Of the weights.
    """

    system: System
    target: LoadedModel
    draft: LoadedModel | LoadedHead
    params: dict[str, Any]
    state: DecodeState
    slots: int
    dtype: str = "float32"

    @classmethod
    def of(
        cls,
        target: LoadedModel,
        draft: LoadedModel | LoadedHead,
        config: SpeculativeConfig,
        prompt: Sequence[int],
        slots: int,
        dtype: str = "float32",
    ) -> Rounds:
        """Returns greedy rounds after a prompt.

        Args:
          target: The target, in float32.
          draft: What drafts, likewise.
          config: K and the method.
          prompt: The prompt as ids.
          slots: S.
          dtype: Of the weights.
        """
        target, draft = in_dtype(target, dtype), in_dtype(draft, dtype)
        decoder = SpeculativeDecoder(target, draft, config)
        system = decoder.system()
        max_new_tokens = slots - len(prompt) - system.num_draft - 1
        state = start(system, decoder.params(), [prompt], slots, max_new_tokens)
        return cls(system, target, draft, decoder.params(1), state, slots, dtype)

    def makers(self) -> dict[str, Callable[[], Timer]]:
        """Returns makers of timers of a round and of its parts, each a jitted loop of 64, one row.

        "passes" are those of a round in one loop, see ``passes.round_timer``.
        """
        K = self.system.num_draft
        passes = functools.partial(
            round_timer, self.target, self.draft, slots=self.slots, batch=1, iterations=ROUNDS
        )
        return {
            "target": functools.partial(passes, k=0, num_passes=0),
            "verify": functools.partial(passes, k=K, num_passes=0),
            "passes": functools.partial(passes, k=K, num_passes=K),
            "rest": functools.partial(rest_timer, self.system, self.slots),
            "round": lambda: GenerateTimer(
                self.system, self.params, [self.state], max_rounds=ROUNDS, unit="round"
            ),
        }


def parts_ms(times: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the sum of a round's parts, by repeat."""
    return times["passes"] + times["rest"]


def predict(times: Mapping[str, np.ndarray], stats: Stats, num_draft: int) -> np.ndarray:
    """Returns the speed-up that acceptance and the costs of the parts predict, by repeat.

    The rest of a round, which is measured here, counts, and the unit is a token of the fastest
    plain loop. ``spec_jax.evaluation.costs.predict`` counts passes alone, in passes of one token.
    """
    draft = (times["passes"] - times["verify"]) / num_draft / times["plain"]
    verify = (times["verify"] + times["rest"]) / times["plain"]
    rates = stats.acceptance_by_position
    return np.asarray([predicted_speedup(rates, d, v) for d, v in zip(draft, verify)])


def round_lines(
    times: Mapping[str, np.ndarray],
    stats: Stats,
    rounds: Rounds,
    bars: ConfigDict,
    plain_variant: str,
    verify_bar: float | None = None,
) -> list[Line]:
    """Returns the lines of a method's round.

    Args:
      times: Of ``Rounds.makers`` and of whole generations: "plain" (the fastest loop) and
        "speculative", in ms a token.
      stats: Of the speculative generation.
      rounds: What was timed.
      bars: ``round``, ``predicted``, and ``draft`` for a draft model.
      plain_variant: The name of the fastest plain loop.
      verify_bar: The bar of the verify pass, or None.
    """
    K = rounds.system.num_draft
    measured, predicted = times["plain"] / times["speculative"], predict(times, stats, K)
    rates = ", ".join(f"{r:.2f}" for r in stats.acceptance_by_position)
    of = f"{rounds.system.drafter.name}, K={K}, {rounds.dtype}"
    drafting = times["passes"] - times["verify"]
    return [
        Line(
            f"{of}: verify pass of {K + 1} tokens / pass of one",
            times["verify"] / times["target"],
            bar=verify_bar,
        ),
        Line(
            f"{of}: a drafted token / pass of one",
            drafting / K / times["target"],
            bar=bars.draft if isinstance(rounds.draft, LoadedModel) else None,
            note="what drafting adds to a loop of verify passes",
        ),
        Line(
            f"{of}: round / sum of its parts",
            times["round"] / parts_ms(times),
            bar=bars.round,
            note="its passes in a loop of their own, and the rest",
        ),
        Line(
            f"{of}: speed-up",
            measured,
            note=f"over {plain_variant}; tau {stats.tau:.2f}, accepted {rates}",
        ),
        Line(f"{of}: predicted speed-up", predicted, note="from acceptance and the parts"),
        Line(
            f"{of}: measured / predicted", measured / predicted, bar=bars.predicted, is_upper=False
        ),
        Line(f"{of}: pass of one token", times["target"], "ms"),
        Line(f"{of}: pass of {K + 1} tokens", times["verify"], "ms"),
        Line(f"{of}: all passes of a round", times["passes"], "ms"),
        Line(f"{of}: rest of a round", times["rest"], "ms", note="noise, rule, limits, commit"),
        Line(f"{of}: round", times["round"], "ms"),
    ]


def plain_lines(
    times: Mapping[str, np.ndarray], no_draft: Mapping[str, np.ndarray], bars: ConfigDict
) -> list[Line]:
    """Returns a line for every plain loop that was tried, and for ``generate`` without drafts.

    Args:
      times: Milliseconds a token of each plain loop.
      no_draft: ``decoding.generate`` at K = 0 over the fastest plain loop, by dtype.
      bars: ``no_draft``.
    """
    return [
        *(
            Line(
                f"decoding.generate at K=0 / fastest plain loop, {dtype}",
                ratio,
                bar=bars.no_draft,
                note="what one program for everything costs where nothing is drafted",
            )
            for dtype, ratio in no_draft.items()
        ),
        *(Line(f"plain loop, {name}", ms, "ms") for name, ms in times.items()),
    ]
