"""The grid of an experiment, methods x K x temperatures, each timed beside plain decoding."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError, SpecJaxError
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.evaluation.own import Own
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.rules import make_rule

COPYING = ("ngram", "suffix")  # methods of chains, without logits


class Cell(NamedTuple):
    """One row of the table.

    Attributes:
      method: The method or, if there are several heads, the label of one; the name of a drafter of
        the user's own; or "plain".
      k: K, drafted tokens per round; 0 for plain decoding.
      temperature: The temperature of target and draft.
      rule: The acceptance rule; None for the default one.
      tree: A tree of K nodes, as ``tree_options`` reads it, or ``Own.tree``; None for a chain.
    """

    method: str
    k: int
    temperature: float
    rule: str | None = None
    tree: str | None = None

    @property
    def label(self) -> str:
        """A name for messages."""
        k = f" K={self.k}" if self.k else ""
        k = f" tree {self.tree}" if self.tree else k
        rule = f" {self.rule}" if self.rule else ""
        return f"{self.method}{k} T={self.temperature:g}{rule}"


def tree_options(text: str) -> dict:
    """Parses a tree; returns the options of ``SpeculativeConfig``.

    Args:
      text: "3x2x1", the number of children at each depth, or "59:6:10", the nodes and levels of
        EAGLE-2's dynamic tree and the number of nodes that each level expands.

    Raises:
      ConfigError: It is neither, or there is no such tree.
    """
    try:
        if ":" in text:
            names = ("num_speculative_tokens", "tree_depth", "tree_top_k")
            options = dict(zip(names, map(int, text.split(":")), strict=True))
        else:
            options = {"tree": tuple(map(int, text.split("x")))}
    except ValueError:
        raise ConfigError(
            f"the tree is {text!r}; expected children by depth, as 3x2x1, or nodes, levels and "
            "children of a dynamic tree, as 59:6:10"
        ) from None
    return options | {"num_speculative_tokens": SpeculativeConfig(**options).tree_shape.num_nodes}


def make_cells(
    methods: Sequence[str],
    ks: Sequence[int],
    temperatures: Sequence[float],
    rules: dict[str, Sequence[str]],
    trees: Sequence[str] = (),
    own: Own = Own(),
) -> list[Cell]:
    """Returns all cells, plain decoding first at each temperature.

    Args:
      methods: The methods that are compared with "plain", which is always included.
      ks: The values of K of every method.
      temperatures: The temperatures; at 0 the rule is "greedy".
      rules: The rules of each method above temperature 0.
      trees: Trees that methods with a model draft beside the chains, see ``tree_options``.
      own: A drafter that is one more method, and a rule for every drafter that it can serve.

    Raises:
      ConfigError: The user's rule can serve no row.
    """
    cells, own_rules = [], [] if own.rule is None else [own.rule.name]
    nodes = {tree: tree_options(tree)["num_speculative_tokens"] for tree in trees}
    for temperature in temperatures:
        cells.append(Cell("plain", 0, temperature))
        for method in methods:
            if method == "plain":
                continue
            is_own = own.drafter is not None and method == own.drafter.name
            has_logits = own.drafter.is_sampled if is_own else method not in COPYING
            shapes = [(k, None) for k in ks]
            if is_own and own.tree:
                shapes = [(own.drafter.tree.num_nodes, own.tree)]
            elif not is_own and has_logits:
                shapes += [(nodes[tree], tree) for tree in trees]
            named = rules[method] if temperature > 0 else ["greedy"]
            cells += [
                Cell(method, k, temperature, rule, tree)
                for rule in [*named, *own_rules]
                for k, tree in shapes
                if rule in named
                or own.can_serve(temperature, is_tree=bool(tree), has_logits=has_logits)
            ]
    if not {*own_rules} <= {cell.rule for cell in cells}:
        is_greedy = own.rule.is_greedy
        needs = "temperature 0: --config.temperatures=0" if is_greedy else "logits, or chains"
        raise ConfigError(f"rule {own.rule.name!r} can serve no row of the table: it needs {needs}")
    return list(dict.fromkeys(cells))


def usable_cells(
    bench: Bench, cells: Sequence[Cell], notes: list[str], *, is_strict: bool = False
) -> list[Cell]:
    """Returns the cells that can be decoded.

    Args:
      bench: What decodes; nothing is compiled.
      cells: Of all methods.
      notes: Gets a sentence on each cell that is left out; one on a method, all of whose cells are
        left out for one reason, such as a head of another target.
      is_strict: Whether only a draft may be left out, none of whose cells can be decoded.

    Raises:
      ConfigError: Plain decoding is impossible, or another cell that may not be left out.
    """
    found, refused = [], {}
    for cell in cells:
        try:
            bench.decoder(cell)
        except SpecJaxError as error:
            if cell.method == "plain":
                raise
            refused[cell] = error
        else:
            found.append(cell)
    whole = {cell.method for cell in refused} - {cell.method for cell in found}
    kept = [c for c in refused if c.method not in whole or c.method not in bench.drafts]
    if is_strict and kept:
        raise refused[kept[0]]
    names = {c: c.method if c.method in whole else c.label for c in refused}
    said = (f"{names[cell]} is left out: {why}" for cell, why in refused.items())
    notes += dict.fromkeys(said)
    return found


class Row(Protocol):
    """What is read of the output of one prompt, a ``Generation`` or one that was saved."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> str: ...

    @property
    def stats(self) -> Stats: ...


