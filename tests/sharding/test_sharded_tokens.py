"""A mesh changes no token: nor a piece of text, a reason to finish, or a count.

Each case decodes the same requests on one device and on eight. The prompts are ragged, rows stop
at a token inside of a block or at the end of the cache, and those that have finished stay while
others go on. Every choice that ``support/sharded.py`` lists occurs in some case.
"""

from __future__ import annotations

import pytest
from support import sharded
from support.sharded import Case, decode, is_feasible

FACTORS = sharded.FACTORS._asdict()


def covering():
    """Cases in which every choice occurs: the factor with the most choices left chooses first."""
    left = {name: list(values) for name, values in FACTORS.items()}
    while any(left.values()):
        chosen = {}
        for name in sorted(left, key=lambda name: -len(left[name])):
            values = [*left[name], *FACTORS[name]]
            chosen[name] = next(x for x in values if is_feasible(**chosen, **{name: x}))
        left = {name: [x for x in left[name] if x != chosen[name]] for name in left}
        yield Case(**chosen)


COVERING = list(covering())
_ONE = dict(mesh="data:2,tensor:4", target="llama", drafter="standalone", member="first")
_ONE |= dict(tree="chain", rule="match", sampling="bare", layers="separate", draft="sharded")
_ONE |= dict(rows="even", drive="call")
ONE = Case(**_ONE)
# Its key-value heads lie on several devices.
GROUPED = ONE._replace(mesh="data:1,tensor:8", target="grouped", drafter="plain", rule="greedy")
SMALL = ONE._replace(mesh="data:2,tensor:2")  # of four of the eight devices
# EAGLE-3 in a chain and n-grams, on recurrent targets, in streams: pairs alone do not bring these.
CHAINS = [
    SMALL._replace(drafter="eagle", rule="residual", drive="stream"),
    SMALL._replace(target="mamba2", drafter="eagle", drive="stream"),
    # Two key-value heads on eight devices: the target's, and those of gated attention.
    ONE._replace(mesh="data:1,tensor:8", target="grouped", drafter="mtp", rule="greedy"),
]


def name(case):
    return "-".join(case).replace(",", "x").replace("data:", "").replace("tensor:", "")


@pytest.mark.representatives(name(ONE))
@pytest.mark.landing(*map(name, COVERING))
@pytest.mark.parametrize(
    "case", [ONE, *COVERING, *CHAINS, pytest.param(GROUPED, id="grouped")], ids=name
)
def test_a_mesh_changes_no_token(case):
    found = decode(case, is_sharded=True)
    assert found == decode(case, is_sharded=False)
    if case in CHAINS:
        assert sum(row[3].accepted for row in found if len(row) == 4) > 0  # the others are pieces


def test_every_choice_occurs_and_goes_with_the_others():
    for name, values in FACTORS.items():
        assert {getattr(case, name) for case in COVERING} == set(values)
    assert all(is_feasible(**case._asdict()) for case in COVERING) and len(COVERING) <= 8
