"""Block drafters leave the target's distribution as it is, whatever the step and the rule."""

from __future__ import annotations

import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.block_drafts import toy_config, toy_maker, toy_params

import spec_jax
from spec_jax.config import SamplerConfig
from spec_jax.drafters.block.model import block_drafter
from spec_jax.drafters.common.chain import with_confidence_stop
from spec_jax.named import to_rule
from spec_jax.testing import CertificateError
from spec_jax.testing.certificate.reported import force_all
from spec_jax.testing.certificate.rounds import check_round
from spec_jax.testing.certificate.subjects import certified_rows, make_subject, prefixes
from spec_jax.tree import Tree

KINDS, RULES = ("dflash", "dspark", "treeflash", "dflash2"), ("residual", "block")
TREE = Tree((0, 0, 1, 3))


def round_of(make, params, rule, num_draft=2, num_rows=4, batch=1032, draft=None):
    subject, rows = make_subject(make, params, 0), certified_rows()[:num_rows]
    rows = rows if draft is None else [row._replace(draft=draft) for row in rows]
    system = subject.system(to_rule(rule), num_draft)
    items = prefixes(subject, num_rows, 1)
    forced = force_all(system, subject.params, rows, items, 3, batch)
    found = check_round(system, forced, rows, subject.logits_of, 1e-6)
    if found.first is not None:
        raise CertificateError(found.first.text(system.num_draft))
    return found, np.asarray(forced.proposal.n_draft)


CASES = [f"{kind}-{rule}" for kind, rule in itertools.product(KINDS, RULES)]
CASES.remove("dflash2-block")  # certified as a whole, below
CASES += [f"{kind}-{rule}-tree" for kind in KINDS for rule in ("residual", "traversal")]


@pytest.mark.representatives("dflash-block", "treeflash-residual-tree")
@pytest.mark.parametrize("case", CASES)
def test_a_round_is_proved(case):
    """All outcomes of rounds after every text of a token, in wide, peaked and penalised rows."""
    kind, rule, *tree = case.split("-")
    make = toy_maker(kind, TREE if tree else None)
    found, _ = round_of(make, toy_params(kind), rule)
    assert found.error <= 1e-6 and found.num_outcomes >= 20


@pytest.mark.representatives("block")
@pytest.mark.parametrize("rule", RULES)
def test_rounds_of_the_likeliest_drafts_are_proved(rule):
    """DFlash's default: the draft is cold, the target warm, filtered or penalised."""
    found, offered = round_of(
        toy_maker("dflash"), toy_params("dflash"), rule, draft=SamplerConfig(temperature=0.0)
    )
    assert found.error <= 1e-6 and (offered == 2).all() and found.num_outcomes >= 20


def stopping(make, threshold=0.4):
    return lambda target: with_confidence_stop(make(target), threshold)


def peeking(make):
    """The mutation: a confidence that looks at the token whose offer it decides on."""

    def changed(target):
        drafter = make(target)

        def propose(*args):
            proposal, state = drafter.propose(*args)
            is_liked = jnp.cumprod(proposal.tokens != 0, axis=1)
            return proposal.replace(n_draft=is_liked.sum(axis=1, dtype=jnp.int32)), state

        return drafter._replace(propose=propose)

    return changed


@pytest.mark.representatives("block")
@pytest.mark.parametrize("rule", RULES)
def test_a_confidence_in_a_draft_may_decide_on_it_before_it_is_drawn(rule):
    found, offered = round_of(stopping(toy_maker("dspark")), sure_after_some_drafts, rule)
    assert found.error <= 1e-6
    assert set(np.unique(offered)) == {0, 1, 2}


def test_mutation_a_confidence_that_looks_at_its_own_draft_is_caught():
    with pytest.raises(CertificateError):
        round_of(peeking(toy_maker("dspark")), toy_params("dspark"), "residual")


# No output for it; and candidates enough that some drafts are surer than others.
OPTIONS = {"dspark": {"has_confidence": False}, "dflash2": {"selector_top_k": 3}}


def fitted(kind, *, is_fresh=True):
    """A head that fits its confidence; if it is not fresh, rows begin with a fit by their text."""

    def make(target):
        config = toy_config(kind, target.model.vocab_size, **OPTIONS.get(kind, {}))
        drafter = block_drafter(config, target.model, fitted_drafts=4)

        def prefill(params, state, tokens, lengths, pending, features, *chunk):
            state = drafter.prefill(params, state, tokens, lengths, pending, features, *chunk)
            text = (3 * lengths + pending)[:, None] * jnp.asarray([1.0, 2.3, 3.1])
            mean = jnp.sin(text) * jnp.asarray([2, 0.3, 30.0])
            fit = state.fit.replace(mean=mean, spread=state.fit.spread / 50)
            return state if is_fresh else state.replace(fit=fit)

        return drafter._replace(prefill=prefill)

    return make


