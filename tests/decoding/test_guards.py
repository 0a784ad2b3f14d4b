"""Nothing wrong passes silently: drafters and rules that break their contract, ours too.

What can be seen in shapes is refused while tracing, what shows in numbers ends its row with a
reason. Most is tested on the guards' own functions, a case a row, without a loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import rule
from support.trees import BUSH

from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, decoding, testing
from spec_jax.contracts import Context, Noise, Proposal, Rule, TargetScores, Verdict
from spec_jax.decoding import Finish
from spec_jax.decoding.validate import find_fault, validate_proposal, validate_verdict
from spec_jax.drafters.model_free import model_free
from spec_jax.engine.queue import DecodeQueue
from spec_jax.errors import InvalidDraftError, InvalidVerdictError
from spec_jax.rules import batched, chain
from spec_jax.sampling import sample

V, K = 11, 3
PROMPTS = [[1, 2, 3], [4, 5], [9], [2, 7, 1]]
HOT, COLD = SamplerConfig(1.0), SamplerConfig(0.0)
CONFIG = SpeculativeConfig(num_speculative_tokens=K, rejection_sampling_strategy="residual")


def careless(divide_by=lambda sampler: sampler.temperature):
    """Draws bigrams of a table, by the row's temperature, which it divides by whatever it is."""

    def propose(params, state, context: Context, num_draft: int):
        rows = jnp.arange(len(context.length))
        token = context.tokens[rows, context.length]
        tokens, probs = [], []
        for node in range(num_draft):
            logits = params["logits"][token] / divide_by(context.sampler)[:, None]
            noise = jax.vmap(
                lambda seed, at: jax.random.gumbel(
                    jax.random.fold_in(jax.random.key(seed), at), (V,)
                )
            )(context.sampler.seed, context.length + 1000 * node)
            probs.append(jax.nn.softmax(logits))
            token = sample(logits, noise)
            tokens.append(token)
        n = jnp.full(context.length.shape, num_draft, jnp.int32)
        return Proposal(jnp.stack(tokens, 1), n, probs=jnp.stack(probs, 1)), state

    return model_free("careless", propose, V)._replace(is_sampled=True)


def careless_decoder(samplers, **options):
    """The likeliest token's logit is 0: divided by temperature 0 it is NaN, and that is drafted.

    After every other token it is the target's own.
    """
    target, draft = testing.mock_model(V, 0, contexts=V), testing.mock_model(V, 1, contexts=V)
    table = target.params["logits"]
    table = jnp.where(jnp.arange(V)[:, None] % 2 == 0, table, jnp.roll(table, 1, axis=1))
    draft.params["logits"] = table - table.max(axis=1, keepdims=True)
    settings = dict(drafter=careless(**options), target_sampler=samplers)
    return SpeculativeDecoder(
        target, draft, SpeculativeConfig("standalone", K, "residual"), **settings
    )


@pytest.mark.exhaustive
def test_rows_of_temperature_0_never_read_what_their_drafts_were_drawn_from():
    """The drafter reports NaN there; the tokens are plain decoding's, stop tokens too."""
    decoder = careless_decoder([COLD, HOT, COLD, COLD])
    plain = SpeculativeDecoder(decoder.target)
    for stops in ((0,), ()):
        rows = decoder.generate(PROMPTS, 24, stop_tokens=stops)
        for row in (0, 2, 3):
            expected = plain.generate(PROMPTS[row], 24, stop_tokens=stops, pad_to=16)
            assert rows[row].tokens == expected.tokens
            assert rows[row].finish_reason == expected.finish_reason
        assert rows[1].finish_reason in ("length", "stop_token")
    counted = [rows[row].stats for row in (0, 2, 3)]
    assert sum(s.accepted for s in counted) > 0 < sum(s.corrected for s in counted)


