"""A mesh changes no token: nor a piece of text, a reason to finish, or a count.

    pytest -m measure tests/sharding/test_sharded_tokens.py    # hours, or -k for a part of it

Each case decodes the same requests on one device and on eight. The prompts are ragged, rows stop
at a token inside of a block or at the end of the cache, and those that have finished stay while
others go on. The exhaustive tier covers every pair of choices that ``support/sharded.py`` lists:
eight cases in which every choice occurs at each landing, the others in turn. What is to be measured
is the product of meshes, targets, drafters, trees and rules.
"""

from __future__ import annotations

import itertools

import pytest
from support import sharded
from support.pairwise import covering, feasible_pairs, pairs_of, product
from support.sharded import Case, decode, is_feasible

FACTORS = sharded.FACTORS._asdict()
# Of 200 seeds this one makes the fewest cases, 24.
COVERING = [Case(**chosen) for chosen in covering(FACTORS, is_feasible, tries=10, seed=195)]
MAIN = ("mesh", "target", "drafter", "member", "tree", "rule")
_ONE = dict(mesh="data:2,tensor:4", target="llama", drafter="standalone", member="first")
_ONE |= dict(tree="chain", rule="match", sampling="bare", layers="separate", draft="sharded")
_ONE |= dict(rows="even", drive="call")
ONE = Case(**_ONE)
SMALL = ONE._replace(mesh="data:2,tensor:2")  # of four of the eight devices
# EAGLE-3 in a chain and n-grams, on recurrent targets, in streams: pairs alone do not bring these.
CHAINS = [
    SMALL._replace(drafter="eagle", rule="residual", drive="stream"),
    SMALL._replace(target="mamba2", drafter="eagle", drive="stream"),
    SMALL._replace(target="bamba", drafter="mtp", rule="residual", drive="stream"),
    SMALL._replace(target="mamba2", drafter="copies", rule="another", drive="stream"),
    # Two key-value heads on eight devices: the target's, and those of gated attention.
    ONE._replace(mesh="data:1,tensor:8", target="grouped", drafter="mtp", rule="greedy"),
]


def name(case):
    return "-".join(case).replace(",", "x").replace("data:", "").replace("tensor:", "")


def check(case):
    assert decode(case, is_sharded=True) == decode(case, is_sharded=False)


def test_a_mesh_changes_no_token():
    check(ONE)


@pytest.mark.exhaustive
def test_key_value_heads_that_lie_on_several_devices_change_no_token():
    check(ONE._replace(mesh="data:1,tensor:8", target="grouped", drafter="plain", rule="greedy"))


@pytest.mark.exhaustive
@pytest.mark.landing(*map(name, COVERING[:8]))
@pytest.mark.parametrize("case", COVERING, ids=name)
def test_every_pair_of_choices_gives_the_tokens_of_one_device(case):
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CHAINS, ids=name)
def test_chains_on_a_part_of_the_devices_give_the_tokens_of_one(case):
    found = decode(case, is_sharded=True)
    assert found == decode(case, is_sharded=False)
    assert sum(row[3].accepted for row in found if len(row) == 4) > 0  # the others are pieces


def product_of(mesh, drafter):
    """The product of the main factors, with this mesh and drafter; the others take turns."""
    main = {**{name: FACTORS[name] for name in MAIN}, "mesh": (mesh,), "drafter": (drafter,)}
    others = {name: values for name, values in FACTORS.items() if name not in MAIN}
    turns = itertools.cycle(itertools.product(*others.values()))
    for chosen in product(main, is_feasible):
        cases = (chosen | dict(zip(others, turn)) for turn in turns)
        yield Case(**next(case for case in cases if is_feasible(**case)))


@pytest.mark.measure
@pytest.mark.parametrize("mesh", FACTORS["mesh"])
@pytest.mark.parametrize("drafter", FACTORS["drafter"])
def test_the_product_of_choices_gives_the_tokens_of_one_device(mesh, drafter):
    different = [
        case
        for case in product_of(mesh, drafter)
        if decode(case, is_sharded=True) != decode(case, is_sharded=False)
    ]
    assert different == []


def test_every_pair_of_choices_occurs_in_the_covering():
    found = set().union(*(pairs_of(case._asdict()) for case in COVERING))
    assert found == feasible_pairs(FACTORS, is_feasible)
    of_landings = {choice for case in COVERING[:8] for choice in case._asdict().items()}
    assert of_landings == {(name, value) for name in FACTORS for value in FACTORS[name]}
    assert all(is_feasible(**case._asdict()) for case in COVERING) and len(COVERING) < 26


def test_a_covering_is_small_and_leaves_out_what_does_not_go_together():
    """Three factors of three: nine cases are the fewest, and one pair is forbidden."""
    factors = dict.fromkeys("abc", "xyz")
    goes = lambda **chosen: (chosen.get("a"), chosen.get("b")) != ("x", "y")
    cases = covering(factors, goes)
    pairs = {(a + x, b + y) for case in cases for (a, x), (b, y) in pairs_of(case)}
    every = {(a + x, b + y) for a, b in ("ab", "ac", "bc") for x in "xyz" for y in "xyz"}
    assert pairs == every - {("ax", "by")} and 9 <= len(cases) <= 12
