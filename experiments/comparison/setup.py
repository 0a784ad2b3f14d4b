"""From a config to models, questions and the cells of a comparison."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from configs import decode_default, evaluate_zoo
from experiments.run import cli, report
from spec_jax import named
from spec_jax.config import STRATEGIES, SamplerConfig, build
from spec_jax.contracts import Drafter, Rule
from spec_jax.data import python_source, questions, sources, tokens
from spec_jax.data.questions import Question, Questions
from spec_jax.errors import ConfigError, SpecJaxError, did_you_mean
from spec_jax.evaluation.bench import Bench, in_dtype, usable_cells
from spec_jax.evaluation.cells import PLAIN, Cell, Draft, copying_methods, make_cells
from spec_jax.evaluation.compare import custom_rule
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.evaluation.prompts import (
    PromptEncoder,
    check_effect,
    encodable,
    fitting,
    room_for_prompt,
)
from spec_jax.evaluation.token_kinds import token_kinds
from spec_jax.loading import (
    DTYPES,
    LoadedHead,
    LoadedModel,
    has_own_modules,
    load_draft,
    load_model,
)

RULES = tuple(s for s in STRATEGIES if s not in ("greedy", "synthetic"))
_PIECES = ("", "pieces")  # of config.data: pieces of held-out modules
_FUNCTIONS = "functions"  # likewise: functions of held-out modules


def resolve(config: ConfigDict) -> ConfigDict:
    """Checks a config and returns it with every value in its final form.

    Raises:
      ConfigError: A key is unknown or missing, or a value is out of range.
    """
    cli.check_keys(config, evaluate_zoo.get_config())
    config = config.copy_and_resolve_references()
    for name in ("rules", "copying_rules", "categories"):
        config[name] = tuple(cli.listed(",".join(map(str, config[name]))))
    for name in ("ks", "batches", "temperatures"):
        more = ", or --config.ks=() for the K of each draft" if name == "ks" else ""
        if tuple(config[name]) == ("",):
            raise ConfigError(f"--config.{name}= has no value; give numbers, such as 1,2{more}")
    usual = evaluate_zoo.get_config()
    dtypes = cli.listed(config.dtype)
    zoo_drafts = usual.drafts, decode_default.get_config().drafts
    if config.target != usual.target and config.drafts in zoo_drafts:
        # The zoo's drafts are for the zoo's target; a directory may hold modules for its own.
        config.drafts = f"{config.target},ngram" if _has_modules(config.target) else "ngram"

    def is_temperature(x):
        return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < float("inf")

    def are_counts(values):
        return all(type(x) is int and x >= 1 for x in values)

    def are_of(names, known):
        return bool(names) and set(names) <= set(known)

    for name in ("rules", "copying_rules"):
        hint = next((did_you_mean(n, RULES) for n in config[name] if n not in RULES), "")
        expected = f"one or more of {', '.join(RULES)}{hint}"
        cli.require(are_of(config[name], RULES), config, name, expected)
    longest = config.max_prompt_tokens
    least = 1 if config.data in (*_PIECES, _FUNCTIONS) else 0
    cli.require_each(
        config,
        (config.batches, "batches", "one or more"),
        (config.temperatures, "temperatures", "one or more"),
        (are_counts(config.ks), "ks", "integers of 1 or more, or none for each draft's own K"),
        (are_counts(config.batches), "batches", "integers of 1 or more"),
        (all(map(is_temperature, config.temperatures)), "temperatures", "numbers of 0 or more"),
        (config.repeats >= 1, "repeats", "1 or more"),
        (config.order in ("spread", "group"), "order", "spread or group"),
        (config.max_new_tokens >= 2, "max_new_tokens", "2 or more (prefill makes the first)"),
        (longest is None or longest >= 1, "max_prompt_tokens", "1 or more, or none"),
        (are_of(dtypes, DTYPES), "dtype", f"one of {', '.join(DTYPES)}, or several with commas"),
        (config.baseline in ("same", "fastest"), "baseline", "same or fastest"),
        (config.target, "target", "a zoo name or a directory: --config.target=PATH"),
        (config.num_prompts >= least, "num_prompts", "1 or more; 0 for all of a set or a file"),
        (config.num_shown >= 0, "num_shown", "0 or more"),
        (config.prompt_tokens >= 1, "prompt_tokens", "1 or more"),
        (cli.listed(config.drafts) or config.drafter, "drafts", "names or paths, with commas"),
    )
    config.dtype = ",".join(name for name in DTYPES if name in dtypes)  # the most exact first
    config.temperatures = tuple(map(float, config.temperatures))
    config.batches = tuple(sorted(set(config.batches)))
    drafts = [*cli.listed(config.drafts), *cli.listed(usual.drafts)]
    for name in best_k(config):
        if name not in drafts:
            raise ConfigError(
                f"best_k names {name!r}, which is none of the drafts: {config.drafts}"
                f"{did_you_mean(name, drafts)}"
            )
    return config


def best_k(config: ConfigDict) -> dict[str, int]:
    """Returns the K of each draft that ``config.best_k`` names.

    Raises:
      ConfigError: An entry is not NAME=K.
    """
    found = {}
    for entry in cli.listed(config.best_k):
        name, _, k = entry.rpartition("=")
        if not (name and k.isdigit() and int(k) >= 1):
            raise ConfigError(f"best_k has {entry!r}; expected NAME=K with K of 1 or more")
        found[name] = int(k)
    return found


def held_out_pieces(target: LoadedModel, n: int, length: int, seed: int) -> list[list[int]]:
    """Returns ids of evenly spread pieces of the held-out modules.

    Args:
      target: Its tokenizer may put BOS before a text: then each piece begins with it.
      n: The number of pieces.
      length: The ids of a piece.
      seed: Shifts all places.

    Raises:
      ConfigError: There are fewer places, or no token that separates documents.
    """
    try:
        text, starts = tokens.pack(target.tokenizer, python_source.documents("held_out"))
    except ConfigError as error:
        raise ConfigError(f"{error}, or ask your own questions: --config.data=FILE") from error
    begin = [x for x in target.tokenizer.encode("")[:1] if x == target.config.bos_token_id]
    if begin:  # each document has it at its start
        text = np.delete(text, starts[:-1])
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
      drafts: What drafts for it, by name.
      rule: A custom rule, or None.
      cells: The cells of each temperature, plain decoding first.
      questions: The questions.
      room: The maximum tokens of a prompt.
      devices: The devices.
      by_dtype: Target and drafts in each dtype, if there are several.
      notes: What was left out.
    """

    config: ConfigDict
    target: LoadedModel
    drafts: dict[str, Draft]
    rule: Rule | None
    cells: dict[float, list[Cell]]
    questions: Questions
    room: int
    devices: MeshOptions
    by_dtype: dict[str, tuple[LoadedModel, dict[str, Draft]]]
    notes: list[str]

    @classmethod
    def of(cls, config: ConfigDict) -> Setup:
        """Loads models and questions; leaves out, with a note, what cannot draft.

        Raises:
          SpecJaxError: A config, a target or questions that cannot be used; or nothing drafts.
        """
        config = resolve(config)
        if config.data not in (*_PIECES, _FUNCTIONS):
            sources.check(config.data)
        devices = MeshOptions.of(config)
        dtypes = config.dtype.split(",")
        variables = cli.json_object(config, "chat_template_kwargs")
        target = load_model(
            config.target,
            dtypes[0],
            scan_layers=config.scan_layers,
            attention=config.attention,
            mesh=devices.mesh,
        )
        target = target.with_chat_template_kwargs(variables)
        drafts, ks, notes = _load_drafts(config, target, devices)
        rule = custom_rule(config.rule) if config.rule else None
        asked = _questions(config, target)
        num_prompts = sum(question.num_turns for question in asked.chosen)
        config.batches, cut_off = fitting(config.batches, num_prompts)
        by_dtype = {
            dtype: (in_dtype(target, dtype), {n: in_dtype(d, dtype) for n, d in drafts.items()})
            for dtype in dtypes
            if len(dtypes) > 1
        }
        setup = cls(config, target, drafts, rule, {}, asked, 0, devices, by_dtype, notes)
        devices.check_drafts([*setup.loaded.values()])
        cells: dict[float, list[Cell]] = {}
        every = make_cells(
            drafts,
            ks,
            config.temperatures,
            config.rules,
            config.copying_rules,
            cli.listed(config.trees),
            rule,
        )
        every = [cell._replace(dtype=dtype) for cell in every for dtype in by_dtype or (None,)]
        for cell in usable_cells(setup.bench([[0]], 1, [[0]]), every, notes):
            cells.setdefault(cell.temperature, []).append(cell)
        used = {cell.method for group in cells.values() for cell in group}
        drafts = {name: draft for name, draft in drafts.items() if name in used}
        room = room_for_prompt(target, config.max_new_tokens, config.max_prompt_tokens)
        notes = [*notes, *asked.notes, *cut_off]
        return setup._replace(drafts=drafts, cells=cells, room=room, notes=notes)

    @property
    def loaded(self) -> dict[str, LoadedModel | LoadedHead]:
        """The drafts that are models or heads."""
        return {n: d for n, d in self.drafts.items() if isinstance(d, LoadedModel | LoadedHead)}

    @property
    def custom(self) -> dict[str, dict[str, str]]:
        """The custom drafter and rule for a report, by "drafter" and "rule"."""
        facts = {}
        for draft in self.drafts.values():
            if isinstance(draft, Drafter):
                kind = "sampled" if draft.is_sampled else "deterministic"
                facts["drafter"] = {"name": draft.name, "is": kind, "given": self.config.drafter}
        if self.rule is not None:
            kind = "lossless, as it states" if self.rule.is_lossless else "lossy"
            facts["rule"] = {"name": self.rule.name, "is": kind, "given": self.config.rule}
        return facts

    def bench(self, prompts: list[list[int]], batch: int, layout: Sequence[Sequence[int]]) -> Bench:
        """Returns what decodes prompts.

        Args:
          prompts: The ids of each.
          batch: Prompts that are decoded together.
          layout: The indices of the prompts of each batch.
        """
        config = self.config
        sampler = build(SamplerConfig, {**config.sampler.to_dict(), "seed": config.seed})
        kinds = None
        if config.has_acceptance_by_kind:
            kinds = token_kinds(self.target.tokenizer, self.target.model.vocab_size)
        return Bench(
            self.target,
            self.drafts,
            prompts,
            sampler,
            config.max_new_tokens,
            batch,
            draft_temperature=config.draft_temperature,
            method_options={
                "ngram": {"ngram_max": config.ngram_max, "ngram_min": config.ngram_min}
            },
            has_expected=config.has_expected,
            devices=self.devices,
            rule=self.rule,
            has_audit=config.has_audit,
            token_kinds=kinds,
            has_places=config.has_acceptance_by_place,
            layout=layout,
            by_dtype=self.by_dtype,
        )


