"""The lines of answers.jsonl: what one cell answered to one question, and its times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import GREEDY_BELOW
from spec_jax.engine.decoder import Generation
from spec_jax.engine.request import padded_width
from spec_jax.engine.stats import Stats
from spec_jax.evaluation.bench import Bench, CellOutput, Run
from spec_jax.evaluation.cells import Cell
from spec_jax.evaluation.compare import CellRun
from spec_jax.loading import LoadedModel
from spec_jax.meshes import mesh_of, use_mesh
from spec_jax.sharding import replicate

_ALTERNATIVES = 3  # the likeliest tokens at each place that the page shows
_CONTEXT = 64  # ids before a token that its text may depend on


class Group(NamedTuple):
    """Questions that are measured and saved together.

    Attributes:
      questions: Their indices.
      batches: The indices of the batches that hold their prompts, and nothing else.
    """

    questions: tuple[int, ...]
    batches: tuple[int, ...]


def pack(
    prompts: Sequence[Sequence[int]], batch: int, *, is_spread: bool = False
) -> tuple[list[Group], list[list[int]]]:
    """Lays prompts out in batches, so that the turns of a question are in one group.

    Args:
      prompts: The indices of each question's prompts.
      batch: Prompts that are decoded together.
      is_spread: Whether all questions are one group, so that the repeats of a prompt are spread
        over the run.

    Returns:
      The groups, and the prompts of each batch.
    """
    groups = []
    layout = []
    members = []
    rows = []

    def close() -> None:
        parts = [rows[i : i + batch] for i in range(0, len(rows), batch)]
        numbers = range(len(layout), len(layout) + len(parts))
        groups.append(Group(tuple(members), tuple(numbers)))
        layout.extend(parts)

    for number, indices in enumerate(prompts):
        if rows and len(rows) + len(indices) > batch:
            close()
            members = []
            rows = []
        members, rows = [*members, number], [*rows, *indices]
    close()
    if is_spread:
        groups = [Group(tuple(range(len(prompts))), tuple(range(len(layout))))]
    return groups, layout


def key_of(cell: Cell, batch: int, question: str) -> dict[str, Any]:
    """Returns the part of a line that says what it answers, and how.

    Args:
      cell: What decodes.
      batch: Prompts that are decoded together.
      question: The name of the question.
    """
    return {"cell": cell.label, **cell._asdict(), "batch": batch, "question": question}


def turn_of(
    cell_run: CellRun, prompt: int, index: int, text: str, probs: Probabilities | None
) -> dict[str, Any]:
    """Returns the entry of a line's ``turns`` for one prompt.

    Args:
      cell_run: What the cell has done.
      prompt: The index of the prompt.
      index: That of its batch.
      text: The text of the prompt.
      probs: Computes the target's probabilities; None to leave them out.
    """
    bench = cell_run.bench
    run = cell_run.runs[index]
    row: Generation = cell_run.rows[prompt]
    trace = row.trace
    tokens = [*row.tokens]
    shown = trace.shown(tokens)
    temperature = cell_run.cell.temperature
    found = (None, None) if probs is None else probs(bench.prompts[prompt], tokens, temperature)
    return {
        "prompt": text,
        "prompt_tokens": len(bench.prompts[prompt]),
        "tokens": tokens,
        "pieces": [token.text for token in shown],
        "kinds": [*trace.kinds[: len(tokens)]],
        "offered": [*trace.offered[: len(tokens)]],
        "rejected": [token.rejected for token in shown],
        "decode_s": [round(s, 6) for s in cell_run.times_s[index]],
        "prefill_s": round(run.prefill_s, 6),
        "finish": row.finish_reason,
        "probs": found[0],
        "alternatives": found[1],
        "counts": {name: getattr(row.stats, name) for name in _COUNTS},
        **({"seen": {name: x.tolist() for name, x in row.seen.items()}} if row.seen else {}),
    }


def text_of(target: LoadedModel, ids: Sequence[int]) -> str:
    """Returns the text of ids with special tokens; the ids if the target has no tokenizer."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer.decode(ids, has_special=True)


_COUNTS = [field.name for field in dataclasses.fields(Stats) if not field.name.endswith("_s")]


