"""Decodes one set of prompts with any cell of a comparison."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Drafter, Rule
from spec_jax.decoding import acceptance_by_kind
from spec_jax.decoding.loop import passes_of
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.engine import Engine
from spec_jax.engine.request import Request, make_request
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError, SpecJaxError
from spec_jax.evaluation.cells import Cell, Draft, has_logits, tree_options
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.evaluation.places import ACCEPTANCE_BY_PLACE
from spec_jax.loading import LoadedModel
from spec_jax.rules import make_rule
from spec_jax.sampling import draft_samplers, make_sampler

_USUAL_OPTIONS = {"suffix": {"suffix_history_tokens": 0}}


class CellOutput(NamedTuple):
    """What figures are computed from: a ``Generation``, or the saved output of one prompt."""

    tokens: Sequence[int]
    finish_reason: str
    stats: Stats
    seen: Mapping[str, Any] = {}  # by observers of acceptance


class Run(NamedTuple):
    """The outputs of one batch of prompts, and their times."""

    prefill_s: float
    decode_s: float
    rows: Sequence[CellOutput]

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
      drafts: What drafts, by name; None: "ngram" and "suffix", which copy tokens.
      prompts: The prompts as ids.
      sampler: The sampler of every row, without temperature; prompt i has seed ``seed + i``.
      max_new_tokens: New tokens of every row.
      batch: Prompts that are decoded together.
      draft_temperature: The draft's temperature where the target's is above 0; None for the
        drafter's own, or else the target's.
      method_options: Options of ``SpeculativeConfig`` by method, such as "ngram". A method that
        remembers outputs ("suffix") keeps none by default, or a repeat would copy its last output.
      has_expected: Whether to record the expected acceptance of chains above temperature 0, if
        the rule reads the draft distributions anyway.
      devices: The devices; target and drafts are there already.
      rule: A custom rule, or None.
      has_audit: Whether rows that differ from plain decoding's are decoded again, to explain them.
      token_kinds: The kind of each token, to count acceptance by kind; None: it is not counted.
      has_places: Whether to count acceptance by place, see ``places``; rounds take longer.
      layout: Indices of the prompts of each batch, ``batch`` of them or fewer; by default all
        prompts in their order. A batch that lacks prompts is filled up with its own ones again.
      by_dtype: Target and drafts of the cells that have a dtype, by the dtype.
      compile_s: How long each cell has compiled so far.
    """

    target: LoadedModel
    drafts: Mapping[str, Draft]
    prompts: list[list[int]]
    sampler: SamplerConfig
    max_new_tokens: int
    batch: int = 1
    draft_temperature: float | None = None
    method_options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    has_expected: bool = False
    devices: MeshOptions = MeshOptions()
    rule: Rule | None = None
    has_audit: bool = False
    token_kinds: np.ndarray | None = None
    has_places: bool = False
    layout: Sequence[Sequence[int]] = ()
    by_dtype: Mapping[str, tuple[LoadedModel, Mapping[str, Draft]]] = dataclasses.field(
        default_factory=dict
    )
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
        """Returns the index of the prompt in each row of batch ``index``."""
        return [*itertools.islice(itertools.cycle(self.layout[index]), self.batch)]

    def models(self, dtype: str | None) -> tuple[LoadedModel, Mapping[str, Draft]]:
        """Returns the target and the drafts of cells of a dtype."""
        return (self.target, self.drafts) if dtype is None else self.by_dtype[dtype]

    @functools.cache  # noqa: B019, a bench lives as long as the program
    def decoder(self, cell: Cell) -> SpeculativeDecoder:
        """Returns the decoder of a cell.

        Raises:
          ConfigError: K, rule, temperature or vocabularies do not fit.
        """
        sampler = dataclasses.replace(self.sampler, temperature=cell.temperature)
        target, drafts = self.models(cell.dtype)
        if cell.is_plain:
            return SpeculativeDecoder(target, target_sampler=sampler, **self.devices.options(None))
        draft = drafts[cell.method]
        config = self._config(cell)
        rule = self.rule if self.rule is not None and self.rule.name == cell.rule else None
        drafter = draft if isinstance(draft, Drafter) else None
        loaded = None if drafter else draft
        has_expected = self.has_expected and not cell.is_greedy and not cell.tree
        if has_expected and has_logits(draft):  # or the probabilities would cost time
            has_expected = (rule or make_rule(config)).needs_probs
        observers = [] if self.token_kinds is None else [acceptance_by_kind(self.token_kinds)]
        observers += [ACCEPTANCE_BY_PLACE] if self.has_places else []
        return SpeculativeDecoder(
            target,
            loaded,
            config,
            target_sampler=sampler,
            has_expected=has_expected,
            drafter=drafter,
            rule=rule,
            observers=observers,
            **self.devices.options(loaded),
        )

    def _config(self, cell: Cell) -> SpeculativeConfig:
        draft = self.drafts[cell.method]
        options = {"num_speculative_tokens": cell.k}
        if not isinstance(draft, Drafter):
            options = tree_options(cell.tree) if cell.tree else options
            options["speculative_method"] = cell.method if draft is None else draft.method
        options |= {**_USUAL_OPTIONS, **self.method_options}.get(cell.method, {})
        if cell.rule != (self.rule and self.rule.name):
            options["rejection_sampling_strategy"] = cell.rule
        return SpeculativeConfig(**options)

    def samplers(self, cell: Cell, index: int) -> tuple[list[SamplerConfig], list[SamplerConfig]]:
        """Returns the samplers of target and draft of each row of batch ``index``."""
        decoder = self.decoder(cell)
        config = decoder.target_sampler
        temperature = self.draft_temperature
        seeds = [(self.sampler.seed + i) % 2**32 for i in self.chosen(index)]
        target = [dataclasses.replace(config, seed=seed) for seed in seeds]
        if temperature is None:
            temperature = decoder.system().drafter.defaults.draft_temperature
        return target, [*draft_samplers(None, target, temperature)]

    def request(self, cell: Cell, index: int, **options) -> tuple[Engine, Request]:
        """Returns what decodes a cell, and batch ``index`` with ``options`` of ``make_request``."""
        engine = self.decoder(cell).engine()
        V = self.target.model.vocab_size
        samplers = [make_sampler(configs, self.batch, V) for configs in self.samplers(cell, index)]
        prompts = [self.prompts[i] for i in self.chosen(index)]
        options["pad_to"] = self.longest
        args = (engine.system, prompts, self.max_new_tokens, *samplers)
        return engine, make_request(*args, **options)

    def warm_up(self, cell: Cell) -> None:
        """Runs every program of a cell: the first batch, and each size of pass over prompts."""
        self.run(cell, 0)
        known = set()
        for index in self.batches:
            engine, request = self.request(cell, index, stop_tokens=self.target.stop_tokens)
            passes = passes_of(int(request.lengths.max()), request.tokens.shape[1], engine.system)
            sizes = {size for _, size in passes}
            if index > 0 and not sizes <= known:
                engine.prefill(request)
            known |= sizes

    def run(self, cell: Cell, index: int, **options) -> Run:
        """Decodes batch ``index``; ``options`` are those of ``SpeculativeDecoder.generate``."""
        decoder = self.decoder(cell)
        target, draft = self.samplers(cell, index)
        decoder.reset_stats()
        rows = decoder.generate(
            [self.prompts[i] for i in self.chosen(index)],
            self.max_new_tokens,
            sampler=target,
            draft_sampler=draft,
            pad_to=self.longest,
            **options,
        )
        stats = decoder.stats
        self.compile_s[cell] = self.compile_s.get(cell, 0.0) + stats.compile_s
        return Run(stats.prefill_s, stats.decode_s, rows)


