"""Meshes for tests.

Every test process has eight CPU devices (``tests/conftest.py``), so a test that needs a mesh is a
test like any other: it makes one with ``mesh("data:2,tensor:4")`` and compares with the same
decoder without a mesh. Nothing has to run in a process of its own.
"""

import functools

import jax

from spec_jax.meshes import make_mesh

NAMES = ("data:1,tensor:8", "data:2,tensor:4", "data:4,tensor:2", "data:8,tensor:1")


@functools.cache
def mesh(name: str) -> jax.sharding.Mesh:
    """A mesh of the first of the eight devices."""
    return make_mesh(name)
