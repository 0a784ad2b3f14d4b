"""From the config of ``experiments.evaluate`` to models, questions and the grid of cells."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from configs import evaluate_zoo
from experiments.comparison.decode_setup import METHODS, RULES, check_grid, load_usable
from experiments.run import cli, report
from spec_jax.config import SamplerConfig, build
from spec_jax.data import python_source, questions, sources, tokens
from spec_jax.data.questions import Question, Questions
from spec_jax.errors import ConfigError
from spec_jax.evaluation.grid import COPYING, Bench, Cell, make_cells, usable_cells
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.evaluation.own import Own
from spec_jax.evaluation.prompts import PromptEncoder, cut, encodable, fitting, room_for_prompt
from spec_jax.loading import LoadedHead, LoadedModel, load_draft, load_model

_TAKEN = ("target", *METHODS)  # what tables and timers call something else


def resolve(config: ConfigDict) -> ConfigDict:
    """Checks a config and returns it with every value in its final form.

    Raises:
      ConfigError: A key is unknown or missing, or a value is out of range.
    """
    cli.check_keys(config, evaluate_zoo.get_config())
    config = config.copy_and_resolve_references()
    config.data = config.prompts or config.data
    check = lambda ok, name, expected: cli.require(ok, config, name, expected)
    for name in ("rules", "copying_rules", "categories"):
        parts = (x.strip() for entry in config[name] for x in str(entry).split(","))
        config[name] = tuple(filter(None, parts))
    for name in ("rules", "copying_rules"):
        is_known = bool(config[name]) and set(config[name]) <= set(RULES)
        check(is_known, name, f"one or more of {', '.join(RULES)}")
    check_grid(config)
    check(len(config.batches) > 0, "batches", "one or more")
    are_counts = all(type(b) is int and b >= 1 for b in config.batches)
    check(are_counts, "batches", "integers of 1 or more")
    config.batches = tuple(sorted(set(config.batches)))
    check(config.num_prompts >= (1 if not config.data else 0), "num_prompts",
          "1 or more; 0 for all questions of a set or a file")  # fmt: skip
    check(config.num_shown >= 0, "num_shown", "0 or more")
    check(config.prompt_tokens >= 1, "prompt_tokens", "1 or more")
    usual = evaluate_zoo.get_config()
    if config.target != usual.target and config.drafts == usual.drafts:
        config.drafts = "ngram"  # the zoo's drafts are for the zoo's target
    check(bool(names_of(config) or config.drafter), "drafts", "names or directories, with commas")
    return config


def names_of(config: ConfigDict) -> list[str]:
    """Returns the names in ``config.drafts``, each once."""
    names = (name.strip() for name in config.drafts.split(","))
    return [*dict.fromkeys(name for name in names if name)]


def held_out_pieces(target: LoadedModel, n: int, length: int, seed: int) -> list[list[int]]:
    """Returns ids of ``n`` evenly spread pieces of the held-out modules; ``seed`` shifts them.

    A piece begins with BOS if the tokenizer puts it before a text, and has ``length`` ids with it.

    Raises:
      ConfigError: There are fewer places, or no token that separates documents.
    """
    try:
        text = tokens.pack(target.tokenizer, python_source.documents("held_out"))
    except ConfigError as error:
        raise ConfigError(f"{error}, or ask questions of your own: --config.data=FILE") from error
    begin = [x for x in target.tokenizer.encode("")[:1] if x == target.config.bos_token_id]
    length = max(length - len(begin), 1)
    room = len(text) - length
    if room < n:
        raise ConfigError(f"num_prompts is {n}; the held-out modules have {room} places")
    shift = int(np.random.default_rng(seed).integers(room))
    starts = [(shift + i * room // n) % room for i in range(n)]
    return [begin + text[start : start + length].tolist() for start in starts]


class Setup(NamedTuple):
    """What a run decodes.

    Attributes:
      config: The resolved config.
      target: The target.
      drafts: What drafts for it, by method.
      methods: All methods but plain decoding, in their order.
      cells: The cells of each temperature, plain decoding first.
      questions: The questions.
      room: The maximum tokens of a prompt.
      where: The devices.
      own: A drafter and a rule of the user's own.
      notes: What was left out.
    """

    config: ConfigDict
    target: LoadedModel
    drafts: dict[str, LoadedModel | LoadedHead]
    methods: list[str]
    cells: dict[float, list[Cell]]
    questions: Questions
    room: int
    where: MeshOptions
    own: Own
    notes: list[str]

    @classmethod
    def of(cls, config: ConfigDict) -> Setup:
        """Loads models and questions; leaves out, with a note, what cannot draft.

        Raises:
          SpecJaxError: A config, a target or questions that cannot be used; or nothing drafts.
        """
        config = resolve(config)
        sources.check(config.data)
        where = MeshOptions.of(config)
        target = load_model(
            config.target, config.dtype, scan_layers=config.scan_layers, mesh=where.mesh
        )
        drafts, methods, notes = _load_drafts(config, target, where)
        own = Own.of(config, target, (*METHODS, *methods))
        methods += [] if own.drafter is None else [own.drafter.name]
        if not methods:
            raise ConfigError(f"nothing drafts for {target.name}: {'; '.join(notes)}")
        where.check_drafts([*drafts.values()])
        found = _questions(config, target)
        config.batches, cut_off = fitting(
            config.batches, sum(question.num_turns for question in found.chosen)
        )
        cells, more = _cells(config, target, drafts, methods, where, own)
        used = {cell.method for group in cells.values() for cell in group}
        methods = [method for method in methods if method in used]
        drafts = {name: draft for name, draft in drafts.items() if name in methods}
        models = [target, *drafts.values(), *own.limits]
        room = room_for_prompt(models, config.max_new_tokens, config.max_prompt_tokens)
        return cls(
            config, target, drafts, methods, cells, found, room, where, own,
            [*notes, *more, *found.notes, *cut_off],
        )  # fmt: skip

    def bench(self, prompts: list[list[int]], batch: int, layout: Sequence[Sequence[int]]) -> Bench:
        """Returns what decodes prompts, ``batch`` at a time, laid out as ``layout`` says."""
        return _bench(self.config, self.target, self.drafts, self.where, self.own, prompts, batch,
                      layout)  # fmt: skip

    def ids(self, asker: PromptEncoder, question: Question, answers: Sequence[str]) -> list[int]:
        """Returns the ids of a prompt, without the beginning that exceeds ``room``."""
        return cut(asker(question, answers), self.room, self.target.config.bos_token_id)


def _load_drafts(config: ConfigDict, target: LoadedModel, where: MeshOptions):
    """Returns drafts by method, all methods, and notes on those that cannot be loaded."""
    notes, names = [], names_of(config)
    load = lambda name: load_draft(
        name, target, config.dtype, mesh=where.mesh, rules=where.draft_rules
    )
    loaded = dict(load_usable([name for name in names if name not in COPYING], load, notes))
    usable = [name for name in names if name in COPYING or name in loaded]
    given = [name for name in usable if name in loaded]
    short = zip(given, report.names_of(given))
    longer = lambda name: "/".join((".", *pathlib.PurePath(name).parts)[-2:])
    labels = {name: longer(name) if label in _TAKEN else label for name, label in short}
    drafts = {labels[name]: draft for name, draft in loaded.items()}
    return drafts, [labels.get(name, name) for name in usable], notes


def _questions(config: ConfigDict, target: LoadedModel) -> Questions:
    if target.tokenizer is None:
        raise ConfigError(
            f"{target.name} has no tokenizer, and all questions are text; expected tokenizer.json "
            "in its directory"
        )
    if config.data:
        found = questions.load(config.data, config.num_prompts, config.categories)
        notes = [*found.notes]
        chosen = encodable(found.chosen, PromptEncoder(target), notes)
        return found._replace(chosen=chosen, notes=notes)
    pieces = held_out_pieces(target, config.num_prompts, config.prompt_tokens, config.seed)
    chosen = [Question(f"piece {i}", "pieces", ids=tuple(p)) for i, p in enumerate(pieces, 1)]
    notes = ["categories are chosen from questions, and these are pieces of text"]
    return Questions(chosen, "pieces of held-out modules", notes if config.categories else [])


def _bench(config, target, drafts, where, own, prompts, batch, layout) -> Bench:
    sampler = build(SamplerConfig, {**config.sampler.to_dict(), "seed": config.seed})
    ngram = {"ngram_max": config.ngram_max, "ngram_min": config.ngram_min}
    return Bench(
        target, drafts, prompts, sampler, config.max_new_tokens, batch, ngram=ngram, where=where,
        own=own, layout=layout, has_audit=config.has_audit,
    )


def _cells(config, target, drafts, methods, where, own):
    """Returns the cells by temperature, without those that cannot be, on which there are notes."""
    copying = lambda m: m in COPYING or (own.drafter is not None and m == own.drafter.name
                                         and not own.drafter.is_sampled)  # fmt: skip
    rules = {m: config.copying_rules if copying(m) else config.rules for m in methods}
    trees = [tree.strip() for tree in config.trees.split(",") if tree.strip()]
    cells = make_cells(methods, config.ks, config.temperatures, rules, trees, own)
    bench, notes, found = _bench(config, target, drafts, where, own, [[0]], 1, [[0]]), [], {}
    for cell in usable_cells(bench, cells, notes):
        found.setdefault(cell.temperature, []).append(cell)
    if all(len(group) < 2 for group in found.values()):
        raise ConfigError(f"there is nothing to compare with plain decoding: {'; '.join(notes)}")
    return found, notes