def test_a_distribution_of_nan_stops_its_row_and_names_the_drafter(caplog):
    decoder = careless_decoder(
        [HOT, SamplerConfig(1.0, seed=1)], divide_by=lambda s: jnp.where(s.seed == 0, 0.0, 1.0)
    )
    with pytest.raises(InvalidDraftError, match=r"'careless'.*\.probs.*rows \[0\]") as error:
        decoder.generate(PROMPTS[:2], 9)
    stopped, complete = error.value.generations
    assert (stopped.finish_reason, len(stopped.tokens)) == ("invalid_draft_probs", 1)
    assert (complete.finish_reason, len(complete.tokens)) == ("length", 9)
    rows = DecodeQueue(
        decoder, enumerate(PROMPTS[:2]), batch=2, max_prompt_tokens=3, max_new_tokens=9
    )
    assert {i: row.finish_reason for i, row in rows} == {0: "invalid_draft_probs", 1: "length"}
    assert "drafter 'careless' returned Proposal.probs" in caplog.text
    assert "prompt 0, which stopped there" in caplog.text


# ------------------------------------------------------------------------ proposals, by row

FAIR = np.full(V, 1 / V, np.float32)
SYSTEM = decoding.System(testing.toy_model(V), careless(), rule("residual"), K)


def changed(value, at=5):
    row = FAIR.copy()
    row[at] = value
    return row


CASES = {
    "fair": FAIR,
    "nearly normal": FAIR * 1.002,
    "nan": changed(np.nan),
    "infinite": changed(np.inf),
    "minus infinity": changed(-np.inf),
    "negative": changed(-0.05),
    "negative, of sum one": FAIR + np.eye(V, dtype=np.float32)[3] - np.eye(V, dtype=np.float32)[4],
    "half": FAIR / 2,
    "zero": 0 * FAIR,
    "not its own": np.eye(V, dtype=np.float32)[7],
}
SOUND = ("fair", "nearly normal")


def proposal_of(rows, position, **changes):
    """A proposal whose drafts have fair distributions, but for the one at ``position``."""
    probs = np.tile(FAIR, (len(rows), K, 1))
    probs[:, position] = np.stack(list(rows))
    tokens = jnp.ones((len(rows), K), jnp.int32)
    n_draft = jnp.full(len(rows), K, jnp.int32)
    return Proposal(tokens, n_draft, probs=jnp.asarray(probs)).replace(**changes)


def probs_faults(proposal, is_greedy=False, system=SYSTEM):
    flags = jnp.full(len(proposal.n_draft), is_greedy)
    return np.asarray(validate_proposal(proposal, system, flags).fault)


@pytest.mark.parametrize("position", [0, K - 1])
def test_what_is_no_distribution_ends_a_row_that_is_sampled_and_offers_it(position):
    proposal = proposal_of(CASES.values(), position)
    wanted = [0 if name in SOUND else Finish.INVALID_DRAFT_PROBS for name in CASES]
    assert probs_faults(proposal).tolist() == wanted
    fewer = proposal.replace(n_draft=jnp.full(len(CASES), position, jnp.int32))
    assert not probs_faults(fewer).any()  # not offered
    assert not probs_faults(proposal, is_greedy=True).any()
    unread = SYSTEM._replace(rule=rule("match"))
    assert not probs_faults(proposal, system=unread).any()


def test_on_a_tree_a_node_without_children_needs_no_distribution_and_zeros_are_free_choices():
    options = dict(parents=jnp.tile(jnp.asarray([0, 0, 1]), (len(CASES), 1)), tree_depth=2)
    shape = dict(tokens=jnp.tile(jnp.asarray([1, 2, 3]), (len(CASES), 1)), **options)
    sound = (*SOUND, "zero", "not its own")
    wanted = [0 if name in sound else Finish.INVALID_DRAFT_PROBS for name in CASES]
    assert probs_faults(proposal_of(CASES.values(), 0, **shape)).tolist() == wanted
    assert probs_faults(proposal_of(CASES.values(), 1, **shape)).tolist() == wanted
    assert not probs_faults(proposal_of(CASES.values(), 2, **shape)).any()  # a leaf


def test_greedy_rows_are_given_point_masses_and_others_what_was_reported():
    proposal = proposal_of([FAIR, FAIR], 0, tokens=jnp.asarray([[1, 2, 3], [4, 5, 6]]))
    given = validate_proposal(proposal, SYSTEM, jnp.asarray([True, False])).probs
    np.testing.assert_array_equal(given[0], np.eye(V)[[1, 2, 3]])
    np.testing.assert_array_equal(given[1], proposal.probs[1])


