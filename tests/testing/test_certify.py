"""One certificate: each defect is found by one of its checks, and what is right passes.

Each defect also says where it shows: after which text, and how probable a token is and should be.
What is right and passes as a whole: the pages of docs (``tests/test_docs.py``).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.rounds import force, run_of
from support.decoders import changed_draft, mutant

import spec_jax
from spec_jax import rng, sampling, testing
from spec_jax.contracts import Rule, Verdict
from spec_jax.decoding import round as decode_round
from spec_jax.drafters.early_exit import early_exit
from spec_jax.drafters.standalone.model import standalone
from spec_jax.errors import ConfigError
from spec_jax.rules import batched, chain
from spec_jax.testing import CertificateError
from spec_jax.testing.certificate import certify as certification
from spec_jax.testing.certificate.forcing import (
    DRAFT_SEED,
    mixed_lengths,
    truncate_drafts,
    with_confidence,
)

WHERE = r"after the prompt \(.*\) and the output \(.*\), token \d has probability (1 - )?\d\.\d+"


def refused(words: str, check, *args) -> None:
    with pytest.raises(CertificateError, match=words):
        check(*args)


def lossless(accept_row) -> Rule:
    return Rule("mutant", batched(accept_row), is_lossless=True, needs_probs=True)


@functools.cache
def small_rounds():
    """Rounds of two drafts in three settings, forced."""
    return force(None, 2, 3, batch=512)


def test_one_round_of_the_default_drafter_is_proved_for_every_number_of_drafts():
    """The heart of a certificate, without the loop: one small round, whole and cut."""
    forced = small_rounds().forced
    for some in (forced, truncate_drafts(forced, 1), *mixed_lengths(forced)):
        np.testing.assert_allclose(some.weights.sum(), 9, rtol=1e-5)  # of 9 texts
        found = small_rounds().check("residual", some)
        assert found.error <= 1e-6 and found.num_outcomes >= 20 and found.p_value is None
    doubled = forced._replace(logits=forced.logits * 2)  # the rule is told another target
    with pytest.raises(CertificateError, match=WHERE):
        small_rounds().check("residual", doubled)


def reads_noise_backwards(sharpness):
    """Draws its last token with noise in another order, from a power of what it states."""

    def accept(target, proposal, noise):
        verdict = chain.residual(target, proposal, noise)
        scores = sharpness * jnp.log(verdict.replacement)
        token = sampling.sample(scores, noise.gumbel[0, ::-1])
        is_last = jnp.arange(len(verdict.tokens)) == verdict.n_accept
        return verdict.replace(tokens=jnp.where(is_last, token, verdict.tokens))

    return lossless(accept)


def test_a_rule_may_read_its_noise_in_any_order():
    found = small_rounds().check(reads_noise_backwards(1.0))
    assert found.error <= 1e-6 and found.p_value > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharpness", [0.8, 1.25, 1e9])
def test_a_rule_that_reads_its_noise_in_another_order_must_draw_from_its_replacement(sharpness):
    with pytest.raises(CertificateError, match="does not draw from its replacement"):
        small_rounds().check(reads_noise_backwards(sharpness))


@pytest.mark.exhaustive
def test_the_certificate_says_that_rare_last_tokens_were_only_drawn():
    run = run_of(reads_noise_backwards(1.0), num_rows=3)
    run._enumerate(run.main, 1)
    assert run.checks[-1].p_value > 1e-3 and "p-value" in str(run.checks[-1])
    assert any("rare last tokens of mutant" in text for text in run.certificate(None).not_proved)


def test_a_rule_that_is_wrong_in_a_batch_of_one_is_refused():
    def accept(target, proposal, noise):
        if len(proposal.tokens) == 1:
            target = target.replace(processed=target.processed[:, ::-1])
        return batched(chain.residual)(target, proposal, noise)

    rule = lossless(chain.residual)._replace(accept=accept)
    with pytest.raises(CertificateError, match=r"for a row in a batch of one.*with the same noise"):
        small_rounds().check(rule)


def test_a_rule_whose_rows_are_offered_what_the_longest_is_is_refused():
    def accept(target, proposal, noise):
        longest = jnp.broadcast_to(proposal.n_draft.max(), proposal.n_draft.shape)
        offered = proposal.replace(n_draft=longest)
        return batched(chain.residual)(target, offered, noise)

    rule = lossless(chain.residual)._replace(accept=accept)
    small_rounds().check(rule)  # all rows have as many
    with pytest.raises(CertificateError, match="for a row in a batch of one"):
        for some in mixed_lengths(small_rounds().forced):
            small_rounds().check(rule, some)


@pytest.mark.exhaustive
def test_a_rule_that_drops_a_block_where_a_later_confidence_is_low_is_refused():
    def drop(number):
        """As ``residual``, but offers nothing where this confidence is low."""

        def accept(target, proposal, noise):
            if proposal.confidence is None:
                return chain.residual(target, proposal, noise)
            n_draft = jnp.where(proposal.confidence[number] < 0.4, 0, proposal.n_draft)
            return chain.residual(target, proposal.replace(n_draft=n_draft), noise)

        return lossless(accept)

    forced = with_confidence(small_rounds().forced)
    assert small_rounds().check(drop(0), forced).error <= 1e-6  # known before anything is drafted
    small_rounds().check(drop(1))
    with pytest.raises(CertificateError, match=WHERE):
        small_rounds().check(drop(1), forced)
    run = run_of(drop(1), num_rows=3)
    with pytest.raises(CertificateError, match=WHERE + ".*K=3"):
        run._enumerate(run.main, 3)


def test_a_vocabulary_that_is_too_large_says_what_to_pass():
    with pytest.raises(ConfigError, match=r"1000 ids.*make\(target\)"):
        spec_jax.certify(drafter=standalone(testing.toy_model(1000)))


def at_another_temperature(proposal, context):
    return proposal.replace(probs=jax.nn.softmax(jnp.log(proposal.probs) / 1.3, axis=-1))


def no_number_at_temperature_0(proposal, context):
    t = context.sampler.temperature[:, None, None]
    return proposal.replace(probs=proposal.probs * t / t)


def stops_by_its_own_token(proposal, context):
    own = jnp.take_along_axis(proposal.probs, proposal.tokens[:, :, None], axis=2)[:, :, 0]
    n_draft = jnp.cumprod(own >= 0.35, axis=1).sum(axis=1, dtype=jnp.int32)
    return proposal.replace(n_draft=n_draft)


def depends_on_the_draw(proposal, context):
    return proposal.replace(probs=jax.nn.one_hot(proposal.tokens, proposal.probs.shape[2]))


def keeps_a_rejected_draft(target):
    honest = standalone(target.model)

    def commit(params, state, tokens, n, features, path):
        return honest.commit(params, state, tokens, jnp.minimum(n + 1, 3), features, path)

    return honest._replace(name="mutant", commit=commit)


def reads_what_was_rejected(target):
    """A draft that reads the target's cache, and offers as many drafts as a slot past it says."""
    honest = early_exit(target.model, 1)

    def propose(params, state, context, num_draft):
        proposal, state = honest.propose(params, state, context, num_draft)
        cache = context.target.cache
        after = jnp.take_along_axis(cache.tokens, cache.length[:, None] + 1, axis=1)[:, 0]
        return proposal.replace(n_draft=jnp.minimum(num_draft, 1 + after)), state

    return honest._replace(name="mutant", propose=propose)


