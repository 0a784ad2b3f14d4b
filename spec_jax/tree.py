"""Shapes of draft trees.

Node 0 is the root, the pending token; nodes 1..K are drafts, parents before children and
siblings in the order in which a rule tries them. A chain is the tree without branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spec_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree that is the same in every round.

    Attributes:
      parents: of nodes 1..K, by node; in the order of their depths.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        for node, parent in enumerate(self.parents, start=1):
            if not 0 <= parent < node:
                raise ConfigError(
                    f"node {node} of the tree has parent {parent}; parents come before their "
                    f"children, so expected 0 to {node - 1}"
                )
        depths = self.depths
        if not self.parents or list(depths) != sorted(depths):
            raise ConfigError(
                f"a tree needs one node or more, in the order of their depths; the depths are "
                f"{depths[1:]}"
            )

    @classmethod
    def branching(cls, counts: Sequence[int]) -> Tree:
        """The tree in which every node of depth i has ``counts[i]`` children."""
        level, parents = [0], []
        for count in counts:
            if count < 1:
                raise ConfigError(f"the tree branches {tuple(counts)}; expected 1 or more each")
            new = [node for node in level for _ in range(count)]
            level = range(len(parents) + 1, len(parents) + 1 + len(new))
            parents += new
        return cls(tuple(parents))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> Tree:
        """The tree of these nodes, each given by the rank of every node on its path.

        ``[0], [1], [0, 0]``: the two likeliest first drafts, and the likeliest second draft
        behind the first of them.

        Raises:
          ConfigError: a path whose parent or whose more likely sibling is not listed, or that
            is listed twice.
        """
        ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
        for path in ordered:
            if not path or ordered.count(path) > 1:
                what = "twice" if path else "as a node, which is the root"
                raise ConfigError(f"the tree lists {list(path)} {what}")
        index = {(): 0} | {path: i for i, path in enumerate(ordered, start=1)}
        for path in ordered:
            needed = [path[:-1]] + ([(*path[:-1], path[-1] - 1)] if path[-1] else [])
            for other in needed:
                if other not in index:
                    raise ConfigError(f"the tree lists {list(path)} and not {list(other)}")
        return cls(tuple(index[path[:-1]] for path in ordered))

    @property
    def num_nodes(self) -> int:
        """K, the root left out."""
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Of nodes 0..K."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Of the deepest node: the most drafts that a round accepts."""
        return max(self.depths)

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents, start=1) if parent == node]

    @property
    def most_children(self) -> int:
        return max(len(self.children(node)) for node in range(self.num_nodes))

    @property
    def num_fed(self) -> int:
        """Drafts that have children, so that drafting feeds them."""
        return sum(bool(self.children(node)) for node in range(1, self.num_nodes))

    @property
    def widest(self) -> int:
        """The most drafts that are fed in one pass, those of one level."""
        inner = set(self.parents) - {0}
        fed = [depth for node, depth in enumerate(self.depths) if node in inner]
        return max(map(fed.count, fed), default=0)


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: grown anew in every round where the draft is sure.

    Each level keeps the ``top_k`` best of the last level's ``top_k`` children each, by the sum
    of log-probabilities on the path; of all nodes seen, the best ``num_nodes`` are proposed.

    Source: EAGLE-2, arXiv 2406.16858, section 4.

    Attributes:
      num_nodes: K, the root left out.
      depth: levels that are drafted.
      top_k: nodes that a level expands, and children of each.
    """

    num_nodes: int
    depth: int
    top_k: int = 10

    def __post_init__(self):
        for name in ("num_nodes", "depth", "top_k"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} of the tree is {value}; expected 1 or more")
        seen = self.top_k + (self.depth - 1) * self.top_k**2
        if not self.depth <= self.num_nodes <= seen:
            raise ConfigError(
                f"the tree has {self.num_nodes} nodes; {self.depth} levels of {self.top_k} "
                f"have {self.depth} to {seen}"
            )

    @property
    def most_children(self) -> int:
        return self.top_k

    @property
    def num_fed(self) -> int:
        """Drafts that drafting feeds."""
        return (self.depth - 1) * self.top_k

    @property
    def widest(self) -> int:
        """The most drafts that are fed in one pass, those of one level."""
        return self.top_k if self.depth > 1 else 0


def check_children(tree: Tree | DynamicTree | None, num_tokens: int, whose: str) -> None:
    """Raises a ConfigError where a node has more children than ``whose`` vocabulary has tokens."""
    if tree is not None and tree.most_children > num_tokens:
        raise ConfigError(
            f"the tree has {tree.most_children} children of a node; {whose} vocabulary has "
            f"{num_tokens} tokens"
        )


def paths(parents: jax.Array, depth: int) -> jax.Array:
    """bool[...,Q,Q]: entry [i, j] says that node j is on the way from the root to i, or i itself.

    Args:
      parents: i32[...,K], of nodes 1..K.
      depth: of the deepest node, or more.
    """
    up = jnp.concatenate([jnp.zeros_like(parents[..., :1]), parents], axis=-1)
    index = jnp.arange(up.shape[-1], dtype=up.dtype)
    node = jnp.broadcast_to(index, up.shape)
    seen = node[..., None] == index
    for _ in range(depth):
        node = jnp.take_along_axis(up, node, axis=-1)
        seen |= node[..., None] == index
    return seen