@pytest.mark.parametrize("name", ["residual", "traversal"])
@pytest.mark.parametrize("parents", [None, BUSH.parents], ids=["chain", "tree"])
def test_a_rule_takes_the_argmax_in_greedy_rows_whatever_was_reported(name, parents):
    """The greedy rule needs no distributions: it is the oracle."""
    draw, size = np.random.default_rng(3), 64
    num_draft = K if parents is None else len(parents)
    processed = np.where(np.eye(V)[draw.integers(0, 3, (size, num_draft + 1))] > 0, 0.0, -np.inf)
    scores = TargetScores(*[jnp.asarray(processed, jnp.float32)] * 2)
    proposal = Proposal(
        jnp.asarray(draw.integers(0, 3, (size, num_draft)), jnp.int32),
        jnp.asarray(draw.integers(0, num_draft + 1, size), jnp.int32),
        probs=jnp.full((size, num_draft, V), jnp.nan),
        parents=None if parents is None else jnp.tile(jnp.asarray(parents), (size, 1)),
        tree_depth=0 if parents is None else BUSH.depth,
    )
    noise = Noise(
        jnp.asarray(draw.random((size, num_draft)), jnp.float32),
        jnp.asarray(draw.gumbel(size=(size, 1, V)), jnp.float32),
    )
    system = SYSTEM._replace(rule=rule(name), num_draft=num_draft)
    guarded = validate_proposal(proposal, system, jnp.ones(size, bool))
    assert not guarded.fault.any()
    found, expected = (jax.jit(rule(of).accept)(scores, guarded, noise) for of in (name, "greedy"))
    np.testing.assert_array_equal(found.n_accept, expected.n_accept)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert int(found.n_accept.max()) > 1


def test_drafts_whose_raw_logits_are_not_finite_are_left_out_where_the_rule_reads_them():
    logits = np.zeros((4, K, V), np.float32)
    logits[1, 0, 3] = np.nan
    logits[2, 1] = -np.inf  # forbidden, and finite
    logits[3, 2, 4] = -np.inf  # an id that only pads
    proposal = proposal_of([FAIR] * 4, 0, logits=jnp.asarray(logits))
    system = SYSTEM._replace(rule=rule("logit-comparison"))
    found = validate_proposal(proposal, system)
    assert found.n_draft.tolist() == [K, 0, 1, K]
    assert found.is_sound.tolist() == [True, False, True, True]
    assert not found.fault.any()
    assert validate_proposal(proposal, SYSTEM).n_draft.tolist() == [K] * 4


def test_a_chain_ends_before_a_dropped_draft_and_has_a_count_all_the_same():
    is_dropped = jnp.arange(K) == jnp.full((3, 1), 1)
    counts = dict(n_draft=jnp.asarray([K, K + 1, -1]), is_dropped=is_dropped)
    found = validate_proposal(proposal_of([FAIR] * 3, 0, **counts), SYSTEM)
    assert found.n_draft.tolist() == [1, 1, 0]
    wanted = [Finish.RUNNING, Finish.INVALID_DRAFT, Finish.INVALID_DRAFT]
    assert found.fault.tolist() == wanted


def test_of_a_tree_what_follows_a_dropped_draft_is_not_offered():
    """Nodes 1 and 2 are children of the root, 3 of node 1."""
    shape = dict(parents=jnp.tile(jnp.asarray([0, 0, 1]), (3, 1)), tree_depth=2)
    dropped = jnp.asarray([[1, 0, 0], [0, 1, 0], [0, 0, 1]], bool)
    found = validate_proposal(proposal_of([FAIR] * 3, 0, is_dropped=dropped, **shape), SYSTEM)
    wanted = [[False, True, False], [True, False, True], [True, True, False]]
    assert found.is_offered.tolist() == wanted
    assert found.levels.tolist() == [1, 2, 1]
    assert found.without(jnp.asarray([[0, 1, 0]] * 3, bool)).levels.tolist() == [0, 2, 1]


def test_a_parent_must_stand_before_its_children():
    parents = jnp.asarray([[0, 0, 1], [0, 0, 5], [0, 2, 1], [-1, 0, 1]])
    proposal = proposal_of([FAIR] * 4, 0, parents=parents, tree_depth=2)
    fault = validate_proposal(proposal, SYSTEM).fault
    assert (fault == Finish.INVALID_DRAFT).tolist() == [False, True, True, True]