def with_seed(context, seed):
    return context._replace(sampler=context.sampler.replace(seed=seed))


def seed_of_a_place(params, context, num_draft):
    place = jnp.arange(len(context.length), dtype=jnp.uint32)
    return with_seed(context, context.sampler.seed + place)


def seed_of_a_sampler(params, context, num_draft):
    """That of the draft sampler, where there is one."""
    seed = context.sampler.seed
    return with_seed(context, jnp.where(seed == context.request, seed, DRAFT_SEED))


AT_0 = r".*draft temperature 0\.0"
PROPOSALS = {
    at_another_temperature: r"draws token \d with probability 0\.\d+ .* reports",
    no_number_at_temperature_0: "(nan|stops the row)" + AT_0,
    stops_by_its_own_token: WHERE,
    depends_on_the_draw: "the report may not depend on the draw",
}


def bonus_is_an_argmax(is_stated):
    def accept(target, proposal, noise):
        verdict = chain.residual(target, proposal, noise)
        p = target.probs[verdict.n_accept]
        token, is_bonus = sampling.argmax(p), verdict.n_accept == proposal.n_draft
        is_last = jnp.arange(len(verdict.tokens)) == verdict.n_accept
        verdict = verdict.replace(tokens=jnp.where(is_last & is_bonus, token, verdict.tokens))
        if not is_stated:  # it says that it draws
            return verdict
        point = jax.nn.one_hot(token, len(p))
        return verdict.replace(replacement=jnp.where(is_bonus, point, verdict.replacement))

    return accept