def in_dtype(model: Any, dtype: str) -> Any:
    """Returns a model or head with weights in ``dtype``; a custom drafter stays as it is."""
    if isinstance(model, Drafter | None):
        return model

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    params = jax.tree.map(cast, model.params)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(model.params))
    is_same = all(new.dtype == old.dtype for new, old in pairs)
    return model if is_same else dataclasses.replace(model, params=params)


def usable_cells(bench: Bench, cells: Sequence[Cell], notes: list[str]) -> list[Cell]:
    """Returns the cells that can be decoded.

    Args:
      bench: What decodes; nothing is compiled.
      cells: The cells of all drafts.
      notes: Gets a sentence on each cell that is left out; one on a draft, all of whose cells are
        left out for one reason, such as a head of another target.

    Raises:
      ConfigError: Plain decoding is impossible, or nothing else is possible.
    """
    usable = []
    refused = {}
    for cell in cells:
        try:
            bench.decoder(cell)
        except SpecJaxError as error:
            if cell.is_plain:
                raise
            refused[cell] = error
        else:
            usable.append(cell)
    whole = {cell.title for cell in refused} - {cell.title for cell in usable}
    names = {c: c.title if c.title in whole else c.label for c in refused}
    notes += dict.fromkeys(f"{names[cell]} is left out: {why}" for cell, why in refused.items())
    if all(cell.is_plain for cell in usable):
        raise ConfigError(f"there is nothing to compare with plain decoding: {'; '.join(notes)}")
    return usable
