"""Measures drafts by real speculative decoding: tau, acceptance by position, with intervals.

    python -m experiments.evaluate
    python -m experiments.evaluate --config.target=PATH --config.drafts=HEAD1,HEAD2

Every draft decodes the same prompts in chains of K. Intervals are of 95 %, from resampling the
prompts, since rounds of one text are not independent; differences to the first draft are taken
prompt by prompt. Greedily, a head's training-time unrolling is judged at the same round starts
beside it ("teacher-forced"): a test of the one by the other. A run leaves evaluation.json,
evaluation.md and acceptance.png.
"""

from __future__ import annotations

import functools
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs import evaluate_zoo
from experiments.common import cli, costs, head_eval, plots, report
from experiments.common.prompts import fit, load_prompts
from spec_jax.config import GREEDY_BELOW
from spec_jax.data import python_source, tokens
from spec_jax.engine.decoder import Generation
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel, load_draft, load_model

_RESAMPLES = 2000


class Interval(NamedTuple):
    """A figure, and between which values it lies in 95 of 100 resamples of the prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class Counts(NamedTuple):
    """What one draft did, by prompt.

    Attributes:
      tokens: i64[P], emitted in rounds.
      rounds: i64[P].
      judged: i64[P,K].
      accepted: i64[P,K].
    """

    tokens: np.ndarray
    rounds: np.ndarray
    judged: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Generation]) -> Counts:
        stats = [row.stats for row in rows]
        listed = lambda get: np.asarray([get(s) for s in stats])
        return cls(
            listed(lambda s: s.emitted - s.first), listed(lambda s: s.rounds),
            listed(lambda s: s.judged_at), listed(lambda s: s.accepted_at),
        )  # fmt: skip

    def rates(self, chosen: np.ndarray) -> np.ndarray:
        """Tau, then conditional acceptance by position, of resampled prompts.

        Args:
          chosen: i64[R,P], how often each resample holds each prompt.

        Returns:
          f64[R,1+K], NaN where nothing was judged.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            tau = (chosen @ self.tokens) / (chosen @ self.rounds)
            return np.column_stack([tau, (chosen @ self.accepted) / (chosen @ self.judged)])


@functools.cache
def _resamples(num_prompts: int) -> np.ndarray:
    """i64[R+1,P]: all prompts once, then draws with replacement."""
    draws = np.random.default_rng(0).multinomial(
        num_prompts, np.full(num_prompts, 1 / num_prompts), size=_RESAMPLES
    )
    return np.vstack([np.ones((1, num_prompts), int), draws])


