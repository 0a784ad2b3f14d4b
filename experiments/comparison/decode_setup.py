"""From the config of ``experiments.decode`` to models, prompts and the grid of cells."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax
from ml_collections import ConfigDict

from configs import decode_default
from experiments.run import cli
from spec_jax.config import STRATEGIES, SamplerConfig, build
from spec_jax.data import questions, sources
from spec_jax.data.questions import Question
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, SpecJaxError
from spec_jax.evaluation.grid import Bench, Cell, make_cells, usable_cells
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.evaluation.own import Own
from spec_jax.evaluation.prompts import PromptEncoder, encodable, fit, fitting
from spec_jax.loading import (
    DTYPES,
    LoadedHead,
    LoadedModel,
    load_draft,
    load_model,
    random_head,
)

T = TypeVar("T")
METHODS = ("plain", "ngram", "standalone", "eagle", "mtp", "suffix")
SOURCES = {"standalone": "draft", "eagle": "head", "mtp": "mtp"}  # the config's key of each
RULES = tuple(s for s in STRATEGIES if s not in ("greedy", "synthetic"))
# Heads with random weights, by method and name: the output is exact, but nothing is accepted.
RANDOM_HEADS = {
    "eagle": {
        "random-eagle-1": lambda target: EagleConfig.of_target(target, 1),
        "random-eagle-3": lambda target: EagleConfig.of_target(target, 3, target.vocab_size // 2),
    },
    "mtp": {"random": MtpConfig.of_target},
}


def resolve(config: ConfigDict) -> ConfigDict:
    """Checks a config and returns it with every value in its final form.

    Raises:
      ConfigError: A key is unknown or missing, or a value is out of range.
    """
    cli.check_keys(config, decode_default.get_config())
    config = config.copy_and_resolve_references()
    check = lambda ok, name, expected: cli.require(ok, config, name, expected)
    known = dict.fromkeys(("standalone_rules", "ngram_rules", "head_rules"), RULES)
    known = {"methods": METHODS, **known}
    for name in known:
        config[name] = tuple(x.strip() for entry in config[name] for x in str(entry).split(","))
    for name, names in known.items():
        check(set(config[name]) <= set(names), name, f"names among {', '.join(names)}")
    for name in known:
        check(len(config[name]) > 0, name, "one or more")
    for name in ("num_prompts", "batch"):
        check(config[name] >= 1, name, "1 or more")
    is_whole = config.num_prompts % config.batch == 0
    check(is_whole, "num_prompts", f"a multiple of batch {config.batch}")
    check_grid(config)
    usual = decode_default.get_config()
    is_other = config.target != usual.target  # the zoo's drafts are for the zoo's target
    config.data = config.prompts or config.data
    for name in SOURCES.values():
        if config[name].lower() == "none" or (is_other and config[name] == usual[name]):
            config[name] = ""
    return config


def check_grid(config: ConfigDict) -> None:
    """Checks what every grid of cells has, and makes its temperatures floats.

    Raises:
      ConfigError: A value is out of range.
    """
    check = lambda ok, name, expected: cli.require(ok, config, name, expected)
    is_number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
    is_finite = lambda x: is_number(x) and 0 <= x < float("inf")
    for name in ("ks", "temperatures"):
        check(len(config[name]) > 0, name, "one or more")
    check(all(type(k) is int and k >= 1 for k in config.ks), "ks", "integers of 1 or more")
    check(all(map(is_finite, config.temperatures)), "temperatures", "numbers of 0 or more")
    config.temperatures = tuple(map(float, config.temperatures))
    check(config.repeats >= 1, "repeats", "1 or more")
    check(config.max_new_tokens >= 2, "max_new_tokens", "2 or more (prefill makes the first)")
    longest = config.max_prompt_tokens
    check(longest is None or longest >= 1, "max_prompt_tokens", "1 or more, or none")
    check(config.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
    check(config.target != "", "target", "a zoo name or a directory: --config.target=PATH")


def load_usable(
    names: Iterable[str], load: Callable[[str], T], notes: list[str]
) -> list[tuple[str, T]]:
    """Loads drafts; returns those that can be loaded, with their names.

    Args:
      names: Their names.
      load: Loads one by its name, or raises a SpecJaxError.
      notes: Gets a sentence on each that cannot be loaded, and that is then left out.
    """
    found = []
    for name in names:
        try:
            found.append((name, load(name)))
        except SpecJaxError as error:
            notes.append(f"{name} is left out: {error}")
    return found


def load_drafts(
    config: ConfigDict, target: LoadedModel, where: MeshOptions, notes: list[str]
) -> dict[str, LoadedModel | LoadedHead]:
    """Loads the drafts that the config names for ``config.methods``, by label.

    The label is the method; several heads are labelled by version: "eagle-1", "eagle-3".

    Args:
      config: The resolved config.
      target: The model that is drafted for.
      where: The devices.
      notes: See ``load_usable``.

    Raises:
      ConfigError: Several models are named for the method "standalone".
    """
    drafts = {}
    for method, key in SOURCES.items():
        names = [name.strip() for name in config[key].split(",") if name.strip()]
        if method not in config.methods or not names:
            continue
        if method == "standalone":
            if len(names) > 1:
                raise ConfigError(f"draft is {config[key]!r}; expected one model")
            load = functools.partial(
                load_model, dtype=config.dtype, scan_layers=config.scan_layers, mesh=where.mesh,
                rules=where.draft_rules,
            )  # fmt: skip
            drafts.update((method, draft) for _, draft in load_usable(names, load, notes))
            continue
        load = functools.partial(_load_head, method, config=config, target=target, where=where)
        loaded = load_usable(names, load, notes)
        for _, head in loaded:
            label = method
            if len(loaded) > 1:
                version = head.config.version if method == "eagle" else 1 + len(drafts)
                label = f"{method}-{version}"
                label += "" if label not in drafts else f"-{len(drafts)}"
            drafts[label] = head
    return drafts


def _load_head(
    method: str, name: str, config, target: LoadedModel, where: MeshOptions
) -> LoadedHead:
    if name in RANDOM_HEADS[method]:
        shape = RANDOM_HEADS[method][name](target.config)
        head = random_head(shape, jax.random.key(config.seed), config.dtype)
        return head if where.mesh is None else head.on_mesh(where.mesh, where.draft_rules)
    return load_draft(
        name, target, config.dtype, method=method, mesh=where.mesh, rules=where.draft_rules
    )


class Setup(NamedTuple):
    """What a run decodes.

    Attributes:
      config: The resolved config.
      bench: Models and prompts.
      cells: The rows of the table to be.
      prompts: The prompts as text.
      num_cut: How many of them lost their beginning.
      notes: What was left out.
    """

    config: ConfigDict
    bench: Bench
    cells: list[Cell]
    prompts: Sequence[Question]
    num_cut: int
    notes: list[str]

    @classmethod
    def of(cls, config: ConfigDict) -> Setup:
        """Loads models and prompts, and checks every cell before anything is compiled.

        Drafts that cannot be loaded or do not fit are left out with a note, as are rows that are no
        prompts.

        Raises:
          SpecJaxError: A config, a target or prompts that cannot be used; or nothing drafts.
        """
        config = resolve(config)
        sources.check(config.data)
        where = MeshOptions.of(config)
        target = load_model(
            config.target, config.dtype, scan_layers=config.scan_layers, mesh=where.mesh
        )
        notes: list[str] = []
        drafts = load_drafts(config, target, where, notes)
        own = Own.of(config, target, (*METHODS, *drafts))
        where.check_drafts([*drafts.values()])
        labels = {m: [label for label in drafts if label.split("-")[0] == m] for m in SOURCES}
        methods = [label for m in config.methods for label in labels.get(m, [m])]
        methods += [] if own.drafter is None else [own.drafter.name]
        if not methods or (notes and set(methods) == {"plain"}):
            keys = (f"--config.{SOURCES[m]}=PATH" for m in config.methods if m in SOURCES)
            why = "; ".join([", ".join(keys), *notes])
            raise ConfigError(f"methods are {config.methods}, and nothing drafts for them: {why}")
        loaded = questions.load(config.data, config.num_prompts, seed=config.seed)
        notes += loaded.notes
        prompts = encodable(loaded.chosen, PromptEncoder(target), notes)
        (config.batch,), cut_off = fitting((config.batch,), len(prompts))
        notes += cut_off
        rules = {"standalone": config.standalone_rules}
        rules |= dict.fromkeys(("ngram", "suffix"), config.ngram_rules)
        rules |= dict.fromkeys([*labels["eagle"], *labels["mtp"]], config.head_rules)
        if own.drafter is not None:
            kind = config.standalone_rules if own.drafter.is_sampled else config.ngram_rules
            rules[own.drafter.name] = kind
        trees = [tree.strip() for tree in config.trees.split(",") if tree.strip()]
        cells = make_cells(methods, config.ks, config.temperatures, rules, trees, own)
        sampler = build(SamplerConfig, {**config.sampler.to_dict(), "seed": config.seed})
        make = functools.partial(
            Bench, target, sampler=sampler, max_new_tokens=config.max_new_tokens,
            draft_temperature=config.draft_temperature,
            ngram={"ngram_max": config.ngram_max, "ngram_min": config.ngram_min},
            has_expected=config.has_expected, where=where, own=own, has_audit=config.has_audit,
        )  # fmt: skip
        cells = usable_cells(make(drafts, [[0]]), cells, notes, is_strict=True)
        used = {cell.method for cell in cells}
        if used == {"plain"} and notes and {*methods} != used:
            why = "; ".join(notes)
            raise ConfigError(f"there is nothing to compare with plain decoding: {why}")
        drafts = {method: draft for method, draft in drafts.items() if method in used}
        models = [target, *drafts.values(), *own.limits]
        ids, num_cut = fit(prompts, models, config.max_new_tokens, config.max_prompt_tokens)
        bench = make(drafts, ids, batch=config.batch)
        return cls(config, bench, cells, prompts, num_cut, notes)
