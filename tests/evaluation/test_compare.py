"""``spec_jax.compare``: a table with intervals in three lines, from independent arithmetic."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import tokenizers
from scipy.stats import binomtest
from support.block_drafts import HEADS, TARGET, head_of
from support.pairs import tiny_pair

import spec_jax
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.errors import ConfigError, PromptError
from spec_jax.evaluation import compare as comparing
from spec_jax.evaluation.bench import Bench, in_dtype
from spec_jax.evaluation.cells import Cell
from spec_jax.evaluation.compare import CellRun, name_drafts, results_of
from spec_jax.evaluation.token_kinds import TOKEN_KINDS, token_kinds
from spec_jax.models.tokenizer import Tokenizer

PROMPTS = ["x = 1", "import os", "def f(", "for i in"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def comparison(pair):
    """Of a cell of a notebook: two drafts with intervals."""
    target = spec_jax.load_model(pair / "target")
    options = dict(ks=2, max_new_tokens=6, has_costs=False)
    options |= dict(has_acceptance_by_kind=True, has_acceptance_by_place=True)
    return spec_jax.compare(target, {"twin": target, "ngram": "ngram"}, PROMPTS, **options)


def test_two_drafts_are_compared_in_three_lines(comparison):
    plain, twin, ngram = comparison.results
    assert [r.cell for r in comparison.results] == [
        Cell("plain", 0, 0.0, "greedy"),
        Cell("twin", 2, 0.0, "greedy"),
        Cell("ngram", 2, 0.0, "greedy"),
    ]
    assert all(r.is_identical and r.rows == r.num_pairs == 4 for r in comparison.results)
    assert all(x.value == 1 for x in twin.acceptance), "the target's own drafts are all accepted"
    assert 2 < twin.tau.value <= 3 and plain.tau.value == 1
    for r in (twin, ngram):
        assert r.speedup.value == pytest.approx(r.tokens_per_s / r.plain_tokens_per_s)
        assert 0 <= r.speedup.low < r.speedup.value < r.speedup.high
    assert math.isnan(plain.speedup.low) and plain.speedup.value == 1
    assert all(x.accepted.value == x.share.value == 1 for x in twin.places.values())
    assert sum(x.reached for x in ngram.places.values()) == sum(ngram.stats.reached_at)
    assert not plain.places


def test_it_shows_as_text_as_html_and_as_a_plot(comparison):
    text, html = str(comparison), comparison._repr_html_()
    for part in ("twin", "at T=0", "identifier", "Acceptance by kind", "Acceptance by place"):
        assert part in text and part in html
    (axis,) = comparison.plot().axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["twin K=2", "ngram K=2"]


def test_figures_are_those_of_independent_arithmetic(pair, monkeypatch):
    """With made-up times: in turn r prompt i takes plain decoding 2 (i + 1) r, the draft i + 1."""
    target = spec_jax.load_model(pair / "target")
    ids = [target.tokenizer.encode(prompt) for prompt in PROMPTS]
    kinds = token_kinds(target.tokenizer, 300)
    bench = Bench(target, {"ngram": None}, ids, spec_jax.SamplerConfig(), 6, token_kinds=kinds)
    real = Bench.run
    calls = itertools.count()

    def run(self, cell, index):
        next(calls)
        turn = sum(1 for _ in turns[cell, index])
        turns[cell, index].append(0)
        seconds = 2.0 * (index + 1) * (turn + 1) if cell.is_plain else index + 1.0
        return real(self, cell, index)._replace(decode_s=seconds)

    cells = [Cell("plain", 0, 0.0), Cell("ngram", 2, 0.0, "greedy")]
    turns = {(cell, i): [] for cell in cells for i in range(4)}
    monkeypatch.setattr(Bench, "run", run)
    runs = [CellRun(bench, cell) for cell in cells]
    for _ in comparing.run_interleaved(runs, itertools.product(range(3), bench.batches)):
        pass
    assert next(calls) == 2 * 4 * 3
    _, result = results_of(runs, [[0, 1], [2], [3]])
    plain_s, own_s = np.asarray([4.0, 8, 12, 16]), np.asarray([1.0, 2, 3, 4])  # medians of three
    assert result.speedup.value == pytest.approx(4.0)
    assert result.plain_tokens_per_s == pytest.approx(4 * 5 / plain_s.sum())
    assert result.tokens_per_s == pytest.approx(4 * 5 / own_s.sum())
    stats = [row.stats for row in runs[1].rows.values()]
    rounds = np.asarray([stats[0].rounds + stats[1].rounds, stats[2].rounds, stats[3].rounds])
    assert result.tau.value == pytest.approx(20 / rounds.sum())
    without = np.asarray([10, 15, 15]) / (rounds.sum() - rounds)  # a question left out at a time
    width = 4.302653 * without.std() * math.sqrt(2)  # Student's t, two degrees of freedom
    assert result.tau.high == pytest.approx(min(result.tau.value + width, 3.0), rel=1e-5)
    check_kinds(result, kinds, runs[1].rows)


def check_kinds(result, kinds, rows):
    """Counts by the traces, and Wilson's interval where all questions have the same share."""
    counts = np.zeros((3, len(TOKEN_KINDS), 2))
    for question, prompts in enumerate([[0, 1], [2], [3]]):
        for row in (rows[i] for i in prompts):
            for token, origin, rejected in zip(row.tokens, row.trace.kinds, row.trace.rejected):
                if origin in ("accepted", "corrected"):
                    reached = token if origin == "accepted" else rejected
                    counts[question, kinds[reached]] += 1, origin == "accepted"
    assert counts.sum() > 0 and [*result.kinds] == [*TOKEN_KINDS][: len(result.kinds)]
    for kind, (reached, accepted, rate) in enumerate(result.kinds.values()):
        assert [reached, accepted] == counts[:, kind].sum(axis=0).tolist()
        if not reached:
            assert math.isnan(rate.value)
            continue
        assert rate.value == pytest.approx(accepted / reached)
        left = counts[:, kind].sum(axis=0) - counts[:, kind]
        if (left[:, 0] > 0).all() and accepted in (0, reached):
            known = binomtest(accepted, reached).proportion_ci(method="wilson")
            assert [rate.low, rate.high] == pytest.approx([known.low, known.high], abs=1e-6)


