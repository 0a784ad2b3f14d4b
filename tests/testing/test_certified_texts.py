"""The certificate's long texts: drafters that are wrong only with noise of their own.

Each is right in every round whose noise is forced, and close to right where its last drafts are
seldom read.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.rounds import run_of
from support.decoders import mutant

from spec_jax import rng
from spec_jax.config import SamplerConfig
from spec_jax.decoding import Kind
from spec_jax.drafters.standalone.model import standalone
from spec_jax.named import to_rule
from spec_jax.testing import CertificateError, toy_params
from spec_jax.testing.certificate.certify import _TEXT
from spec_jax.testing.certificate.loop import check_texts
from spec_jax.testing.oracles import Row
from spec_jax.tree import Tree


def warm_where(factor):
    """Draws at ``factor(params, context, num_draft)`` times the temperature that it reports."""

    def see(params, context, num_draft):
        warm = context.sampler.temperature * factor(params, context, num_draft)
        return context._replace(sampler=context.sampler.replace(temperature=warm))

    def cool(proposal, params, context, num_draft):
        times = jnp.broadcast_to(factor(params, context, num_draft), context.length.shape)
        logits = jnp.log(proposal.probs) * times[:, None, None]
        return proposal.replace(probs=jax.nn.softmax(logits, axis=-1))

    return mutant(see, cool)


def with_half_seeds(params, context, num_draft):
    sampler = context.sampler
    return context._replace(sampler=sampler.replace(seed=sampler.seed // 2))


def with_noise_by_position(params, context, num_draft):
    def draw(i):
        at = rng.keys(context.sampler.seed, rng.Purpose.DRAFT, context.length + i)
        return rng.gumbel(at, 3)

    if context.gumbel is not None:
        return context
    return context._replace(gumbel=jnp.stack([draw(i + 1) for i in range(num_draft)], axis=1))


def offer_last_by_its_coin(proposal, params, context, num_draft):
    keys = rng.keys(context.request, rng.Purpose.ACCEPT, context.length)
    is_dropped = rng.uniform(keys, num_draft)[:, -1] >= 0.5
    return proposal.replace(n_draft=num_draft - is_dropped.astype(jnp.int32))


def warm_at_2_drafts(params, context, num_draft):
    return 1.6 if num_draft == 2 and context.gumbel is None else 1.0


def warm_from(params, context, num_draft):
    return jnp.where(context.length >= params["from"], 1.6, 1.0)


def test_a_certificate_has_every_check():
    texts = [f"texts with {k} drafts" for k in (4, 2, 1)]
    rounds = ["1 drafts", "draws of the drafter", "2 drafts", "3 drafts", "4 drafts"]
    others = ["drafts of scripted", "drafts of tree"]
    rest = ["a padded vocabulary", "a memory", "the compiled loop"]
    assert [what for what, _ in run_of("residual").steps] == [*rounds, *others, *rest, *texts]
    assert [what for what, _ in run_of("match").steps][-3:] == texts
    make = lambda target: standalone(target.model, Tree((0, 0, 1)))
    assert [what for what, _ in run_of(make=make).steps][-2:] == [
        "the compiled loop",
        "texts with 3 drafts",
    ]


MUTANTS = {
    "noise by position": (mutant(with_noise_by_position), "block", 2, "after a round with 0"),
    "noise by half of the seed": (mutant(with_half_seeds), "residual", 1, "of neighbouring seeds"),
    "the last draft by its coin": (mutant(change=offer_last_by_its_coin), "residual", 2, "should"),
    "warm at K = 2": (warm_where(warm_at_2_drafts), "residual", 2, "should be with"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MUTANTS)
def test_a_drafter_that_is_wrong_with_its_own_noise_is_refused(name):
    make, rule, num_draft, match = MUTANTS[name]
    with pytest.raises(CertificateError, match=match):
        run_of(rule, make, None)._text(num_draft)


@pytest.mark.exhaustive
def test_a_drafter_that_is_wrong_from_some_length_on_is_refused():
    params = {**toy_params(3, 1), "from": jnp.int32(_TEXT + 9)}
    run = run_of(make=warm_where(warm_from), num_rows=None, params=params)
    run._text(4)  # all texts are shorter
    assert run.checks[-1].p_value > 1e-4 and run.checks[-1].trials >= 10**5
    for n in (0, 1, 5, 16, 31, 32):
        run._near.params["draft"]["from"] = jnp.int32(n)
        with pytest.raises(CertificateError, match=r"tokens \d+ to \d+ after|the first token"):
            run._text(4)
    assert f"texts of more than {_TEXT + 1} tokens" in run.certificate(None).not_proved


@pytest.mark.exhaustive
def test_a_coupled_rule_that_is_wrong_in_a_batch_of_one_is_refused():
    honest = to_rule("match")

    def accept(target, proposal, noise):
        if proposal.tokens.shape[0] == 1:
            noise = noise.replace(gumbel=noise.gumbel[:, :, ::-1])
        return honest.accept(target, proposal, noise)

    run = run_of(honest._replace(accept=accept), num_rows=None)
    run._text(1)
    with pytest.raises(CertificateError, match="as decoded by plain decoding"):
        run._text(1, is_last=True)


@pytest.mark.exhaustive
def test_a_drafter_that_is_wrong_in_a_batch_of_one_is_refused():
    alone = lambda params, context, num_draft: 1.6 if len(context.length) == 1 else 1.0
    run = run_of(make=warm_where(alone), num_rows=None)
    with pytest.raises(CertificateError, match="proposes other drafts in a batch of one"):
        run._loop(run.main)


def chains(num_rows=1500, wrong_from=99, is_shared=False, is_late=False):
    """Texts of a chain of second order, and random ends of rounds: tokens, kinds and logits."""
    draw, logits = np.random.default_rng(0), np.random.default_rng(1).normal(size=(3, 3, 3))
    tokens = draw.integers(0, 3, (num_rows, 1))
    before = np.full(num_rows, 2)
    kinds = draw.choice((Kind.ACCEPTED, Kind.CORRECTED), (num_rows, _TEXT + 1))
    for t in range(_TEXT):
        gumbel = draw.gumbel(size=(num_rows, 3))
        if is_shared:
            gumbel = np.where(
                draw.random((num_rows, 1)) < 0.2, np.repeat(gumbel[::2], 2, 0), gumbel
            )
        is_wrong = np.full(num_rows, t >= wrong_from)
        if is_late:  # after a round that has accepted nothing
            is_wrong |= (kinds[:, max(t - 1, 0) : t + 1] == Kind.CORRECTED).all(axis=1)
        warm = logits[before, tokens[:, -1]] / np.where(is_wrong, 1.5, 1.0)[:, None]
        before, token = tokens[:, -1], (warm + gumbel).argmax(axis=1)
        tokens = np.concatenate([tokens, token[:, None]], axis=1)
    return tokens, kinds, lambda text: logits[text[-2], text[-1]]


WRONG = {
    "late tokens": (dict(wrong_from=32), "tokens 34 to 41 after"),
    "neighbours": (dict(is_shared=True), "of neighbouring seeds agree with"),
    "rounds": (dict(is_late=True), "first token after a round with 0 accepted drafts, corrected,"),
}


@pytest.mark.representatives("None", "rounds")
@pytest.mark.parametrize("name", [None, *WRONG])
def test_texts_are_tested_by_place_by_round_and_with_their_neighbours(name):
    options, match = WRONG.get(name, ({}, ""))
    tokens, kinds, logits_of = chains(**options)
    row = Row((2,), SamplerConfig(temperature=1.0), SamplerConfig())
    system = SimpleNamespace(num_draft=4)
    loop = SimpleNamespace(name="chains", system=system, logits_of=logits_of)
    check = lambda: check_texts(loop, tokens, kinds, row)
    if name is None:
        assert check() > 1e-3
        return
    with pytest.raises(CertificateError, match=match):
        check()
