"""The axis letters, and a check that uses them.

This is the only legend. Every docstring and trailing comment refers to it; ``dtype[B,T,D]`` is an
array with these axes.

    B  rows of a batch              H  head dimension
    T  tokens in this call          F  feed-forward width
    S  cache slots                  V  vocabulary
    L  layers                       U  draft vocabulary
    D  model width                  E  tapped feature width
    N  query heads                  K  drafted tokens a round
    G  key-value heads              Q  tree nodes
    W  tokens of a window           M  output slots
    Z  state size of a head         C  channels of a convolution
                                    R  reach of a convolution

Words:

    n_accept  number of drafts accepted in a round, 0..K
    pending   the one token that a row has emitted but not yet fed to the target
    length    number of tokens fed
    pos       absolute position
    tau       mean acceptance length: tokens emitted per target pass, the bonus token included
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax.errors import ShapeError


def check_shapes(
    sizes: Mapping[str, int] | None = None, **named: tuple[Any, str]
) -> dict[str, int]:
    """Checks arrays against axis letters.

    Args:
      sizes: sizes that are already known, by letter.
      **named: ``name=(array, "B T")``; a number in the string is a literal size.

    Returns:
      The size of every letter.

    Raises:
      ShapeError: an array has another rank, or two arrays disagree on a letter.
    """
    known = dict(sizes or {})
    for name, (array, axes) in named.items():
        letters = axes.split()
        shape = tuple(array.shape)
        if len(letters) != len(shape):
            raise ShapeError(f"{name} has shape {shape}; expected [{axes}]")
        for letter, size in zip(letters, shape):
            expected = int(letter) if letter.isdigit() else known.setdefault(letter, size)
            if expected != size:
                raise ShapeError(
                    f"{name} has shape {shape}, so {letter}={size}; expected {letter}={expected}"
                )
    return known
