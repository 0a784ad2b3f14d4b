"""Covering arrays: few cases in which every pair of choices that go together occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(case: Mapping[str, str]) -> set[Pair]:
    """The pairs of choices that occur in one case."""
    return set(itertools.combinations(case.items(), 2))


def product(
    factors: Mapping[str, Sequence[str]], is_feasible: Callable[..., bool]
) -> Iterator[dict[str, str]]:
    """Every case whose choices go together.

    Args:
      factors: the choices by name.
      is_feasible: of some choices, given by name; false of a case where it is of a part of it.
    """

    def extend(chosen, names):
        if not names:
            yield chosen
            return
        for value in factors[names[0]]:
            longer = {**chosen, names[0]: value}
            if is_feasible(**longer):
                yield from extend(longer, names[1:])

    return extend({}, list(factors))


def covering(
    factors: Mapping[str, Sequence[str]],
    is_feasible: Callable[..., bool],
    tries: int = 50,
    seed: int = 0,
) -> list[dict[str, str]]:
    """Chooses cases until every pair of choices that occurs in any case has occurred.

    Each case is the best of ``tries``: one that begins with a pair still to cover, and then takes
    for one factor after another, in random order, the value that covers most.

    Args:
      factors, is_feasible: of ``product``.
      tries: more of them make fewer cases.
      seed: of the choices at random; another one may make fewer cases.
    """
    draw = random.Random(seed)
    left = feasible_pairs(factors, is_feasible)
    cases = []
    while left:
        found = [_grow(left, factors, is_feasible, draw) for _ in range(tries)]
        cases.append(max(filter(None, found), key=lambda case: len(pairs_of(case) & left)))
        left -= pairs_of(cases[-1])
    return cases


def feasible_pairs(
    factors: Mapping[str, Sequence[str]], is_feasible: Callable[..., bool]
) -> set[Pair]:
    """Returns the pairs of choices of which there is a case."""

    def has_case(pair):
        chosen = dict(pair)
        fixed = {name: (chosen[name],) if name in chosen else factors[name] for name in factors}
        return next(product(fixed, is_feasible), None) is not None

    every = (
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    )
    return set(filter(has_case, every))


def _grow(left, factors, is_feasible, draw) -> dict[str, str] | None:
    """A case that begins with a pair of ``left``; None where it came to a dead end."""
    chosen = dict(draw.choice(sorted(left)))
    names = [name for name in factors if name not in chosen]
    draw.shuffle(names)
    in_order = list(factors)
    for name in names:

        def new(value):
            pairs = (
                tuple(sorted([(name, value), item], key=lambda x: in_order.index(x[0])))
                for item in chosen.items()
            )
            return sum(pair in left for pair in pairs)

        values = [v for v in factors[name] if is_feasible(**chosen, **{name: v})]
        if not values:
            return None
        draw.shuffle(values)
        chosen = {**chosen, name: max(values, key=new)}
    return {name: chosen[name] for name in factors}