def test_tokens_have_the_kind_of_their_text():
    texts = ["\n    ", " def", "naïve_1", "7", " 42", "):", "…", "x1(", "1.5", "<s>"]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(texts, range(10)))))
    backend.add_special_tokens(["<s>"])
    kinds = [TOKEN_KINDS[kind] for kind in token_kinds(Tokenizer(backend), 12)]
    words = ["whitespace", "identifier", "identifier", "digit", "digit", "punctuation"]
    assert kinds == [*words, "punctuation", *["other"] * 5]  # ids 10 and 11 have no token


@pytest.mark.exhaustive
def test_speedups_are_over_plain_decoding_of_the_same_dtype_or_the_fastest(pair, monkeypatch):
    """With made-up times: plain decoding takes 4 s in float32 and 2 in bfloat16, the draft 1."""
    target = spec_jax.load_model(pair / "target")
    by_dtype = {d: (in_dtype(target, d), {"ngram": None}) for d in ("float32", "bfloat16")}
    ids = [target.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    bench = Bench(target, {"ngram": None}, ids, spec_jax.SamplerConfig(), 6, by_dtype=by_dtype)
    real = Bench.run

    def run(self, cell, index):
        seconds = {"float32": 4.0, "bfloat16": 2.0}[cell.dtype] if cell.is_plain else 1.0
        return real(self, cell, index)._replace(decode_s=seconds)

    monkeypatch.setattr(Bench, "run", run)
    cells = [Cell("plain", 0, 0.0), Cell("ngram", 2, 0.0, "greedy")]
    cells = [cell._replace(dtype=dtype) for cell in cells for dtype in by_dtype]
    runs = [CellRun(bench, cell) for cell in cells]
    for _ in comparing.run_interleaved(runs, [(0, 0), (0, 1)]):
        pass
    weights = {cell.dtype: bench.decoder(cell).params()["target"]["embed"] for cell in cells}
    assert {dtype: str(array.dtype) for dtype, array in weights.items()} == {d: d for d in by_dtype}
    for is_over_fastest, expected in ((False, [1, 1, 4, 2]), (True, [0.5, 1, 2, 2])):
        results = results_of(runs, [[0], [1]], is_over_fastest=is_over_fastest)
        assert [r.speedup.value for r in results] == pytest.approx(expected)
        assert [r.cell.name for r in results[2:]] == ["ngram float32 K=2", "ngram bfloat16 K=2"]
        for r, run in zip(results, runs):  # tokens are compared within a dtype
            same = next(t for t in runs if t.cell.dtype == r.cell.dtype)
            equal = [run.rows[i].tokens == same.rows[i].tokens for i in (0, 1)]
            assert r.identical_rows == sum(equal)


def test_drafts_are_named_by_what_is_given(pair):
    target = spec_jax.load_model(pair / "target")
    path = str(pair / "draft")
    named = name_drafts(target, [path, "ngram", target, target, NO_DRAFT._replace(name="mine")])
    assert [*named] == [path, "ngram", target.name, f"{target.name} #2", "mine"]
    assert named["ngram"] is None and named[path].num_params > 0
    assert [*name_drafts(target, "suffix")] == ["suffix"]


RESIDUAL = spec_jax.rules.make_rule(
    spec_jax.SpeculativeConfig(rejection_sampling_strategy="block")
)._replace(name="residual")
REFUSED = [
    ([], {}, r"drafts are \[\]; expected one or more"),
    (3, {}, "is of type int; expected a model, a head"),
    ({"plain": "ngram"}, {}, "none named 'plain'"),
    ({"x": 3}, {}, "draft 'x' is of type int; expected a model, a head"),
    ({"x": "ngram"}, {}, "draft 'x' is the method 'ngram'; give it by its own name: {'ngram'"),
    ({"suffix": "zoo/draft"}, {}, "the draft named 'suffix' is not the method 'suffix'"),
    ("ngram", {"ks": {"other": (1,)}}, "ks are of other; the drafts are ngram"),
    ("ngram", {"ks": {"ngram": []}}, "ks is empty; expected one value or more"),
    ("ngram", {"temperatures": ()}, "temperatures is empty; expected one value or more"),
    ("ngram", {"sampler": [spec_jax.SamplerConfig()]}, "sampler is of type list; expected one Sam"),
    ("ngram", {"sampler": spec_jax.SamplerConfig(temperature=0.7)}, "give temperatures=0.7"),
    ("zoo/eagle1", {}, "draft 'zoo/eagle1' cannot draft for .*target: .*a target of vocabulary"),
    ("ngram", {"rules": ["blok"]}, "rule is 'blok' .did you mean block.*; expected one of"),
    ("ngram", {"copying_rules": "mach"}, "rule is 'mach' .did you mean match"),
    ("ngram", {"rule": RESIDUAL, "temperatures": 1.0}, "has the name 'residual', which a rule"),
    ("ngram", {"batch": 0}, "batch is 0"),
    ("ngram", {"prompts": []}, "there are 0 prompts"),
    ("zoo/draft", {}, "nothing to compare .*the vocabularies differ"),
]


@pytest.mark.parametrize("drafts, changes, words", REFUSED)
def test_what_cannot_be_compared_is_refused(pair, drafts, changes, words):
    options = {"prompts": PROMPTS} | changes
    with pytest.raises((ConfigError, PromptError), match=words):
        spec_jax.compare(str(pair / "target"), drafts, **options)


def test_a_draft_is_drawn_as_its_drafter_prefers_unless_the_comparison_says_otherwise():
    prompts = [[1, 2, 3]]
    dflash, dspark = (head_of(HEADS[name]) for name in ("dflash", "dspark"))
    bench = Bench(TARGET, {"a": dflash, "b": dspark}, prompts, spec_jax.SamplerConfig(), 4)
    of_draft = lambda bench, name, T: bench.samplers(Cell(name, 2, T, "residual"), 0)[1][0]
    assert of_draft(bench, "a", 1.0).temperature == 0.0
    assert of_draft(bench, "b", 1.0).temperature == 1.0
    given = dataclasses.replace(bench, draft_temperature=0.5)
    assert {of_draft(given, name, 1.0).temperature for name in "ab"} == {0.5}
    assert of_draft(given, "b", 0.0).temperature == 0.0
