"""The grid of an experiment, methods x K x temperatures, each timed beside plain decoding."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common.cli import MeshOptions
from experiments.common.own import Own
from experiments.common.timing import interleave
from spec_jax.config import GREEDY_BELOW, SamplerConfig, SpeculativeConfig
from spec_jax.data.tokens import looping_share
from spec_jax.engine.decoder import Generation, SpeculativeDecoder
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.meshes import mesh_of, use_mesh
from spec_jax.rules import make_rule

_COPYING = ("ngram", "suffix")  # methods of chains, without logits


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
            has_logits = own.drafter.is_sampled if is_own else method not in _COPYING
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


class Run(NamedTuple):
    """The outputs of one batch of prompts, and their times."""

    prefill_s: float
    decode_s: float
    rows: list[Generation]

    @property
    def tokens(self) -> int:
        """Decoded tokens, without the first of each row, which prefill samples."""
        return sum(row.stats.emitted - row.stats.first for row in self.rows)


@dataclasses.dataclass(eq=False)
class Bench:
    """Decodes one set of prompts with any cell of the grid, in shapes that all calls share.

    Attributes:
      target: The target.
      drafts: The draft of each method that has one: a model for "standalone", or heads.
      prompts: The prompts as ids.
      sampler: The sampler of every row, without temperature; prompt i has seed ``seed + i``.
      max_new_tokens: New tokens of every row.
      batch: Prompts that are decoded together; divides their number.
      draft_temperature: The draft's temperature where the target's is above 0; None for the same.
      ngram: Options of the method "ngram".
      has_expected: Whether to record the expected acceptance of chains above temperature 0, if
        the rule reads the draft distributions anyway.
      where: The devices; target and drafts lie there already.
      own: A drafter and a rule of the user's own.
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

    def __post_init__(self):
        self._plain: dict[float, list[Run]] = {}  # first runs, by temperature
        self._plain_s: dict[tuple[float, int], list[float]] = {}  # by temperature and batch

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def batches(self) -> range:
        """Indices of the batches."""
        return range(len(self.prompts) // self.batch)

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

    def run(self, cell: Cell, index: int, **options) -> Run:
        """Decodes batch ``index``; ``options`` are those of ``SpeculativeDecoder.generate``."""
        decoder = self.decoder(cell)
        chosen = range(index * self.batch, (index + 1) * self.batch)
        target = [
            dataclasses.replace(decoder.target_sampler, seed=(self.sampler.seed + i) % 2**32)
            for i in chosen
        ]
        draft = None
        if self.draft_temperature is not None and cell.temperature > 0:
            draft = [dataclasses.replace(s, temperature=self.draft_temperature) for s in target]
        decoder.reset_stats()
        rows = decoder.generate(
            [self.prompts[i] for i in chosen], self.max_new_tokens, sampler=target,
            draft_sampler=draft, pad_to=self.longest, **options,
        )
        return Run(decoder.stats.prefill_s, decoder.stats.decode_s, rows)

    def compile(self, cell: Cell) -> None:
        """Compiles the programs of a cell."""
        self.run(cell, 0)

    def measure(self, cell: Cell, repeats: int) -> dict:
        """Measures one entry of a report's ``results``, without its predicted speed-up.

        In each batch, this cell and plain decoding take turns, so that drift of the machine
        cancels in their ratio. The time of a batch is the median of its repeats.
        """
        plain_cell = Cell("plain", 0, cell.temperature)
        runs, plain_runs = [], []
        own_s = plain_s = 0.0
        for index in self.batches:
            turns, plain_turns = [], []

            def timer(which: Cell, kept: list[Run]) -> float:
                kept.append(self.run(which, index))
                return kept[-1].decode_s

            times = interleave({
                "plain": functools.partial(timer, plain_cell, plain_turns),
                "own": functools.partial(timer, cell, turns),
            }, repeats, is_backwards=bool(index % 2))  # fmt: skip
            self._plain_s.setdefault((cell.temperature, index), []).extend(times["plain"])
            own_s += float(np.median(times["own"]))
            plain_s += float(np.median(times["plain"]))
            runs.append(turns[0])
            plain_runs.append(plain_turns[-1])
        plain_runs = self._plain.setdefault(cell.temperature, plain_runs)
        stats = functools.reduce(
            operator.add,
            (row.stats for run in runs for row in run.rows),
            Stats(prefill_s=sum(run.prefill_s for run in runs), decode_s=own_s),
        )
        tokens, plain_tokens = (sum(run.tokens for run in r) for r in (runs, plain_runs))
        has_time = tokens and plain_tokens
        ratio = (plain_s / plain_tokens) / (own_s / tokens) if has_time else float("nan")
        is_plain = cell.method == "plain"
        return {
            **cell._asdict(),
            **self._describe(cell),
            "speedup": 1.0 if is_plain else ratio,
            # Plain decoding timed against itself: the effect of noise on a speed-up.
            "repeatability": ratio if is_plain else None,
            **self._compare(cell, runs, plain_runs),
            **_of_rows([row for run in runs for row in run.rows]),
            **stats.to_dict(),
        }

    def refresh_plain(self, results: list[dict], temperature: float) -> None:
        """Updates the plain row of a temperature with the median of all its timings so far."""
        row = next(r for r in results if (r["method"], r["temperature"]) == ("plain", temperature))
        times = [self._plain_s[temperature, index] for index in self.batches]
        row["decode_s"] = float(sum(map(np.median, times)))
        row["tokens_per_s"] = (row["emitted"] - row["first"]) / row["decode_s"]

    def _describe(self, cell: Cell) -> dict:
        rule = self.decoder(cell).system().rule
        return {"rule": rule.name, "is_lossless": rule.is_lossless}

    def _compare(self, cell: Cell, runs: list[Run], plain_runs: list[Run]) -> dict:
        """Compares the tokens with plain decoding's; None if the rule samples other tokens."""
        ours, theirs = ([row.tokens for run in r for row in run.rows] for r in (runs, plain_runs))
        rule, is_cold = self.decoder(cell).system().rule, cell.temperature < GREEDY_BELOW
        if not (is_cold and rule.is_lossless or rule.name == "match"):
            return {"identical_to_plain": None, "identical_rows": None, "rows": len(ours)}
        same = [a == b for a, b in zip(ours, theirs)]
        gaps = [
            self._gap(i, theirs[i], ours[i])
            for i in range(len(same))
            if is_cold and not same[i]
        ]
        return {
            "identical_to_plain": all(same), "identical_rows": sum(same), "rows": len(ours),
            "smallest_gap_at_difference": min(gaps, default=None),
        }

    def _gap(self, index: int, plain: Sequence[int], other: Sequence[int]) -> float:
        """Returns the distance of the two top logits where two greedy outputs first differ."""
        pairs = zip(plain, other)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
        return top_gap(self.target, [*self.prompts[index], *plain[:at]])


def top_gap(target: LoadedModel, ids: Sequence[int]) -> float:
    """Returns the difference of the two largest logits after ``ids``."""
    model = target.model
    with use_mesh(mesh_of(target.params)):
        cache = model.init_cache(target.params, 1, len(ids))
        hidden = model.forward(target.params, jnp.asarray([ids], jnp.int32), cache).hidden[:, -1]
        first, second = jax.lax.top_k(model.unembed(target.params, hidden)[0], 2)[0]
    return float(first - second)


def _of_rows(rows: Sequence[Generation]) -> dict:
    """Returns how rows ended, and the share of their tokens that repeat in loops."""
    sizes = np.asarray([len(row.tokens) for row in rows])
    shares = np.asarray([looping_share(row.tokens) for row in rows])
    reasons = [row.finish_reason for row in rows]
    return {
        "looping_share": float((sizes * shares).sum() / max(sizes.sum(), 1)),
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
    }
