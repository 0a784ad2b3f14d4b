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
    members: list[list[int]] = [[]]
    room = batch
    for question, indices in enumerate(prompts):
        if members[-1] and len(indices) > room:
            members.append([])
            room = batch
        members[-1].append(question)
        room -= len(indices)
    groups = []
    layout: list[list[int]] = []
    for questions in members:
        rows = [i for question in questions for i in prompts[question]]
        first = len(layout)
        layout += [rows[i : i + batch] for i in range(0, len(rows), batch)]
        groups.append(Group(tuple(questions), tuple(range(first, len(layout)))))
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
    cell_run: CellRun, prompt: int, index: int, probs: Probabilities | None
) -> dict[str, Any]:
    """Returns the entry of a line's ``turns`` for one prompt.

    Args:
      cell_run: What the cell has done.
      prompt: The index of the prompt.
      index: That of its batch.
      probs: Computes the target's probabilities; None to leave them out.
    """
    bench = cell_run.bench
    run = cell_run.runs[index]
    row: Generation = run.rows[bench.chosen(index).index(prompt)]
    trace = row.trace
    ids = bench.prompts[prompt]
    tokens = [*row.tokens]
    shown = trace.shown(tokens)
    found = (None, None)
    if probs is not None:
        found = probs(ids, tokens, cell_run.cell.temperature)
    return {
        "prompt": text_of(bench.target, ids),
        "prompt_tokens": len(ids),
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


def checked(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a line; raises one of ``journal.REFUSED`` unless ``restore`` can read its turns."""
    for turn in line["turns"]:
        Run(turn["prefill_s"], turn["decode_s"][0], [_saved(turn)])
        if not isinstance(turn["prompt"], str):
            raise TypeError(f"the prompt is {turn['prompt']!r:.60}")
    return line


def restore(cell_run: CellRun, index: int, turns: Mapping[int, Mapping[str, Any]]) -> None:
    """Puts the saved outputs and times of a batch into a ``CellRun``.

    Args:
      cell_run: Of the cell.
      index: The index of the batch.
      turns: The entries of ``turns`` of its prompts, by index.
    """
    chosen = cell_run.bench.chosen(index)
    rows = {i: _saved(turns[i]) for i in set(chosen)}
    first = turns[chosen[0]]
    outputs = [rows[i] for i in chosen]
    cell_run.runs[index] = Run(first["prefill_s"], first["decode_s"][0], outputs)
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
        if key in self._known:
            return self._known[key]
        target = self._target
        whole = [*prompt, *tokens]
        padded = np.zeros((1, padded_width(len(prompt) + self._new)), np.int32)
        padded[0, : len(whole)] = whole
        with use_mesh(mesh_of(target.params)):
            found = _pass(
                target.params,
                padded,
                np.int32(len(prompt)),
                np.float32(1.0 if temperature < GREEDY_BELOW else temperature),
                model=target.model,
                new=self._new,
            )
        probs, best, ids = (np.asarray(x)[: len(tokens)].tolist() for x in found)
        alternatives = []
        for i, pairs in enumerate(map(zip, ids, best), len(prompt)):
            before = whole[max(0, i - _CONTEXT) : i]
            alternatives.append([[_piece(target, before, t), round(p, 5)] for t, p in pairs])
        self._known[key] = [round(p, 5) for p in probs], alternatives
        return self._known[key]


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
