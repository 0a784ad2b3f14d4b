"""Argmax drafts that are accepted as if they had been drawn, in exact fractions."""

from fractions import Fraction

P = tuple(Fraction(n, 10) for n in (5, 3, 2))
Q = tuple(Fraction(n, 10) for n in (6, 2, 2))


def first_token(p, q, batch=1, is_drawn=False):
    """Distribution of a row's first token under one draft; every row of the batch has p and q.

    Args:
      batch: rows; where one of them rejects, all draw from the residual.
      is_drawn: the draft is drawn from q, not its argmax.
    """
    left = [max(a - b, Fraction(0)) for a, b in zip(p, q)]
    residual = [x / sum(left) for x in left]
    found = [Fraction(0)] * len(p)
    best = max(range(len(q)), key=q.__getitem__)
    for draft in range(len(q)) if is_drawn else [best]:
        weight = q[draft] if is_drawn else Fraction(1)
        accepted = min(Fraction(1), p[draft] / q[draft]) ** batch
        found[draft] += weight * accepted
        for token, mass in enumerate(residual):
            found[token] += weight * (1 - accepted) * mass
    return found
