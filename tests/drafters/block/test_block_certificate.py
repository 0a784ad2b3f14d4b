"""Block drafters leave the target's distribution as it is, whatever the step and the rule."""

from __future__ import annotations

import itertools

import pytest
from support.block_drafts import toy_maker, toy_params

from spec_jax.named import to_rule
from spec_jax.testing.certificate.reported import force_all
from spec_jax.testing.certificate.rounds import check_round
from spec_jax.testing.certificate.subjects import certified_rows, make_subject, prefixes
from spec_jax.tree import Tree

KINDS, RULES = ("dflash", "dspark", "treeflash"), ("residual", "block")
TREE = Tree((0, 0, 1, 3))


def round_of(make, params, rule, num_draft=2, num_rows=4, batch=1032):
    subject, rows = make_subject(make, params, 0), certified_rows()[:num_rows]
    system = subject.system(to_rule(rule), num_draft)
    items = prefixes(subject, num_rows, 1)
    forced = force_all(system, subject.params, rows, items, 3, batch)
    return check_round(system, forced, rows, subject.logits_of, 1e-6)


CASES = [f"{kind}-{rule}" for kind, rule in itertools.product(KINDS, RULES)]
CASES += [f"{kind}-{rule}-tree" for kind in KINDS for rule in ("residual", "traversal")]


@pytest.mark.representatives("dflash-block", "dspark-block", "treeflash-residual-tree")
@pytest.mark.parametrize("case", CASES)
def test_a_round_is_proved(case):
    """All outcomes of rounds after every text of a token, in wide, peaked and penalised rows."""
    kind, rule, *tree = case.split("-")
    make = toy_maker(kind, TREE if tree else None)
    found = round_of(make, toy_params(kind), rule)
    assert found.error <= 1e-6 and found.num_outcomes >= 20
