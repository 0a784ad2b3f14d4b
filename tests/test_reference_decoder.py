"""The algorithm for black boxes: its exact distribution, its metrics, its errors, its adapters."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pathlib
import textwrap
import types

import numpy as np
import pytest

import spec_jax
from spec_jax import testing
from spec_jax.decoding.round import decode_round
from spec_jax.reference import (
    Config,
    DraftProposal,
    ErrorKind,
    FunctionDraft,
    FunctionTarget,
    MockDraft,
    MockTarget,
    SpeculativeDecoder,
    SpeculativeError,
    SpeculativeMetrics,
    TargetScores,
    accept,
    acceptance_probability,
    as_draft,
    as_target,
    draw,
    expected_speed_up,
    expected_tokens,
    generator,
)

# By last token. Every threshold that a uniform is compared with is a multiple of 1/4, or 1/8 where
# the last token is drawn: the mean over the midpoints of such cells is the integral, exactly.
P = np.array([[3, 3, 2], [2, 2, 4], [5, 0, 3]]) / 8
Q = np.array([[2, 2, 4], [4, 2, 2], [2, 4, 2]]) / 8
V = len(P)


class Scripted:
    """A generator whose draws are given."""

    def __init__(self, values):
        self.values = iter(values)

    def random(self, size=None):
        values = [next(self.values) for _ in range(1 if size is None else size)]
        return values[0] if size is None else np.array(values)


def cells(n):
    return (np.arange(n) + 0.5) / n


def round_distribution(k, last):
    """Probability of everything that one round can emit after the token ``last``, integrated."""
    draft, target, decoder = MockDraft(Q), MockTarget(P), SpeculativeDecoder(Config(k=k))
    dist = {}
    grid = [cells(4)] * (2 * k) + [cells(8)]
    for u in itertools.product(*grid):
        draft.generator, decoder.generator = Scripted(u[:k]), Scripted(u[k:])
        emitted = decoder.decode_round(draft, target, (last,), limit=99)[1:]
        dist[emitted] = dist.get(emitted, 0.0) + 1 / (4 ** (2 * k) * 8)
    return dist


def joint_distribution(k, num_tokens):
    """f64[V,...,V], the distribution of the first tokens of a generation from the prompt (0,)."""
    rounds = [round_distribution(k, last) for last in range(V)]
    dist = np.zeros((V,) * num_tokens)

    def visit(output, probability):
        if len(output) >= num_tokens:
            dist[output[:num_tokens]] += probability
            return
        for emitted, p in rounds[output[-1] if output else 0].items():
            visit(output + emitted, probability * p)

    visit((), 1.0)
    return dist


def plain_distribution(num_tokens):
    dist = np.zeros((V,) * num_tokens)
    for tokens in np.ndindex(dist.shape):
        dist[tokens] = np.prod([P[a, b] for a, b in zip((0, *tokens), tokens)])
    return dist


@pytest.mark.parametrize("k, num_tokens", [(0, 2), (1, 3), (2, 4)])
def test_joint_distribution_matches_target_exactly(k, num_tokens):
    joint, plain = joint_distribution(k, num_tokens), plain_distribution(num_tokens)
    np.testing.assert_allclose(joint, plain, atol=1e-12)


def test_streams_of_a_seed_are_independent():
    a, b, again = (generator(3, name).random(4) for name in ("accept", "draft", "accept"))
    assert (a == again).all() and (a != b).all()


# ------------------------------------------------------------------------- pure functions


def proposal_and_scores(tokens=(2, 0)):
    with np.errstate(divide="ignore"):
        return DraftProposal(tokens, np.log(Q[:2])), TargetScores(np.log(P))


def test_a_draft_is_accepted_below_its_probability_and_not_at_it():
    proposal, scores = proposal_and_scores()
    # Each is accepted with probability 1/2; replacements and bonus are drawn from rows 0, 1, 2.
    below, at = np.nextafter(0.5, 0) - 1e-12, 0.5 + 1e-12
    assert accept(proposal, scores, [at, 0.0, 0.4]) == (0, 0)
    assert accept(proposal, scores, [at, 0.0, 0.6]) == (0, 1)
    assert accept(proposal, scores, [below, at, 0.0]) == (1, 2)
    assert accept(proposal, scores, [below, below, 0.0]) == (2, 0)
    assert accept(proposal, scores, [below, below, 0.63]) == (2, 2)


def test_what_has_no_probability_is_never_emitted():
    p, q = np.array([0.0, 1.0, 0.0]), np.full(3, 1 / 3)
    assert acceptance_probability(p, q, 0) == 0.0
    last = np.nextafter(1.0, 0.0)
    assert [draw(p, u) for u in (0.0, 0.5, last)] == [1, 1, 1]
    with np.errstate(divide="ignore"):
        scores = TargetScores(np.log(np.stack([p, p])))
    assert accept(DraftProposal((0,), np.log(q[None])), scores, [0.0, 0.0]) == (0, 1)


def test_a_text_after_which_nothing_is_allowed_is_a_fault_only_where_it_is_emitted():
    """Token 2 allows nothing after it; the draft proposes it always."""
    table = np.array([[0.5, 0.2, 0.3], [0.4, 0.4, 0.2], [0.0, 0.0, 0.0]])
    draft = FunctionDraft(lambda tokens: np.eye(3)[2], generator(0, "draft"))
    for seed in range(20):
        config = Config(k=2, max_new_tokens=4, stop_tokens=(2,), seed=seed)
        tokens = SpeculativeDecoder(config).generate(draft, MockTarget(table), (0,))
        assert len(tokens) == 4 or tokens[-1] == 2
        tokens = SpeculativeDecoder(config).generate(MockDraft(table), MockTarget(table), (0,))
        assert len(tokens) == 4 or tokens[-1] == 2
    config = Config(k=2, max_new_tokens=50)
    with pytest.raises(SpeculativeError, match=r"no token after \(0, .*2\)") as error:
        SpeculativeDecoder(config).generate(MockDraft(table), MockTarget(table), (0,))
    assert error.value.kind == ErrorKind.SCORES


def test_metrics_follow_the_paper():
    assert expected_tokens(0.0, 4) == 1.0 and expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_speed_up(0.8, 4, 0.1) == pytest.approx((1 - 0.8**5) / (0.2 * (4 * 0.1 + 1)))
    assert expected_speed_up(0.5, 0, 0.1) == 1.0
    metrics = SpeculativeMetrics(steps=10, drafted=40, tested=30, accepted=24, emitted=34)
    assert metrics.acceptance_rate == 0.8 and metrics.tokens_per_step == 3.4
    assert metrics.speed_up(0.1) == pytest.approx(34 / (10 + 4))
    empty = SpeculativeMetrics()
    unknown = (empty.acceptance_rate, empty.tokens_per_step, empty.speed_up(0.1))
    assert np.isnan(unknown).all()


def counting(tokens):
    """A model that counts: after a token t it says t + 1, surely."""
    return np.eye(10)[(tokens[-1] + 1) % 10]


@pytest.mark.parametrize(
    "config, expected, counts",
    [
        (Config(k=4, max_new_tokens=7), (1, 2, 3, 4, 5, 6, 7), (2, 6, 6, 6, 7)),
        (Config(k=4, stop_tokens=(3, 7)), (1, 2, 3), (1, 4, 3, 3, 3)),
        (Config(k=4, stop_tokens=(5,)), (1, 2, 3, 4, 5), (1, 4, 4, 4, 5)),
        (Config(k=0, max_new_tokens=2), (1, 2), (2, 0, 0, 0, 2)),
    ],
    ids=["limit", "stop token", "bonus is a stop token", "plain"],
)
def test_limits_and_stop_tokens_cut_a_round(config, expected, counts):
    decoder = SpeculativeDecoder(config)
    draft = FunctionDraft(counting, generator(0, "draft"))
    assert decoder.generate(draft, FunctionTarget(counting), (0,)) == expected
    m = decoder.metrics
    assert (m.steps, m.drafted, m.tested, m.accepted, m.emitted) == counts


# ---------------------------------------------------------------------------------- errors


def answers(proposal=None, scores=None):
    """A draft and a target that give these answers, whatever they are asked."""
    good, good_scores = proposal_and_scores()
    propose = lambda prefix, k: proposal or good
    verify = lambda prefix, tokens: scores or good_scores
    return types.SimpleNamespace(propose=propose), types.SimpleNamespace(verify=verify)


drafted = lambda ids, probs: DraftProposal(ids, np.log(probs))
TOO_FEW, FOUR_IDS = TargetScores(np.log(Q[:2])), TargetScores(np.log(np.full((3, 4), 0.25)))
LONG = answers(drafted((0, 1, 2), Q), TargetScores(np.log(np.tile(Q[0], (4, 1)))))
KINDS = [
    (ErrorKind.PROPOSAL, r"shape \(1, 3\); expected \(2, V\)", answers(drafted((0, 1), Q[:1]))),
    (ErrorKind.PROPOSAL, "sum to", answers(drafted((0, 1), Q[:2] / 2))),
    (ErrorKind.PROPOSAL, "token 7", answers(drafted((0, 7), Q[:2]))),
    (ErrorKind.PROPOSAL, "3 drafts; expected at most 2", LONG),
    (ErrorKind.SCORES, r"shape \(2, 3\); expected \(3, V\)", answers(scores=TOO_FEW)),
    (ErrorKind.SCORES, "sum to", answers(scores=TargetScores(np.zeros((3, 3))))),
    (ErrorKind.VOCABULARY, "3 ids, the target 4", answers(scores=FOUR_IDS)),
]


@pytest.mark.parametrize("kind, message, models", KINDS)
def test_answers_that_cannot_be_are_named(kind, message, models):
    with pytest.raises(SpeculativeError, match=message) as error:
        SpeculativeDecoder(Config(k=2)).generate(*models, (0,))
    assert error.value.kind is kind


def test_configs_and_prompts_that_cannot_be_are_named():
    for bad in ({"k": -1}, {"max_new_tokens": 0}, {"seed": -1}):
        with pytest.raises(SpeculativeError, match=f"{next(iter(bad))} is") as error:
            Config(**bad)
        assert error.value.kind is ErrorKind.CONFIG
    with pytest.raises(SpeculativeError, match="empty") as error:
        SpeculativeDecoder().generate(*answers(), ())
    assert error.value.kind is ErrorKind.PROMPT
    assert isinstance(error.value, ValueError)


# -------------------------------------------------------------------------- loaded models


def test_a_loaded_model_gives_the_sampled_distributions():
    target = testing.mock_model(4, seed=1)
    sampler = testing.STANDARD_SETTINGS["all together"]
    rows = as_target(target, sampler, prompt_length=2).verify((0, 1, 3), (2, 2)).logprobs
    history = (0, 1, 3, 2, 2)
    for i, row in enumerate(rows):
        logits = testing.oracles.toy_logits(target.params, history[: 3 + i])
        expected = testing.reference_distribution(logits, sampler, (0, 1), history[2 : 3 + i])
        np.testing.assert_allclose(np.exp(row), expected, atol=1e-12)
    processor = spec_jax.Processor("any", *(lambda *args: args,) * 3)
    for make in (as_draft, as_target):
        for needy in (sampler, spec_jax.SamplerConfig(processors=(processor,))):
            with pytest.raises(SpeculativeError, match="prompt_length") as error:
                make(target, needy)
            assert error.value.kind is ErrorKind.CONFIG
    short = dataclasses.replace(target, model=testing.toy_model(4, max_length=3))
    with pytest.raises(SpeculativeError, match="4 tokens are more than the 3 of mock-1") as error:
        as_target(short).verify((0, 1), (2, 3))
    assert error.value.kind is ErrorKind.LENGTH


def test_near_the_end_of_a_models_length_less_is_drafted():
    """By the target no draft passes the limit, and by the draft none its own length."""
    target = testing.mock_model(4, seed=1)
    held = lambda longest: dataclasses.replace(
        target, model=target.model._replace(max_length=longest)
    )
    text = (0, 1, 2)
    while len(text) < 11:
        text += (int(np.argmax(testing.oracles.toy_logits(target.params, text))),)
    for longest, drafted in ((11, 4 + 3), (8, 4), (7, 4), (6, 0)):
        decoder = SpeculativeDecoder(Config(k=4, max_new_tokens=8))
        output = decoder.generate(as_draft(held(longest)), as_target(held(11)), text[:3])
        assert output == text[3:] and decoder.metrics.drafted == drafted
        assert decoder.metrics.accepted == drafted


def check_agreement(target, draft, prompts, k, num_tokens):
    """Greedy tokens and counts of the compiled loop, ragged rows at once, and of the reference."""
    config = spec_jax.SpeculativeConfig(num_speculative_tokens=k)
    compiled = spec_jax.SpeculativeDecoder(target, draft, config)
    rows = compiled.generate(prompts, max_new_tokens=num_tokens, stop_tokens=())
    # The loop's first token is prefill's, and its first round begins after it.
    decoder = SpeculativeDecoder(Config(k=k, max_new_tokens=num_tokens - 1))
    for prompt, row in zip(prompts, rows):
        start = (*compiled.encode(prompt), row.tokens[0])
        assert decoder.generate(as_draft(draft), as_target(target), start) == row.tokens[1:]
    metrics, stats = decoder.metrics, compiled.stats
    assert metrics.steps == stats.rounds and metrics.accepted == stats.accepted
    assert 0 < metrics.accepted < metrics.tested == sum(stats.reached_at)


def test_greedy_tokens_and_rounds_are_those_of_the_compiled_loop():
    target = testing.mock_model(16, seed=1)
    noise = testing.toy_params(16, seed=2, scale=0.5)["logits"]
    near = dataclasses.replace(target, params={"logits": target.params["logits"] + noise})
    check_agreement(target, near, [[1, 2], [7], [3, 3, 9]], k=3, num_tokens=20)


@pytest.mark.exhaustive
def test_greedy_tokens_and_rounds_of_the_zoo_are_those_of_the_compiled_loop():
    target, draft = spec_jax.load_model("zoo/target"), spec_jax.load_model("zoo/draft")
    check_agreement(target, draft, ["def add(a, b):", "import os\n"], k=4, num_tokens=24)


def test_the_page_quotes_both_rounds_as_they_are():
    page = pathlib.Path(__file__).parents[1] / "docs" / "how_it_works.md"
    quotes = page.read_text(encoding="utf-8").split("```python\n")[1:]
    for quote, function in zip(quotes, (SpeculativeDecoder.decode_round, decode_round)):
        source = textwrap.dedent(inspect.getsource(function))
        body = textwrap.dedent(source[source.index("    proposal") :])
        assert quote.split("```")[0] == body
