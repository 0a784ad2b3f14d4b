"""Counts the products of a traced program."""

import math

import jax


def products(jaxpr) -> int:
    """Returns the multiplications of every product, each as often as its loops run it."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total += inner * math.prod(eqn.outvars[0].aval.shape)
        for value in jax.tree.leaves(list(eqn.params.values())):
            body = getattr(value, "jaxpr", value)
            if hasattr(body, "eqns"):
                total += eqn.params.get("length", 1) * products(body)
    return total
