"""Shapes of draft trees.

Node 0 is the root and holds the pending token. Nodes 1..K are drafts: parents come before their
children, and siblings stand in the order in which a rule tries them. A chain is a tree without
branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spec_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static tree: the same shape in every round.

    Example:
      ```python
      from spec_jax.tree import Tree

      tree = Tree.branching((3, 2))  # three first drafts, two after each of them
      print(tree.num_nodes, tree.depths, tree.children(1))
      ```

    Attributes:
      parents: the parent of each of the nodes 1..K. Nodes are sorted by depth.
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
        """Returns the tree in which every node at depth i has ``counts[i]`` children.

        Raises:
          ConfigError: a count is smaller than 1.
        """
        level = [0]
        parents = []
        for count in counts:
            if count < 1:
                raise ConfigError(f"the tree branches {tuple(counts)}; expected 1 or more each")
            new = [node for node in level for _ in range(count)]
            level = range(len(parents) + 1, len(parents) + 1 + len(new))
            parents += new
        return cls(tuple(parents))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> Tree:
        """Returns the tree of the given nodes, each described by its path from the root.

        A path lists the rank of every node on it: ``[0], [1], [0, 0]`` are the two most likely
        first drafts, and the most likely second draft after the first of them.

        Args:
          paths: one path a node, in any order.

        Raises:
          ConfigError: a path is listed twice, is empty, or lacks its parent or a more likely
            sibling.
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
        """K: the number of drafts, without the root."""
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """The depth of each of the nodes 0..K; the root's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The depth of the deepest node: a round accepts at most this many drafts."""
        return max(self.depths)

    def children(self, node: int) -> list[int]:
        """The children of a node, in the order in which a rule tries them."""
        return [i for i, parent in enumerate(self.parents, start=1) if parent == node]

    @property
    def max_children(self) -> int:
        """The largest number of children of a node."""
        return max(len(self.children(node)) for node in range(self.num_nodes))

    @property
    def num_fed(self) -> int:
        """Number of drafts that have children, and are therefore fed while drafting."""
        return sum(bool(self.children(node)) for node in range(1, self.num_nodes))


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's dynamic tree: in every round it grows where the draft is confident.

    Nodes are ranked by the sum of the log-probabilities on their path. Each level expands its
    ``top_k`` best nodes into ``top_k`` children each, and of all nodes seen the best ``num_nodes``
    are proposed.

    Source: EAGLE-2, arXiv 2406.16858, section 4.

    Attributes:
      num_nodes: K, the number of drafts, without the root.
      depth: number of levels to draft.
      top_k: number of nodes that each level expands, and number of children of each.
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
    def max_children(self) -> int:
        """The largest number of children of a node."""
        return self.top_k

    @property
    def num_fed(self) -> int:
        """Number of drafts that are fed while drafting."""
        return (self.depth - 1) * self.top_k


AnyTree = Tree | DynamicTree


def check_children(tree: AnyTree | None, num_tokens: int, whose: str) -> None:
    """Checks that no node has more children than a vocabulary has tokens.

    Args:
      tree: None for a chain, which passes.
      num_tokens: the size of the vocabulary.
      whose: whose vocabulary it is, for the message.

    Raises:
      ConfigError: a node has more children.
    """
    if tree is not None and tree.max_children > num_tokens:
        raise ConfigError(
            f"the tree has {tree.max_children} children of a node; {whose} vocabulary has "
            f"{num_tokens} tokens"
        )


def paths(parents: jax.Array, depth: int) -> jax.Array:
    """Returns which nodes lie on the path from the root to each node.

    Args:
      parents: i32[...,K], the parents of nodes 1..K.
      depth: the depth of the deepest node, or more.

    Returns:
      bool[...,Q,Q]; entry [i, j] is True if node j is node i or one of its ancestors.
    """
    up = jnp.concatenate([jnp.zeros_like(parents[..., :1]), parents], axis=-1)
    index = jnp.arange(up.shape[-1], dtype=up.dtype)
    node = jnp.broadcast_to(index, up.shape)
    seen = node[..., None] == index
    for _ in range(depth):
        node = jnp.take_along_axis(up, node, axis=-1)
        seen |= node[..., None] == index
    return seen