# ------------------------------------------------------------------------- verdicts, by row

DRAFTS = [3, 4, 5]
GOOD = dict(n_accept=1, tokens=[3, 8, 0, 0], accept_probs=[1.0, 0.5, 0.5], replacement=FAIR)
VERDICTS = {
    "good": ({}, True),
    "nothing accepted": (dict(n_accept=0, tokens=[8, 0, 0, 0]), True),
    "all accepted": (dict(n_accept=2, tokens=[3, 4, 8, 0]), True),
    "what is after the last token": (dict(tokens=[3, 8, -7, 99]), True),
    "a coin that is not reached": (dict(accept_probs=[1.0, 0.5, np.nan]), True),
    "fewer than none": (dict(n_accept=-1), False),
    "more than there are": (dict(n_accept=4, tokens=[3, 4, 5, 8]), False),
    "what is not offered": (dict(n_accept=3, tokens=[3, 4, 5, 8]), False),
    "another draft": (dict(tokens=[4, 8, 0, 0]), False),
    "no token": (dict(tokens=[3, V, 0, 0]), False),
    "a negative token": (dict(tokens=[3, -1, 0, 0]), False),
    "a coin of nan": (dict(accept_probs=[1.0, np.nan, 0.5]), False),
    "an infinite coin": (dict(accept_probs=[np.inf, 0.5, 0.5]), False),
    "a replacement of nan": (dict(replacement=FAIR * np.nan), False),
    "a token of no probability": (dict(replacement=np.eye(V, dtype=np.float32)[2]), False),
}


FINITE = TargetScores(None, None, is_finite=jnp.ones((1, K + 1), bool))


def validated(cases, proposal, system=SYSTEM, **shared):
    rows = verdicts(cases, **shared)
    nodes = (len(rows.n_accept), K + 1)
    scores = FINITE.replace(is_finite=jnp.broadcast_to(FINITE.is_finite, nodes))
    return validate_verdict(rows, proposal, scores, system)


def verdicts(cases, **shared):
    rows = [{**GOOD, **shared, **changes} for changes in cases]
    column = lambda name, dtype: jnp.asarray(np.stack([row[name] for row in rows]), dtype)
    return Verdict(
        column("n_accept", jnp.int32),
        column("tokens", jnp.int32),
        column("accept_probs", jnp.float32),
        column("replacement", jnp.float32),
        None if "path" not in rows[0] else column("path", jnp.int32),
    )


def drafted(size, **changes):
    """Three drafts, of which two are offered."""
    proposal = Proposal(
        jnp.tile(jnp.asarray(DRAFTS, jnp.int32), (size, 1)),
        jnp.full(size, 2, jnp.int32),
        fault=jnp.zeros(size, jnp.int32),
    )
    return proposal.replace(**changes)


def test_a_verdict_that_cannot_be_ends_its_row_and_is_safe_to_commit():
    proposal = drafted(len(VERDICTS))
    found = validated((c for c, _ in VERDICTS.values()), proposal)
    is_good = np.asarray([good for _, good in VERDICTS.values()])
    wanted = np.where(is_good, Finish.RUNNING, Finish.INVALID_VERDICT)
    assert dict(zip(VERDICTS, found.fault.tolist())) == dict(zip(VERDICTS, wanted.tolist()))
    assert not np.asarray(found.n_accept)[~is_good].any()
    assert not np.asarray(found.tokens)[~is_good].any()


def test_a_rule_that_reads_every_node_must_have_every_coin():
    cases = [VERDICTS[name][0] for name in ("good", "a coin of nan")]
    joint = SYSTEM._replace(rule=rule("block"))
    # Nothing is accepted: the second coin would not be reached.
    found = validated(cases, drafted(2), joint, n_accept=0, tokens=[8, 0, 0, 0])
    assert found.fault.tolist() == [Finish.RUNNING, Finish.INVALID_VERDICT]
    found = validated(cases, drafted(2), n_accept=0, tokens=[8, 0, 0, 0])
    assert not found.fault.any()