def _saved(turn: Mapping[str, Any]) -> CellOutput:
    counts = {n: tuple(x) if isinstance(x, list) else x for n, x in turn["counts"].items()}
    seen = turn.get("seen", {})
    return CellOutput(tuple(turn["tokens"]), turn["finish"], Stats(**counts), seen)


def _run(turn: Mapping[str, Any], rows: Sequence[CellOutput]) -> Run:
    """Returns the run of a batch, of whose prompts ``turn`` is the first one's."""
    return Run(turn["prefill_s"], turn["decode_s"][0], rows)


def checked(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a line; raises one of ``journal.REFUSED`` unless ``restore`` can read its turns."""
    for turn in line["turns"]:
        _run(turn, [_saved(turn)])
        if not isinstance(turn["prompt"], str):
            raise TypeError(f"the prompt is {turn['prompt']!r:.60}")
    return line


def restore(cell_run: CellRun, index: int, turns: Mapping[int, Mapping[str, Any]]) -> None:
    """Puts a batch that was measured earlier into a ``CellRun``.

    Args:
      cell_run: Of the cell.
      index: The index of the batch.
      turns: The entries of ``turns`` of its prompts, by index.
    """
    chosen = cell_run.bench.chosen(index)
    rows = {i: _saved(turns[i]) for i in set(chosen)}
    first = turns[chosen[0]]
    cell_run.runs[index] = _run(first, [rows[i] for i in chosen])
    cell_run.times_s[index] = [*first["decode_s"]]


class Probabilities:
    """The target's probability of each token of an output, and its likeliest tokens there.

    They come from one pass over prompt and output, at the temperature of the output (at 1 if that
    is greedy), without filters and penalties.

    Args:
      bench: What decodes.
    """

    def __init__(self, bench: Bench):
        self._target = bench.target
        self._new = bench.max_new_tokens
        self._known: dict[Any, tuple[list[float], list[list]]] = {}

    def __call__(
        self, prompt: Sequence[int], tokens: Sequence[int], temperature: float
    ) -> tuple[list[float], list[list[tuple[str, float]]]]:
        """Returns the probability of each token, and the likeliest ones with theirs.

        Args:
          prompt: The ids of the prompt.
          tokens: The ids of the output.
          temperature: That of the output.
        """
        key = (*prompt, -1, *tokens), temperature
        if key not in self._known:
            self._known[key] = self._compute(prompt, tokens, temperature)
        return self._known[key]

    def _compute(self, prompt, tokens, temperature):
        padded = np.zeros((1, padded_width(len(prompt) + self._new)), np.int32)
        padded[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
        heat = 1.0 if temperature < GREEDY_BELOW else temperature
        target = self._target
        with use_mesh(mesh_of(target.params)):
            probs, best, ids = map(
                np.asarray,
                _pass(
                    target.params,
                    padded,
                    np.int32(len(prompt)),
                    np.float32(heat),
                    model=target.model,
                    new=self._new,
                ),
            )
        whole = [*prompt, *tokens]
        alternatives = []
        for i in range(len(tokens)):
            before = whole[max(0, len(prompt) + i - _CONTEXT) : len(prompt) + i]
            pairs = zip(ids[i].tolist(), best[i].tolist())
            alternatives.append([[_piece(target, before, t), round(p, 5)] for t, p in pairs])
        return [round(p, 5) for p in probs[: len(tokens)].tolist()], alternatives


@functools.partial(jax.jit, static_argnames=("model", "new"))
def _pass(params, tokens, begin, heat, *, model, new: int):
    cache = model.init_cache(params, 1, tokens.shape[1])
    hidden = model.forward(params, tokens, cache).hidden
    hidden = jax.lax.dynamic_slice_in_dim(hidden, begin - 1, new, axis=1)
    probs = jax.nn.softmax(model.unembed(params, hidden)[0].astype(jnp.float32) / heat, axis=-1)
    drawn = jax.lax.dynamic_slice_in_dim(tokens[0], begin, new)
    best, ids = jax.lax.top_k(probs, _ALTERNATIVES)
    return replicate((jnp.take_along_axis(probs, drawn[:, None], -1)[:, 0], best, ids))


def _piece(target: LoadedModel, before: Sequence[int], token: int) -> str:
    if target.tokenizer is None:
        return str(token)
    text = target.tokenizer.decode_after(before, [token])
    return text or target.tokenizer.special_texts.get(token, "")
