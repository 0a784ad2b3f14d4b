"""Drafts compared with plain decoding of the same prompts, in turns."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_jax import processes
from spec_jax.config import STRATEGIES, SamplerConfig
from spec_jax.config.checks import check_name
from spec_jax.contracts import Drafter, Rule
from spec_jax.data.tokens import looping_share
from spec_jax.engine.request import encode_all, is_one_prompt, whole_slots
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError, SpecJaxError
from spec_jax.evaluation import costs as pass_costs
from spec_jax.evaluation import summary
from spec_jax.evaluation.bench import Bench, CellOutput, Run, usable_cells
from spec_jax.evaluation.cells import PLAIN, Cell, Draft, copying_methods, make_cells
from spec_jax.evaluation.places import PlaceResult
from spec_jax.evaluation.results import (
    NONE,
    CategoryResult,
    CellResult,
    Counts,
    KindResult,
    RoundTime,
)
from spec_jax.evaluation.timing import interleave
from spec_jax.evaluation.token_kinds import token_kinds
from spec_jax.intervals import Interval, paired_speedup
from spec_jax.loading import LoadedHead, LoadedModel, load_draft, load_model
from spec_jax.named import to_rule
from spec_jax.progress import Progress
from spec_jax.show import page, plots
from spec_jax.show.tables import Section

if TYPE_CHECKING:
    from spec_jax.testing import RowAudit

_MIN_QUESTIONS = 4  # of a category; an interval of fewer says nothing


def run_all(tasks: Mapping[str, Callable[[], Any]], what: str) -> dict[str, Any]:
    """Returns what tasks return. They run two at a time, since one compilation leaves cores idle.

    Several processes run one at a time, since they must run their programs in the same order.
    """
    at_once = 2 if processes.count() == 1 else 1
    bar = Progress(len(tasks), what, is_compiling=True)
    with bar, concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(task): name for name, task in tasks.items()}
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
                bar.step(futures[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return {name: future.result() for future, name in futures.items()}


def compile_all(
    bench: Bench, cells: Sequence[Cell], *, has_costs: bool = True
) -> pass_costs.Costs | None:
    """Compiles every program of the run; returns what the passes of rounds cost.

    Args:
      bench: What decodes.
      cells: The cells, of one dtype; each decodes the first batch once.
      has_costs: Whether to compile and time the passes, too; else None is returned.
    """
    tasks = {cell.label: functools.partial(bench.warm_up, cell) for cell in cells}
    if not has_costs:
        run_all(tasks, "compiling")
        return None
    ks = {c.method: {d.k for d in cells if d.method == c.method and not d.tree} for c in cells}
    target, drafts = bench.models(cells[0].dtype)
    drafts = {n: d for n, d in drafts.items() if not isinstance(d, Drafter | None)}
    widest = max(cell.k for cell in cells if not cell.tree)
    slots = whole_slots(bench.longest + bench.max_new_tokens + widest + 1)  # as decoding has
    makers = pass_costs.timer_makers(target, drafts, ks, slots, bench.batch)
    done = run_all(tasks | {str(loop): make for loop, make in makers.items()}, "compiling")
    timers = {loop: done[str(loop)] for loop in makers}
    with Progress(pass_costs.REPEATS, "timing passes", every_s=10.0, delay_s=2.0) as bar:
        times = interleave(timers, pass_costs.REPEATS, bar.step)
    return pass_costs.Costs.of_times(times, slots=slots, batch=bench.batch)


class CellRun:
    """What one cell has decoded so far, and how long it took.

    Args:
      bench: What decodes.
      cell: The cell.
      max_examined: How many rows that diverge from plain decoding are examined; None: all.

    Attributes:
      runs: The first run of each batch.
      times_s: The decoding times of each batch, one a turn.
    """

    def __init__(self, bench: Bench, cell: Cell, max_examined: int | None = None):
        self.bench = bench
        self.cell = cell
        self.max_examined = max_examined
        self.runs: dict[int, Run] = {}
        self.times_s: dict[int, list[float]] = {}
        self._differences: dict[int, RowAudit] = {}

    @property
    def rule(self) -> Rule:
        """The acceptance rule, resolved."""
        return self.bench.decoder(self.cell).system().rule

    def run(self, index: int) -> float:
        """Decodes batch ``index`` once; returns the time."""
        run = self.bench.run(self.cell, index)
        self.runs.setdefault(index, run)
        self.times_s.setdefault(index, []).append(run.decode_s)
        return run.decode_s

    @property
    def rows(self) -> dict[int, CellOutput]:
        """The output of every prompt, by its index."""
        batches = ((self.bench.chosen(index), run.rows) for index, run in self.runs.items())
        return {i: row for chosen, rows in batches for i, row in zip(chosen, rows)}

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Times and tokens f64[N] of the units of an interval: batches, timed by the median of
        their turns, or the turns of a single batch.
        """
        times = [*self.times_s.values()]
        tokens = [run.tokens for run in self.runs.values()]
        if len(times) == 1:
            return np.asarray(times[0]), np.full(len(times[0]), tokens[0])
        return np.asarray([np.median(x) for x in times]), np.asarray(tokens)

    @property
    def busy_share(self) -> float:
        """The mean share of a batch's rows that are running in a round; 1 for batches of one row.

        A round of a batch takes its time until the last row ends, and rows whose drafts are
        accepted more often, or that meet a stop token, end earlier. NaN where there was no round.
        """
        runs = [*self.runs.values()]
        rounds = sum(row.stats.rounds for run in runs for row in run.rows)
        most = sum(run.passes * len(run.rows) for run in runs)
        return rounds / most if most else float("nan")

    @property
    def round_ms(self) -> float:
        """The mean time of a round of a batch."""
        seconds = sum(float(np.median(times)) for times in self.times_s.values())
        return 1e3 * seconds / max(sum(run.passes for run in self.runs.values()), 1)

    def of_questions(self, questions: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Times and tokens f64[P] of questions, given the prompts of each; of batches of one."""
        batch_of = {self.bench.layout[index][0]: index for index in self.runs}
        batches = [[batch_of[i] for i in prompts] for prompts in questions]
        times = [sum(np.median(self.times_s[b]) for b in chosen) for chosen in batches]
        tokens = [sum(self.runs[b].tokens for b in chosen) for chosen in batches]
        return np.asarray(times), np.asarray(tokens)

    def difference(self, row: int, plain: CellRun) -> RowAudit:
        """Returns where a row diverges from plain decoding, and why; computed once."""
        if row not in self._differences:
            self._differences |= self._examine(row, plain)
        return self._differences[row]

    def _examine(self, row: int, plain: CellRun) -> dict[int, RowAudit]:
        """Examines a greedy row; with an audit its whole batch is decoded again."""
        from spec_jax.testing import audit, audit_outputs  # needs scipy.stats, slow to import

        bench = self.bench
        rows = (plain.rows, self.rows)
        if not bench.has_audit:
            pair = [rows_of[row].tokens for rows_of in rows]
            prompt = bench.prompts[row]
            target, _ = bench.models(self.cell.dtype)
            return {row: audit_outputs(target, prompt, *pair, sampler=bench.sampler, row=row)}
        chosen = next(c for c in map(bench.chosen, bench.batches) if row in c)
        outputs = tuple([rows_of[i].tokens for i in chosen] for rows_of in rows)
        audited = audit(
            bench.decoder(self.cell),
            [bench.prompts[i] for i in chosen],
            bench.max_new_tokens,
            outputs=outputs,
            plain=bench.decoder(plain.cell),
            pad_to=bench.longest,
        )
        return {chosen[r.row]: dataclasses.replace(r, row=chosen[r.row]) for r in audited.rows}


def run_interleaved(
    runs: Sequence[CellRun], turns: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Measures cells of one temperature; yields each turn after it.

    In a turn plain decoding and every cell decode one batch, so that changes in the machine's speed
    cancel in their ratios, and every second turn runs in reverse order.

    Args:
      runs: Of plain decoding, then of the others.
      turns: The number of the repeat and of the batch of each turn.
    """
    for repeat, index in turns:
        timers = {run.cell: functools.partial(run.run, index) for run in runs}
        interleave(timers, 1, is_backwards=bool((repeat + index) % 2))
        yield repeat, index


def results_of(
    runs: Sequence[CellRun],
    questions: Sequence[Sequence[int]],
    costs: Mapping[str | None, pass_costs.Costs] | None = None,
    categories: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    *,
    is_over_fastest: bool = False,
) -> list[CellResult]:
    """Returns what was measured of each cell of one temperature and batch size.

    Args:
      runs: Plain decoding first, once for each dtype.
      questions: The indices of each question's prompts; intervals are over questions.
      costs: The costs of passes by dtype, as far as they were measured.
      categories: The group and the questions of each category.
      is_over_fastest: Whether speed-ups are over the fastest plain decoding of all dtypes, in place
        of that in the cell's dtype.
    """
    plains = {run.cell.dtype: run for run in runs if run.cell.is_plain}
    fastest = min(plains.values(), key=lambda run: run.pairs[0].sum())
    counts: dict[Cell, Counts] = {}
    results = []
    for run in runs:
        cell = run.cell
        plain = fastest if is_over_fastest else plains[cell.dtype]
        rows = run.rows
        outputs = [[rows[i] for i in prompts] for prompts in questions]
        counts[cell] = count = Counts.of(outputs)
        own_s, own_tokens = run.pairs
        plain_s, plain_tokens = plain.pairs
        stats = Stats(
            prefill_s=sum(one.prefill_s for one in run.runs.values()),
            decode_s=float(own_s.sum()) * len(run.runs) / len(own_s),  # once for each batch
            compile_s=run.bench.compile_s.get(cell, 0.0),
        )
        sizes = np.asarray([len(row.tokens) for row in rows.values()])
        loops = np.asarray([looping_share(row.tokens) for row in rows.values()])
        reasons = Counter(row.finish_reason for row in rows.values())
        tau, acceptance = count.intervals()
        identical, differences = _compare(run, plains[cell.dtype])
        result = CellResult(
            cell._replace(rule=run.rule.name),
            run.bench.batch,
            run.rule.is_lossless,
            _speedup(run, plain, questions),
            float(own_tokens.sum() / max(own_s.sum(), 1e-9)),
            float(plain_tokens.sum() / max(plain_s.sum(), 1e-9)),
            len(own_s),
            sum((row.stats for row in rows.values()), stats),
            tau,
            acceptance,
            identical,
            differences,
            looping_share=float((sizes * loops).sum() / max(sizes.sum(), 1)),
            finish_reasons=dict(sorted(reasons.items())),
            busy_share=run.busy_share,
            categories={
                name: _category(run, plain, count, questions, group, chosen)
                for name, (group, chosen) in (categories or {}).items()
            },
            kinds=KindResult.of(outputs),
            places=PlaceResult.of(outputs),
        )
        if cell.k and not cell.tree:  # beside the first draft's chain of the same K
            same = (c for c in counts if (c.k, c.tree, c.dtype) == (cell.k, None, cell.dtype))
            first = next(same)
            if first.method != cell.method:
                difference = count.less(counts[first])
                result = dataclasses.replace(
                    result, compared_with=first.label, difference=difference
                )
        if costs and cell.dtype in costs:
            result = _with_costs(result, run, plain, costs[cell.dtype])
        results.append(result)
    return results


def _compare(run: CellRun, plain: CellRun) -> tuple[int | None, tuple[RowAudit, ...]]:
    """Counts rows with plain decoding's tokens; None if the rule samples other tokens."""
    is_greedy = run.cell.is_greedy
    if not (is_greedy and run.rule.is_lossless or run.rule.name == "match"):
        return None, ()
    rows = run.rows
    expected = plain.rows
    diverged = [i for i, row in rows.items() if row.tokens != expected[i].tokens]
    examined = diverged[: run.max_examined] if is_greedy else []
    return len(rows) - len(diverged), tuple(run.difference(i, plain) for i in examined)


def _speedup(run: CellRun, plain: CellRun, questions: Sequence[Sequence[int]]) -> Interval:
    """The speed-up over pairs: of questions, or of batches of several of them."""
    if run is plain:
        return NONE._replace(value=1.0)
    if run.bench.batch > 1 or len(run.runs) == 1:
        (own_s, own_tokens), (plain_s, plain_tokens) = run.pairs, plain.pairs
    else:
        own_s, own_tokens = run.of_questions(questions)
        plain_s, plain_tokens = plain.of_questions(questions)
    return paired_speedup(own_s, plain_s, own_tokens, plain_tokens)


def _category(run, plain, counts, questions, group, chosen) -> CategoryResult:
    """Returns the figures of some questions."""
    tau, acceptance = Counts(*(x[np.asarray(chosen)] for x in counts)).intervals()
    result = CategoryResult(group, len(chosen), tau, acceptance)
    if run.bench.batch > 1:
        return result
    questions = [questions[i] for i in chosen]
    speedup = _speedup(run, plain, questions)
    if len(chosen) < _MIN_QUESTIONS:
        speedup = NONE._replace(value=speedup.value)

    def rate(run):
        times, tokens = run.of_questions(questions)
        return float(tokens.sum() / max(times.sum(), 1e-9))

    speeds = {"tokens_per_s": rate(run), "plain_tokens_per_s": rate(plain)}
    return result._replace(speedup=speedup, **speeds)


def _with_costs(
    result: CellResult, run: CellRun, plain: CellRun, costs: pass_costs.Costs
) -> CellResult:
    """Adds the predicted speed-up, for the rows that run, and of what a round consists."""
    cell = run.cell
    of_passes = cell.method in costs.draft_ms  # after the first; else of all that draft
    draft_cost = costs.draft_cost(cell.method, 0 if of_passes else cell.k) if cell.k else 0.0
    time = RoundTime(
        run.round_ms,
        draft_cost=draft_cost if cell.k else None,
        is_draft_cost_significant=costs.is_significant(cell.method),
    )
    if not cell.tree and np.isfinite(draft_cost):
        drafts = cell.k * costs.draft_cost(cell.method, cell.k) if cell.k else 0.0
        time = time._replace(
            verify_ms=costs.verify_cost(cell.k) * costs.plain_ms,
            draft_ms=drafts * costs.plain_ms,
            plain_rest_ms=max(plain.round_ms - costs.plain_ms, 0.0),
        )
    predicted = pass_costs.predict(costs, result) * result.busy_share / plain.busy_share
    return dataclasses.replace(result, predicted_speedup=predicted, round_time=time)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """What ``compare`` has measured.

    Attributes:
      title: What was compared.
      results: One record a cell, plain decoding first at each temperature.
      costs: The costs of passes; None if they were not measured.
      notes: What was left out, and why; where drafts were too short for their rows.
    """

    title: str
    results: tuple[CellResult, ...]
    costs: pass_costs.Costs | None
    notes: tuple[str, ...] = ()

    @property
    def conclusions(self) -> list[str]:
        """One sentence for each temperature: its fastest lossless draft."""
        return summary.conclusions(self.results)

    def _tables(self) -> list[Section]:
        results = Section("", table=summary.results_table(self.results))
        return [results, *summary.counted_sections(self.results)]

    def __str__(self) -> str:
        tables = [section.console() for section in self._tables()]
        notes = [f"note: {note}" for note in self.notes]
        return "\n\n".join([self.title, *tables, "\n".join([*self.conclusions, *notes])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = []
        below = [["", line] for line in (*self.conclusions, *self.notes)]
        for section in self._tables():
            rows = [section.table.header, *section.table.rows]
            rows = [[*map(str, row)] for row in rows] + below
            tables.append(page.table(section.title or self.title, rows))
            below = []
        return "".join(tables)

    def plot(self, axes: Any = None) -> Any:
        """Draws the speed-up of every cell with its interval, a panel for each temperature.

        Args:
          axes: matplotlib axes to draw on, one for each temperature; None: a new figure.

        Returns:
          The matplotlib figure.
        """
        drafted = [r for r in self.results if not r.cell.is_plain]
        temperatures = list(dict.fromkeys(r.cell.temperature for r in drafted))
        size = (5.0, 1.2 + 0.32 * len(drafted))
        with plots.panels(len(temperatures), axes, size) as drawn:
            for axis, temperature in zip(drawn, temperatures):
                shown = [r for r in drafted if r.cell.temperature == temperature]
                value = np.asarray([r.speedup.value for r in shown], float)
                ends = np.asarray([r.speedup.bounds for r in shown], float).T
                error = np.nan_to_num(np.abs(ends - value))
                axis.axvline(1, color="0.45", linewidth=1)
                axis.errorbar(value, range(len(shown)), xerr=error, fmt="o", capsize=3)
                axis.set_yticks(range(len(shown)), [r.cell.name for r in shown])
                axis.invert_yaxis()
                label = "speed-up over plain decoding (bars: 95 %)"
                axis.set(title=f"T={temperature:g}", xlabel=label)
            return drawn[0].figure


def compare(
    target: LoadedModel | str,
    drafts: Any,
    prompts: Sequence[Any],
    *,
    ks: int | Sequence[int] | Mapping[str, Sequence[int]] = (3,),
    trees: Sequence[str] = (),
    temperatures: Sequence[float] = (0.0,),
    rules: Sequence[str] = ("residual",),
    copying_rules: Sequence[str] = ("match",),
    rule: Rule | str | None = None,
    max_new_tokens: int = 64,
    batch: int = 1,
    repeats: int = 2,
    sampler: SamplerConfig = SamplerConfig(),
    has_costs: bool = True,
    has_acceptance_by_kind: bool = False,
    has_acceptance_by_place: bool = False,
) -> Comparison:
    """Compares drafts with plain decoding of the same prompts.

    Plain decoding and every draft take turns, prompt by prompt, so that changes in the machine's
    speed cancel in their ratios. Intervals are 95 % confidence intervals over the prompts,
    Student's t of the jackknife; at least four prompts are needed for useful ones.

    Example:
      ```python
      import spec_jax
      from spec_jax.testing import mock_model

      target = mock_model(vocab_size=8)  # or spec_jax.load_model("zoo/target")
      draft = mock_model(vocab_size=8, seed=1)

      comparison = spec_jax.compare(
          target, {"small": draft}, [[1, 2], [3], [4, 5]], ks=2, max_new_tokens=8, has_costs=False
      )
      print(comparison)
      ```

    Args:
      target: The target, or a name or path that ``load_model`` takes.
      drafts: One draft or several: a model, a head, a ``Drafter``, a name or path that
        ``load_draft`` takes, "ngram", "suffix" or "self:N"; or a dict of them by name.
      prompts: Texts, lists of ids, or conversations.
      ks: K, drafted tokens per round: one or several, or those of each draft by its name.
      trees: Trees to draft in addition to chains, for drafts with logits, such as "3x2x1" or
        "59:6:10".
      temperatures: Of target and draft; at 0 decoding is greedy.
      rules: Acceptance rules above temperature 0 of drafts with logits.
      copying_rules: Those of drafts without logits, such as "ngram".
      rule: A custom rule in addition, or its ``module:NAME``.
      max_new_tokens: New tokens of every prompt.
      batch: Prompts that are decoded together.
      repeats: Turns of each batch; their median counts.
      sampler: Filters and penalties; prompt i has seed ``sampler.seed + i``.
      has_costs: Whether to time passes, in order to predict speed-ups.
      has_acceptance_by_kind: Whether to count acceptance by kind of token, see ``token_kinds``.
      has_acceptance_by_place: Whether to count acceptance by place in trees, see ``places``; rounds
        take longer.

    Returns:
      A ``Comparison``, with a table, a plot and an HTML representation.

    Raises:
      ConfigError: Drafts or values that cannot be compared.
      PromptError: A prompt that cannot be decoded.
    """
    target = load_model(target) if isinstance(target, str | os.PathLike) else target
    prompts = [prompts] if is_one_prompt(prompts) else list(prompts)
    if not isinstance(sampler, SamplerConfig):
        raise ConfigError(
            f"sampler is of type {type(sampler).__name__}; expected one SamplerConfig, for all "
            "prompts"
        )
    if sampler.temperature:
        t = sampler.temperature
        raise ConfigError(f"sampler has temperature {t}; give temperatures={t}")
    trees, temperatures, rules = map(_several, (trees, temperatures, rules))
    copying_rules, rule = _several(copying_rules), None if rule is None else custom_rule(rule)
    for name in (*rules, *copying_rules):
        check_name("rule", name, STRATEGIES)
    named = name_drafts(target, drafts)
    if not prompts or batch < 1 or repeats < 1:
        raise ConfigError(
            f"there are {len(prompts)} prompts, batch is {batch} and repeats {repeats}; expected 1 "
            "or more of each"
        )
    ids, _ = encode_all(target, prompts)
    by_name = ks if isinstance(ks, Mapping) else dict.fromkeys(named, ks)
    if set(by_name) != set(named):
        raise ConfigError(f"ks are of {', '.join(by_name)}; the drafts are {', '.join(named)}")
    by_name = {name: _several(k) for name, k in by_name.items()}
    if not temperatures or not all(by_name.values()):
        empty = "ks" if temperatures else "temperatures"
        raise ConfigError(f"{empty} is empty; expected one value or more")
    cells = make_cells(named, by_name, temperatures, rules, copying_rules, trees, rule)
    bench = Bench(target, named, ids, sampler, max_new_tokens, min(batch, len(ids)), rule=rule)
    bench.has_places = has_acceptance_by_place
    if has_acceptance_by_kind:
        if target.tokenizer is None:
            raise ConfigError(f"{target.name} has no tokenizer, so its tokens have no known kinds")
        bench.token_kinds = token_kinds(target.tokenizer, target.model.vocab_size)
    notes: list[str] = []
    cells = usable_cells(bench, cells, notes)
    costs = compile_all(bench, cells, has_costs=has_costs)
    results: list[CellResult] = []
    groups = {t: [c for c in cells if c.temperature == t] for t in dict.fromkeys(temperatures)}
    turns = [*itertools.product(range(repeats), bench.batches)]
    with Progress(len(turns) * len(groups), "measuring") as bar:
        for temperature, group in groups.items():
            runs = [CellRun(bench, cell, 4) for cell in group]
            for _ in run_interleaved(runs, turns):
                bar.step(f"T={temperature:g}")
            results += results_of(runs, [[i] for i in range(len(ids))], costs and {None: costs})
    title = (
        f"{target.name}: {len(ids)} prompts, {max_new_tokens} new tokens each, batch {bench.batch}"
    )
    notes += summary.length_notes(results)
    return Comparison(title, tuple(results), costs, tuple(notes))


def custom_rule(given: Rule | str) -> Rule:
    """Returns a rule, given as one or by its ``module:NAME``.

    Raises:
      ConfigError: It is not a rule, or it has the name of another rule, which tables show.
    """
    rule = to_rule(given)
    is_custom = ":" in given if isinstance(given, str) else rule is not to_rule(rule.name)
    if is_custom and rule.name in STRATEGIES:
        raise ConfigError(
            f"the custom rule has the name {rule.name!r}, which a rule of the package has; give it "
            "a unique name: rule._replace(name=...)"
        )
    return rule


def name_drafts(target: LoadedModel, drafts: Any) -> dict[str, Draft]:
    """Returns drafts by name, loaded.

    Args:
      target: The model that is drafted for.
      drafts: See ``compare``.

    Raises:
      ConfigError: There is no draft, or one of them cannot draft for the target.
    """
    if not isinstance(drafts, Mapping):
        is_list = isinstance(drafts, list | tuple) and not isinstance(drafts, Drafter)
        given = drafts if is_list else [drafts]
        given = [str(draft) if isinstance(draft, os.PathLike) else draft for draft in given]
        names = [getattr(draft, "name", str(draft)) for draft in given]
        drafts = {_unique(name, names[:i]): d for i, (name, d) in enumerate(zip(names, given))}
    if not drafts or PLAIN in drafts:
        raise ConfigError(f"drafts are {list(drafts)}; expected one or more, none named {PLAIN!r}")
    loaded: dict[str, Draft] = {}
    for name, draft in drafts.items():
        is_method = isinstance(draft, str) and draft in copying_methods()
        if is_method and name != draft:
            raise ConfigError(
                f"draft {name!r} is the method {draft!r}; give it by its own name: "
                f"{{{draft!r}: {draft!r}}}"
            )
        if name in copying_methods() and not is_method and not isinstance(draft, Drafter):
            raise ConfigError(
                f"the draft named {name!r} is not the method {name!r}, which copies tokens; give "
                "it another name"
            )
        if is_method:
            loaded[name] = None
        elif isinstance(draft, str):
            try:
                loaded[name] = load_draft(draft, target)
            except SpecJaxError as error:
                raise ConfigError(
                    f"draft {draft!r} cannot draft for {target.name}: {error}"
                ) from error
        elif isinstance(draft, LoadedModel | LoadedHead | Drafter):  # what a caller may give
            loaded[name] = draft
        else:
            raise ConfigError(
                f"draft {name!r} is of type {type(draft).__name__}; expected a model, a head, a "
                f"Drafter, a name or path, or one of {', '.join(copying_methods())}"
            )
    return loaded


def _several(values: Any) -> tuple[Any, ...]:
    """Returns one value, or several, as a tuple."""
    return (values,) if isinstance(values, str) or np.ndim(values) == 0 else tuple(values)


def _unique(name: str, before: Collection[str]) -> str:
    count = list(before).count(name)
    return f"{name} #{count + 1}" if count else name
