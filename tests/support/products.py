"""Counts the products of a traced program."""

import math

import jax


def products(jaxpr) -> int:
    """Returns the multiplications of every product, each as often as its loops run it.

    Of what depends on the platform, the last alternative counts, which is the default.
    """
    total = 0
    platforms = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "platform_index":
            platforms |= set(eqn.outvars)
        if eqn.primitive.name == "cond" and eqn.invars[0] in platforms:
            total += products(eqn.params["branches"][-1].jaxpr)
            continue
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total += inner * math.prod(eqn.outvars[0].aval.shape)
        for value in jax.tree.leaves(list(eqn.params.values())):
            body = getattr(value, "jaxpr", value)
            if hasattr(body, "eqns"):
                total += eqn.params.get("length", 1) * products(body)
    return total