def greedy_as_its_draft_is(target, proposal, noise):
    if proposal.probs is None:
        return chain.residual(target, proposal, noise)
    is_greedy = proposal.probs.max() > 0.999
    sampled, greedy = (f(target, proposal, noise) for f in (chain.residual, chain.greedy))
    return jax.tree.map(lambda x, y: jnp.where(is_greedy, x, y), greedy, sampled)


def accepts_draft(number: int) -> Rule:
    def accept(target, proposal, noise):
        """Accepts this draft always, if it is reached."""
        K = proposal.tokens.shape[0]
        is_it = (jnp.arange(K) == number - 1) & proposal.is_offered
        drafts = jnp.arange(K), proposal.tokens
        is_it &= target.probs[drafts] > 0
        noise = noise.replace(uniforms=jnp.where(is_it, 0.0, noise.uniforms))
        verdict = chain.residual(target, proposal, noise)
        return verdict.replace(accept_probs=jnp.where(is_it, 1.0, verdict.accept_probs))

    return lossless(accept)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [3, 4])
def test_a_rule_that_is_wrong_at_one_draft_only_is_caught(number):
    run = run_of(accepts_draft(number))
    run._enumerate(run.main, number - 1)
    refused(rf"{WHERE}.*\(K={number},", run._enumerate, run.main, number)


@pytest.mark.exhaustive
def test_the_loop_tests_the_drafts_of_a_vocabulary_that_is_too_large_to_enumerate():
    """Of 30 tokens no table holds a joint distribution, and rounds of 2 drafts are not proved."""
    run = run_of(accepts_draft(2), standalone(testing.toy_model(30)))
    with pytest.raises(CertificateError, match=r"mean probability 0\.08\d+, .* 0\.09\d+ \("):
        run._loop(run.main)
    assert [c.what[:8] for c in run.checks if c.method == "chi-square"] == ["tokens 2"]


@pytest.mark.exhaustive
def test_a_greedy_row_of_the_loop_that_is_drawn_at_its_drafts_temperature_is_caught(monkeypatch):
    honest = decode_round.verify

    def verify(params, state, proposal, system):
        own = state.sampler
        temperature = jnp.where(own.is_greedy, state.draft_sampler.temperature, own.temperature)
        warm = state.replace(sampler=own.replace(temperature=temperature))
        scores, state = honest(params, warm, proposal, system)
        return scores, state.replace(sampler=own)

    monkeypatch.setattr(decode_round, "verify", verify)
    run = run_of(num_rows=None)
    refused(r"chi-square.*should have [01]\.000.*temperature 0\.0", run._loop, run.main)


