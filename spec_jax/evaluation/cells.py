"""The cells of a comparison: every draft, K or tree, temperature and rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spec_jax.config import GREEDY_BELOW, METHODS, SpeculativeConfig
from spec_jax.contracts import Drafter, Rule
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel

PLAIN = "plain"
Draft = LoadedModel | LoadedHead | Drafter | None  # None: the name is a method that copies


class Cell(NamedTuple):
    """One way to decode.

    Attributes:
      method: The name of a draft, or "plain".
      k: K, drafted tokens per round; 0 for plain decoding.
      temperature: The temperature of target and draft.
      rule: The acceptance rule; None for the default one.
      tree: A tree of K nodes, as ``tree_options`` reads it; None for a chain.
      dtype: Of the weights, where cells of several dtypes are compared; else None.
    """

    method: str
    k: int
    temperature: float
    rule: str | None = None
    tree: str | None = None
    dtype: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing drafts."""
        return self.method == PLAIN

    @property
    def is_greedy(self) -> bool:
        """Whether the target takes the argmax."""
        return self.temperature < GREEDY_BELOW

    @property
    def shape(self) -> str:
        """K or the tree, as text."""
        return f"tree {self.tree}" if self.tree else f"K={self.k}"

    @property
    def title(self) -> str:
        """What drafts, with the dtype if cells of several are compared."""
        return f"{self.method} {self.dtype}" if self.dtype else self.method

    @property
    def name(self) -> str:
        """Title and shape and, above temperature 0, the rule."""
        if self.is_plain:
            return self.title
        return f"{self.title} {self.shape}" + ("" if self.is_greedy else f" {self.rule}")

    @property
    def label(self) -> str:
        """A unique name, for messages and files."""
        shape = f" {self.shape}" if self.k else ""
        rule = f" {self.rule}" if self.rule else ""
        return f"{self.title}{shape} T={self.temperature:g}{rule}"


def tree_options(text: str) -> dict:
    """Parses a tree; returns the options of ``SpeculativeConfig``.

    Args:
      text: "3x2x1", the number of children at each depth, or "59:6:10", the nodes and levels of
        EAGLE-2's dynamic tree and the number of nodes that each level expands.

    Raises:
      ConfigError: It is neither, or there is no such tree.
    """
    try:
        if ":" in text:
            names = ("num_speculative_tokens", "tree_depth", "tree_top_k")
            options = dict(zip(names, map(int, text.split(":")), strict=True))
        else:
            options = {"tree": tuple(map(int, text.split("x")))}
    except ValueError:
        raise ConfigError(
            f"the tree is {text!r}; expected children by depth, as 3x2x1, or nodes, levels and "
            "children of a dynamic tree, as 59:6:10"
        ) from None
    return options | {"num_speculative_tokens": SpeculativeConfig(**options).tree_shape.num_nodes}


def copying_methods() -> tuple[str, ...]:
    """Returns the methods that copy tokens, and so need no draft."""
    return tuple(name for name, is_copying in METHODS.items() if is_copying)


def has_logits(draft: Draft) -> bool:
    """Whether drafts are drawn from a distribution, and not copied or chosen."""
    return draft.is_sampled if isinstance(draft, Drafter) else draft is not None


def make_cells(
    drafts: Mapping[str, Draft],
    ks: Mapping[str, Sequence[int]],
    temperatures: Sequence[float],
    rules: Sequence[str] = ("residual",),
    copying_rules: Sequence[str] = ("match",),
    trees: Sequence[str] = (),
    custom_rule: Rule | None = None,
) -> list[Cell]:
    """Returns all cells, plain decoding first at each temperature.

    Args:
      drafts: What is compared with plain decoding, by name.
      ks: The values of K of each.
      temperatures: The temperatures; at 0 the rule is "greedy".
      rules: The rules above temperature 0 of drafts that have logits.
      copying_rules: Those of drafts that have none.
      trees: Trees that drafts with logits draft beside chains, see ``tree_options``.
      custom_rule: One more rule, for every draft that it can accept.

    Raises:
      ConfigError: The custom rule can accept no draft.
    """
    nodes = {tree: tree_options(tree)["num_speculative_tokens"] for tree in trees}
    cells = []
    custom = custom_rule and custom_rule.name
    for temperature in temperatures:
        cells.append(Cell(PLAIN, 0, temperature))
        for name, draft in drafts.items():
            shapes: list[tuple[int, str | None]] = [(k, None) for k in ks[name]]
            if isinstance(draft, Drafter):
                if draft.shape.tree is not None:
                    count = draft.shape.tree.num_nodes
                    shapes = [(count, f"of {count} nodes")]
            elif has_logits(draft):
                shapes += [(nodes[tree], tree) for tree in trees]
            named = [*(rules if has_logits(draft) else copying_rules)]
            if temperature < GREEDY_BELOW:
                named = ["greedy"]
            cells += [
                Cell(name, k, temperature, rule, tree) for rule in named for k, tree in shapes
            ]
            if custom and custom not in named:
                cells += [
                    Cell(name, k, temperature, custom, tree)
                    for k, tree in shapes
                    if _accepts(custom_rule, draft, temperature, bool(tree))
                ]
    if custom and custom not in {cell.rule for cell in cells}:
        needs = "temperature 0: temperatures=0" if custom_rule.is_greedy else "logits, or chains"
        raise ConfigError(f"rule {custom!r} can accept no draft of the table: it needs {needs}")
    return list(dict.fromkeys(cells))


def _accepts(rule: Rule, draft: Draft, temperature: float, is_tree: bool) -> bool:
    return (
        (temperature < GREEDY_BELOW or not rule.is_greedy)
        and (rule.has_trees or not is_tree)
        and (has_logits(draft) or not rule.needs_logits)
    )