FITTED = ("dflash-residual", "dspark-residual", "treeflash-block", "dflash2-block")


@pytest.mark.representatives("treeflash-block")
@pytest.mark.parametrize("case", FITTED)
def test_a_fitted_confidence_leaves_the_distribution_as_it_is(case):
    """Whatever earlier rounds of the row have made of the fit."""
    kind, rule = case.split("-")
    make = stopping(fitted(kind, is_fresh=False), 0.5)
    found, offered = round_of(make, toy_params(kind, **OPTIONS.get(kind, {})), rule)
    assert found.error <= 1e-6
    assert set(np.unique(offered)) == {0, 1, 2}


def test_mutation_a_fitted_confidence_that_looks_at_its_own_draft_is_caught():
    """The features of the token that was drawn, in place of the likeliest one."""

    def make(target):
        drafter = stopping(fitted("treeflash"), 1e-9)(target)

        def propose(params, state, context, num_draft):
            context = context._replace(has_logits=True)
            proposal, state = drafter.propose(params, state, context, num_draft)
            logp = jax.nn.log_softmax(proposal.logits, axis=-1)
            own = jnp.take_along_axis(logp, proposal.tokens[:, :, None], axis=2)
            features = state.fit.features[:, :num_draft].at[..., 1].set(own[..., 0])
            sure = [state.fit.estimate(features[:, i]) >= 0.5 for i in range(num_draft)]
            is_going = jnp.cumprod(jnp.stack(sure, axis=1), axis=1)
            return proposal.replace(n_draft=is_going.sum(axis=1, dtype=jnp.int32)), state

        return drafter._replace(propose=propose)

    with pytest.raises(CertificateError):
        round_of(make, toy_params("treeflash"), "residual")


@flax.struct.dataclass
class Expecting:
    own: Any  # the drafter's state
    tokens: jax.Array  # f32[B], expected of the last round


def choosing(make, is_late=True):
    """Each row drafts nothing where few drafts of its last round were expected to be accepted.

    If it is not late, of this round: the mutation. A confidence has seen the drafts before it.
    """

    def changed(target):
        inner = make(target)

        def init(params, batch, slots):
            return Expecting(inner.init(params, batch, slots), jnp.zeros(batch))

        def prefill(params, state, tokens, lengths, pending, features, *chunk):
            own = inner.prefill(params, state.own, tokens, lengths, pending, features, *chunk)
            return Expecting(own, jnp.sin(3.0 * lengths + pending) + 1.3)  # as any round before

        def propose(params, state, context, num_draft):
            proposal, own = inner.propose(params, state.own, context, num_draft)
            expected = jnp.cumprod(proposal.confidence, axis=1).sum(axis=1)
            by = state.tokens if is_late else expected
            n_draft = jnp.where(by > 1.3, proposal.n_draft, 0)
            return proposal.replace(n_draft=n_draft), Expecting(own, expected)

        def commit(params, state, *args):
            return state.replace(own=inner.commit(params, state.own, *args))

        return inner._replace(init=init, prefill=prefill, propose=propose, commit=commit)

    return changed


def sure_after_some_drafts(target):
    """A DSpark head whose confidence depends on the token before more than on the states."""
    made = toy_params("dspark")(target)
    weight = made["head"]["confidence"] * jnp.asarray([0.1, 0.1, 0.1, 4, 4])[:, None]
    return {**made, "head": {**made["head"], "confidence": weight}}


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", RULES)
def test_k_by_what_earlier_rounds_expected_leaves_the_distribution_as_it_is(rule):
    make = choosing(toy_maker("dspark"))
    found, offered = round_of(make, sure_after_some_drafts, rule)
    assert found.error <= 1e-6 and set(np.unique(offered)) == {0, 2}


def test_mutation_k_by_what_this_round_expects_is_caught():
    """The second draft is expected by what the first one is."""
    make = choosing(toy_maker("dspark"), is_late=False)
    with pytest.raises(CertificateError):
        round_of(make, sure_after_some_drafts, "residual")


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", ["block", "match"])
def test_rounds_that_learn_from_each_other_are_certified(rule):
    """By the loop, whose rounds fit the confidence that later ones stop by."""
    make, params = stopping(fitted("treeflash"), 0.5), toy_params("treeflash")
    certificate = spec_jax.certify(rule, make, params=params, trials=300, has_memory=True)
    assert certificate.failure is None and certificate.max_error <= 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "rule"), [("dspark", "match"), ("dflash2", "block")])
def test_its_distribution_is_certified(kind, rule):
    """By the loop too, with noise of its own, under all settings, and of fewer drafts than K; under
    ``match`` drafts share the target's noise."""
    make, params = toy_maker(kind), toy_params(kind)
    certificate = spec_jax.certify(rule, make, params=params, trials=500)
    assert certificate.failure is None and certificate.max_error <= 1e-6
