"""Names of spec_jax wherever they live, so that one recorder runs on every state of the tree."""

from __future__ import annotations

import functools
import importlib
import pkgutil


@functools.cache
def _modules() -> tuple:
    import spec_jax

    found = pkgutil.walk_packages(spec_jax.__path__, "spec_jax.")
    names = [m.name for m in found if not m.name.endswith(("__main__", "worker"))]
    return tuple(importlib.import_module(name) for name in names)


@functools.cache
def find(*names: str, room: str = ""):
    """Returns the first of several names that a module of spec_jax defines.

    Args:
      *names: the name today, then names it may get or has had.
      room: part of the module's dotted name, where the name alone is ambiguous.

    Raises:
      LookupError: no module defines one of them.
    """
    for name in names:
        for module in _modules():
            value = getattr(module, name, None)
            if getattr(value, "__module__", None) == module.__name__ and room in module.__name__:
                return value
    raise LookupError(f"no module of spec_jax defines {' or '.join(names)}")