def _load_drafts(
    config: ConfigDict, target: LoadedModel, devices: MeshOptions
) -> tuple[dict[str, Draft], dict[str, Sequence[int]], list[str]]:
    """Returns drafts by name, the Ks of each, and notes on those that cannot be loaded."""
    notes: list[str] = []
    loaded: dict[str, Draft] = {}
    taken = ("target", PLAIN, *copying_methods())  # names that tables and timers use
    dtype = config.dtype.partition(",")[0]
    options = {"attention": config.attention, "mesh": devices.mesh}
    options["axis_rules"] = devices.draft_axis_rules
    for name in cli.listed(config.drafts):
        try:
            is_method = name in copying_methods()
            loaded[name] = None if is_method else load_draft(name, target, dtype, **options)
        except SpecJaxError as error:
            notes.append(f"{name} is left out: {error}")
    paths = [name for name in loaded if name not in copying_methods()]

    def longer(name):
        return "/".join((".", *pathlib.PurePath(name).parts)[-2:])

    short = dict(zip(paths, report.names_of(paths)))
    labels = {name: longer(name) if label in taken else label for name, label in short.items()}
    drafts = {labels.get(name, name): draft for name, draft in loaded.items()}
    best = best_k(config)
    ks = {labels.get(name, name): config.ks or (best.get(name, 3),) for name in loaded}
    if config.drafter:
        drafter = named.to_drafter(config.drafter, target)
        if drafter.name in (*taken, *drafts):
            raise ConfigError(
                f"drafter {config.drafter} has the name {drafter.name!r}, which tables use for "
                "another; give it a unique name: drafter._replace(name=...)"
            )
        drafts[drafter.name], ks[drafter.name] = drafter, config.ks or (3,)
    if not drafts:
        raise ConfigError(f"nothing drafts for {target.name}: {'; '.join(notes)}")
    return drafts, ks, notes