def eager(target):
    """As right as the drafter that it wraps: it offers as many drafts as were accepted, and one."""
    honest = standalone(target.model)

    def propose(params, state, context, num_draft):
        proposal, draft = honest.propose(params, state[0], context, num_draft)
        return proposal.replace(n_draft=jnp.minimum(num_draft, state[1])), (draft, state[1])

    def commit(params, state, tokens, n, features, path):
        return honest.commit(params, state[0], tokens, n, features, path), jnp.maximum(n, 1)

    options = dict(
        init=lambda params, batch, slots: (
            honest.init(params, batch, slots),
            jnp.ones((batch,), jnp.int32),
        ),
        prefill=lambda params, state, *args: (honest.prefill(params, state[0], *args), state[1]),
    )
    return honest._replace(name="eager", propose=propose, commit=commit, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("has_memory", [True, False])
def test_a_drafter_that_remembers_more_than_the_text_is_certified_if_that_is_said(has_memory):
    run = run_of(make=eager, has_memory=has_memory)
    if not has_memory:
        with pytest.raises(CertificateError, match="pass has_memory=True"):
            run._loop(run.main)
        return
    run._loop(run.main)
    assert {check.method for check in run.checks} >= {"chi-square", "mean probability"}
    assert "the memory of eager" in str(run.certificate(None))


@pytest.mark.exhaustive
def test_drafts_that_requests_of_one_draft_sampler_share_are_caught():
    run = run_of(make=mutant(seed_of_a_sampler))
    with pytest.raises(CertificateError, match="chi-square.*measured in"):
        run._loop(run.main)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_draft_that_reads_the_targets_cache_is_certified_unless_it_writes_there(
    is_damaged, monkeypatch
):
    honest = decode_round.draft

    def damaged(params, state, system):
        """As ``round.draft``, but the first token of the target's cache is another one."""
        proposal, state = honest(params, state, system)
        tokens = state.target.tokens
        tokens = tokens.at[:, 0].set((tokens[:, 0] + 1) % 3)
        return proposal, state.replace(target=state.target.replace(tokens=tokens))

    run = run_of(make=lambda target: early_exit(target.model, 1))
    if is_damaged:
        monkeypatch.setattr(decode_round, "draft", damaged)
        refused("fresh prefill|has probability", run._loop, run.main)
        return
    run._enumerate(run.main, 1)
    run._loop(run.main)
    assert run.certificate(None).max_error <= 1e-6


@pytest.mark.exhaustive
def test_top_p_before_temperature_is_caught(monkeypatch):
    def process(logits, sampler, drafted, is_before, *, is_argmax):
        """As ``sampling.process_rows``, but the filters see the logits before the temperature."""
        warm = sampler.replace(filters=None)
        x = honest(logits, warm, drafted, is_before, is_argmax=is_argmax)
        if is_argmax or sampler.filters is None:
            return x
        t = jnp.where(sampler.is_greedy, 1.0, sampler.temperature)[:, None, None]
        before = jax.lax.optimization_barrier(x * t)
        return jnp.where(sampling.is_dropped(before, sampler.filters), -jnp.inf, x)

    honest = sampling.process_rows
    monkeypatch.setattr(sampling, "process_rows", process)
    with pytest.raises(CertificateError, match=WHERE + ".*top_p") as caught:
        spec_jax.certify()
    certificate = caught.value.certificate
    assert certificate.failure == str(caught.value) and "No certificate" in str(certificate)
    assert "failed" in repr(certificate)


@pytest.mark.exhaustive
def test_noise_reused_between_draft_and_residual_is_caught(monkeypatch):
    pack = rng.pack

    def shared(purpose, node):
        is_own = purpose != rng.Purpose.REPLACE
        return pack(purpose, node) if is_own else pack(rng.Purpose.DRAFT, 1)

    monkeypatch.setattr(rng, "pack", shared)
    run = run_of(num_rows=None, trials=4_000)
    refused("chi-square.*measured in", run._loop, run.main)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_biased", [False, True])
def test_a_drafter_with_noise_of_its_own_is_compared_with_its_report(is_biased, monkeypatch):
    """It cannot be forced, so the rule is enumerated with another, and the certificate says so."""
    monkeypatch.setattr(certification, "_PLACES", 16)  # Python is called for every row

    def drafts(prefix, k, seed):
        q = np.full((k, 3), 0.25)
        q[:, prefix[-1]] = 0.5
        draw = np.random.default_rng(seed)
        return [int(draw.choice(3, p=None if is_biased else row)) for row in q], q

    host = spec_jax.host_drafter(drafts, is_sampled=True, vocab_size=3)
    run = run_of(make=host)
    run._enumerate(run.main, 1)
    if is_biased:
        refused(r"host.* draws token \d with probability 0\.[23]\d+ .* reports 0", run._draws)
        return
    run._draws()
    run._loop(run.main)
    certificate = run.certificate(None)
    assert certificate.max_error <= 1e-6
    assert any("Context.gumbel" in text for text in certificate.not_proved)


@pytest.mark.exhaustive
def test_a_rule_that_emits_plain_decodings_tokens_is_certified_by_equality():
    make = lambda target: standalone(target.model)  # its parameters are another toy's
    certificate = spec_jax.certify("match", make, trials=300)
    equal = [check.what for check in certificate.checks if check.method == "equality"]
    assert sum("of plain decoding" in what for what in equal) == 5  # one pads, three are long texts
    assert certificate.failure is None and 1e-6 < certificate.min_p_value


def emits_argmax(dtype, *, margin=0.0, is_coupled=False):
    """Emits the argmax of scores of another dtype, or accepts what nearly is it."""

    def accept(target, proposal, noise):
        scores = target.processed + (noise.gumbel if is_coupled else 0.0)
        scores = scores.astype(dtype)
        own = jnp.argmax(scores, axis=-1)
        of_draft = jnp.take_along_axis(scores[:-1], proposal.tokens[:, None], axis=1)[:, 0]
        is_near = of_draft >= scores.max(axis=-1)[:-1] - margin
        is_accepted = (is_near if margin else proposal.tokens == own[:-1]) & proposal.is_offered
        n_accept = jnp.cumprod(is_accepted.astype(jnp.int32)).sum()
        dist = jax.nn.one_hot(own[n_accept], scores.shape[-1])
        drafts = jnp.append(proposal.tokens, 0)
        index = jnp.arange(len(drafts))
        tokens = jnp.where(index == n_accept, own[n_accept], jnp.where(index < n_accept, drafts, 0))
        return Verdict(n_accept, tokens, is_accepted.astype(jnp.float32), dist)

    rule = Rule("mutant", batched(accept), is_lossless=True)
    return rule._replace(is_coupled=is_coupled, is_greedy=not is_coupled)


def enumerate_drafts(run):
    run._enumerate(run.main, 1)


def loop(run):
    run._loop(run.main)


IS_ARGMAX = r"token \d should be \d as decoded by plain decoding"
NOT_FRESH = "not that of a fresh prefill"
# What is wrong, the check that finds it, and what that says.
DRAFTERS = {
    **{f.__name__: (changed_draft(f), enumerate_drafts, words) for f, words in PROPOSALS.items()},
    "keeps a rejected draft": (keeps_a_rejected_draft, loop, NOT_FRESH),
    "reads what was rejected": (reads_what_was_rejected, loop, NOT_FRESH),
    "reads its place": (mutant(seed_of_a_place), loop, "in another place of the batch"),
}
RULES = {
    "a bonus is an argmax": (lossless(bonus_is_an_argmax(True)), enumerate_drafts, WHERE),
    "a bonus seems drawn": (lossless(bonus_is_an_argmax(False)), enumerate_drafts, WHERE),
    "greedy as its draft": (lossless(greedy_as_its_draft_is), enumerate_drafts, WHERE + AT_0),
    "bfloat16": (emits_argmax(jnp.bfloat16), loop, IS_ARGMAX),
    "bfloat16, coupled": (emits_argmax(jnp.bfloat16, is_coupled=True), loop, IS_ARGMAX),
    "margin": (emits_argmax(jnp.float32, margin=1e-3), loop, IS_ARGMAX),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("defect", [*DRAFTERS, *RULES])
def test_a_part_with_one_defect_is_caught(defect):
    part, check, words = (DRAFTERS | RULES)[defect]
    options = dict(make=part) if defect in DRAFTERS else dict(rule=part)
    refused(words, check, run_of(**options, num_rows=None))