class Run(NamedTuple):
    """The outputs of one batch of prompts, and their times."""

    prefill_s: float
    decode_s: float
    rows: Sequence[Row]

    @property
    def tokens(self) -> int:
        """Decoded tokens, without the first of each row, which prefill samples."""
        return sum(row.stats.emitted - row.stats.first for row in self.rows)

    @property
    def passes(self) -> int:
        """Target passes of the batch, those of the row that takes the most rounds."""
        return max(row.stats.rounds for row in self.rows)


@dataclasses.dataclass(eq=False)
class Bench:
    """Decodes one set of prompts with any cell of the grid, in shapes that all calls share.

    Attributes:
      target: The target.
      drafts: The draft of each method that has one: a model for "standalone", or heads.
      prompts: The prompts as ids.
      sampler: The sampler of every row, without temperature; prompt i has seed ``seed + i``.
      max_new_tokens: New tokens of every row.
      batch: Prompts that are decoded together.
      draft_temperature: The draft's temperature where the target's is above 0; None for the same.
      ngram: Options of the method "ngram".
      has_expected: Whether to record the expected acceptance of chains above temperature 0, if
        the rule reads the draft distributions anyway.
      where: The devices; target and drafts lie there already.
      own: A drafter and a rule of the user's own.
      has_audit: Whether rows that differ from plain decoding's are decoded again, to explain them.
      layout: Indices of the prompts of each batch, ``batch`` of them or fewer; by default all
        prompts in their order. A batch that lacks prompts is filled up with its own ones again.
      compile_s: How long each cell has compiled so far.
    """

    target: LoadedModel
    drafts: Mapping[str, LoadedModel | LoadedHead]
    prompts: list[list[int]]
    sampler: SamplerConfig
    max_new_tokens: int
    batch: int = 1
    draft_temperature: float | None = None
    ngram: dict[str, int] = dataclasses.field(default_factory=dict)
    has_expected: bool = False
    where: MeshOptions = MeshOptions()
    own: Own = Own()
    has_audit: bool = False
    layout: Sequence[Sequence[int]] = ()
    compile_s: dict[Cell, float] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    def __post_init__(self):
        if not self.layout:
            count = len(self.prompts)
            starts = range(0, count, self.batch)
            self.layout = [range(i, min(i + self.batch, count)) for i in starts]

    @property
    def batches(self) -> range:
        """Indices of the batches."""
        return range(len(self.layout))

    def chosen(self, index: int) -> list[int]:
        """Returns the prompt of each row of batch ``index``."""
        return [*itertools.islice(itertools.cycle(self.layout[index]), self.batch)]

    @functools.cache  # noqa: B019, a bench lives as long as the program
    def decoder(self, cell: Cell) -> SpeculativeDecoder:
        """Returns the decoder of a cell.

        Raises:
          ConfigError: K, rule, temperature or vocabularies do not fit.
        """
        config, draft, options = None, self.drafts.get(cell.method), {}
        if cell.method != "plain":
            config, options = self._config(cell), self._own(cell)
        sampler = dataclasses.replace(self.sampler, temperature=cell.temperature)
        has_expected = self.has_expected and cell.k > 0 and cell.temperature > 0 and not cell.tree
        is_sampled = draft is not None
        if "drafter" in options:
            is_sampled = self.own.drafter.is_sampled
        if has_expected and is_sampled:  # or they would cost time
            has_expected = (options.get("rule") or make_rule(config)).needs_probs
        return SpeculativeDecoder(
            self.target, draft, config, target_sampler=sampler, has_expected=has_expected,
            **options, **self.where.options(draft),
        )

    def _own(self, cell: Cell) -> dict[str, Any]:
        """Returns what a cell has of the user's own, as options of the decoder."""
        own = {"drafter": (cell.method, self.own.drafter), "rule": (cell.rule, self.own.rule)}
        return {key: x for key, (name, x) in own.items() if x is not None and x.name == name}

    def _config(self, cell: Cell) -> SpeculativeConfig:
        options, own = {"num_speculative_tokens": cell.k}, self._own(cell)
        if cell.tree and "drafter" not in own:
            options = tree_options(cell.tree)
        options |= self.ngram if cell.method == "ngram" else {}
        if cell.method == "suffix":  # or a repeat would copy its last output
            options["suffix_history_tokens"] = 0
        if "rule" not in own:
            options["rejection_sampling_strategy"] = cell.rule
        if "drafter" not in own:
            draft = self.drafts.get(cell.method)
            options["speculative_method"] = cell.method if draft is None else draft.method
        return SpeculativeConfig(**options)

    def has_own_temperature(self, cell: Cell) -> bool:
        """Returns whether a cell's drafts are drawn at a temperature of their own."""
        return self.draft_temperature is not None and cell.temperature > 0

    def run(self, cell: Cell, index: int, **options) -> Run:
        """Decodes batch ``index``; ``options`` are those of ``SpeculativeDecoder.generate``."""
        decoder = self.decoder(cell)
        chosen = self.chosen(index)
        target = [
            dataclasses.replace(decoder.target_sampler, seed=(self.sampler.seed + i) % 2**32)
            for i in chosen
        ]
        draft = None
        if self.has_own_temperature(cell):
            draft = [dataclasses.replace(s, temperature=self.draft_temperature) for s in target]
        decoder.reset_stats()
        rows = decoder.generate(
            [self.prompts[i] for i in chosen], self.max_new_tokens, sampler=target,
            draft_sampler=draft, pad_to=self.longest, **options,
        )
        stats = decoder.stats
        self.compile_s[cell] = self.compile_s.get(cell, 0.0) + stats.compile_s
        return Run(stats.prefill_s, stats.decode_s, rows)