def intervals(rates: np.ndarray) -> list[Interval]:
    """By column of f64[R+1,N], the first row being the figure itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)  # a place never judged
        low, high = np.nanquantile(rates[1:], [0.025, 0.975], axis=0)
    return [Interval(*map(float, x)) for x in zip(rates[0], low, high)]


def held_out_pieces(target: LoadedModel, n: int, length: int, seed: int) -> list[list[int]]:
    """Ids of ``n`` pieces of the held-out modules, at evenly spread places that ``seed`` shifts."""
    documents = python_source.documents("held_out")
    text = tokens.pack(target.tokenizer.backend, documents)
    room = len(text) - length
    if room < n:
        raise ConfigError(f"num_prompts is {n}; the held-out modules have {room} places")
    shift = int(np.random.default_rng(seed).integers(room))
    starts = [(shift + i * room // n) % room for i in range(n)]
    return [text[start : start + length].tolist() for start in starts]


def validate(config: ConfigDict) -> None:
    """Raises ConfigError on an unknown key or a value that cannot be."""
    cli.check_keys(config, evaluate_zoo.get_config())
    for name in ("num_prompts", "prompt_tokens", "num_draft", "batch"):
        if config[name] < 1:
            raise ConfigError(f"{name} is {config[name]}; expected a positive integer")
    if config.max_new_tokens < 2:
        raise ConfigError(f"max_new_tokens is {config.max_new_tokens}; expected 2 or more")
    if not config.drafts:
        raise ConfigError("drafts are empty; expected names or directories, with commas")


def measure(name: str, draft, target: LoadedModel, prompts, config: ConfigDict) -> dict:
    """Decodes all prompts by one draft; a row of the report and, as ``counts``, its ``Counts``."""
    began_s = time.monotonic()
    rows, stats = head_eval.decode(
        target, draft, prompts, num_draft=config.num_draft, batch=config.batch,
        max_new_tokens=config.max_new_tokens, temperature=config.temperature,
    )  # fmt: skip
    counts = Counts.of(rows)
    rates = intervals(counts.rates(_resamples(len(prompts))))
    row = {
        "draft": name,
        "kind": "standalone" if isinstance(draft, LoadedModel) else draft.method,
        "parameters": draft.num_params,
        "rounds": stats.rounds,
        "tau": rates[0],
        "accept": rates[1:],
        "looping_share": float(np.mean([tokens.looping_share(r.tokens) for r in rows])),
        "counts": counts,
        "elapsed_s": round(time.monotonic() - began_s, 1),
    }
    is_recycled = isinstance(draft, LoadedHead) and draft.head(target.model) is not None
    if is_recycled and config.temperature < GREEDY_BELOW:
        judged, accepted = head_eval.teacher_forced(
            target, draft, prompts, rows, num_draft=config.num_draft
        )
        with np.errstate(invalid="ignore"):
            row["teacher_forced"] = (accepted / judged).tolist()
    return row


def pass_costs(target: LoadedModel, drafts: dict, config: ConfigDict) -> dict[str, float]:
    """A draft pass of one token, by draft, in target passes of one token; batch 1, interleaved."""
    slots = -(-(config.prompt_tokens + config.max_new_tokens + config.num_draft + 1) // 128) * 128
    timer = lambda model, params: costs.pass_timer(model, params, 1, slots, 1)
    timers = {"": timer(target.model, target.decoding_params(1))}
    for name, draft in drafts.items():
        if isinstance(draft, LoadedModel):
            timers[name] = timer(draft.model, draft.decoding_params(1))
        elif (head := draft.head(target.model)) is not None:
            params = {"head": draft.decoding_params(1), "target": target.decoding_params(1)}
            timers[name] = costs.head_timer(head, params, slots)
    found = costs.interleaved_medians(timers)
    return {name: ms / found[""] for name, ms in found.items() if name}


def evaluate(config: ConfigDict, workdir: str | None = None) -> dict:
    """Runs the experiment; returns its report.

    Raises:
      SpecJaxError: a config, a model or a prompt that cannot be used.
    """
    validate(config)
    target = load_model(config.target, config.dtype)
    names = [name.strip() for name in config.drafts.split(",")]
    drafts = {name: load_draft(name, target, config.dtype) for name in names if name}
    if config.prompts:
        found = load_prompts(config.prompts, config.num_prompts, config.seed)
        models = [target, *drafts.values()]
        prompts, num_cut = fit(found, models, config.max_new_tokens, config.prompt_tokens)
    else:
        prompts = held_out_pieces(target, config.num_prompts, config.prompt_tokens, config.seed)
        num_cut = 0
    folder = cli.open_workdir("evaluate", workdir)
    rows = []
    with cli.Progress(len(drafts) + config.has_costs, "evaluating") as bar:
        for name, draft in drafts.items():
            bar.now(name)
            rows.append(measure(name, draft, target, prompts, config))
            bar.step(f"{name}: tau {rows[-1]['tau']}")
        if config.has_costs:
            bar.now("passes")
            found = pass_costs(target, drafts, config)
            rows = [row | {"cost": found.get(row["draft"])} for row in rows]
            bar.step("passes")
    chosen = _resamples(len(prompts))
    first = rows[0]["counts"].rates(chosen)
    for row in rows[1:]:
        row["difference"] = intervals(row["counts"].rates(chosen) - first)
    for row in rows:
        del row["counts"]
    rep = {
        "command": shlex.join(["python", "-m", "experiments.evaluate", *sys.argv[1:]]),
        "config": config.to_dict(), "environment": report.environment(), "rows": rows,
        "num_cut": num_cut,
    }  # fmt: skip
    text = markdown(rep)
    report.write_json(folder / "evaluation.json", rep)
    (folder / "evaluation.md").write_text(text, encoding="utf-8")
    plots.plot_intervals(folder / "acceptance.png", rows)
    print(f"\n{text}\n{folder / 'evaluation.md'} written")
    return rep


def markdown(rep: dict) -> str:
    """The report as Markdown."""
    config, K = rep["config"], rep["config"]["num_draft"]
    header = [
        "draft", "parameters", "pass / target's", "rounds", "tau",
        *(f"accepted at {i}" for i in range(1, K + 1)), "looping",
    ]  # fmt: skip
    lines = [_row(header), _row(["---"] * len(header))]
    differences, forced = [], []
    for row in rep["rows"]:
        cost = row.get("cost")
        lines.append(_row([
            row["draft"], f"{row['parameters']:,}", "" if cost is None else f"{cost:.3f}",
            row["rounds"], row["tau"], *row["accept"], f"{row['looping_share']:.0%}",
        ]))  # fmt: skip
        if "difference" in row:
            tau, *accept = row["difference"]
            parts = ", ".join(f"at {i} {x}" for i, x in enumerate(accept, 1))
            first = rep["rows"][0]["draft"]
            differences.append(f"- {row['draft']} less {first}: tau {tau}; accepted {parts}")
        if "teacher_forced" in row:
            gaps = np.abs(np.subtract(row["teacher_forced"], [x.value for x in row["accept"]]))
            forced.append(f"- {row['draft']}: at most {np.nanmax(gaps):.4f} apart, by position")
    text = [
        "# Evaluation", "", f"`{rep['command']}`", "",
        f"Chains of {K}, temperature {config['temperature']:g}, {config['num_prompts']} prompts, "
        f"{config['max_new_tokens']} new tokens each; intervals of 95 % over prompts. Accepted: "
        "of the drafts judged at a position.", "", *lines,
    ]  # fmt: skip
    if differences:
        text += ["", "Differences, prompt by prompt:", *differences]
    if forced:
        text += ["", "Teacher-forced beside real, the same round starts:", *forced]
    if rep["num_cut"]:
        text += [
            "", f"{rep['num_cut']} prompts had more than {config['prompt_tokens']} tokens, or more "
            "than the models hold: they lost their beginning, a chat template's too.",
        ]  # fmt: skip
    return "\n".join([*text, "", f"Machine: {report.describe_machine(rep['environment'])}", ""])


def _row(cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    _CONFIG = cli.define_config("evaluate_zoo.py", evaluate_zoo.get_config)
    _WORKDIR = flags.DEFINE_string(
        "workdir", None, "The run's folder, a new one; by default runs/evaluate/TIME."
    )

    def main() -> None:
        cli.enable_compilation_cache()
        evaluate(_CONFIG.value, _WORKDIR.value)

    cli.run(main)