def test_a_path_must_lead_from_the_root_over_drafts_that_are_offered():
    """Nodes 1 and 2 are children of the root, 3 of node 1; node 3 is not offered."""
    cases = {
        "to node 2": (dict(tokens=[4, 8, 0], path=[0, 2, 0]), True),
        "nowhere": (dict(n_accept=0, tokens=[8, 0, 0], path=[0, 0, 0]), True),
        "not from the root": (dict(tokens=[4, 8, 0], path=[1, 2, 0]), False),
        "over another's child": (dict(n_accept=2, tokens=[4, 5, 8], path=[0, 2, 3]), False),
        "to what is not offered": (dict(n_accept=2, tokens=[3, 5, 8], path=[0, 1, 3]), False),
        "to no node": (dict(tokens=[5, 8, 0], path=[0, 7, 0]), False),
        "to a node before the root": (dict(tokens=[3, 8, 0], path=[0, -1, 0]), False),
        "with another's token": (dict(tokens=[3, 8, 0], path=[0, 2, 0]), False),
    }
    proposal = drafted(
        len(cases), parents=jnp.tile(jnp.asarray([0, 0, 1]), (len(cases), 1)), tree_depth=2
    )
    found = validated((c for c, _ in cases.values()), proposal)
    wanted = [0 if good else Finish.INVALID_VERDICT for _, good in cases.values()]
    assert dict(zip(cases, found.fault.tolist())) == dict(zip(cases, wanted))
    assert int(found.path.min()) >= 0 and int(found.path.max()) <= K


def test_a_target_without_a_distribution_is_at_fault_before_draft_and_rule_where_it_is_read():
    is_finite = np.ones((7, K + 1), bool)
    is_finite[1:3, 2] = False  # offered, and not emitted from by a verdict that accepts one draft
    is_finite[3, 3] = False  # not offered
    is_finite[4, 1] = is_finite[5, 0] = is_finite[6, 0] = False
    scores = FINITE.replace(is_finite=jnp.asarray(is_finite))
    cases = [{}, {}, {"n_accept": -1}, {"n_accept": -1}, {"replacement": FAIR * np.nan}, {}, {}]
    verdict = validate_verdict(verdicts(cases), drafted(7), scores, SYSTEM)
    fault, num_before = find_fault(scores, drafted(7), verdict)
    running, nan, invalid = Finish.RUNNING, Finish.NAN_TARGET, Finish.INVALID_VERDICT
    assert fault.tolist() == [running, running, invalid, invalid, nan, nan, nan]
    assert num_before.tolist()[2:] == [0, 0, 1, 0, 0]
    faulty = drafted(7, fault=jnp.full(7, Finish.INVALID_DRAFT_PROBS, jnp.int32))
    fault, num_before = find_fault(scores, faulty, verdict)
    probs = Finish.INVALID_DRAFT_PROBS
    assert fault.tolist() == [probs, probs, probs, probs, probs, nan, nan]
    assert not num_before.any()


def test_a_rule_that_divides_by_zero_is_named_and_other_rows_are_whole():
    def accept_row(target, proposal, noise):
        verdict = chain.match(target, proposal, noise)
        p = target.probs[verdict.n_accept]
        rest = jnp.where(p < p.max(), p, 0.0) / jnp.where(proposal.tokens[0] == 1, 0.0, 1.0)
        token = sample(jnp.log(rest), noise.gumbel[0])
        at = jnp.arange(len(verdict.tokens)) == verdict.n_accept
        return verdict.replace(tokens=jnp.where(at, token, verdict.tokens), replacement=rest)

    once = testing.scripted_drafter(lambda tokens, length, K: jnp.tile(tokens[:, :1], (1, K)))
    options = dict(rule=Rule("hasty", batched(accept_row), is_lossless=False), target_sampler=HOT)
    decoder = SpeculativeDecoder(testing.mock_model(V), config=CONFIG, drafter=once, **options)
    with pytest.raises(InvalidVerdictError, match=r"'hasty'.*in rows \[0\]") as error:
        decoder.generate(PROMPTS[:2], 9)
    stopped, complete = error.value.generations
    assert (stopped.finish_reason, len(stopped.tokens)) == ("invalid_verdict", 1)
    assert (complete.finish_reason, len(complete.tokens)) == ("length", 9)
    assert decoder.stats.emitted == 10
