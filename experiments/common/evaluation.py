"""How ``experiments.evaluate`` measures a draft, and its report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments.common import costs, head_eval, report
from experiments.common.cli import MeshOptions
from experiments.common.intervals import Interval, bootstrap
from experiments.common.own import Own
from experiments.common.own import lines as own_lines
from experiments.common.tables import table
from experiments.common.timing import interleave
from spec_jax.config import GREEDY_BELOW
from spec_jax.data import python_source, tokens
from spec_jax.engine.decoder import Generation
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel

Draft = LoadedModel | LoadedHead


class Counts(NamedTuple):
    """What one draft did, by prompt.

    Attributes:
      tokens: i64[P], tokens emitted in rounds.
      rounds: i64[P], rounds.
      reached: i64[P,K], drafts at each position whose predecessors were all accepted.
      accepted: i64[P,K], those that it accepted.
    """

    tokens: np.ndarray
    rounds: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Generation]) -> Counts:
        """Counts the outputs of one draft."""
        counts = [(s.emitted - s.first, s.rounds, s.reached_at, s.accepted_at)
                  for s in (row.stats for row in rows)]  # fmt: skip
        return cls(*map(np.asarray, zip(*counts)))

    def rates(self, chosen: np.ndarray) -> np.ndarray:
        """Tau and the conditional acceptance at each position, over chosen prompts.

        Args:
          chosen: i64[...,P], indices of prompts.

        Returns:
          f64[1+K,...], NaN where no draft was reached.
        """
        tau = self.tokens[chosen].sum(-1) / self.rounds[chosen].sum(-1)
        accept = self.accepted[chosen].sum(-2) / self.reached[chosen].sum(-2)
        return np.concatenate([tau[None], np.moveaxis(accept, -1, 0)])


def differences(counts: Counts, first: Counts) -> list[Interval]:
    """Returns intervals of the rates of ``counts`` less those of ``first``, prompt by prompt."""
    return bootstrap(lambda i: counts.rates(i) - first.rates(i), len(first.tokens))


def held_out_pieces(target: LoadedModel, n: int, length: int, seed: int) -> list[list[int]]:
    """Returns ids of ``n`` evenly spread pieces of the held-out modules; ``seed`` shifts them."""
    text = tokens.pack(target.tokenizer.backend, python_source.documents("held_out"))
    room = len(text) - length
    if room < n:
        raise ConfigError(f"num_prompts is {n}; the held-out modules have {room} places")
    shift = int(np.random.default_rng(seed).integers(room))
    starts = [(shift + i * room // n) % room for i in range(n)]
    return [text[start : start + length].tolist() for start in starts]


def measure(
    name: str, draft: Draft | None, target: LoadedModel, prompts: list[list[int]],
    config: ConfigDict, where: MeshOptions = MeshOptions(), own: Own = Own(),
) -> tuple[dict, Counts]:  # fmt: skip
    """Decodes all prompts with one draft; returns its row of the report, and its counts.

    Args:
      name: The draft's name in the report.
      draft: The draft; None for the drafter of ``own``.
      target: The target.
      prompts: The prompts as ids.
      config: Of the experiment.
      where: The devices.
      own: The user's own drafter, and the rule that accepts.
    """
    began_s = time.monotonic()
    rows, stats = head_eval.decode(
        target, draft, prompts, num_draft=config.num_draft, batch=config.batch,
        max_new_tokens=config.max_new_tokens, temperature=config.temperature,
        where=where, drafter=own.drafter if draft is None else None, rule=own.rule,
    )  # fmt: skip
    counts = Counts.of(rows)
    tau, *accept = bootstrap(counts.rates, len(prompts))
    row = {
        "draft": name,
        "kind": "own" if draft is None else draft.method,
        "parameters": draft and draft.num_params,
        "rounds": stats.rounds,
        "tau": tau,
        "accept": accept,
        "looping_share": float(np.mean([tokens.looping_share(r.tokens) for r in rows])),
        "elapsed_s": round(time.monotonic() - began_s, 1),
    }
    is_recycled = draft is not None and draft.head(target.model) is not None
    if is_recycled and config.temperature < GREEDY_BELOW and own.rule is None:
        reached, accepted = head_eval.teacher_forced(
            target, draft, prompts, rows, num_draft=config.num_draft
        )
        with np.errstate(invalid="ignore"):
            row["teacher_forced"] = (accepted / reached).tolist()
    return row, counts


def pass_costs(
    target: LoadedModel, drafts: Mapping[str, Draft], config: ConfigDict
) -> dict[str, float]:
    """Measures a draft pass of one token, by draft, in target passes of one token; batch 1."""
    slots = -(-(config.prompt_tokens + config.max_new_tokens + config.num_draft + 1) // 128) * 128
    timers = {"": costs.pass_timer(target.model, target.decoding_params(1), 1, slots, 1)}
    timers |= {name: costs.draft_timer(draft, target, slots, 1) for name, draft in drafts.items()}
    timers = {name: timer for name, timer in timers.items() if timer is not None}
    found = {name: np.median(ms) for name, ms in interleave(timers, costs.REPEATS).items()}
    return {name: float(ms / found[""]) for name, ms in found.items() if name}


def markdown(rep: dict) -> str:
    """Formats the report as Markdown."""
    config, first, K = rep["config"], rep["rows"][0], rep["config"]["num_draft"]
    header = ["draft", "parameters", "pass / target's", "rounds", "tau",
              *(f"accepted at {i}" for i in range(1, K + 1)), "looping"]  # fmt: skip
    cells, compared, forced = [], [], []
    size = lambda row: "–" if row["parameters"] is None else f"{row['parameters']:,}"
    for row in rep["rows"]:
        cost = row.get("cost")
        cells.append([
            row["draft"], size(row), "" if cost is None else f"{cost:.3f}",
            row["rounds"], row["tau"], *row["accept"], f"{row['looping_share']:.0%}",
        ])  # fmt: skip
        if "difference" in row:
            tau, *accept = row["difference"]
            parts = ", ".join(f"at {i} {x}" for i, x in enumerate(accept, 1))
            compared.append(f"- {row['draft']} less {first['draft']}: tau {tau}; accepted {parts}")
        if "teacher_forced" in row:
            gaps = np.abs(np.subtract(row["teacher_forced"], [x.value for x in row["accept"]]))
            forced.append(f"- {row['draft']}: at most {np.nanmax(gaps):.4f} apart, by position")
    numbers = ("parameters", "pass / target's", "rounds", "looping")
    text = [
        f"Chains of {K} drafts, temperature {config['temperature']:g}, {config['num_prompts']} "
        f"prompts, {config['max_new_tokens']} new tokens each. In parentheses: the 95 % confidence "
        "interval over prompts; none where it is one point (the same in all prompts), or where too "
        "few prompts have rounds that got there. *Accepted at i*: of the drafts whose predecessors "
        "were all accepted, the share that was accepted at position i.",
        "", table(header, cells, numbers=numbers, is_markdown=True),
    ]  # fmt: skip
    if compared:
        text += ["", "Differences, prompt by prompt:", "", *compared]
    if forced:
        text += ["", "Teacher-forced compared with real decoding, from the same round starts:", "",
                 *forced]  # fmt: skip
    if rep["own"]:
        text += ["", *(f"- {line}" for line in own_lines(rep["own"]))]
        text += ["", "A drafter of one's own is measured by real decoding alone, and so is every "
                 "draft under a rule of one's own; only heads are teacher-forced, greedily."]
    if rep["num_cut"]:
        text += [
            "", f"{rep['num_cut']} prompts had more than {config['prompt_tokens']} tokens, or more "
            "than the models hold: they lost their beginning, a chat template's too.",
        ]  # fmt: skip
    text += [f"\n{line}" for line in report.mesh_lines(rep["mesh"])]
    return report.document("Evaluation", rep, "\n".join(text))