def _has_modules(target: str) -> bool:
    """Whether a directory holds MTP modules; what cannot be read is refused when it is loaded."""
    with contextlib.suppress(SpecJaxError):
        return pathlib.Path(target).is_dir() and has_own_modules(pathlib.Path(target))
    return False


def _questions(config: ConfigDict, target: LoadedModel) -> Questions:
    if target.tokenizer is None:
        raise ConfigError(
            f"{target.name} has no tokenizer, and all questions are text; expected tokenizer.json "
            "in its directory"
        )
    variables = cli.json_object(config, "chat_template_kwargs")
    if config.data in _PIECES:
        check_effect(variables, [])
        pieces = held_out_pieces(target, config.num_prompts, config.prompt_tokens, config.seed)
        chosen = [Question(f"piece {i}", "pieces", ids=tuple(p)) for i, p in enumerate(pieces, 1)]
        notes = ["categories are chosen from questions, and these are pieces of text"]
        return Questions(chosen, "pieces of held-out modules", notes if config.categories else [])
    data = "" if config.data == _FUNCTIONS else config.data
    asked = questions.load(data, config.num_prompts, config.categories, config.seed)
    check_effect(variables, asked.chosen)
    chosen, left_out = encodable(asked.chosen, PromptEncoder(target))
    return asked._replace(chosen=chosen, notes=[*asked.notes, *left_out])
